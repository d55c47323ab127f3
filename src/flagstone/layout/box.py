"""Regions of a tensor: boxes in its index space, spans in its row-major flattening.

    shape (3, 4), flattened:   0  1  2  3
                               4  5  6  7
                               8  9 10 11

    Box((1, 1), (2, 2))    ->  spans [5, 7) and [9, 11)
    Span(2, 7), [2, 9)     ->  boxes {2 3}, {4 5 6 7}, {8}

A span is at most ``2 * ndim - 1`` boxes: rows that begin it, whole rows, rows that end it, at every dimension.
All numbers count elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region: ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` in every dimension d."""

    offsets: Shape
    sizes: Shape

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"a box needs as many offsets as sizes: {self.offsets} and {self.sizes}")
        if any(n < 0 for n in (*self.offsets, *self.sizes)):
            raise ValueError(f"a box has no negative offsets or sizes: {self.offsets} and {self.sizes}")

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """The box of all elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes this box out of an array."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def relative_to(self, origin: Box) -> Box:
        """The same region in the coordinates of ``origin``, a box that contains it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin.offsets, strict=True)), self.sizes)


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` elements of a tensor's row-major flattening, from ``start``."""

    start: int
    length: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 0:
            raise ValueError(f"a span has no negative start or length: {self.start}, {self.length}")

    @property
    def stop(self) -> int:
        return self.start + self.length


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that two boxes of one tensor share, or None when there are none."""
    offsets, sizes = [], []
    for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        low, high = max(ao, bo), min(ao + an, bo + bn)
        if low >= high:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


def box_span(box: Box, shape: Shape) -> Span | None:
    """The span that a box is, when it is one; None when it is several, or empty."""
    if box.numel == 0:
        return None
    start, stride, whole = 0, 1, True
    for offset, size, extent in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        if not whole and size != 1:
            return None
        whole = whole and size == extent
        start += offset * stride
        stride *= extent
    return Span(start, box.numel)


def box_spans(box: Box, shape: Shape) -> Iterator[Span]:
    """The spans of a box, in order, each as long as can be."""
    if box.numel == 0:
        return
    split = len(shape)  # dimensions from here on are taken whole
    while split > 0 and box.sizes[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)  # this one is contiguous too, as a part
    strides = _strides(shape)
    length = prod(box.sizes[split:])
    base = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    index = [0] * split
    while True:
        yield Span(base + sum(i * s for i, s in zip(index, strides, strict=False)), length)
        for dim in reversed(range(split)):
            index[dim] += 1
            if index[dim] < box.sizes[dim]:
                break
            index[dim] = 0
        else:
            return


def span_boxes(span: Span, shape: Shape) -> list[Box]:
    """The boxes of a span, in order: at most ``2 * ndim - 1`` of them."""
    if span.length == 0:
        return []
    if span.stop > prod(shape):
        raise ValueError(f"the span [{span.start}, {span.stop}) is not inside a tensor of shape {shape}")
    return list(_boxes(span.start, span.stop, shape, ()))


def _boxes(start: int, stop: int, shape: Shape, lead: Shape) -> Iterator[Box]:
    """Boxes of [start, stop) in the trailing ``shape``, below the fixed leading indices ``lead``."""
    ones = (1,) * len(lead)
    if len(shape) == 0:
        yield Box(lead, ones)
        return
    row, inner = prod(shape[1:]), shape[1:]
    first, last = start // row, stop // row
    if first == last:  # inside one row
        yield from _boxes(start - first * row, stop - first * row, inner, (*lead, first))
        return
    if start != first * row:
        yield from _boxes(start - first * row, row, inner, (*lead, first))
        first += 1
    if first < last:
        yield Box((*lead, first, *(0,) * len(inner)), (*ones, last - first, *inner))
    if stop != last * row:
        yield from _boxes(0, stop - last * row, inner, (*lead, last))


def _strides(shape: Shape) -> Shape:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))
