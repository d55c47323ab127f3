"""Devices: the collectives of their own library, on one stream of high priority beside computation.

The stream waits for computation before it takes a buffer over, and computation waits for an event before it uses a
result; the host waits for neither. The library wants equal shards, so buffers are padded to ``size`` times the first
one; where parameters are not cut (``whole_tensors``), shards are unequal and go as lists.

Sums are made in the type that gradients have on the wire, unlike those of ``cpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flagstone.layout import Span
from flagstone.sharding.comm import Comm, Ticket
from flagstone.sharding.host import RankError

if TYPE_CHECKING:
    from flagstone.sharding.stream import Stream


class Queue(Protocol):
    """A queue of work on a device, beside that of computation."""

    def run(self) -> AbstractContextManager[Any]:
        """What is called inside goes into this queue, after all that computation was given so far."""

    def mark(self) -> Callable[[], None]:
        """Mark what is in this queue now. Calling the result lets computation wait for it."""


class DeviceQueue:
    """A stream of high priority of the current device."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device, priority=-1)

    def run(self) -> AbstractContextManager[Any]:
        self._stream.wait_stream(self._module.current_stream())
        return self._module.stream(self._stream)

    def mark(self) -> Callable[[], None]:
        event = self._module.Event()
        event.record(self._stream)
        return lambda: self._module.current_stream().wait_event(event)


class Native(Comm):
    """See above.

    Args:
        group: the process group of the ranks, whose backend has collectives for the device.
        queue: where they run.
    """

    pads = True

    def __init__(self, group: Any, queue: Queue) -> None:
        self._group, self._queue = group, queue
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self._sums: Tensor | None = None  # what a reduction leaves, of the largest stream

    @property
    def exposed(self) -> float:
        return 0.0  # what a device waits for, only a profile tells

    def weights(self, stream: Stream) -> tuple[Tensor, Tensor]:
        source = torch.zeros(stream.shard_numel, dtype=stream.compute_dtype, device=stream.device)
        return source.new_empty(0), source[: stream.span.length]

    def write_weights(self) -> None:
        self._queue.mark()()  # gathers that nobody has waited for read them

    def gather(self, stream: Stream) -> Ticket:
        with self._queue.run():
            if stream.is_even:
                source = _padded(stream.source, stream.shard_numel)
                whole = _padded(stream.full.data, stream.shard_numel * self.size)
                self._try(f"gather of {stream.name}", dist.all_gather_into_tensor, whole, source, group=self._group)
            else:
                parts = [stream.full.data[s.start : s.stop] for s in stream.spans]
                self._try(f"gather of {stream.name}", dist.all_gather, parts, stream.source, group=self._group)
            return _Marked(self._queue.mark())

    def reduce(self, stream: Stream, used: Sequence[bool]) -> Ticket:
        assert stream.gradients is not None
        flat, what = stream.gradients.flat, f"reduce of {stream.name}"
        with self._queue.run():
            mine = self._buffer(stream)
            if stream.is_even:
                whole = _padded(flat, stream.shard_numel * self.size)
                self._try(what, dist.reduce_scatter_tensor, mine, whole, group=self._group)
            else:
                parts = [flat[s.start : s.stop] for s in stream.spans]
                mine = mine[: stream.span.length]
                self._try(what, dist.reduce_scatter, mine, parts, group=self._group)
            # Which parameters other ranks have used is not asked: that would let the host wait for the device.
            stream.unit.engine.reduced(
                stream, [mine[: stream.span.length]], [v.requires_grad for v in stream.views.parameters]
            )
            return _Marked(self._queue.mark())

    def _buffer(self, stream: Stream) -> Tensor:
        nbytes = stream.shard_numel * stream.reduce_dtype.itemsize
        if self._sums is None or self._sums.numel() < nbytes:
            self._sums = torch.empty(nbytes, dtype=torch.uint8, device=stream.device)
        return self._sums[:nbytes].view(stream.reduce_dtype)

    def all_reduce(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        total = values.detach().clone()
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        self._try(what, dist.all_reduce, total, op=op, group=self._group)
        return total

    def gather_flat(self, part: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        longest = max(s.length for s in spans)
        padded = part.new_zeros(longest)
        padded[: part.numel()] = part
        whole = part.new_empty(self.size * longest)
        self._try(what, dist.all_gather_into_tensor, whole, padded, group=self._group)
        return torch.cat([whole[r * longest : r * longest + s.length] for r, s in enumerate(spans)])

    def _try(self, what: str, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
        except RuntimeError as error:
            me = dist.get_rank()
            raise RankError(f"rank {me}: {what} failed: {str(error).splitlines()[0]}") from error


class _Marked(Ticket):
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def finish(self) -> None:
        self._wait()

    def release(self) -> None:
        self._wait()


def _padded(view: Tensor, numel: int) -> Tensor:
    """The memory of a flat view and what is reserved behind it."""
    return view.as_strided((numel,), (1,), view.storage_offset())
