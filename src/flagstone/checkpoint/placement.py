"""Who writes which bytes: each rank its own, replicated bytes divided, every block of 4096 bytes by one rank.

    file      | block  | block  | block  | block  | block  |
    held by   |   rank 0   |      rank 1      |   rank 2   |
    written by|     0      |... 0 |    1      |  1 |   2   |     a block is written by who holds its first byte

What a rank holds of a block that another one writes, an edge, is handed over. A tensor whose pieces interleave
(columns of tensor parallelism) is divided evenly among its ranks, whoever holds what, and is exchanged in bounded
rounds. All of it follows from the layout and the shardings; nothing is gathered, and a rank computes its own part only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flagstone.layout import BLOCK, DTYPES, Box, FileLayout, Sharding, Slot, Span, intersect, span_boxes


class Stretch(NamedTuple):
    """Bytes [begin, end) of a file that one rank owns, all of them held by ``holders`` alike."""

    begin: int
    end: int
    owner: int
    holders: tuple[int, ...]


class Fragment(NamedTuple):
    """Bytes that one rank holds and another one writes: ``nbytes`` of [begin, end) of a file.

    All of them, or where pieces interleave a ``box`` of the tensor in slot ``slot``, which lies in ``part``, a box that
    is contiguous in the file.
    """

    file: int
    begin: int
    end: int
    source: int
    target: int
    nbytes: int
    slot: int = -1
    part: Box | None = None
    box: Box | None = None


class Extent(NamedTuple):
    """Neighbouring tensors that are divided alike: [begin, end) of the file, slots [low, high)."""

    begin: int
    end: int
    low: int
    high: int
    kind: str  # "run": whole on every rank, "rows": every piece one span, "mixed": pieces interleave
    sharding: Sharding


class FilePlan:
    """The division of one file among the ranks."""

    def __init__(self, number: int, layout: FileLayout, shardings: Mapping[str, Sharding]) -> None:
        self.number, self.layout = number, layout
        self.shardings = [shardings[s.name] for s in layout.slots]
        self._extents = list(self._divide())
        self._begins = [e.begin for e in self._extents]
        self._slot_begins = [s.begin for s in layout.slots]

    @property
    def mixed(self) -> list[Extent]:
        return [e for e in self._extents if e.kind == "mixed"]

    @property
    def is_exchanged(self) -> bool:
        """Whether bytes of this file go from rank to rank, or may: a fact that all ranks see alike."""
        return any(e.kind != "run" for e in self._extents) or len({e.sharding.ranks for e in self._extents}) > 1

    def slots(self, begin: int, end: int) -> Iterator[tuple[int, Slot, int, int]]:
        """The tensors that overlap [begin, end), with the bytes of the file that they share with it."""
        i = max(bisect_right(self._slot_begins, begin) - 1, 0)
        slots = self.layout.slots
        while i < len(slots) and slots[i].begin < end:
            low, high = max(begin, slots[i].begin), min(end, slots[i].end)
            if low < high:
                yield i, slots[i], low, high
            i += 1

    def owned(self, rank: int) -> Iterator[tuple[Stretch, bool]]:
        """What a rank owns, in order, before edges are rounded; and whether its pieces interleave."""
        for extent in self._extents:
            if rank not in extent.sharding.ranks:
                continue
            if extent.kind == "rows":
                slot = self.layout.slots[extent.low]
                size = DTYPES[slot.dtype].size
                span = extent.sharding.span(slot.shape, rank)
                if span is None:
                    continue
                _, holders = extent.sharding.locate(slot.shape, span.start)
                begin, end = slot.begin + span.start * size, slot.begin + span.stop * size
            else:
                holders = extent.sharding.ranks
                begin, end = extent.begin, extent.end
            low, high = _part(begin, end, len(holders), holders.index(rank))
            if low < high:
                yield Stretch(low, high, rank, holders), extent.kind == "mixed"

    def at(self, byte: int) -> tuple[Stretch, Extent]:
        """Who owns a byte."""
        extent = self._extents[bisect_right(self._begins, byte) - 1]
        if extent.kind == "rows":
            slot = self.layout.slots[extent.low]
            size = DTYPES[slot.dtype].size
            span, holders = extent.sharding.locate(slot.shape, (byte - slot.begin) // size)
            begin, end = slot.begin + span.start * size, slot.begin + span.stop * size
        else:
            holders = extent.sharding.ranks
            begin, end = extent.begin, extent.end
        i = _part_at(begin, end, len(holders), byte)
        low, high = _part(begin, end, len(holders), i)
        return Stretch(low, high, holders[i], holders), extent

    def written(self, stretch: Stretch) -> tuple[int, int]:
        """The blocks that the owner of a stretch writes for it: [begin, end), empty when others write them all."""
        return _up(stretch.begin), min(_up(stretch.end), self.layout.size)

    def edges(self, rank: int) -> Iterator[Fragment]:
        """What a rank hands to others and gets from others for blocks at the edges, each fragment once."""
        for stretch, mixed in self.owned(rank):
            begin, end = self.written(stretch)
            if not mixed and stretch.begin < begin:  # my first bytes lie in a block that began before me
                writer = self.at(stretch.begin - stretch.begin % BLOCK)[0].owner
                if writer not in stretch.holders:
                    yield self._fragment(stretch.begin, min(stretch.end, begin), rank, writer)
            if begin < end:
                at = stretch.end
                while at < end:  # my last block goes on into what others hold
                    other, extent = self.at(at)
                    stop = min(end, extent.end if extent.kind == "mixed" else other.end)
                    if extent.kind == "mixed":
                        yield from (f for f in self._boxes(extent, at, stop, rank) if f.source != rank)
                    elif rank not in other.holders:
                        yield self._fragment(at, stop, other.owner, rank)
                    at = stop
        for extent in self.mixed:
            if extent.begin % BLOCK and rank in extent.sharding.ranks:
                writer = self.at(extent.begin - extent.begin % BLOCK)[0].owner
                if writer != rank:
                    fragments = self._boxes(extent, extent.begin, min(extent.end, _up(extent.begin)), writer)
                    yield from (f for f in fragments if f.source == rank)

    def rounds(self, extent: Extent, limit: int) -> Iterator[list[tuple[int, int, int]]]:
        """For each round the parts (writer, begin, end) of a mixed extent, one a rank, none above ``limit`` bytes."""
        ranks = extent.sharding.ranks
        parts = [(r, *_part(extent.begin, extent.end, len(ranks), i)) for i, r in enumerate(ranks)]
        todo = [[r, _up(begin), end] for r, begin, end in parts if _up(begin) < end]
        while todo:
            yield [(r, begin, min(begin + limit, end)) for r, begin, end in todo]
            todo = [[r, begin + limit, end] for r, begin, end in todo if begin + limit < end]

    def sources(self, extent: Extent, begin: int, end: int, writer: int) -> Iterator[Fragment]:
        """Where a writer gets the bytes [begin, end) of a mixed extent from, its own among them."""
        return self._boxes(extent, begin, end, writer)

    def _boxes(self, extent: Extent, begin: int, end: int, writer: int) -> Iterator[Fragment]:
        slot = self.layout.slots[extent.low]
        size = DTYPES[slot.dtype].size
        span = Span((begin - slot.begin) // size, (end - begin) // size)
        pieces = extent.sharding.pieces(slot.shape)
        for part in span_boxes(span, slot.shape):
            for box, holders in pieces:
                shared = intersect(part, box)
                if shared is not None:
                    source = writer if writer in holders else holders[writer % len(holders)]
                    nbytes = shared.numel * size
                    yield Fragment(self.number, begin, end, source, writer, nbytes, extent.low, part, shared)

    def _fragment(self, begin: int, end: int, source: int, target: int) -> Fragment:
        return Fragment(self.number, begin, end, source, target, end - begin)

    def _divide(self) -> Iterator[Extent]:
        run: Extent | None = None
        for i, (slot, sharding) in enumerate(zip(self.layout.slots, self.shardings, strict=True)):
            if not slot.nbytes:
                continue
            if sharding.splits:
                if run is not None:
                    yield run
                    run = None
                kind = "rows" if sharding.is_contiguous(slot.shape) else "mixed"
                yield Extent(slot.begin, slot.end, i, i + 1, kind, sharding)
            elif run is not None and run.sharding.ranks == sharding.ranks:
                run = run._replace(end=slot.end, high=i + 1)
            else:
                if run is not None:
                    yield run
                run = Extent(slot.begin, slot.end, i, i + 1, "run", sharding)
        if run is not None:
            yield run


def needs_link(plans: Sequence[FilePlan]) -> bool:
    """Whether the ranks must exchange bytes: the same answer on every rank."""
    return any(p.is_exchanged for p in plans)


def _up(byte: int) -> int:
    return -(-byte // BLOCK) * BLOCK


def _step(begin: int, end: int, count: int) -> int:
    low = begin - begin % BLOCK
    return max(_up(-(-(end - low) // count)), BLOCK)


def _part(begin: int, end: int, count: int, i: int) -> tuple[int, int]:
    """The i-th of ``count`` parts of [begin, end), cut where blocks begin; late ones may be empty."""
    if count == 1:
        return begin, end
    low, step = begin - begin % BLOCK, _step(begin, end, count)
    cut = [min(max(low + j * step, begin), end) for j in (i, i + 1)]
    return cut[0], cut[1]


def _part_at(begin: int, end: int, count: int, byte: int) -> int:
    return 0 if count == 1 else (byte - (begin - begin % BLOCK)) // _step(begin, end, count)
