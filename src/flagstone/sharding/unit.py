"""A unit: the parameters that are gathered and reduced together; usually one block. And what its hooks remember."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from flagstone.sharding.precision import MixedPrecision

if TYPE_CHECKING:
    from flagstone.sharding.engine import Engine
    from flagstone.sharding.stream import Stream


class Unit:
    """One call of ``fully_shard``.

    Attributes:
        name: the first module's path below the root, for messages.
        streams: its parameters.
        entered: calls of forward under way.
        in_backward: its gradients are being computed.
        pinned: whole because somebody has called ``unshard``.
        is_root: no unit is around it.
    """

    def __init__(self, engine: Engine, modules: Sequence[nn.Module], precision: MixedPrecision, reshard: bool) -> None:
        self.engine = engine
        self._modules = [weakref.ref(m) for m in modules]
        self.name = type(modules[0]).__name__
        self.precision = precision
        self.reshard_after_forward = reshard
        self.reshard_after_backward = True
        self.streams: list[Stream] = []
        self.is_root = False
        self.sync = True  # gradients are reduced in this backward
        self.all_reduce = True  # and summed over replicas
        self.divide: float | None = None  # the sum of gradients; by default the number of ranks
        self.forward_prefetch: list[weakref.ref[Unit]] | None = None
        self.backward_prefetch: list[weakref.ref[Unit]] | None = None
        self.entered = 0
        self.methods = 0  # of those, methods with another name, which may call forward
        self.todo: set[int] = set()  # modules of the unit that this forward has still to see
        self.in_backward = False
        self.pinned = False
        self.computing: set[object] = set()  # calls whose backward has begun, and whose inputs have no gradient yet
        self.ends_late = False  # one has no such inputs: it ends with the last gradient of a parameter
        self.was_evicted = False  # in the middle of its backward

    @property
    def modules(self) -> Iterator[nn.Module]:
        for reference in self._modules:
            module = reference()
            if module is not None:
                yield module

    def end_backward(self) -> None:
        self.in_backward = self.ends_late = False
        self.computing.clear()

    @property
    def is_busy(self) -> bool:
        """Whether its weights may be in use."""
        return self.entered > 0 or self.in_backward or self.pinned

    @property
    def is_resident(self) -> bool:
        return all(s.resident for s in self.streams)
