"""Ranks on processors: shared memory inside of a host, point to point between hosts. There may be one, or one a rank.

On one host the weights are there once, each rank's part a range of them: a gather moves nothing. A rank sums its own
range of its neighbours' gradients where they lie. What is left is order: nobody writes weights that another rank may
still read, nobody reads gradients before they are complete, and nobody overwrites them before all have summed them.

A rank alone, without a process group, may have its memory on any device.

With several hosts, each has slots for whole weights, which its ranks fill together: every byte comes to a host once.
Gradients go from each rank to the one that sums them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flagstone.layout import Span
from flagstone.sharding.comm import DONE, Comm, Ticket, in_order
from flagstone.sharding.host import Board, neighbours
from flagstone.sharding.link import Exchange, Link

if TYPE_CHECKING:
    from flagstone.sharding.stream import Stream

_SCRATCH = 1 << 20  # bytes a rank: what small exchanges on a host go through
_BITS = 62  # parameters in a counter
# Counters. Backward passes ended; then of each stream: gathers begun into its buffer, gathers done, reductions posted
# and summed, and the parameters in the last.
_ENDED = 0
_BEGUN, _FILLED, _POSTED, _SUMMED, _USED = range(5)


class Cpu(Comm):
    """See above. A *window* is one reduction of a stream, of those gradients that came since the last.

    Args:
        ranks: of the job, in the order of the mesh.
        index: this one's place among them.
    """

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self.size, self.index = len(ranks), index
        self._host, hosts = neighbours(ranks)
        self._here = next(h for h in hosts if index in h)
        self._others = [h for h in hosts if index not in h]
        self._away = [r for r in range(self.size) if r not in self._here]
        self.shares_weights, self.shares_slots = not self._away, len(self._here) > 1
        self._link = Link(ranks, index)
        self._thread = ThreadPoolExecutor(1, "flagstone-gather") if self._away and len(self._here) > 1 else None
        self._sending: list[Exchange] = []  # of weights
        self._staging: dict[int, list[Tensor]] = {}
        self._scratch: list[Tensor] = []
        self._board: Board
        self._serving: Sequence[Stream] = ()  # between the last reduction of a backward and its end
        self._at: list[int] = []  # each stream's first counter
        self._buffers: list[int] = []  # the number of the first stream that has the same buffer for whole weights
        self._begun: list[int] = []
        self._posted: list[int] = []
        self._summed: list[int] = []
        self._backward = 1

    @property
    def exposed(self) -> float:
        return self._summing + self._host.waited + self._link.waited

    _summing = 0.0  # seconds

    # Memory.

    def weights(self, stream: Stream) -> tuple[Tensor, Tensor]:
        if self._away:
            return super().weights(stream)
        full = self.whole(stream.nbytes, stream.device).view(stream.compute_dtype)
        return full, full[stream.span.start : stream.span.stop]

    def whole(self, nbytes: int, device: torch.device) -> Tensor:
        if self.size == 1:
            return super().whole(nbytes, device)
        return self._host.segment(nbytes)[:nbytes]

    def gradients(self, nbytes: int, device: torch.device) -> tuple[list[Tensor], int]:
        if self.size == 1:
            return super().gradients(nbytes, device)
        return self._host.segments(nbytes), self._host.rank

    def begin(self, streams: Sequence[Stream]) -> None:
        self._host.timeout = self._link.timeout = self.timeout
        self._at = []
        at = 1
        for stream in streams:
            self._at.append(at)
            at += _USED + -(-len(stream.places) // _BITS)
        slots = [s.weight_slot for s in streams]
        self._buffers = [i if slot is None else slots.index(slot) for i, slot in enumerate(slots)]
        count = len(streams)
        self._begun, self._posted, self._summed, self._backward = [0] * count, [0] * count, [0] * count, 1
        self._board = Board(self._host, at)

    # Weights.

    def read_weights(self) -> None:
        if not self._away:
            self._board.barrier("the first use of weights after they were changed")

    def write_weights(self) -> None:
        self.finish_sending()
        if not self._away:
            self._board.barrier("the first change of weights after they were used")

    def finish_sending(self) -> None:
        for exchange in self._sending:
            exchange.release()
        self._sending.clear()

    def gather(self, stream: Stream) -> Ticket:
        if not self._away:
            return DONE
        what, tag = f"gather of {stream.name}", 2 * stream.number + 1
        parts = [stream.full.data[s.start : s.stop] for s in stream.spans]
        arriving = {r: parts[r] for r in self._away if self._receiver(r, self._here) == self.index}
        leaving = {self._receiver(self.index, h): stream.source for h in self._others}
        if self._thread is None:
            exchange = self._link.exchange(leaving, arriving, tag, what)
            parts[self.index].copy_(stream.source)
            self._sending.append(exchange)
            return exchange
        self._sending.append(self._link.exchange(leaving, {}, tag, what))
        buffer = self._buffers[stream.number]
        self._begun[buffer] += 1
        count, at = self._begun[buffer], self._at[buffer]
        self._board.publish(at + _BEGUN, count)

        def fill() -> None:
            """When no neighbour needs what is in the buffer, fill this rank's share of it."""
            self._board.wait(lambda r: self._board.read(r, at + _BEGUN) >= count, lambda: what)
            exchange = self._link.exchange({}, arriving, tag, what)
            parts[self.index].copy_(stream.source)
            exchange.finish()
            self._board.publish(at + _FILLED, count)

        return _Filling(self, self._thread.submit(fill), at + _FILLED, count, what)

    def _receiver(self, rank: int, host: Sequence[int]) -> int:
        """Which rank of a host gets the weights of a rank of another."""
        return host[rank % len(host)]

    # Gradients.

    def reduce(self, stream: Stream, used: Sequence[bool]) -> Ticket:
        self._post(stream, used)
        return _Reduction(self, stream, self._posted[stream.number], self._send_gradients(stream, used))

    def _post(self, stream: Stream, used: Sequence[bool]) -> None:
        """Say that this rank's gradients for the next window are complete, and of which parameters there are any."""
        at = self._at[stream.number]
        for i in range(0, len(used), _BITS):
            bits = sum(1 << j for j, has in enumerate(used[i : i + _BITS]) if has)
            self._board.publish(at + _USED + i // _BITS, bits)
        self._posted[stream.number] += 1
        self._board.publish(at + _POSTED, self._posted[stream.number])

    def _send_gradients(self, stream: Stream, used: Sequence[bool]) -> _Remote | None:
        if not self._away:
            return None
        assert stream.gradients is not None
        flat, tag, what = stream.gradients.flat, 2 * stream.number + 2, f"reduce of {stream.name}"
        which = torch.tensor(used, dtype=torch.bool)
        theirs = {r: torch.empty_like(which) for r in self._away}
        parts = self._stage(stream)
        words = self._link.exchange(dict.fromkeys(self._away, which), theirs, tag, what)
        spans = stream.spans
        sums = self._link.exchange({r: flat[spans[r].start : spans[r].stop] for r in self._away}, parts, tag, what)
        return _Remote(words, sums, parts, theirs)

    def _stage(self, stream: Stream) -> dict[int, Tensor]:
        """Where the gradients of other hosts come to: as many buffers as there are slots."""
        key, nbytes = id(stream.gradient_slot), stream.span.length * stream.reduce_dtype.itemsize
        known = self._staging.get(key)
        if known is None or known[0].numel() < nbytes:
            known = self._staging[key] = [torch.empty(nbytes, dtype=torch.uint8) for _ in self._away]
        return {r: b[:nbytes].view(stream.reduce_dtype) for r, b in zip(self._away, known, strict=True)}

    def close_backward(self, streams: Sequence[Stream]) -> None:
        if not self._away:
            self._serving = streams
            self._board.publish(_ENDED, self._backward)

    def end_backward(self) -> None:
        if not self._away:
            self._board.wait(self._has_ended, lambda: "the end of backward", self._serve)
            self._serve()
            self._serving = ()
            self._board.barrier("the end of backward")
            self._backward += 1

    def _serve(self) -> None:
        """Sum what others have and this rank has not, so that they can go on; when it reduces nothing more itself."""
        for stream in self._serving:
            while True:
                window = self._posted[stream.number] + 1
                states = self._states(stream, window)
                if None in states or not any(states):
                    break
                self._post(stream, [False] * len(stream.places))
                self._sum(stream, states, None)

    def _states(self, stream: Stream, window: int) -> list[bool | None]:
        """For each neighbour whether it has gradients for a window; None where that is not known yet."""
        at = self._at[stream.number] + _POSTED
        return [
            True if self._board.read(r, at) >= window else False if self._has_ended(r) else None
            for r in range(self._host.size)
        ]

    def _has_ended(self, rank: int) -> bool:
        return self._board.read(rank, _ENDED) >= self._backward

    def finish_reduction(self, stream: Stream, window: int, remote: _Remote | None) -> None:
        if remote is not None:
            remote.words.finish()
            remote.sums.finish()
        at = self._at[stream.number] + _POSTED

        def known(rank: int) -> bool:
            return self._board.read(rank, at) >= window or (remote is None and self._has_ended(rank))

        self._board.wait(known, lambda: f"reduce of {stream.name}", self._serve)
        self._sum(stream, self._states(stream, window), remote)

    def _sum(self, stream: Stream, states: Sequence[bool | None], remote: _Remote | None) -> None:
        """Sum this rank's range of the gradients of those ranks that have any, and tell that it is done."""
        number, at, slot = stream.number, self._at[stream.number], stream.gradient_slot
        assert slot is not None
        began = time.perf_counter()
        size = stream.reduce_dtype.itemsize
        used = torch.zeros(len(stream.places), dtype=torch.bool)
        parts: dict[int, Tensor] = {}
        for local, rank in enumerate(self._here):
            bits = [self._board.read(local, at + _USED + i // _BITS) >> (i % _BITS) & 1 for i in range(len(used))]
            if states[local] and any(bits):
                mine = slot.everyone[local][stream.span.start * size : stream.span.stop * size]
                parts[rank] = mine.view(stream.reduce_dtype)
                used |= torch.tensor(bits, dtype=torch.bool)
        if remote is not None:
            for rank, which in remote.used.items():
                if which.any():
                    parts[rank] = remote.parts[rank]
                    used |= which
        stream.unit.engine.reduced(stream, [parts[r] for r in sorted(parts)], used.tolist())
        self._summed[number] += 1
        self._board.publish(at + _SUMMED, self._summed[number])
        self._summing += time.perf_counter() - began

    def release_reduction(self, stream: Stream, window: int, remote: _Remote | None) -> None:
        at = self._at[stream.number] + _SUMMED
        self._board.wait(lambda r: self._board.read(r, at) >= window, lambda: f"reduce of {stream.name}")
        if remote is not None:
            remote.words.release()
            remote.sums.release()

    def recover(self, streams: Sequence[Stream]) -> None:
        board, ranks = self._board, range(self._host.size)
        self._serving = ()
        board.regroup()
        most = [[max(board.read(r, at + i) for r in ranks) for i in range(_USED)] for at in self._at]
        self._backward = max(board.read(r, _ENDED) for r in ranks) + 1
        board.barrier("recovered from an exception")
        for i, (at, counts) in enumerate(zip(self._at, most, strict=True)):
            self._begun[i], self._posted[i], self._summed[i] = counts[_BEGUN], counts[_POSTED], counts[_POSTED]
            for counter, value in ((_BEGUN, _BEGUN), (_FILLED, _BEGUN), (_POSTED, _POSTED), (_SUMMED, _POSTED)):
                board.publish(at + counter, counts[value])
        board.publish(_ENDED, self._backward - 1)
        board.barrier("going on after an exception")
        if self._away:
            self._link.open()  # others may still wait for what this rank was sending: it must not be dropped before
            self._sending.clear()
            self._staging.clear()

    # Small things.

    def all_reduce(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        if self._away:
            return self._link.all_reduce(values, what, maximum)
        flat = values.detach().reshape(-1)
        if self.size == 1:
            return flat.clone().view(values.shape)
        parts = flat.new_empty(self.size, flat.numel())
        for at, shown in self._show(flat, flat.numel(), what):
            for r, theirs in enumerate(shown):
                parts[r, at : at + theirs.numel()] = theirs
        return in_order(parts, maximum).view(values.shape)

    def gather_flat(self, part: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        if self._away:
            return self._link.gather_flat(part, spans, what)
        whole = part.new_empty(sum(s.length for s in spans))
        if self.size == 1:
            return whole.copy_(part)
        for at, shown in self._show(part, max(s.length for s in spans), what):
            for span, theirs in zip(spans, shown, strict=True):
                length = min(theirs.numel(), max(span.length - at, 0))
                whole[span.start + at : span.start + at + length] = theirs[:length]
        return whole

    def _show(self, flat: Tensor, longest: int, what: str) -> Iterator[tuple[int, list[Tensor]]]:
        """Show a flat tensor to all neighbours, a stretch at a time: where it begins, and what each rank shows."""
        if not self._scratch:
            self._scratch = self._host.segments(_SCRATCH)
        views = [s.view(flat.dtype) for s in self._scratch]
        step = views[0].numel()
        for at in range(0, longest, step):
            mine = flat[at : at + step]
            views[self.index][: mine.numel()] = mine
            self._board.barrier(what)
            yield at, [v[: longest - at] for v in views]
            self._board.barrier(what)


class _Remote:
    """Gradients that come from other hosts, and which parameters they are of."""

    def __init__(self, words: Exchange, sums: Exchange, parts: dict[int, Tensor], used: dict[int, Tensor]) -> None:
        self.words, self.sums, self.parts, self.used = words, sums, parts, used


class _Filling(Ticket):
    def __init__(self, comm: Cpu, mine: Future[None], counter: int, count: int, what: str) -> None:
        self._comm, self._mine, self._counter, self._count, self._what = comm, mine, counter, count, what

    def finish(self) -> None:
        began = time.perf_counter()
        self._mine.result()
        board = self._comm._board
        board.wait(lambda r: board.read(r, self._counter) >= self._count, lambda: self._what)
        self._comm._summing += time.perf_counter() - began


class _Reduction(Ticket):
    def __init__(self, comm: Cpu, stream: Stream, window: int, remote: _Remote | None) -> None:
        self._comm, self._stream, self._window, self._remote, self._is_summed = comm, stream, window, remote, False

    def finish(self) -> None:
        if not self._is_summed:
            self._is_summed = True
            self._comm.finish_reduction(self._stream, self._window, self._remote)

    def release(self) -> None:
        self.finish()
        self._comm.release_reduction(self._stream, self._window, self._remote)
