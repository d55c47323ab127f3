"""Ranks that exchange bytes over gloo: point to point, straight into the flat buffers, and summed here.

gloo's own collectives copy through temporaries and stop computation; sends and receives do not. Each message is tagged
with its stream and verb, so that ranks that have come apart wait, and never take one message for another.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flagstone.layout import Span
from flagstone.sharding.comm import Comm, Ticket, in_order
from flagstone.sharding.host import RankError

if TYPE_CHECKING:
    from flagstone.sharding.stream import Stream

_SMALL = 0  # the tag of exchanges that belong to no stream


class Gloo(Comm):
    """See above.

    Args:
        ranks: of the job, in the order of the mesh.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.size, self.index, self._ranks = len(ranks), list(ranks).index(dist.get_rank()), list(ranks)
        self._group: Any = None
        self._sending: list[_Exchange] = []  # of weights
        self._staging: dict[int, list[Tensor]] = {}

    def begin(self, streams: Sequence[Stream]) -> None:
        if self._group is None and self.size > 1:
            self._group = dist.new_group(
                self._ranks,
                backend="gloo",
                timeout=datetime.timedelta(seconds=self.timeout),
                use_local_synchronization=True,
            )

    def write_weights(self) -> None:
        for exchange in self._sending:
            exchange.release()
        self._sending.clear()

    def gather(self, stream: Stream) -> Ticket:
        parts = [stream.full.data[s.start : s.stop] for s in stream.spans]
        parts[self.index].copy_(stream.source)
        others = [r for r in range(self.size) if r != self.index]
        exchange = self._exchange(
            dict.fromkeys(others, stream.source),
            {r: parts[r] for r in others},
            2 * stream.number + 1,
            f"gather of {stream.name}",
        )
        self._sending = [e for e in self._sending if not e.is_released]
        self._sending.append(exchange)
        return exchange

    def reduce(self, stream: Stream, used: Sequence[bool]) -> Ticket:
        assert stream.gradients is not None
        flat = stream.gradients.flat
        others = [r for r in range(self.size) if r != self.index]
        staged = self._stage(stream)
        which = torch.tensor(used, dtype=torch.bool)
        theirs = [torch.empty_like(which) for _ in range(self.size)]
        tag = 2 * stream.number + 2
        what = f"reduce of {stream.name}"
        words = self._exchange(dict.fromkeys(others, which), {r: theirs[r] for r in others}, tag, what)
        sums = self._exchange(
            {r: flat[stream.spans[r].start : stream.spans[r].stop] for r in others},
            {r: staged[r] for r in others},
            tag,
            what,
        )
        theirs[self.index] = which
        staged[self.index] = flat[stream.span.start : stream.span.stop]
        return _Reduction(self, stream, words, sums, staged, theirs)

    def _stage(self, stream: Stream) -> list[Tensor]:
        """Where the other ranks' gradients of this rank's range come to: as many buffers as there are slots."""
        key = id(stream.gradient_slot)
        nbytes = stream.span.length * stream.reduce_dtype.itemsize
        known = self._staging.get(key)
        if known is None or known[0].numel() < nbytes:
            known = [torch.empty(0 if r == self.index else nbytes, dtype=torch.uint8) for r in range(self.size)]
            self._staging[key] = known
        return [b[:nbytes].view(stream.reduce_dtype) if b.numel() else b for b in known]

    def recover(self, streams: Sequence[Stream]) -> None:
        self._sending.clear()
        self._staging.clear()
        self._group = None  # messages of the broken step may still be under way
        self.begin(streams)

    def all_reduce(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        flat = values.detach().reshape(-1).contiguous()
        parts = flat.new_empty(self.size, flat.numel())
        parts[self.index] = flat
        self._swap(flat, {r: parts[r] for r in range(self.size)}, what)
        return in_order(parts, maximum).view(values.shape)

    def gather_flat(self, part: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        whole = part.new_empty(sum(s.length for s in spans))
        pieces = list(whole.split([s.length for s in spans]))
        pieces[self.index].copy_(part)
        self._swap(part.contiguous(), dict(enumerate(pieces)), what)
        return whole

    def _swap(self, mine: Tensor, theirs: Mapping[int, Tensor], what: str) -> None:
        self.begin(())
        others = [r for r in range(self.size) if r != self.index]
        exchange = self._exchange(dict.fromkeys(others, mine), {r: theirs[r] for r in others}, _SMALL, what)
        exchange.finish()
        exchange.release()

    def _exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], tag: int, what: str) -> _Exchange:
        arriving, leaving = [], []
        peer = -1
        try:
            for peer, data in receive.items():
                if data.numel():
                    arriving.append((peer, dist.irecv(_bytes(data), src=self._ranks[peer], group=self._group, tag=tag)))
            for peer, data in send.items():
                if data.numel():
                    leaving.append((peer, dist.isend(_bytes(data), dst=self._ranks[peer], group=self._group, tag=tag)))
        except RuntimeError as error:
            raise self.failed(peer, what, error) from error
        return _Exchange(self, arriving, leaving, what)

    def failed(self, peer: int, what: str, error: RuntimeError) -> RankError:
        me, name = self._ranks[self.index], self._ranks[peer]
        if "imed out" in str(error):
            return RankError(f"rank {name} did not come within {self.timeout:g} s; rank {me} waited in {what}")
        return RankError(f"rank {name} is gone; rank {me} waited for it in {what}: {str(error).splitlines()[0]}")


class _Exchange(Ticket):
    def __init__(self, comm: Gloo, arriving: list[Any], leaving: list[Any], what: str) -> None:
        self._comm, self._arriving, self._leaving, self._what = comm, arriving, leaving, what

    @property
    def is_released(self) -> bool:
        return not self._arriving and not self._leaving

    def finish(self) -> None:
        self._wait(self._arriving)

    def release(self) -> None:
        self._wait(self._arriving)
        self._wait(self._leaving)

    def _wait(self, works: list[Any]) -> None:
        began = time.perf_counter()
        while works:
            peer, work = works[0]
            try:
                work.wait(datetime.timedelta(seconds=self._comm.timeout))
            except RuntimeError as error:
                raise self._comm.failed(peer, self._what, error) from error
            works.pop(0)
        self._comm.exposed += time.perf_counter() - began


class _Reduction(Ticket):
    def __init__(
        self, comm: Gloo, stream: Stream, words: _Exchange, sums: _Exchange, parts: list[Tensor], used: list[Tensor]
    ) -> None:
        self._comm, self._stream, self._words, self._sums, self._parts, self._used = (
            comm,
            stream,
            words,
            sums,
            parts,
            used,
        )
        self._summed = False

    def finish(self) -> None:
        if self._summed:
            return
        self._summed = True
        self._words.finish()
        self._sums.finish()
        began = time.perf_counter()
        used = torch.stack(self._used).any(0).tolist()
        parts = [p for p, any_of in zip(self._parts, self._used, strict=True) if bool(any_of.any())]
        self._stream.unit.engine.reduced(self._stream, parts, used)
        self._comm.exposed += time.perf_counter() - began

    def release(self) -> None:
        self.finish()
        self._words.release()
        self._sums.release()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8) if tensor.dtype != torch.uint8 else tensor.detach()
