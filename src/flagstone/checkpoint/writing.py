"""The bytes' way to the files: pieces into reused buffers, a checksum on the way, a write, a few at a time."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flagstone.checkpoint.manifest import RUN, Extent, run_digest
from flagstone.checkpoint.piece import Piece, words
from flagstone.checkpoint.placement import FilePlan, Fragment, needs_link
from flagstone.checkpoint.world import World
from flagstone.layout import BLOCK, DTYPES, Span, box_span
from flagstone.storage import Staging, WriteFile, base, buffers
from flagstone.storage.buffers import aligned

ROUND = 4 << 20  # bytes that a rank writes after one round of an exchange
ROUNDS = 2  # one is written while the next is exchanged


class Writer:
    """Writes one rank's bytes of all files. A failure is kept for ``close``, so that exchanges with others go on."""

    def __init__(self, staging: Staging | None, progress: Callable[[int], None] | None) -> None:
        self.staging = staging
        self._progress = progress
        self._lock = threading.Lock()
        self._files: dict[str, WriteFile] = {}
        self._extents: dict[str, list[Extent]] = defaultdict(list)
        self._pool = ThreadPoolExecutor(buffers.WRITERS, thread_name_prefix="flagstone-write")
        # What was exchanged must not wait behind all that was not: other ranks wait for the next round.
        self._round_pool = ThreadPoolExecutor(ROUNDS, thread_name_prefix="flagstone-round")
        self._pending: list[Future[None]] = []
        self.error: BaseException | None = None
        self.written = 0

    def submit(self, work: Callable[..., None], *args: Any, in_round: bool = False) -> Future[None]:
        """Do something in one of the threads."""

        def guarded() -> None:
            try:
                work(*args)
            except BaseException as error:  # a thread's failure is the save's
                self.fail(error)

        future = (self._round_pool if in_round else self._pool).submit(guarded)
        self._pending.append(future)
        return future

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def chunk(self, file: str, begin: int, end: int, fill: Callable[[int, int, base.Bytes], None]) -> None:
        """Write [begin, end) of a file; ``fill(low, high, out)`` provides the bytes, in runs from front to back."""
        if self.error is not None:
            return  # the save has failed already
        with buffers.POOL.lent() as buffer:
            digests = []
            for low in range(begin, end, RUN):
                high = min(low + RUN, end)
                out = buffer[low - begin : high - begin]
                fill(low, high, out)
                digests.append(run_digest(out))
            self._write(file, begin, buffer[: end - begin], digests)

    def filled(self, file: str, begin: int, data: base.Bytes) -> None:
        """Write what has been put together already."""
        if self.error is None:
            digests = [run_digest(data[i : i + RUN]) for i in range(0, data.nbytes, RUN)]
            self._write(file, begin, data, digests)

    def _write(self, file: str, begin: int, data: base.Bytes, digests: Sequence[bytes]) -> None:
        self._open(file).write(begin, data)
        with self._lock:
            self._extents[file].append(Extent(begin, begin + data.nbytes, b"".join(digests)))
            self.written += data.nbytes
        if self._progress is not None:
            self._progress(data.nbytes)

    def _open(self, file: str) -> WriteFile:
        with self._lock:
            if file not in self._files:
                assert self.staging is not None
                self._files[file] = self.staging.open(file)
            return self._files[file]

    def drain(self) -> None:
        """Wait for all that was submitted."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def sync(self) -> None:
        """Make all files that were written durable."""
        self.drain()
        for file in list(self._files.values()):
            self.submit(file.sync)
        self.drain()

    def close(self) -> dict[str, list[Extent]]:
        """End the threads, close the files; what was written, in order, neighbours joined. Raises what failed."""
        self.drain()
        self._pool.shutdown()
        self._round_pool.shutdown()
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                self.fail(error)
        if self.error is not None:
            raise self.error
        return {file: _join(extents) for file, extents in self._extents.items()}


def _join(extents: Iterable[Extent]) -> list[Extent]:
    joined: list[Extent] = []
    for extent in sorted(extents, key=lambda e: e.begin):
        last = joined[-1] if joined else None
        if last and last.end == extent.begin and (last.end - last.begin) % RUN == 0:
            joined[-1] = Extent(last.begin, extent.end, last.digests + extent.digests)
        else:
            joined.append(extent)
    return joined


class RankWriter:
    """Fills the blocks that this rank writes, from its own pieces and from what others hand over."""

    def __init__(
        self,
        plans: Sequence[FilePlan],
        pieces: Mapping[str, Piece | None],
        world: World,
        writer: Writer,
        seconds: float,
    ) -> None:
        self._plans, self._pieces, self._world, self._writer = plans, pieces, world, writer
        self._seconds = seconds
        self._spare: deque[tuple[base.Bytes, Future[None] | None]] = deque()
        self._edges: dict[int, list[tuple[Fragment, base.Bytes]]] = {}  # by file, in order

    def run(self) -> None:
        """Write everything. Only a rank that is gone raises here; other failures are the writer's."""
        if self._world.size > 1 and needs_link(self._plans):
            self._exchange_edges()
        for plan in self._plans:
            for begin, end in self._ranges(plan):
                for low in range(begin, end, buffers.CHUNK):
                    high = min(low + buffers.CHUNK, end)
                    self._writer.submit(self._writer.chunk, plan.layout.file, low, high, _bind(self._fill, plan))
        for plan in self._plans:
            for extent in plan.mixed:
                self._exchange_rounds(plan, extent)

    def _ranges(self, plan: FilePlan) -> list[tuple[int, int]]:
        """What this rank writes without a round of exchange, neighbours joined."""
        joined: list[tuple[int, int]] = []
        for stretch, mixed in plan.owned(self._world.rank):
            begin, end = plan.written(stretch)
            if mixed or begin >= end:
                continue
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        return joined

    def _fill(self, plan: FilePlan, begin: int, end: int, out: base.Bytes) -> None:
        """The bytes [begin, end) of a file that this rank holds or was handed."""
        rank = self._world.rank
        for i, slot, low, high in plan.slots(begin, end):
            piece = self._pieces.get(slot.name)
            if piece is None:
                continue
            sharding = plan.shardings[i]
            if not sharding.splits:
                _copy(piece, low - slot.begin, out[low - begin : high - begin])
                continue
            if sharding.is_contiguous(slot.shape):
                span = sharding.span(slot.shape, rank)
                if span is None:
                    continue
                start = slot.begin + span.start * DTYPES[slot.dtype].size
                low, high = max(low, start), min(high, start + span.length * DTYPES[slot.dtype].size)
                if low < high:
                    _copy(piece, low - start, out[low - begin : high - begin])
            else:
                extent = plan.at(low)[1]
                for fragment in plan.sources(extent, low, high, rank):
                    if fragment.source == rank:
                        data = np.empty(fragment.nbytes, np.uint8)
                        self._pack(plan, fragment, data)
                        _place(plan, fragment, data, out, begin)
        edges = self._edges.get(plan.number, [])
        for fragment, data in edges[bisect_left(edges, begin, key=_begin) : bisect_left(edges, end, key=_begin)]:
            if fragment.box is not None:
                _place(plan, fragment, data, out, begin)
            else:
                out[fragment.begin - begin : fragment.end - begin] = data

    def _pack(self, plan: FilePlan, fragment: Fragment, out: base.Bytes) -> None:
        """Copy what this rank holds of a fragment."""
        if fragment.box is None:
            self._fill(plan, fragment.begin, fragment.end, out)
            return
        slot = plan.layout.slots[fragment.slot]
        mine = plan.shardings[fragment.slot].box(slot.shape, self._world.rank)
        piece = self._pieces.get(slot.name)
        if mine is None or piece is None:
            raise ValueError(f"{slot.name}: rank {self._world.rank} has no piece of it")
        piece.read_box(fragment.box.relative_to(mine), out)

    def _exchange_edges(self) -> None:
        rank = self._world.rank
        fragments = [f for plan in self._plans for f in plan.edges(rank)]
        by_peer: dict[bool, dict[int, list[Fragment]]] = {True: defaultdict(list), False: defaultdict(list)}
        for fragment in sorted(fragments, key=_order):
            sending = fragment.source == rank
            by_peer[sending][fragment.target if sending else fragment.source].append(fragment)
        send = {peer: self._packed(group) for peer, group in by_peer[True].items()}
        receive = {peer: np.empty(sum(f.nbytes for f in g), np.uint8) for peer, g in by_peer[False].items()}
        self._world.link.exchange(send, receive, self._seconds)  # by every rank: the first time opens the link
        for peer, group in by_peer[False].items():
            at = 0
            for fragment in group:
                data = receive[peer][at : at + fragment.nbytes]
                self._edges.setdefault(fragment.file, []).append((fragment, data))
                at += fragment.nbytes
        for edges in self._edges.values():
            edges.sort(key=_begin)

    def _packed(self, fragments: Sequence[Fragment]) -> base.Bytes:
        message = np.zeros(sum(f.nbytes for f in fragments), np.uint8)
        at = 0
        for fragment in fragments:
            try:
                self._pack(self._plans[fragment.file], fragment, message[at : at + fragment.nbytes])
            except Exception as error:  # the peer waits for this message; the save fails at its end
                self._writer.fail(error)
            at += fragment.nbytes
        return message

    def _exchange_rounds(self, plan: FilePlan, extent: Any) -> None:
        rank = self._world.rank
        if rank not in extent.sharding.ranks:
            return
        for parts in plan.rounds(extent, ROUND):
            send, receive, mine = {}, {}, None
            expected: dict[int, list[Fragment]] = defaultdict(list)
            for target, begin, end in parts:
                fragments = list(plan.sources(extent, begin, end, target))
                if target == rank:
                    mine = begin, end
                    for fragment in fragments:
                        if fragment.source != rank:
                            expected[fragment.source].append(fragment)
                else:
                    outgoing = [f for f in fragments if f.source == rank]
                    if outgoing:
                        send[target] = self._packed(outgoing)
            for source, group in expected.items():
                receive[source] = np.empty(sum(f.nbytes for f in group), np.uint8)
            if send or receive:
                self._world.link.exchange(send, receive, self._seconds)
            if mine is None:
                continue
            begin, end = mine
            stop = end if end % BLOCK == 0 else min(end + BLOCK - end % BLOCK, plan.layout.size)
            buffer, pending = self._spare.popleft() if len(self._spare) == ROUNDS else (aligned(ROUND + BLOCK), None)
            if pending is not None:
                pending.result()
            out = buffer[: stop - begin]
            try:
                self._fill(plan, begin, stop, out)
                for source, group in expected.items():
                    at = 0
                    for fragment in group:
                        _place(plan, fragment, receive[source][at : at + fragment.nbytes], out, begin)
                        at += fragment.nbytes
            except Exception as error:
                self._writer.fail(error)
            future = self._writer.submit(self._writer.filled, plan.layout.file, begin, out, in_round=True)
            self._spare.append((buffer, future))


