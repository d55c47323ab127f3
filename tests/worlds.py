"""Worlds whose ranks are threads of one process: the store is a dict, the link is queues."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flagstone.checkpoint.world import Link, SilentRank, Store, World
from flagstone.storage.base import Bytes


class DictStore(Store):
    """What all ranks see, in a dict."""

    def __init__(self) -> None:
        self.words: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.words[key] = value
            self._changed.notify_all()

    def get(self, keys: Sequence[str], seconds: float) -> list[bytes | None]:
        end = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: all(k in self.words for k in keys), end - time.monotonic())
            return [self.words.get(k) for k in keys]

    def first(self, key: str, value: bytes) -> bytes:
        with self._changed:
            held = self.words.setdefault(key, value)
            self._changed.notify_all()
            return held

    def delete(self, key: str) -> None:
        with self._changed:
            self.words.pop(key, None)


class Mail:
    """One queue for every pair of ranks, and for every time that they began anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: defaultdict[tuple[int, int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)

    def queue(self, epoch: int, source: int, target: int) -> queue.Queue[bytes]:
        with self._lock:
            return self._queues[epoch, source, target]

    def unread(self) -> int:
        with self._lock:
            return sum(q.qsize() for q in self._queues.values())


class QueueLink(Link):
    """A rank's end of the mail; ``sent`` counts the bytes that it gave away."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self._rank, self.mail = rank, mail
        self._epoch = 0
        self.sent = 0

    def exchange(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes], seconds: float) -> None:
        for peer, data in send.items():
            self.mail.queue(self._epoch, self._rank, peer).put(data.tobytes())
            self.sent += data.nbytes
        for peer, out in receive.items():
            try:
                message = self.mail.queue(self._epoch, peer, self._rank).get(timeout=seconds)
            except queue.Empty:
                raise SilentRank([peer], seconds) from None
            if len(message) != out.nbytes:
                raise ConnectionError(f"{len(message)} bytes came from rank {peer}, and {out.nbytes} were awaited")
            out[:] = np.frombuffer(message, np.uint8)

    def reset(self) -> None:
        self._epoch += 1


def make_worlds(size: int) -> list[World]:
    """A world of ``size`` ranks, as each of them sees it."""
    store, mail = DictStore(), Mail()
    return [World(rank, size, store, QueueLink(rank, mail)) for rank in range(size)]


def unread(worlds: Sequence[World]) -> int:
    """Messages that were sent, and that nobody received."""
    return worlds[0].link.mail.unread()


def in_threads(worlds: Sequence[World], work: Callable[[World], Any]) -> list[Any]:
    """What ``work`` returned on every rank, each in a thread of its own; the first exception is raised."""
    results: list[Any] = [None] * len(worlds)
    errors: list[BaseException] = []

    def run(world: World) -> None:
        try:
            results[world.rank] = work(world)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(w,), daemon=True) for w in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
