"""Reused buffers for direct I/O: aligned, on huge pages where the kernel gives them, within one budget.

The first touch of fresh memory is the slowest step of a save, so buffers are kept for the next one.
"""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from flagstone.storage.base import Bytes

CHUNK = 16 << 20  # bytes of one buffer: what a disk likes to be given at once
WRITERS = 3  # threads of a save, of every rank: two at the disk while one copies and hashes
READERS = 4  # threads of a load
BUFFERS = 4  # 64 MiB: the budget of a save or a load
_HUGE = 2 << 20


def aligned(nbytes: int) -> Bytes:
    """Fresh zeroed memory of ``nbytes``, aligned to 2 MiB, with huge pages asked for."""
    mapping = mmap.mmap(-1, nbytes + _HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: small pages do as well, only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + nbytes]


class BufferPool:
    """``BUFFERS`` buffers of ``CHUNK`` bytes; who asks for one more waits."""

    def __init__(self) -> None:
        self._free: queue.LifoQueue[Bytes | None] = queue.LifoQueue()
        for _ in range(BUFFERS):
            self._free.put(None)  # made when first wanted

    def take(self) -> Bytes:
        buffer = self._free.get()
        if buffer is not None:
            return buffer
        try:
            return aligned(CHUNK)
        except BaseException:
            self._free.put(None)  # or those who wait would wait for ever
            raise

    def give(self, buffer: Bytes) -> None:
        self._free.put(buffer)

    @contextmanager
    def lent(self) -> Iterator[Bytes]:
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give(buffer)


POOL = BufferPool()


def _renew() -> None:
    global POOL
    POOL = BufferPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)  # the parent's buffers may be on loan to threads that are not here