def _order(fragment: Fragment) -> tuple[Any, ...]:
    part, box = fragment.part, fragment.box
    return (fragment.file, fragment.begin, part.offsets if part else (), box.offsets if box else ())


def _begin(edge: tuple[Fragment, base.Bytes]) -> int:
    return edge[0].begin


def _bind(fill: Callable[..., None], plan: FilePlan) -> Callable[[int, int, base.Bytes], None]:
    return lambda begin, end, out: fill(plan, begin, end, out)


def _copy(piece: Piece, start: int, out: base.Bytes) -> None:
    flat = piece.flat()
    if flat is not None:
        out[:] = flat[start : start + out.nbytes]
    else:
        piece.read(start, out)


def _place(plan: FilePlan, fragment: Fragment, data: base.Bytes, out: base.Bytes, begin: int) -> None:
    """Put a fragment that is a box where it belongs in the bytes of a file from ``begin`` on."""
    assert fragment.part is not None
    assert fragment.box is not None
    slot = plan.layout.slots[fragment.slot]
    size = DTYPES[slot.dtype].size
    span = box_span(fragment.part, slot.shape) or Span(0, 0)
    at = slot.begin + span.start * size - begin
    whole = words(out[at : at + span.length * size], size, fragment.part.sizes)
    whole[fragment.box.relative_to(fragment.part).slices] = words(data, size, fragment.box.sizes)
