"""The errors of Flagstone: one small hierarchy, ordinary exceptions, the same text on every rank."""

from __future__ import annotations

from dataclasses import dataclass


class FlagstoneError(Exception):
    """Everything that Flagstone raises on purpose."""


class SaveError(FlagstoneError):
    """A save did not happen: nothing was published, and what was there before is untouched."""


class LoadError(FlagstoneError):
    """A checkpoint cannot be read, or does not fit what it is loaded into."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of bytes of a file that is not what was written.

    Attributes:
        file: name within the checkpoint folder.
        start: first byte of the range.
        stop: byte after the last one of the range.
        tensors: names of the tensors that the range belongs to.
        reason: what is wrong, in words.
    """

    file: str
    start: int
    stop: int
    tensors: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}: bytes {self.start:,} to {self.stop:,}"
        if self.tensors:
            shown = ", ".join(self.tensors[:4])
            more = f" and {len(self.tensors) - 4} more" if len(self.tensors) > 4 else ""
            where += f" (tensor {shown}{more})"
        return f"{where}: {self.reason}"


class DamagedError(LoadError):
    """Bytes of a checkpoint are not those that were written.

    Attributes:
        damage: what was found, range by range.
        overwritten: names of the target's tensors that had been changed, wholly or in part, when the damage was
            found; empty when nothing was.
    """

    def __init__(self, message: str, damage: tuple[Damage, ...] = (), overwritten: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.damage = damage
        self.overwritten = overwritten

    def __reduce__(self) -> tuple[type[DamagedError], tuple[str, tuple[Damage, ...], tuple[str, ...]]]:
        return type(self), (str(self), self.damage, self.overwritten)


class FlagstoneWarning(UserWarning):
    """Something that a person should know, but that does not stop the work."""
