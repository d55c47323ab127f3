"""Bytes under names: the small interface, local disk, memory."""

from __future__ import annotations

import os

from flagstone.storage.base import ReadFile, Staging, Storage, WriteFile


def resolve(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that a path names, and the folder's name in it.

    A plain path is the local file system; ``memory://name`` lives in this process.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        from flagstone.storage.local import LocalDisk

        return LocalDisk(), os.path.abspath(text)
    if scheme == "memory":
        from flagstone.storage.memory import SHARED

        return SHARED, rest.strip("/")
    raise ValueError(f"{text}: no storage for {scheme}:// is known; use a local path or memory://name")


__all__ = ["ReadFile", "Staging", "Storage", "WriteFile", "resolve"]
