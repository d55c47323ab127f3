"""Folders in the memory of this process: for tests, and for trying things out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from flagstone.storage.base import Bytes, ReadFile, Staging, Storage, WriteFile


class _Attempt:
    """A folder that is being built, the one that it replaces, and how many take part."""

    def __init__(self, replaces: dict[str, bytearray] | None) -> None:
        self.files: dict[str, bytearray] = {}
        self.replaces = replaces
        self.holders = 0


class Memory(Storage):
    """Folders as dictionaries of bytes. Threads may share one; processes cannot."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folders: dict[str, dict[str, bytearray]] = {}
        self._attempts: dict[tuple[str, str], _Attempt] = {}

    def exists(self, folder: str) -> bool:
        return bool(self._folders.get(folder))

    def list(self, folder: str) -> dict[str, int]:
        with self._lock:
            return {file: len(data) for file, data in self._folder(folder).items()}

    def open(self, folder: str, file: str) -> ReadFile:
        with self._lock:
            try:
                return _Reading(self._folder(folder)[file])
            except KeyError:
                raise FileNotFoundError(2, "no such file in this memory folder", f"{folder}/{file}") from None

    def stage(self, folder: str, token: str, *, replace: bool = False) -> Staging:
        with self._lock:
            if not replace and self.exists(folder):
                raise FileExistsError(17, "a folder is there", folder)
            self._attempts[folder, token] = _Attempt(self._folders.get(folder) if replace else None)
            return _Staged(self, folder, token)

    def join(self, folder: str, token: str) -> Staging:
        return _Staged(self, folder, token)

    def clean(self, folder: str) -> Sequence[str]:
        with self._lock:
            dead = [(name, token) for (name, token), attempt in self._attempts.items() if not attempt.holders]
            for key in dead:
                del self._attempts[key]
            return [f"{name} ({token})" for name, token in dead]

    def put(self, folder: str, file: str, data: bytes) -> None:
        """Set a file of a published folder, as a user may do with a folder on disk."""
        with self._lock:
            self._folders.setdefault(folder, {})[file] = bytearray(data)

    def get(self, folder: str, file: str) -> bytes:
        """The bytes of a file of a published folder."""
        with self._lock:
            return bytes(self._folder(folder)[file])

    def _folder(self, folder: str) -> dict[str, bytearray]:
        try:
            return self._folders[folder]
        except KeyError:
            raise FileNotFoundError(2, "no such memory folder", folder) from None


class _Reading(ReadFile):
    def __init__(self, data: bytearray) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read(self, offset: int, out: Bytes) -> None:
        part = self._data[offset : offset + out.nbytes]
        out.data[: len(part)] = part

    def read_cached(self, offset: int, out: Sequence[Bytes]) -> int:
        at = offset
        for buffer in out:
            self.read(at, buffer)
            at += buffer.nbytes
        return max(min(at, self.size) - offset, 0)

    def close(self) -> None:
        self._data.release()


class _Writing(WriteFile):
    def __init__(self, data: bytearray) -> None:
        self._data = data

    def write(self, offset: int, data: Bytes) -> None:
        if offset + data.nbytes > len(self._data):
            raise OSError(27, f"bytes {offset} to {offset + data.nbytes} are outside the {len(self._data)} created")
        self._data[offset : offset + data.nbytes] = data.data

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Staged(Staging):
    def __init__(self, storage: Memory, folder: str, token: str) -> None:
        self._storage, self._name, self._token = storage, folder, token
        self._released = False
        with storage._lock:
            self._attempt.holders += 1

    @property
    def _attempt(self) -> _Attempt:
        try:
            return self._storage._attempts[self._name, self._token]
        except KeyError:
            raise FileNotFoundError(2, "no such attempt in this memory", f"{self._name} ({self._token})") from None

    def create(self, file: str, size: int) -> None:
        with self._storage._lock:
            files = self._attempt.files
            if file in files:
                raise FileExistsError(17, "created twice", file)
            files[file] = bytearray(size)

    def open(self, file: str) -> WriteFile:
        try:
            return _Writing(self._attempt.files[file])
        except KeyError:
            raise FileNotFoundError(2, "was not created", file) from None

    def adopt(self, exclude: frozenset[str]) -> None:
        with self._storage._lock:
            files, replaces = self._attempt.files, self._attempt.replaces
            for file, data in (self._storage._folders.get(self._name, {}) if replaces is not None else {}).items():
                if file in exclude:
                    continue
                if file in files:
                    raise FileExistsError(17, "would be replaced, but is not of a checkpoint", file)
                files[file] = data

    def publish(self) -> None:
        with self._storage._lock:
            attempt = self._attempt
            there = self._storage._folders.get(self._name)
            if there and there is not attempt.replaces:
                raise FileExistsError(17, "another folder appeared meanwhile", self._name)
            self._storage._folders[self._name] = attempt.files
            self.discard()

    def discard(self) -> None:
        with self._storage._lock:
            self._storage._attempts.pop((self._name, self._token), None)
            self._released = True

    def release(self) -> None:
        with self._storage._lock:
            if not self._released:
                self._released = True
                with contextlib.suppress(FileNotFoundError):
                    self._attempt.holders -= 1


SHARED = Memory()
