"""How a tensor is divided over ranks: a mesh of ranks, and which mesh dimensions split which tensor dimensions.

    mesh (2, 2), ranks 0 1     splits ((0, 0),)          rows in halves: ranks 0, 1 hold the upper, 2, 3 the lower
                       2 3     splits ((0, 0), (1, 1))   quarters
                               splits ((1, 0), (0, 0))   rows over mesh dim 1 first, each part over mesh dim 0
                                                         (FSDP over tensor parallel)

A split cuts as ``torch.chunk`` does: parts of ``ceil(n / k)``, the last ones shorter or empty. One of the dimension
``FLAT``, which must be the only one, cuts the row-major flattening, where ``cuts`` says:

    mesh (2, 2), splits ((1, FLAT),), cuts (0, 5, 12)     ranks 0, 2 hold elements 0 to 5, ranks 1, 3 the others
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import product
from math import prod

from flagstone.layout.box import Box, Shape, Span, box_span

FLAT = -1


@dataclass(frozen=True, slots=True)
class Sharding:
    """The division of one tensor.

    Attributes:
        mesh: shape of the mesh.
        ranks: the mesh's ranks, row-major.
        splits: pairs (mesh dimension, tensor dimension), in the order in which they are cut; mesh dimensions
            that are in no pair hold replicas.
        cuts: for a split of ``FLAT``: where the parts begin, in elements, and where the last one ends.
    """

    mesh: Shape
    ranks: tuple[int, ...]
    splits: tuple[tuple[int, int], ...] = ()
    cuts: Shape = ()

    def __post_init__(self) -> None:
        if prod(self.mesh) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a mesh of shape {self.mesh} needs as many different ranks: {self.ranks}")
        dims = [m for m, _ in self.splits]
        if len(set(dims)) != len(dims) or any(not 0 <= m < len(self.mesh) for m in dims):
            raise ValueError(f"every mesh dimension splits at most once: {self.splits} on a mesh of shape {self.mesh}")
        parts = [self.mesh[m] for m, dim in self.splits if dim == FLAT]
        if parts and (len(self.splits) > 1 or list(self.cuts) != sorted(self.cuts) or len(self.cuts) != parts[0] + 1):
            raise ValueError(f"a flat split is alone, with one cut more than parts: {self.splits}, {self.cuts}")

    @classmethod
    def replicated(cls, ranks: tuple[int, ...]) -> Sharding:
        """The whole tensor on every one of ``ranks``."""
        return cls((len(ranks),), ranks)

    @property
    def is_flat(self) -> bool:
        return bool(self.splits) and self.splits[0][1] == FLAT

    def region(self, shape: Shape, rank: int) -> Box | Span | None:
        """The elements that ``rank`` holds: a span where the flattening is cut; None when it is not in the mesh."""
        if not self.is_flat:
            return self.box(shape, rank)
        coordinate = self._coordinate(rank)
        return None if coordinate is None else self._span(coordinate)

    def span(self, shape: Shape, rank: int) -> Span | None:
        """The same where it is one span; None when it is several, empty, or nothing."""
        region = self.region(shape, rank)
        if isinstance(region, Span):
            return region if region.length else None
        return None if region is None else box_span(region, shape)

    def box(self, shape: Shape, rank: int) -> Box | None:
        """The elements of a tensor of ``shape`` that ``rank`` holds; None when it is not in the mesh."""
        if not self.splits:
            return Box.whole(shape) if rank in self.ranks else None
        coordinate = self._coordinate(rank)
        return None if coordinate is None else self._box(shape, coordinate)

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same piece as ``rank``, itself among them; none when it is not in the mesh."""
        coordinate = self._coordinate(rank)
        return () if coordinate is None else self._holders(coordinate)

    def pieces(self, shape: Shape) -> list[tuple[Box, tuple[int, ...]]]:
        """All different pieces of a tensor, empty ones left out, each with the ranks that hold it."""
        split = {m for m, _ in self.splits}
        found = []
        for coordinate in product(*(range(n) if m in split else (0,) for m, n in enumerate(self.mesh))):
            box = self._box(shape, coordinate)
            if box.numel:
                found.append((box, self._holders(coordinate)))
        return found

    def is_contiguous(self, shape: Shape) -> bool:
        """Whether every piece is one span: nothing is cut below a dimension that has several indices."""
        return self.is_flat or all(prod(shape[:dim]) == 1 for _, dim in self.splits)

    def locate(self, shape: Shape, element: int) -> tuple[Span, tuple[int, ...]]:
        """The piece that holds an element, as a span, and its ranks; for contiguous shardings only."""
        low, high = [0] * len(shape), list(shape)
        index = list(_unravel(element, shape))
        coordinate = [0] * len(self.mesh)
        if self.is_flat:
            coordinate[self.splits[0][0]] = bisect_right(self.cuts, element) - 1
            return self._span(tuple(coordinate)), self._holders(tuple(coordinate))
        for mesh_dim, dim in self.splits:
            part = -(-(high[dim] - low[dim]) // self.mesh[mesh_dim])
            at = (index[dim] - low[dim]) // part
            coordinate[mesh_dim] = at
            low[dim], high[dim] = low[dim] + at * part, min(low[dim] + (at + 1) * part, high[dim])
        span = box_span(Box(tuple(low), tuple(h - o for o, h in zip(low, high, strict=True))), shape)
        if span is None:
            raise ValueError(f"{self} does not divide shape {shape} in spans")
        return span, self._holders(tuple(coordinate))

    def _coordinate(self, rank: int) -> Shape | None:
        return _unravel(self.ranks.index(rank), self.mesh) if rank in self.ranks else None

    def _span(self, coordinate: Shape) -> Span:
        at = coordinate[self.splits[0][0]]
        return Span(self.cuts[at], self.cuts[at + 1] - self.cuts[at])

    def _box(self, shape: Shape, coordinate: Shape) -> Box:
        low, high = [0] * len(shape), list(shape)
        for mesh_dim, dim in self.splits:
            part = -(-(high[dim] - low[dim]) // self.mesh[mesh_dim])
            start = min(low[dim] + coordinate[mesh_dim] * part, high[dim])
            low[dim], high[dim] = start, min(start + part, high[dim])
        return Box(tuple(low), tuple(h - o for o, h in zip(low, high, strict=True)))

    def _holders(self, coordinate: Shape) -> tuple[int, ...]:
        """The ranks that share the piece at a coordinate: all along the mesh dimensions that do not split."""
        split = {m for m, _ in self.splits}
        if not split:
            return self.ranks
        places = [0]
        for m, extent in enumerate(self.mesh):
            indices = (coordinate[m],) if m in split else range(extent)
            places = [p * extent + i for p in places for i in indices]
        return tuple(self.ranks[p] for p in places)


def _unravel(element: int, shape: Shape) -> Shape:
    index = []
    for extent in reversed(shape):
        index.append(element % extent)
        element //= extent
    return tuple(reversed(index))
