"""A stream: a unit's parameters of one element type, trainable or frozen, in one flat buffer divided over the ranks.

full      | weight | weight | bias |      what forward computes with, in the type of computation
source           | rank 1 |               this rank's part of it
master           | rank 1 |               the same in the parameters' own type, which the optimizer changes;
                                          the same memory as source where the types are equal
sums             | rank 1 |               reduced gradients, in the parameters' own type
gradients | weight | weight | bias |      this rank's gradients, in a slot that streams take turns with
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flagstone.adapters.pytorch import NAMES
from flagstone.flat.places import FlatGradients, FlatViews, ParameterPlace
from flagstone.layout import FlatLayout, overlap
from flagstone.sharding.precision import MixedPrecision
from flagstone.sharding.tensor import Placement, ShardedTensor

if TYPE_CHECKING:
    from flagstone.sharding.comm import Comm
    from flagstone.sharding.engine import Engine
    from flagstone.sharding.slots import Slot
    from flagstone.sharding.unit import Unit

CHUNK = 1 << 16  # elements summed at a time: they stay in the processor's cache


class Stream:
    """See above.

    Attributes:
        name: of its unit and type, for messages.
        number: among the streams of the engine; the same on every rank.
        resident: whole from its first use in a step to the end of the step, with a gradient buffer of its own.
        is_open: gradients are in the slot that are not being reduced yet.
        epoch: of the weights that ``full`` holds.
    """

    def __init__(
        self, unit: Unit, engine: Engine, places: Sequence[ParameterPlace], precision: MixedPrecision, whole: bool
    ) -> None:
        first = places[0].parameter
        self._unit = weakref.ref(unit)
        self.name, self.number, self.resident = places[0].fqn, -1, False
        self.dtype = first.dtype
        self.compute_dtype = (
            precision.param if precision.param is not None and first.is_floating_point() else self.dtype
        )
        self.reduce_dtype = precision.reduce or self.compute_dtype
        self.layout = FlatLayout.of(NAMES[self.dtype], [(p.fqn, p.shape) for p in places])
        by_name = {p.fqn: p for p in places}
        self.places = [by_name[p.name] for p in self.layout.places]
        for place, laid in zip(self.places, self.layout.places, strict=True):
            place.offset = laid.offset
        self.numel = self.layout.numel
        self.spans = self.layout.shards(engine.size, whole=whole)
        self.span = self.spans[engine.index]
        self.is_even = not whole
        self.shard_numel = max(s.length for s in self.spans)
        self.reserved = self.shard_numel * engine.size if engine.comm.pads and self.is_even else self.numel
        self.device = engine.device
        self.full, self.source = engine.comm.weights(self)
        self.master = (
            self.source
            if self.compute_dtype == self.dtype
            else torch.zeros(self.span.length, dtype=self.dtype, device=self.device)
        )
        self.parameters = [self._take(place, engine) for place in self.places]
        for place, parameter in zip(self.places, self.parameters, strict=True):
            place.put(parameter)  # type: ignore[arg-type]

        self.views: FlatViews
        self.weight_slot: Slot | None = None
        self.gradient_slot: Slot | None = None
        self.epoch = -1
        self.loading: Any = None  # the ticket of a gather under way
        self.gradients: FlatGradients | None = None
        self.unsynced: FlatGradients | None = None  # gradients that are not to be reduced yet
        self.arrivals: set[ParameterPlace] = set()  # gradients of this backward
        self.expected = 0
        self.is_open = False
        self.sums: Tensor | None = None
        self._sums_of: list[ShardedTensor] = []
        self.partial: Tensor | None = None  # sums over this replica's ranks that other replicas have not seen
        self.partly_used: Sequence[bool] = ()  # of which parameters

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None
        return unit

    @property
    def nbytes(self) -> int:
        """Of a buffer for the whole, as it is computed with."""
        return self.reserved * self.compute_dtype.itemsize

    @property
    def gradient_nbytes(self) -> int:
        """Of a buffer for this rank's gradients."""
        return self.reserved * self.reduce_dtype.itemsize

    def _take(self, place: ParameterPlace, engine: Engine) -> ShardedTensor:
        """Copy this rank's part of a parameter, and leave the original empty."""
        original = place.parameter
        spans = tuple(overlap(place.span, s) for s in self.spans)
        span = spans[engine.index]
        local = self.master.narrow(0, self._at(place.offset), span.length)
        placement = Placement(place.fqn, torch.Size(place.shape), spans, span, place.offset, engine, True)
        with torch.no_grad():
            if original.is_meta:
                placement.is_unset = True
            else:
                local.copy_(original.reshape(-1)[span.start : span.stop])
        parameter = ShardedTensor.of(local, placement, original.requires_grad)
        parameter._is_param = True  # what makes it an nn.Parameter
        parameter.__dict__.update({k: v for k, v in original.__dict__.items() if k not in parameter.__dict__})
        original.flagstone_home = weakref.ref(self), place  # type: ignore[attr-defined]
        if not original.is_meta:
            original.data = original.data.new_empty(0)
        place.parameter = parameter  # type: ignore[assignment]
        return parameter

    # Weights.

    def make_views(self) -> None:
        """Make the parameters that forward sees; ``full`` is known."""
        me = weakref.ref(self)

        def arrived(place: ParameterPlace, gradient: Tensor) -> None:
            stream = me()
            if stream is not None:
                stream.unit.engine.arrived(stream, place, gradient)

        self.views = FlatViews(self.places, self.full, arrived)
        self.follow()

    def rename(self, unit: str) -> None:
        """Take the names of the root: the unit is at this path."""
        for place, parameter in zip(self.places, self.parameters, strict=True):
            parameter.placement.name = f"{unit}.{place.fqn}" if unit else place.fqn
        self.name = f"{unit or self.places[0].fqn} ({str(self.dtype).removeprefix('torch.')})"

    def follow(self) -> None:
        """See anew which parameters are trainable."""
        self.views.follow()
        self.expected = sum(view.requires_grad for view in self.views.parameters)

    def cast(self) -> None:
        """Bring what ranks give each other up to date with the master."""
        if self.source is not self.master:
            self.source.copy_(self.master)

    # Gradients.

    def open(self) -> None:
        assert self.gradient_slot is not None
        if self.gradients is None:
            flat = self.gradient_slot.mine[: self.gradient_nbytes].view(self.reduce_dtype)
            self.gradients = FlatGradients(self.places, flat[: self.numel])
        self.gradients.clear()
        self.is_open = True

    def close(self) -> list[bool]:
        """Complete the flat gradient: with what was not reduced before, and zeros. Returns which places have any."""
        assert self.gradients is not None
        if self.unsynced is not None:
            for place in self.unsynced.places:
                if place in self.unsynced.filled:
                    self.gradients.add(place, place.of(self.unsynced.flat))
            self.unsynced = None
        self.gradients.close()
        self.is_open = False
        return [place in self.gradients.filled for place in self.places]

    def hold(self, place: ParameterPlace, gradient: Tensor) -> None:
        """Keep a gradient that is not to be reduced yet."""
        if self.unsynced is None:
            flat = torch.empty(self.numel, dtype=self.reduce_dtype, device=self.device)
            self.unsynced = FlatGradients(self.places, flat)
        self.unsynced.add(place, gradient)

    def add_up(
        self, parts: Sequence[Tensor], used: Sequence[bool], divide: float, replicas: Comm | None, all_reduce: bool
    ) -> None:
        """Add the sum of the ranks' parts, in their order and divided, to the gradients of the parameters.

        Args:
            parts: of each rank that has any, its gradients of this rank's span.
            used: which parameters have a gradient on any rank; the others keep none.
            divide: what the sum is divided by.
            replicas: the ranks that have other sums of the same span.
            all_reduce: whether to sum over them now.
        """
        if replicas is not None:
            fresh = self.partial is None
            if self.partial is None:
                wide = torch.promote_types(self.dtype, torch.float32)
                self.partial = torch.empty(self.span.length, dtype=wide, device=self.device)
                self.partly_used = [False] * len(self.places)
            add_up(self.partial, parts, 1.0, fresh)
            used = self.partly_used = [a or b for a, b in zip(self.partly_used, used, strict=True)]
            if not all_reduce:
                return
            parts = [replicas.all_reduce(self.partial, f"all-reduce of {self.name}")]
            self.partial = None
        fresh = self._ready_sums()
        assert self.sums is not None
        add_up(self.sums, parts, divide, fresh)
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, mine, has in zip(self.parameters, self._sums_of, used, strict=True):
                if has and parameter.grad is None:
                    parameter.grad = mine
        for parameter, has in zip(self.parameters, used, strict=True):
            hooks = parameter._post_accumulate_grad_hooks if has else None
            for hook in list((hooks or {}).values()):
                hook(parameter)

    def _ready_sums(self) -> bool:
        """Let ``sums`` hold what the parameters have as gradients; whether that is nothing."""
        if self.sums is None:
            self.sums = torch.empty(self.span.length, dtype=self.dtype, device=self.device)
            for parameter in self.parameters:
                at = self._at(parameter.placement.offset)
                placement = parameter.placement.of_value()
                self._sums_of.append(ShardedTensor.of(self.sums.narrow(0, at, placement.span.length), placement))
        with torch._C.DisableTorchFunctionSubclass():
            given = [p.grad for p in self.parameters]
            if all(g is None for g in given):
                return True
            for parameter, mine, gradient in zip(self.parameters, self._sums_of, given, strict=True):
                if gradient is None:
                    mine.zero_()
                elif gradient is not mine:
                    mine.copy_(gradient)
                    parameter.grad = mine
        return False

    def _at(self, offset: int) -> int:
        """Where a parameter begins in this rank's part."""
        return min(max(offset - self.span.start, 0), self.span.length)


def add_up(out: Tensor, parts: Sequence[Tensor], divide: float, fresh: bool) -> None:
    """``out = sum(parts) / divide``, or that added to it; in the order of the parts, in float32 or wider."""
    if not parts:
        if fresh:
            out.zero_()
        return
    wide = torch.promote_types(torch.promote_types(out.dtype, parts[0].dtype), torch.float32)
    direct = fresh and out.dtype == wide
    scratch = torch.empty(min(CHUNK, out.numel()), dtype=wide, device=out.device)
    divisor = torch.tensor(divide, dtype=wide, device=out.device)
    for at in range(0, out.numel(), CHUNK):
        target = out[at : at + CHUNK]
        total = target if direct else scratch[: target.numel()]
        first, *rest = (part[at : at + CHUNK] for part in parts)
        if rest and first.dtype == wide:
            torch.add(first, rest.pop(0), out=total)
        else:
            total.copy_(first)
        for part in rest:
            total.add_(part)
        if fresh:
            if divide != 1:
                total.div_(divisor)
            if not direct:
                target.copy_(total)
        elif out.dtype == wide:
            target.addcdiv_(total, divisor)
        else:
            target.add_(total.div_(divisor))
