"""Folders in the memory of this process: for tests, and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from flagstone.storage.base import Bytes, ReadFile, Staging, Storage, WriteFile


class Memory(Storage):
    """Folders as dictionaries of bytes. Threads may share one; processes cannot."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folders: dict[str, dict[str, bytearray]] = {}
        self._replaces: dict[tuple[str, str], dict[str, bytearray] | None] = {}
        self._staged: dict[tuple[str, str], dict[str, bytearray]] = {}

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
            old = self._folders.get(folder)
            if old and not replace:
                raise FileExistsError(17, "a folder is there", folder)
            self._staged[folder, token] = {}
            self._replaces[folder, token] = old
            return _Staged(self, folder, token)

    def join(self, folder: str, token: str) -> Staging:
        with self._lock:
            if (folder, token) not in self._staged:
                raise FileNotFoundError(2, "memory is not shared between processes", folder)
            return _Staged(self, folder, token)

    def clean(self, folder: str) -> list[str]:
        return []  # what is in memory dies with its process

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
        memoryview(out)[: len(part)] = part

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
        self._data[offset : offset + data.nbytes] = memoryview(data)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Staged(Staging):
    def __init__(self, storage: Memory, folder: str, token: str) -> None:
        self._storage, self._name, self._token = storage, folder, token

    @property
    def _files(self) -> dict[str, bytearray]:
        return self._storage._staged[self._name, self._token]

    def create(self, file: str, size: int) -> None:
        if file in self._files:
            raise FileExistsError(17, "created twice", file)
        self._files[file] = bytearray(size)

    def open(self, file: str) -> WriteFile:
        try:
            return _Writing(self._files[file])
        except KeyError:
            raise FileNotFoundError(2, "was not created", file) from None

    def adopt(self, exclude: frozenset[str]) -> None:
        for file, data in self._storage._folders.get(self._name, {}).items():
            if file in exclude:
                continue
            if file in self._files:
                raise FileExistsError(17, "would be replaced, but is not of a checkpoint", file)
            self._files[file] = data

    def publish(self) -> None:
        key = (self._name, self._token)
        with self._storage._lock:
            there = self._storage._folders.get(self._name)
            if there and there is not self._storage._replaces[key]:
                raise FileExistsError(17, "another folder appeared meanwhile", self._name)
            self._storage._folders[self._name] = self._storage._staged.pop(key)

    def discard(self) -> None:
        with self._storage._lock:
            self._storage._staged.pop((self._name, self._token), None)
            self._storage._replaces.pop((self._name, self._token), None)

    def release(self) -> None:
        pass


SHARED = Memory()
