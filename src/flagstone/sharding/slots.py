"""Buffers that streams take turns with: which stream uses which is fixed, as autograd keeps views of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from flagstone.sharding.stream import Stream
    from flagstone.sharding.unit import Unit


class Slot:
    """A buffer of bytes.

    Attributes:
        kind: what is in it.
        nbytes: of its largest user.
        users: the streams that take turns.
        mine: this rank's buffer.
        everyone: each rank's, where memory is shared; else this rank's alone.
        ticket: what still reads or writes it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.nbytes = 0
        self.users: list[weakref.ref[Stream]] = []
        self.everyone: list[Tensor] = []
        self.rank = 0
        self.ticket: Any = None
        self._holder: weakref.ref[Stream] | None = None

    def add(self, stream: Stream, nbytes: int) -> None:
        self.users.append(weakref.ref(stream))
        self.nbytes = max(self.nbytes, nbytes)

    @property
    def mine(self) -> Tensor:
        return self.everyone[self.rank]

    @property
    def holder(self) -> Stream | None:
        """The stream whose bytes are in it."""
        return None if self._holder is None else self._holder()

    @holder.setter
    def holder(self, stream: Stream | None) -> None:
        self._holder = None if stream is None else weakref.ref(stream)


def assign(
    streams: Iterable[tuple[Stream, int]], above: Callable[[Unit], Sequence[Unit]], count: int, kind: str
) -> dict[Stream, Slot]:
    """Give each stream a slot, in turn: ``count`` for each class of sizes, which differ by a factor of 2 at most.

    Args:
        streams: with the bytes that each needs, in the order of use.
        above: the units around a unit, which are in use while it is; they never share a slot with it.
        count: of slots to begin with.
        kind: what they are for.
    """
    classes: dict[int, list[Slot]] = {}
    turn: dict[int, int] = {}
    found: dict[Stream, Slot] = {}
    for stream, nbytes in streams:
        size_class = nbytes.bit_length()
        slots = classes.setdefault(size_class, [])
        around = {stream.unit, *above(stream.unit)}
        taken = {found[s] for s in found if s.unit in around}
        start = turn.get(size_class, 0)
        order = [*range(start, max(len(slots), count)), *range(start)]
        number = next((i for i in order if i >= len(slots) or slots[i] not in taken), len(slots))
        while number >= len(slots):
            slots.append(Slot(kind))
        slots[number].add(stream, nbytes)
        found[stream] = slots[number]
        turn[size_class] = (number + 1) % max(len(slots), count)
    return found
