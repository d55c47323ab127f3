"""Values that belong to one rank, and are meant to differ."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class per_rank(Generic[T]):  # noqa: N801 - reads as the verb that it is
    """A value that every rank has of its own, such as a random number generator's state.

    Saved, each rank's is kept. As a target of ``load``, ``value`` becomes what the rank of the same number had; a rank
    that the save did not have keeps what it has, and is told.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"
