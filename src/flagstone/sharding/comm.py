"""What the engine asks of the ranks: three verbs, and an order of reading and writing weights.

    gather      the whole of a stream's weights, from each rank's part
    reduce      each rank's part of the sum of all ranks' gradients
    all_reduce  the sum of small tensors, or of replicas' parts

What takes its time returns a ticket: ``finish`` waits until its result is there, ``release`` until nobody uses the
buffers that were given any more. All ranks call the same verbs in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flagstone.layout import Span

if TYPE_CHECKING:
    from flagstone.sharding.stream import Stream


class Ticket:
    """Something that was begun. This one is done."""

    def finish(self) -> None:
        """Wait for the result."""

    def release(self) -> None:
        """Wait until the buffers may be used for something else."""


DONE = Ticket()


class Comm(ABC):
    """The ranks that a parameter is divided over.

    Attributes:
        size: their number.
        index: this one's.
        shares_slots: whether several ranks compute with the same buffers.
        pads: whether buffers must have room for equal shards.
        shares_weights: whether all ranks compute with the same memory, so that a gather moves nothing.
        timeout: seconds to wait for another rank.
    """

    size: int
    index: int
    shares_weights = False
    shares_slots = False
    pads = False
    timeout: float = 600.0

    @property
    @abstractmethod
    def exposed(self) -> float:
        """Seconds that this rank stood still for others, or summed their gradients."""

    def weights(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Memory for the whole of a stream, or none where a slot is going to have it; and for this rank's part."""
        source = torch.zeros(stream.span.length, dtype=stream.compute_dtype, device=stream.device)
        return source.new_empty(0), source

    def whole(self, nbytes: int, device: torch.device) -> Tensor:
        """A buffer for whole weights."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def gradients(self, nbytes: int, device: torch.device) -> tuple[list[Tensor], int]:
        """A buffer for gradients; and those of the ranks that share memory, with this one's place among them."""
        return [torch.zeros(nbytes, dtype=torch.uint8, device=device)], 0

    def begin(self, streams: Sequence[Stream]) -> None:  # noqa: B027
        """These are the streams from now on; all ranks have the same."""

    def read_weights(self) -> None:  # noqa: B027
        """This rank has written its weights, and is going to read."""

    def write_weights(self) -> None:  # noqa: B027
        """Wait until this rank's weights may be changed: nobody reads them any more."""

    def finish_sending(self) -> None:  # noqa: B027
        """Wait until others have the weights that this rank sends: it may be about to end."""

    @abstractmethod
    def gather(self, stream: Stream) -> Ticket: ...

    @abstractmethod
    def reduce(self, stream: Stream, used: Sequence[bool]) -> Ticket: ...

    def close_backward(self, streams: Sequence[Stream]) -> None:  # noqa: B027
        """This rank begins no more reductions in this backward."""

    def end_backward(self) -> None:  # noqa: B027
        """And has finished its own: take part in those that others still make."""

    def recover(self, streams: Sequence[Stream]) -> None:  # noqa: B027
        """Forget what an exception has left undone."""

    @abstractmethod
    def all_reduce(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        """The sum over ranks, in their order, or the maximum. The same bits on every rank."""

    @abstractmethod
    def gather_flat(self, part: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        """The whole of a flat tensor of which each rank has a span: a new one."""


def in_order(parts: Tensor, maximum: bool = False) -> Tensor:
    """The sum, or the maximum, over the first dimension, which is the ranks: always in their order."""
    if maximum:
        return parts.amax(0)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
