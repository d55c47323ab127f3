"""Where parameters lie in one flat buffer, and which part of it each rank has. Arithmetic only.

    elements      0                                   numel
    places        | weight | weight | bias | bias |          no holes
    4 ranks       |   rank 0   |   rank 1   | 2 |            equal shards, cut where blocks of 4096 bytes begin
    whole=True    | rank 0 | rank 1 | rank 2      |          cut only where a parameter begins

Parameters whose bytes are whole blocks come first, as they do in a file (``flagstone.layout.files``): so a rank's shard
is one range of the file's bytes, or two where it has some of the others too. All numbers count elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from flagstone.layout.box import Shape, Span
from flagstone.layout.dtypes import DTYPES
from flagstone.layout.files import BLOCK


class Place(NamedTuple):
    """A parameter's place in a flat buffer: ``numel`` elements from ``offset``.

    ``order`` lists its dimensions as they lie in memory, the one with the longest stride first; empty for row-major.
    """

    name: str
    shape: Shape
    offset: int
    numel: int
    order: Shape = ()

    @property
    def span(self) -> Span:
        return Span(self.offset, self.numel)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of parameters of one element type, in the order of their elements."""

    dtype: str
    places: tuple[Place, ...]

    @classmethod
    def of(cls, dtype: str, parameters: Iterable[tuple[str, Shape]], *, blocks_first: bool = True) -> FlatLayout:
        """Give each (name, shape) its place: in the order given, but whole blocks before the others.

        Raises:
            ValueError: two parameters have one name.
        """
        sized = [(name, tuple(shape), prod(shape)) for name, shape in parameters]
        if len({name for name, _, _ in sized}) != len(sized):
            raise ValueError(f"two parameters have one name: {sorted(name for name, _, _ in sized)}")
        if blocks_first:
            sized.sort(key=lambda p: p[2] * DTYPES[dtype].size % BLOCK != 0)  # stable
        places, offset = [], 0
        for name, shape, numel in sized:
            places.append(Place(name, shape, offset, numel))
            offset += numel
        return cls(dtype, tuple(places))

    @property
    def numel(self) -> int:
        return self.places[-1].offset + self.places[-1].numel if self.places else 0

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].size

    def shards(self, world: int, *, whole: bool = False) -> tuple[Span, ...]:
        """Each rank's span of the buffer: in order, without gap or overlap, the late ones shorter or empty.

        Args:
            world: number of ranks.
            whole: never cut a parameter; shards are then as even as that allows.
        """
        block = BLOCK // DTYPES[self.dtype].size
        step = -(-self.numel // (world * block)) * block
        cuts = [min(i * step, self.numel) for i in range(world + 1)]
        if whole:
            edges = [p.offset for p in self.places] + [self.numel]
            even = [i * self.numel / world for i in range(world + 1)]
            cuts = [min(edges, key=lambda edge: abs(edge - cut)) for cut in even]
        return tuple(Span(a, b - a) for a, b in pairwise(cuts))

    def inside(self, span: Span) -> Iterator[tuple[Place, Span]]:
        """The parts of parameters that a span of the buffer holds: each with its span in its parameter."""
        for place in self.places:
            yield place, overlap(place.span, span)


def overlap(place: Span, span: Span) -> Span:
    """What ``span`` holds of ``place``, counted from where ``place`` begins; an empty span when that is nothing."""
    low = min(max(place.start, span.start), place.stop)
    high = max(min(place.stop, span.stop), low)
    return Span(low - place.start, high - low)
