"""What a storage must do. Folders of files; a new folder is built aside and appears under its name in one step.

Files are written at any offset, by several writers at once, each its own bytes. ``flagstone.storage.testing`` has the
tests that every storage must pass, as a class to inherit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]  # one dimension, contiguous


class _File(ABC):
    @abstractmethod
    def close(self) -> None:
        """Give back what the operating system lent. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ReadFile(_File):
    """An open file. Its methods may be called by several threads at once."""

    size: int  # bytes

    @abstractmethod
    def read(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes from ``offset`` on. What lies past the end of the file may become anything.

        Raises:
            OSError: the bytes could not be read, or the file has become shorter.
        """

    def read_cached(self, offset: int, out: Sequence[Bytes]) -> int:
        """Fill the buffers in turn with what is in memory already; the number of bytes, 0 when that is not known."""
        return 0


class WriteFile(_File):
    """A file of a staging folder. Its methods may be called by several threads at once, for different bytes."""

    @abstractmethod
    def write(self, offset: int, data: Bytes) -> None:
        """Write all of ``data`` at ``offset``, or raise OSError."""

    @abstractmethod
    def sync(self) -> None:
        """Make what was written durable, or raise OSError; after an error the bytes count as lost."""


class Staging(ABC):
    """A folder that is being built, seen by nobody under its final name."""

    @abstractmethod
    def create(self, file: str, size: int) -> None:
        """Make a file of ``size`` bytes; where the storage can, its space is taken now, so that a full disk shows.

        Raises:
            FileExistsError: it was made already.
            OSError: there is no space, or another fault.
        """

    @abstractmethod
    def open(self, file: str) -> WriteFile:
        """Open a file that ``create`` made, here or on another rank, for writing. Raises FileNotFoundError."""

    @abstractmethod
    def adopt(self, exclude: frozenset[str]) -> None:
        """Take over from the folder that will be replaced all that is not in ``exclude``: it is not ours to remove.

        Raises:
            FileExistsError: such a file has the name of a new one.
        """

    @abstractmethod
    def publish(self) -> None:
        """Let the folder appear under its name, durably, in one step: afterwards there is the old or the new.

        Raises:
            FileExistsError: a folder is there now that was not there when this one was begun.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove all of it. Never raises for what is gone already."""

    @abstractmethod
    def release(self) -> None:
        """This process will not write any more; what is not published may be cleaned away by anybody."""


class Storage(ABC):
    """A place for folders."""

    @abstractmethod
    def exists(self, folder: str) -> bool:
        """Whether something is there under this name, other than an empty folder."""

    @abstractmethod
    def list(self, folder: str) -> dict[str, int]:
        """The files of a folder and their sizes in bytes. Raises FileNotFoundError, NotADirectoryError."""

    @abstractmethod
    def open(self, folder: str, file: str) -> ReadFile:
        """Open a file of a folder. Raises OSError; never follows a link out of the folder."""

    @abstractmethod
    def stage(self, folder: str, token: str, *, replace: bool = False) -> Staging:
        """Begin a new folder, to take the place of the one that is there now when ``replace`` is set.

        Args:
            token: names this attempt: 32 hexadecimal digits.

        Raises:
            FileExistsError: a folder is there, and is not to be replaced.
        """

    @abstractmethod
    def join(self, folder: str, token: str) -> Staging:
        """Take part in what another rank began. Raises FileNotFoundError when it cannot be seen from here."""

    @abstractmethod
    def clean(self, folder: str) -> Sequence[str]:
        """Remove what dead attempts left beside ``folder``; the names of what was removed."""
