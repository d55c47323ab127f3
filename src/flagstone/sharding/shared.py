"""One host's processors: flat buffers in memory that all ranks share.

The weights are there once, each rank's part a range of them: a gather moves nothing. A rank sums its own range of all
ranks' gradients where they lie. What is left is order: nobody writes weights that another rank may still read, nobody
reads gradients before they are complete, and nobody overwrites them before all have summed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flagstone.layout import Span
from flagstone.sharding.comm import DONE, Comm, Ticket, in_order
from flagstone.sharding.host import Board, Host

if TYPE_CHECKING:
    from flagstone.sharding.stream import Stream

_SCRATCH = 1 << 20  # bytes a rank: what small exchanges go through
_BITS = 62  # parameters in a counter
# Counters: backward passes ended; then for each stream windows posted, windows summed, and the parameters in the last.
_ENDED, _POSTED, _SUMMED, _USED = 0, 0, 1, 2


class SharedMemory(Comm):
    """See above. A *window* is one reduction of a stream, of those gradients that came since the last."""

    shares_weights = True

    def __init__(self, host: Host) -> None:
        self.size, self.index = host.size, host.rank
        self._host = host
        self._board: Board
        self._scratch: list[Tensor] = []
        self._streams: Sequence[Stream] = ()
        self._at: list[int] = []  # each stream's first counter
        self._posted: list[int] = []
        self._summed: list[int] = []
        self._backward = 1

    def weights(self, stream: Stream) -> tuple[Tensor, Tensor]:
        nbytes = stream.numel * stream.compute_dtype.itemsize
        full = self._host.segment(nbytes)[:nbytes].view(stream.compute_dtype)
        return full, full[stream.span.start : stream.span.stop]

    def buffers(self, nbytes: int, device: torch.device) -> list[Tensor]:
        return self._host.segments(nbytes)

    def begin(self, streams: Sequence[Stream]) -> None:
        self._host.timeout = self.timeout
        self._streams, self._at = streams, []
        at = 1
        for stream in streams:
            self._at.append(at)
            at += _USED + -(-len(stream.places) // _BITS)
        self._posted, self._summed, self._backward = [0] * len(streams), [0] * len(streams), 1
        self._board = Board(self._host, at)

    def read_weights(self) -> None:
        self._barrier("the first use of weights after they were changed")

    def write_weights(self) -> None:
        self._barrier("the first change of weights after they were used")

    def gather(self, stream: Stream) -> Ticket:
        return DONE

    def reduce(self, stream: Stream, used: Sequence[bool]) -> Ticket:
        number, at = stream.number, self._at[stream.number]
        for i in range(0, len(used), _BITS):
            bits = sum(1 << j for j, has in enumerate(used[i : i + _BITS]) if has)
            self._board.publish(at + _USED + i // _BITS, bits)
        self._posted[number] += 1
        self._board.publish(at + _POSTED, self._posted[number])
        return _Reduction(self, stream, self._posted[number])

    def end_backward(self, streams: Sequence[Stream]) -> None:
        self._board.publish(_ENDED, self._backward)
        self._wait(lambda r: self._has_ended(r), lambda: "the end of backward", self._serve)
        self._serve()
        self._barrier("the end of backward")
        self._backward += 1

    def _serve(self) -> None:
        """Sum what others have and this rank has not, so that they can go on."""
        for stream in self._streams:
            while True:
                window = self._posted[stream.number] + 1
                states = self.states(stream, window)
                if None in states or not any(states):
                    break
                self._posted[stream.number] = window
                self._board.publish(self._at[stream.number] + _POSTED, window)
                self.sum(stream, states)

    def states(self, stream: Stream, window: int) -> list[bool | None]:
        """For each rank whether it has gradients for a window; None where that is not known yet."""
        at = self._at[stream.number] + _POSTED
        return [
            True if self._board.read(r, at) >= window else False if self._has_ended(r) else None
            for r in range(self.size)
        ]

    def _has_ended(self, rank: int) -> bool:
        return self._board.read(rank, _ENDED) >= self._backward

    def sum(self, stream: Stream, posted: Sequence[bool | None]) -> None:
        """Sum this rank's range of the gradients of those ranks that have any, and tell that it is done."""
        number, at, slot = stream.number, self._at[stream.number], stream.gradient_slot
        assert slot is not None
        began = time.perf_counter()
        used = [False] * len(stream.places)
        parts, size = [], stream.reduce_dtype.itemsize
        for r in (r for r, has in enumerate(posted) if has):
            mine = slot.everyone[r][stream.span.start * size : stream.span.stop * size]
            parts.append(mine.view(stream.reduce_dtype))
            for i in range(len(used)):
                used[i] = used[i] or bool(self._board.read(r, at + _USED + i // _BITS) >> (i % _BITS) & 1)
        stream.unit.engine.reduced(stream, parts, used)
        self._summed[number] += 1
        self._board.publish(at + _SUMMED, self._summed[number])
        self.exposed += time.perf_counter() - began

    def wait_posted(self, stream: Stream, window: int) -> list[bool | None]:
        def known(rank: int) -> bool:
            return self._board.read(rank, at) >= window or self._has_ended(rank)

        at = self._at[stream.number] + _POSTED
        self._wait(known, lambda: f"reduce of {stream.name}")
        return self.states(stream, window)

    def wait_summed(self, stream: Stream, window: int) -> None:
        at = self._at[stream.number] + _SUMMED
        self._wait(lambda r: self._board.read(r, at) >= window, lambda: f"reduce of {stream.name}")

    def recover(self, streams: Sequence[Stream]) -> None:
        board = self._board
        board.leave()
        board.settle()
        board.barrier("recovering from an exception")
        board.settle()
        posted = [max(board.read(r, at + _POSTED) for r in range(self.size)) for at in self._at]
        self._backward = max(board.read(r, _ENDED) for r in range(self.size)) + 1
        board.barrier("recovered from an exception")
        self._posted, self._summed = posted, list(posted)
        for at, window in zip(self._at, posted, strict=True):
            board.publish(at + _POSTED, window)
            board.publish(at + _SUMMED, window)
        board.publish(_ENDED, self._backward - 1)
        board.barrier("going on after an exception")

    def all_reduce(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        flat = values.detach().reshape(-1)
        if self.size == 1:
            return flat.clone().view(values.shape)
        parts = flat.new_empty(self.size, flat.numel())
        for at, shown in self._show(flat, flat.numel(), what):
            for r, theirs in enumerate(shown):
                parts[r, at : at + theirs.numel()] = theirs[: flat.numel() - at]
        return in_order(parts, maximum).view(values.shape)

    def gather_flat(self, part: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        whole = part.new_empty(sum(s.length for s in spans))
        if self.size == 1:
            return whole.copy_(part)
        start = [sum(s.length for s in spans[:r]) for r in range(self.size)]
        for at, shown in self._show(part, max(s.length for s in spans), what):
            for begin, span, theirs in zip(start, spans, shown, strict=True):
                length = min(theirs.numel(), max(span.length - at, 0))
                whole[begin + at : begin + at + length] = theirs[:length]
        return whole

    def _show(self, flat: Tensor, longest: int, what: str) -> Iterator[tuple[int, list[Tensor]]]:
        """Show a flat tensor to all ranks, a stretch at a time: where it begins, and what each rank shows."""
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

    def _barrier(self, kind: str) -> None:
        before = self._host.waited
        self._board.barrier(kind)
        self.exposed += self._host.waited - before

    def _wait(
        self, reached: Callable[[int], bool], what: Callable[[], str], idle: Callable[[], None] | None = None
    ) -> None:
        before = self._host.waited
        self._board.wait(reached, what, idle)
        self.exposed += self._host.waited - before


class _Reduction(Ticket):
    def __init__(self, comm: SharedMemory, stream: Stream, window: int) -> None:
        self._comm, self._stream, self._window, self._summed = comm, stream, window, False

    def finish(self) -> None:
        if not self._summed:
            self._summed = True
            self._comm.sum(self._stream, self._comm.wait_posted(self._stream, self._window))

    def release(self) -> None:
        self.finish()
        self._comm.wait_summed(self._stream, self._window)
