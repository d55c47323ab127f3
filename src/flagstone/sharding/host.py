"""Ranks of one host: memory that all of them have, and a board of counters on which they wait for each other.

A segment is anonymous memory (memfd) that the others map through ``/proc``. It has no name in any folder, so nothing is
left behind whenever and however the processes end, and the size of ``/dev/shm`` does not matter.

A rank alone writes its own row of a board, and counts up only. Who waits for a counter looks now and then whether its
writer still lives.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flagstone.errors import FlagstoneError

PAGE = 4096
_LINE = 8  # counters of 8 bytes in a cache line
_SPINS = 200  # looks at a counter before the first sleep
_NAP = 50e-6, 1e-3  # seconds between looks: at first, at most
_HEAD = 5  # counters of the board itself: barriers reached, kinds of the last two, steps left, steps recovered from
_BARRIERS, _KIND, _LEFT, _BACK = 0, 1, 3, 4
_PULSE = 0.05  # seconds between looks at the other processes


class RankError(FlagstoneError):
    """Another rank is gone, has given up, or did not come in time."""


class Host:
    """The ranks of a group, all of them on this host.

    Attributes:
        ranks: of the job, in the order of the group.
        rank: this one's index among them.
        size: their number.
        waited: seconds spent waiting for others so far.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, processes: Sequence[tuple[int, str]]) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.timeout = 600.0
        self.waited = 0.0
        self._store, self._processes = store, processes
        self._made = 0
        self._fence = threading.Lock()

    def segment(self, nbytes: int) -> Tensor:
        """Zeroed bytes that all ranks share; they call this together. Freed when nobody has the tensor any more."""
        nbytes = max(-(-nbytes // PAGE) * PAGE, PAGE)
        if self.size == 1:
            return torch.zeros(nbytes, dtype=torch.uint8)
        self._made += 1
        key = f"segment-{self._made}"
        if self.rank == 0:
            fd = os.memfd_create("flagstone", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, nbytes)
                storage = _map(os.getpid(), fd, nbytes)
                self._store.set(key, f"{fd} {nbytes}")
                self._store.wait([f"{key}-{r}" for r in range(1, self.size)], self._limit())
            except RuntimeError as error:
                raise RankError(f"not all of ranks {list(self.ranks)} came to share {nbytes} bytes: {error}") from error
            finally:
                os.close(fd)
            for name in (key, *(f"{key}-{r}" for r in range(1, self.size))):
                with contextlib.suppress(RuntimeError):
                    self._store.delete_key(name)
        else:
            try:
                self._store.wait([key], self._limit())
            except RuntimeError as error:
                raise RankError(f"rank {self.ranks[0]} did not share {nbytes} bytes: {error}") from error
            fd, theirs = map(int, self._store.get(key).split())
            if theirs != nbytes:
                raise RankError(
                    f"rank {self.ranks[0]} shares {theirs} bytes where rank {self.ranks[self.rank]} expects {nbytes}: "
                    "the ranks have not sharded the same modules in the same order"
                )
            storage = _map(self._processes[0][0], fd, nbytes)
            self._store.set(f"{key}-{self.rank}", "1")
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def segments(self, nbytes: int) -> list[Tensor]:
        """As many bytes for each rank: element r is rank r's."""
        nbytes = max(-(-nbytes // PAGE) * PAGE, PAGE)
        return list(self.segment(nbytes * self.size).split(nbytes))[: self.size]

    def board(self, counters: int) -> list[Any]:
        """A row of counters for each rank, all zero."""
        nbytes = -(-counters // _LINE) * _LINE * 8
        return [segment.view(torch.int64).numpy() for segment in self.segments(nbytes)]

    def publish(self, row: Any, index: int, value: int) -> None:
        """Count up: what this rank has written before is seen by whoever sees the counter."""
        with self._fence:  # taking and giving a lock orders memory on every processor
            row[index] = value

    def wait(self, reached: Callable[[int], bool], what: Callable[[], str]) -> None:
        """Wait until ``reached(r)`` for each rank r of this group.

        Raises:
            RankError: naming ``what`` and the rank that is gone, or that did not come within ``timeout``.
        """
        missing = [r for r in range(self.size) if not reached(r)]
        if not missing:
            return
        began = time.perf_counter()
        looks, nap, pulse = 0, _NAP[0], began + _PULSE
        while missing:
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(nap * 1.2, _NAP[1])
                now = time.perf_counter()
                if now > pulse:
                    pulse = now + _PULSE
                    self._check(missing, what, now - began)
            missing = [r for r in missing if not reached(r)]
        with self._fence:
            self.waited += time.perf_counter() - began

    def _check(self, missing: Sequence[int], what: Callable[[], str], seconds: float) -> None:
        me = self.ranks[self.rank]
        gone = [r for r in missing if _started(self._processes[r][0]) != self._processes[r][1]]
        if gone:
            names = ", ".join(f"rank {self.ranks[r]} (process {self._processes[r][0]})" for r in gone)
            raise RankError(f"{names} is gone; rank {me} waited for it in {what()}")
        if seconds > self.timeout:
            names = ", ".join(f"rank {self.ranks[r]}" for r in missing)
            raise RankError(f"{names} did not come within {self.timeout:g} s; rank {me} waited in {what()}")

    def _limit(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.timeout)


_known: dict[tuple[int, ...], tuple[Any, Host, list[list[int]]]] = {}


def neighbours(ranks: Sequence[int]) -> tuple[Host, list[list[int]]]:
    """Who of these ranks of the job shares memory. They call it together.

    Returns:
        The host of this rank, with those of them that share its memory: itself alone, where that is not to be had. And
        for each such host, in the order of its first rank, the indices in ``ranks`` of those on it.
    """
    ranks = tuple(ranks)
    if len(ranks) == 1:
        return Host(ranks, 0, None, [(os.getpid(), "")]), [[0]]
    default = dist.group.WORLD
    known = _known.get(ranks)
    if known is None or known[0] is not default:
        known = _known[ranks] = default, *_find(ranks)
    return known[1], known[2]


def _find(ranks: tuple[int, ...]) -> tuple[Host, list[list[int]]]:
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"flagstone/host/{name}", dist.distributed_c10d._get_default_store())
    me, everyone = ranks.index(dist.get_rank()), range(len(ranks))
    trial = -1
    if os.environ.get("FLAGSTONE_SHARED_MEMORY", "1") != "0":
        with contextlib.suppress(AttributeError, OSError):
            trial = os.memfd_create("flagstone", os.MFD_CLOEXEC)
            os.ftruncate(trial, PAGE)
    store.set(f"process-{me}", f"{os.getpid()} {_started(os.getpid())} {trial} {_host_name()}")
    words = [store.get(f"process-{r}").decode().split(" ", 3) for r in everyone]
    groups: dict[str, list[int]] = {}
    for r in everyone:
        groups.setdefault(words[r][3], []).append(r)
    able = trial >= 0
    mine = groups[words[me][3]]
    if able:
        try:
            _map(int(words[mine[0]][0]), int(words[mine[0]][2]), PAGE)
        except (OSError, RuntimeError):
            able = False
    store.set(f"able-{me}", str(int(able)))
    hosts: list[list[int]] = []
    for group in groups.values():
        if all(store.get(f"able-{r}") == b"1" for r in group):
            hosts.append(group)
        else:
            hosts += [[r] for r in group]
    hosts.sort()
    if trial >= 0:
        os.close(trial)
    here = next(group for group in hosts if me in group)
    local = dist.PrefixStore(f"of-{here[0]}", store)
    processes = [(int(words[r][0]), words[r][1]) for r in here]
    return Host([ranks[r] for r in here], here.index(me), local, processes), hosts


def _map(pid: int, fd: int, nbytes: int) -> torch.UntypedStorage:
    path = f"/proc/{pid}/fd/{fd}"
    os.stat(path)  # from_file would make a file that is not there
    storage: torch.UntypedStorage = torch.UntypedStorage.from_file(path, True, nbytes)  # type: ignore[assignment]
    return storage


def _started(pid: int) -> str:
    """When a process began, in ticks since boot; nothing when it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def _host_name() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


class Board:
    """Counters of the ranks of a host: barriers, and others that its user numbers from 0."""

    def __init__(self, host: Host, counters: int) -> None:
        self.host = host
        self._rows = host.board(_HEAD + counters)
        self._barriers = 0
        self._left = 0

    def read(self, rank: int, index: int) -> int:
        return int(self._rows[rank][_HEAD + index])

    def publish(self, index: int, value: int) -> None:
        """Set this rank's counter; whoever sees it sees what this rank wrote before."""
        self._count(_HEAD + index, value)

    def wait(
        self, reached: Callable[[int], bool], what: Callable[[], str], idle: Callable[[], None] | None = None
    ) -> None:
        """Wait until ``reached(r)`` for every rank. Raises RankError."""

        def arrived(rank: int) -> bool:
            if reached(rank):
                return True
            if int(self._rows[rank][_LEFT]) > self._left:
                name = self.host.ranks[rank]
                raise RankError(f"rank {name} has left this step with an exception; rank {self._me} waited in {what()}")
            if idle is not None:
                idle()
            return False

        self.host.wait(arrived, what)

    def barrier(self, kind: str) -> None:
        """Wait until all ranks are here. Raises RankError: another one is at a barrier of another kind."""
        if self.host.size == 1:
            return
        digest = int.from_bytes(hashlib.sha256(kind.encode()).digest()[:7], "little")
        self._barriers += 1
        count, kind_at = self._barriers, _KIND + self._barriers % 2  # nobody can be two barriers ahead
        self._rows[self.host.rank][kind_at] = digest
        self._count(_BARRIERS, count)
        self.wait(lambda r: int(self._rows[r][_BARRIERS]) >= count, lambda: kind)
        for r in range(self.host.size):
            if int(self._rows[r][kind_at]) != digest:
                raise RankError(
                    f"rank {self._me} is at {kind!r} and rank {self.host.ranks[r]} is not: all ranks must run forward, "
                    "backward, optimizer steps and changes of weights in the same order"
                )

    def regroup(self) -> None:
        """Leave a step that an exception has ended: those who wait for this rank raise. Wait until all have left it."""
        self._left += 1
        self._count(_LEFT, self._left)
        self._everyone(_LEFT)
        self._barriers = max(int(row[_BARRIERS]) for row in self._rows)
        self._count(_BACK, self._left)
        self._everyone(_BACK)
        self._count(_BARRIERS, self._barriers)

    def _everyone(self, counter: int) -> None:
        self.host.wait(lambda r: int(self._rows[r][counter]) >= self._left, lambda: "recovering from an exception")

    def _count(self, counter: int, value: int) -> None:
        self.host.publish(self._rows[self.host.rank], counter, value)

    @property
    def _me(self) -> int:
        return self.host.ranks[self.host.rank]
