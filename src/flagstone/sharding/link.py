"""Bytes between ranks over gloo: point to point, straight from and into the flat buffers.

gloo's own collectives copy through temporaries and stop computation; sends and receives do not. Each message is tagged
with its stream and verb, so that ranks that have come apart wait, and never take one message for another.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flagstone.layout import Span
from flagstone.sharding.comm import Ticket, in_order
from flagstone.sharding.host import RankError

_SMALL = 0  # the tag of exchanges that belong to no stream


class Link:
    """The ranks of a group, and a gloo group of their own.

    Args:
        ranks: of the job, in the group's order. All numbers of ranks elsewhere are indices in this.
        index: this rank's.
    """

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self.ranks, self.index, self.size = list(ranks), index, len(ranks)
        self.timeout = 600.0  # seconds
        self.waited = 0.0  # seconds
        self._group: Any = None

    def open(self) -> None:
        """Connect; all ranks call it together. When this is called again, messages under way are lost."""
        limit = datetime.timedelta(seconds=self.timeout)
        self._group = dist.new_group(self.ranks, backend="gloo", timeout=limit, use_local_synchronization=True)

    def exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], tag: int, what: str) -> Exchange:
        """Begin to send and to receive, by rank."""
        if self._group is None:
            self.open()
        arriving, leaving = [], []
        peer = -1
        try:
            for peer, data in receive.items():
                if data.numel():
                    arriving.append((peer, dist.irecv(_bytes(data), src=self.ranks[peer], group=self._group, tag=tag)))
            for peer, data in send.items():
                if data.numel():
                    leaving.append((peer, dist.isend(_bytes(data), dst=self.ranks[peer], group=self._group, tag=tag)))
        except RuntimeError as error:
            raise self.failed(peer, what, error) from error
        return Exchange(self, arriving, leaving, what)

    def all_reduce(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        """The sum, or the maximum; of large tensors each rank sums a part and shows it to the others."""
        flat = values.detach().reshape(-1)
        step = -(-flat.numel() // self.size)
        spans = [Span(min(r * step, flat.numel()), 0) for r in range(self.size + 1)]
        spans = [Span(a.start, b.start - a.start) for a, b in pairwise(spans)]
        mine = spans[self.index]
        parts = flat.new_empty(self.size, mine.length)
        parts[self.index] = flat[mine.start : mine.stop]
        others = [r for r in range(self.size) if r != self.index]
        outgoing = {r: flat[spans[r].start : spans[r].stop] for r in others}
        self._swap(outgoing, {r: parts[r] for r in others}, what)
        total = in_order(parts, maximum) if mine.length else flat.new_empty(0)
        return self.gather_flat(total, spans, what).view(values.shape)

    def gather_flat(self, part: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        """The whole of a flat tensor of which each rank has a span."""
        whole = part.new_empty(sum(s.length for s in spans))
        pieces = [whole[s.start : s.stop] for s in spans]
        pieces[self.index].copy_(part)
        others = [r for r in range(self.size) if r != self.index]
        self._swap(dict.fromkeys(others, part.contiguous()), {r: pieces[r] for r in others}, what)
        return whole

    def _swap(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], what: str) -> None:
        self.exchange(send, receive, _SMALL, what).release()

    def failed(self, peer: int, what: str, error: RuntimeError) -> RankError:
        me, name = self.ranks[self.index], self.ranks[peer]
        if "imed out" in str(error):
            return RankError(f"rank {name} did not come within {self.timeout:g} s; rank {me} waited in {what}")
        return RankError(f"rank {name} is gone; rank {me} waited for it in {what}: {str(error).splitlines()[0]}")


class Exchange(Ticket):
    """Messages under way."""

    def __init__(self, link: Link, arriving: list[Any], leaving: list[Any], what: str) -> None:
        self._link, self._arriving, self._leaving, self._what = link, arriving, leaving, what

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
                work.wait(datetime.timedelta(seconds=self._link.timeout))
            except RuntimeError as error:
                raise self._link.failed(peer, self._what, error) from error
            works.pop(0)
        self._link.waited += time.perf_counter() - began


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)
