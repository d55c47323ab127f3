"""What benchmarks share: limits of disk and memory, cold caches, peaks, medians."""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

CHUNK = 16 << 20


def huge(nbytes: int) -> np.ndarray:
    """Memory on huge pages, touched."""
    mapping = mmap.mmap(-1, nbytes + (2 << 20))
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % (2 << 20)
    data = whole[start : start + nbytes]
    data[:: 4 << 10] = 1
    return data


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def disk_write(path: Path, nbytes: int, buffers: Sequence[np.ndarray]) -> float:
    """Seconds to write a new file durably: direct I/O, a thread for each buffer, 16 MiB at a time from huge pages."""
    began = time.perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    os.posix_fallocate(fd, 0, nbytes)
    step = CHUNK * len(buffers)

    def work(i: int) -> None:
        for at in range(i * CHUNK, nbytes, step):
            os.pwrite(fd, buffers[i][: min(CHUNK, nbytes - at)], at)

    _in_threads(len(buffers), work)
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - began


def disk_read(path: Path, buffers: Sequence[np.ndarray]) -> float:
    """Seconds to read a file: direct I/O, a thread for each buffer, 16 MiB at a time into huge pages."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    nbytes = os.fstat(fd).st_size
    step = CHUNK * len(buffers)
    began = time.perf_counter()

    def work(i: int) -> None:
        for at in range(i * CHUNK, nbytes, step):
            os.preadv(fd, [buffers[i]], at)

    _in_threads(len(buffers), work)
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


def memory_copy(source: Sequence[np.ndarray], target: Sequence[np.ndarray]) -> float:
    """Seconds to copy memory once, in one thread."""
    began = time.perf_counter()
    for a, b in zip(source, target, strict=True):
        b[...] = a
    return time.perf_counter() - began


def evict(folder: Path) -> None:
    """Make files cold: write them out, and drop them from the page cache."""
    for path in [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(folder: Path) -> None:
    """Bring files into the page cache."""
    for path in [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]:
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def reset_peak() -> int:
    """Forget the peak of this process's memory; bytes in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Bytes of the peak since ``reset_peak``."""
    return _status("VmHWM")


def pss(pid: int | str = "self") -> int:
    """Bytes of memory that a process has now; what it shares with others counts by its share."""
    return _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss")


def _status(key: str) -> int:
    return _field(Path("/proc/self/status"), key)


def _field(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}g} [{min(values):.{digits}g}-{max(values):.{digits}g}]"
