"""The ranks of torch.distributed as a world of ours: words through its store, bytes through a gloo group of our own."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flagstone.checkpoint.world import Link, SilentRank, Store, World
from flagstone.storage.base import Bytes

_worlds: dict[tuple[int, ...], tuple[Any, World, dict[int, int]]] = {}


def world_of(group: Any) -> tuple[World, dict[int, int]]:
    """The world of a process group, the default one for None, and its ranks by the ranks of the job.

    Raises:
        ValueError: this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return World(0, 1), {0: 0}
    default = dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else default))
    me = dist.get_rank()
    if me not in ranks:
        raise ValueError(f"rank {me} of the job is not in the group of ranks {list(ranks)}; only its members may call")
    known = _worlds.get(ranks)
    if known is None or known[0] is not default:
        members = {r: i for i, r in enumerate(ranks)}
        if len(ranks) == 1:
            world = World(0, 1)
        else:
            name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
            store = dist.PrefixStore(f"flagstone/{name}", dist.distributed_c10d._get_default_store())
            world = World(members[me], len(ranks), TorchStore(store), TorchLink(ranks))
        known = _worlds[ranks] = default, world, members
    return known[1], known[2]


class TorchStore(Store):
    """A c10d store. What goes wrong with it is an OSError."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._try(self._store.set, key, value)

    def get(self, keys: Sequence[str], seconds: float) -> list[bytes | None]:
        try:
            self._store.wait(list(keys), datetime.timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            return [self._read(key) if self._try(self._store.check, [key]) else None for key in keys]
        return [self._read(key) for key in keys]

    def _read(self, key: str) -> bytes:
        return self._try(self._store.get, key)

    def first(self, key: str, value: bytes) -> bytes:
        return self._try(self._store.compare_set, key, "", value)

    def delete(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # a store that cannot delete keeps a few words more
            self._store.delete_key(key)

    def _try(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            raise ConnectionError(
                f"the job's store, which rank 0 or the launcher holds, does not answer: {error}"
            ) from error


class TorchLink(Link):
    """A gloo group of the same ranks, made when it is first needed; never the group that training uses."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._group: Any = None

    def reset(self) -> None:
        self._group = None

    def exchange(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes], seconds: float) -> None:
        limit = datetime.timedelta(seconds=seconds)
        try:
            if self._group is None:
                self._group = dist.new_group(self._ranks, backend="gloo", timeout=limit, use_local_synchronization=True)
        except RuntimeError as error:
            raise ConnectionError(f"the ranks cannot be connected: {error}") from error
        works: list[tuple[int, Any]] = []
        peer = -1
        try:
            for peer, data in receive.items():
                works.append((peer, dist.irecv(torch.from_numpy(data), src=self._ranks[peer], group=self._group)))
            for peer, data in send.items():
                works.append((peer, dist.isend(torch.from_numpy(data), dst=self._ranks[peer], group=self._group)))
            while works:
                peer, work = works.pop(0)
                work.wait(limit)
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text:
                raise SilentRank([peer], seconds) from error
            raise ConnectionError(f"rank {peer} is gone: {text.splitlines()[0]}") from error
