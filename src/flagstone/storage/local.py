"""Local and network file systems: direct I/O where it can be had, a hidden folder renamed into place.

    runs/a/.step-00000300.flagstone-<token>      being written, locked by every rank that writes
    runs/a/step-00000300                         complete, because it exists

The lock is an flock on the hidden folder itself; the kernel drops it when a process dies, and so the next save knows
which hidden folders are nobody's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from flagstone.layout import BLOCK
from flagstone.storage.base import Bytes, ReadFile, Staging, Storage, WriteFile

try:
    import fcntl
except ImportError:  # Windows: no locks, so leftovers are left
    fcntl = None  # type: ignore[assignment]

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_O_QUIET = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # a pipe in a file's place must not hang us
_NOWAIT = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "preadv") else 0
_IOV_MAX = 1000
_HIDDEN = re.compile(r"\.(?P<name>.+)\.flagstone-[0-9a-f]{32}(?P<old>\.old)?")
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


class LocalDisk(Storage):
    """Folders of the local file system, or of one that is mounted."""

    def exists(self, folder: str) -> bool:
        try:
            with os.scandir(folder) as entries:
                return any(True for _ in entries)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            return True

    def list(self, folder: str) -> dict[str, int]:
        with os.scandir(folder) as entries:
            return {e.name: e.stat().st_size for e in entries if e.is_file()}

    def open(self, folder: str, file: str) -> ReadFile:
        path = os.path.join(folder, file)
        if os.path.islink(path):
            inside = os.path.realpath(folder)
            if os.path.commonpath([inside, os.path.realpath(path)]) != inside:
                raise PermissionError(errno.EPERM, "is a link out of the checkpoint folder", path)
        return _Reading(path)

    def stage(self, folder: str, token: str, *, replace: bool = False) -> Staging:
        if not replace and self.exists(folder):
            raise FileExistsError(errno.EEXIST, "something is there", folder)
        staged = _Staged(folder, token)
        try:
            staged.begin(replace=replace)
        except OSError:
            staged.release()
            raise
        return staged

    def join(self, folder: str, token: str) -> Staging:
        staged = _Staged(folder, token)
        staged.join()
        return staged

    def clean(self, folder: str) -> Sequence[str]:
        parent = os.path.dirname(os.path.realpath(folder))
        removed: list[str] = []
        try:
            names = os.listdir(parent)
        except FileNotFoundError:
            return removed
        for name in names:
            match = _HIDDEN.fullmatch(name)
            path = os.path.join(parent, name)
            if not match or os.path.islink(path) or not os.path.isdir(path):
                continue
            with contextlib.suppress(OSError):  # not ours, or somebody else was quicker
                lock = _claim(path)
                if lock is None:
                    continue
                try:
                    home = os.path.join(parent, match["name"])
                    if match["old"] and not os.path.lexists(home):
                        os.rename(path, home)  # a crash between the two renames of a replacement
                        _sync_folder(parent)
                    else:
                        shutil.rmtree(path)
                        removed.append(path)
                finally:
                    os.close(lock)
        return removed


class _Opened:
    """A regular file's descriptors: one through the page cache, and one past it where the file system can.

    Who finds that it cannot after all forgets ``_direct``; it stays open until the end, as other threads may use it.
    """

    def __init__(self, path: str, flags: int) -> None:
        self._path = path
        self._fd = os.open(path, flags | _O_QUIET)
        self._direct: int | None = None
        self._fds = [self._fd]
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "is not a regular file", path)
        self.size = status.st_size
        if _O_DIRECT:
            with contextlib.suppress(OSError):
                direct = os.open(path, flags | _O_DIRECT | _O_QUIET)
                self._fds.append(direct)
                if os.path.samestat(os.fstat(direct), status):  # else the folder was replaced between the two
                    self._direct = direct

    def close(self) -> None:
        fds, self._fds = self._fds, []
        self._fd, self._direct = -1, None
        for fd in fds:
            os.close(fd)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self._path)


class _Reading(_Opened, ReadFile):
    def __init__(self, path: str) -> None:
        super().__init__(path, os.O_RDONLY)
        self._pages: Bytes | None = None
        if self.size and os.access(path, os.W_OK):  # of others' files the kernel does not tell what is in memory
            with contextlib.suppress(OSError, ValueError):
                self._pages = np.frombuffer(mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ), np.uint8)

    def read(self, offset: int, out: Bytes) -> None:
        want = min(out.nbytes, self.size - offset)
        done = 0
        while done < want:
            direct = self._direct
            try:
                if direct is not None and _is_aligned(offset + done, out[done:]):
                    got = os.preadv(direct, [out[done:].data], offset + done)
                else:
                    direct = None
                    got = os.preadv(self._fd, [out[done:want].data], offset + done)
            except OSError as error:
                if direct is None or error.errno not in _NO_DIRECT:
                    raise self._named(error) from error
                self._direct = None
                continue
            if got == 0:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done:,} of {self.size:,}", self._path)
            done += got

    def read_cached(self, offset: int, out: Sequence[Bytes]) -> int:
        if not _NOWAIT or not self._is_resident(offset, sum(b.nbytes for b in out)):
            return 0
        try:
            return os.preadv(self._fd, [b.data for b in out[:_IOV_MAX]], offset, _NOWAIT)
        except BlockingIOError:
            return 0  # evicted meanwhile
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise self._named(error) from error
            return 0

    def _is_resident(self, offset: int, length: int) -> bool:
        """Whether the page cache has all of these bytes. Asked first, as a read that does not wait for what is missing
        still has it fetched, and then the disk reads it twice."""
        if self._pages is None or offset + length > self.size or not length:
            return False
        first = offset // mmap.PAGESIZE
        count = -(-(offset + length) // mmap.PAGESIZE) - first
        found = np.empty(count, np.uint8)
        start = ctypes.c_void_p(self._pages.ctypes.data + first * mmap.PAGESIZE)
        size = ctypes.c_size_t(length + offset % mmap.PAGESIZE)
        if _libc().mincore(start, size, ctypes.c_void_p(found.ctypes.data)) != 0:
            return False
        return bool((found & 1).all())

    def close(self) -> None:
        self._pages = None
        super().close()


class _Writing(_Opened, WriteFile):
    def __init__(self, path: str) -> None:
        super().__init__(path, os.O_RDWR)

    def write(self, offset: int, data: Bytes) -> None:
        done = 0
        while done < data.nbytes:
            rest = data[done:]
            blocks = rest.nbytes - rest.nbytes % BLOCK
            direct = self._direct
            try:
                if direct is not None and blocks and _is_aligned(offset + done, rest[:blocks]):
                    got = os.pwrite(direct, rest[:blocks].data, offset + done)
                else:
                    direct = None
                    got = os.pwrite(self._fd, rest.data, offset + done)
            except OSError as error:
                if direct is None or error.errno not in _NO_DIRECT:
                    raise self._named(error) from error
                self._direct = None
                continue
            if got == 0:
                raise OSError(errno.EIO, f"nothing of {rest.nbytes:,} bytes was written", self._path)
            done += got

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._named(error) from error


class _Staged(Staging):
    def __init__(self, folder: str, token: str) -> None:
        self._folder = os.path.realpath(folder)  # where a link points to is what is built, and replaced
        self._parent, name = os.path.split(self._folder)
        self._path = os.path.join(self._parent, f".{name}.flagstone-{token}")
        self._lock: int | None = None
        self._old: int | None = None

    def begin(self, *, replace: bool) -> None:
        _make_folders(self._parent)
        if replace:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._old = _hold(self._folder, wait=False)  # open, so that its inode stays its
        while True:
            os.mkdir(self._path)
            with contextlib.suppress(FileNotFoundError):
                self._lock = _hold(self._path)
                if os.path.lexists(self._path):
                    return
                os.close(self._lock)  # a cleaner took it for a dead one, before it was locked
                self._lock = None

    def join(self) -> None:
        self._lock = _hold(self._path)

    def create(self, file: str, size: int) -> None:
        path = os.path.join(self._path, file)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _O_QUIET, 0o666)
        try:
            _allocate(fd, size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        finally:
            os.close(fd)

    def open(self, file: str) -> WriteFile:
        return _Writing(os.path.join(self._path, file))

    def adopt(self, exclude: frozenset[str]) -> None:
        if self._old is None:
            return
        try:
            names = os.listdir(self._folder)
            now = os.stat(self._folder)
        except FileNotFoundError:
            return  # removed meanwhile
        if not os.path.samestat(now, os.fstat(self._old)):
            raise FileExistsError(errno.EEXIST, "another folder appeared meanwhile", self._folder)
        for name in names:
            if name in exclude:
                continue
            source, target = os.path.join(self._folder, name), os.path.join(self._path, name)
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "would be replaced, but is not of a checkpoint", source)
            if os.path.isdir(source) and not os.path.islink(source):
                shutil.copytree(source, target, symlinks=True, copy_function=_link)
                for folder, _, _ in os.walk(target):
                    _sync_folder(folder)
            else:
                _link(source, target)

    def publish(self) -> None:
        _sync_folder(self._path)
        if self._old is not None and os.path.lexists(self._folder):
            aside = self._exchange(os.fstat(self._old))
        else:
            aside = None
            self._appear()
        try:
            _sync_folder(self._parent)
        except OSError:
            self._withdraw(aside)
            raise
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        self.release()

    def _appear(self) -> None:
        try:
            os.rename(self._path, self._folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FileExistsError(errno.EEXIST, "something appeared there meanwhile", self._folder) from error

    def _exchange(self, old: os.stat_result) -> str:
        """Take the place of the folder that is there; the hidden name that it has now."""
        aside = self._path
        if not _swap(self._path, self._folder):
            # No exchange here: two renames. A crash between them leaves the old one whole under its hidden name, from
            # where the next save brings it back.
            aside = f"{self._path}.old"
            os.rename(self._folder, aside)
            try:
                self._appear()
            except OSError:
                with contextlib.suppress(OSError):
                    os.rename(aside, self._folder)
                raise
        if not os.path.samestat(os.lstat(aside), old):
            self._withdraw(aside)
            raise FileExistsError(errno.EEXIST, "another folder appeared meanwhile", self._folder)
        return aside

    def _withdraw(self, aside: str | None) -> None:
        """Undo an exchange, or an appearance, as far as that can be done."""
        with contextlib.suppress(OSError):
            if aside == self._path:
                _swap(self._path, self._folder)
                return
            os.rename(self._folder, self._path)
            if aside is not None:
                os.rename(aside, self._folder)

    def discard(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        for fd in (self._lock, self._old):
            if fd is not None:
                os.close(fd)
        self._lock = self._old = None


def _is_aligned(offset: int, data: Bytes) -> bool:
    return offset % BLOCK == 0 and data.nbytes % BLOCK == 0 and data.ctypes.data % BLOCK == 0


def _hold(path: str, *, wait: bool = True) -> int:
    """Keep a folder from being cleaned away until the descriptor is closed, or its process dies."""
    fd = os.open(path, _O_FOLDER)
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_SH if wait else fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # Where there are no locks, nobody can claim a folder either: leftovers are left.
        if error.errno not in (*_NO_LOCKS, errno.EWOULDBLOCK):
            os.close(fd)
            raise
    return fd


def _claim(path: str) -> int | None:
    """The lock of a folder that no live process holds; None when one does, or when that cannot be known."""
    fd = os.open(path, _O_FOLDER)
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    os.close(fd)
    return None


def _make_folders(path: str) -> None:
    """``os.makedirs`` whose new entries are durable."""
    if os.path.isdir(path):
        return
    _make_folders(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    _sync_folder(os.path.dirname(path))


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | _O_QUIET)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(path: str) -> None:
    try:
        _sync(path)
    except OSError as error:
        if error.errno not in _NO_DIRECT:  # some network file systems have no such thing
            raise OSError(error.errno, error.strerror, path) from error


def _link(source: str, target: str, **_: Any) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
        if not os.path.islink(target):
            _sync(target)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _allocate(fd: int, size: int) -> None:
    """Give the file its size, and its space where the file system can do that without writing it."""
    if size and sys.platform == "linux":
        libc = _libc()
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
        while libc.fallocate(fd, 0, 0, size) != 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                break
            raise OSError(code, os.strerror(code))
        else:
            return
    space = os.fstatvfs(fd)
    if size > space.f_bavail * space.f_frsize:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size:,} bytes wanted")
    os.ftruncate(fd, size)


def _swap(a: str, b: str) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    libc = _libc()
    here = -100 if sys.platform == "linux" else -2  # AT_FDCWD
    call = getattr(libc, "renameat2" if sys.platform == "linux" else "renameatx_np", None)
    if call is None:
        return False
    if call(here, os.fsencode(a), here, os.fsencode(b), ctypes.c_uint(2)) == 0:  # RENAME_EXCHANGE, RENAME_SWAP
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), b)
