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
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Sequence
from typing import Any

from flagstone.layout import BLOCK
from flagstone.storage.base import Bytes, ReadFile, Staging, Storage, WriteFile

try:
    import fcntl
except ImportError:  # Windows: no locks, so leftovers are left
    fcntl = None  # type: ignore[assignment]

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_QUIET = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # a pipe in a file's place must not hang us
_NOWAIT = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "preadv") else 0
_IOV_MAX = 1000
_HIDDEN = re.compile(r"\.(?P<name>.+)\.flagstone-[0-9a-f]{32}(?P<old>\.old)?")
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


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
        _make_folders(os.path.dirname(folder))
        return _Staged(folder, token, made=True)

    def join(self, folder: str, token: str) -> Staging:
        return _Staged(folder, token, made=False)

    def clean(self, folder: str) -> list[str]:
        parent = os.path.dirname(folder)
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
                lock = _lock(path, exclusive=True)
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


class _Reading(ReadFile):
    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | _O_QUIET)
        self._direct: int | None = None
        self._cached = bool(_NOWAIT)
        self._lock = threading.Lock()
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "is not a regular file", path)
        self.size = status.st_size
        if _O_DIRECT:
            with contextlib.suppress(OSError):
                self._direct = os.open(path, os.O_RDONLY | _O_DIRECT | _O_QUIET)

    def read(self, offset: int, out: Bytes) -> None:
        want = min(out.nbytes, self.size - offset)
        done = 0
        while done < want:
            direct = self._direct
            if direct is not None and _is_aligned(offset + done, out[done:]):
                try:
                    got = os.preadv(direct, [out[done:]], offset + done)
                except OSError as error:
                    if error.errno not in _NO_DIRECT:
                        raise self._named(error) from error
                    self._drop_direct()
                    continue
            else:
                try:
                    got = os.preadv(self._fd, [out[done:want]], offset + done)
                except OSError as error:
                    raise self._named(error) from error
            if got == 0:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done:,} of {self.size:,}", self._path)
            done += got

    def read_cached(self, offset: int, out: Sequence[Bytes]) -> int:
        if not self._cached:
            return 0
        try:
            return os.preadv(self._fd, out[:_IOV_MAX], offset, _NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise self._named(error) from error
            self._cached = False
            return 0

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct = -1, None

    def _drop_direct(self) -> None:
        with self._lock:
            self._direct, fd = None, self._direct
        if fd is not None:
            os.close(fd)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self._path)


class _Writing(WriteFile):
    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | _O_QUIET)
        self._direct: int | None = None
        if _O_DIRECT:
            with contextlib.suppress(OSError):
                self._direct = os.open(path, os.O_RDWR | _O_DIRECT | _O_QUIET)

    def write(self, offset: int, data: Bytes) -> None:
        done = 0
        while done < data.nbytes:
            rest = data[done:]
            blocks = rest.nbytes - rest.nbytes % BLOCK
            direct = self._direct
            try:
                if direct is not None and blocks and _is_aligned(offset + done, rest[:blocks]):
                    got = os.pwrite(direct, rest[:blocks], offset + done)
                else:
                    got = os.pwrite(self._fd, rest, offset + done)
            except OSError as error:
                if direct is not None and error.errno in _NO_DIRECT:
                    self._direct = None  # its descriptor stays open until close: other threads may be using it
                    self._retired = direct
                    continue
                raise OSError(error.errno, error.strerror, self._path) from error
            if got == 0:
                raise OSError(errno.EIO, f"nothing of {rest.nbytes:,} bytes was written", self._path)
            done += got

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def close(self) -> None:
        for fd in (self._fd, self._direct, getattr(self, "_retired", None)):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct, self._retired = -1, None, None

    _retired: int | None = None


class _Staged(Staging):
    def __init__(self, folder: str, token: str, *, made: bool) -> None:
        self._folder, self._parent = folder, os.path.dirname(folder)
        self._path = os.path.join(self._parent, f".{os.path.basename(folder)}.flagstone-{token}")
        self._old: int | None = None
        if made:
            os.mkdir(self._path)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._old = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))  # so that its inode stays its
        self._lock = _lock(self._path, exclusive=False)

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
        for name in os.listdir(self._folder):
            if name in exclude:
                continue
            source, target = os.path.join(self._folder, name), os.path.join(self._path, name)
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "would be replaced, but is not of a checkpoint", source)
            if os.path.isdir(source) and not os.path.islink(source):
                shutil.copytree(source, target, symlinks=True, copy_function=_link)
            else:
                _link(source, target)

    def publish(self) -> None:
        _sync_folder(self._path)
        if self._old is None:
            try:
                os.rename(self._path, self._folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise FileExistsError(errno.EEXIST, "something appeared there meanwhile", self._folder) from error
        else:
            self._exchange(os.fstat(self._old))
        _sync_folder(self._parent)
        if self._old is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        self.release()

    def _exchange(self, old: os.stat_result) -> None:
        aside = self._path
        if not _swap(self._path, self._folder):
            # No exchange here: two renames. A crash between them leaves the old one whole under its hidden name, from
            # where the next save, or `flagstone clean`, brings it back.
            aside = f"{self._path}.old"
            os.rename(self._folder, aside)
            os.rename(self._path, self._folder)
        if not os.path.samestat(os.stat(aside), old):
            if aside == self._path:
                _swap(self._path, self._folder)
            else:
                os.rename(self._folder, self._path)
                os.rename(aside, self._folder)
            raise FileExistsError(errno.EEXIST, "another folder appeared meanwhile", self._folder)
        if aside != self._path:
            _sync_folder(self._parent)
            shutil.rmtree(aside, ignore_errors=True)

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


def _lock(path: str, *, exclusive: bool) -> int | None:
    """Lock a folder until the descriptor is closed, or its process dies; None when others hold it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        elif exclusive:
            raise OSError(errno.ENOTSUP, "no locks here")
        return fd
    except OSError:
        os.close(fd)
        if exclusive:
            return None
        raise


def _make_folders(path: str) -> None:
    """``os.makedirs`` whose new entries are durable."""
    if os.path.isdir(path):
        return
    _make_folders(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    _sync_folder(os.path.dirname(path))


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECT:  # some network file systems have no such thing
            raise
    finally:
        os.close(fd)


def _link(source: str, target: str, **_: Any) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


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
