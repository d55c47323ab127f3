"""What sharding costs: bytes, and seconds of waiting."""

from __future__ import annotations

from typing import Any

from torch import nn

from flagstone.errors import FlagstoneError
from flagstone.sharding.engine import Engine


def _engine(module: nn.Module) -> Engine:
    unit = next((u for m in module.modules() if (u := getattr(m, "_flagstone_unit", None)) is not None), None)
    if unit is None:
        raise FlagstoneError(f"{type(module).__name__} is not sharded")
    engine: Engine = unit.engine
    return engine


def sharding_stats(module: nn.Module) -> dict[str, Any]:
    """What this rank has done so far.

    Returns:
        exposed_seconds: time that forward and backward stood still for exchanges with other ranks, and sums of theirs.
    """
    return {"exposed_seconds": _engine(module).comm.exposed}


def memory_report(module: nn.Module) -> dict[str, Any]:
    """The bytes that sharding needs, by formula: they are given out once, and none are added in later steps.

    Returns:
        shared_bytes: of weights that all ranks of this host have together.
        rank_bytes: of weights, gradients and buffers of this rank alone.
        bound_bytes: of all ranks of this model's replica: what the parts above add up to.
        buffers: a line for each: what it is, bytes, and the units that use it.
    """
    engine = _engine(module)
    engine.ready()
    buffers: list[tuple[str, int, list[str]]] = []
    shared = alone = every = 0
    for stream in engine.streams:
        whole, size = stream.nbytes, stream.dtype.itemsize
        if engine.comm.shares_weights:
            shared += whole
            buffers.append(("weights, shared by the ranks", whole, [stream.name]))
        else:
            mine = stream.span.length * stream.compute_dtype.itemsize
            alone, every = alone + mine, every + whole
            buffers.append(("weights of this rank", mine, [stream.name]))
            if stream.weight_slot is None:
                alone, every = alone + whole, every + whole * engine.size
                buffers.append(("whole weights", whole, [stream.name]))
        if stream.compute_dtype != stream.dtype:
            alone, every = alone + stream.span.length * size, every + stream.numel * size
            buffers.append(
                ("weights of this rank as the optimizer sees them", stream.span.length * size, [stream.name])
            )
        if stream.expected:
            alone, every = alone + stream.span.length * size, every + stream.numel * size
            buffers.append(("gradients of this rank", stream.span.length * size, [stream.name]))
    for slot in engine.slots:
        names = [s.name for r in slot.users if (s := r()) is not None]
        alone, every = alone + slot.nbytes, every + slot.nbytes * engine.size
        buffers.append((slot.kind, slot.nbytes, names))
    return {"shared_bytes": shared, "rank_bytes": alone, "bound_bytes": shared + every, "buffers": buffers}
