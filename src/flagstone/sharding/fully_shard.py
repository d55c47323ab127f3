"""``fully_shard``: what a user calls, and the hooks that let modules drive the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from flagstone.errors import FlagstoneError
from flagstone.flat.places import ParameterPlace, place_of, places_of
from flagstone.sharding.adam import join_neighbours
from flagstone.sharding.comm import Comm
from flagstone.sharding.cpu import Cpu
from flagstone.sharding.engine import Engine
from flagstone.sharding.native import DeviceQueue, Native
from flagstone.sharding.precision import MixedPrecision
from flagstone.sharding.stream import Stream
from flagstone.sharding.tensor import ShardedTensor
from flagstone.sharding.unit import Unit

M = TypeVar("M", nn.Module, list[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | None = None,
    precision: MixedPrecision | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    whole_tensors: bool = False,
    timeout: float = 600.0,
    debug: bool = False,
) -> M:
    """Divide a module's parameters over the ranks, in place. Call it on each block, then on the whole model.

    The parameters that no call for a block has taken become one unit: whole in memory only while the module computes.
    Between steps ``module.parameters()`` are ``ShardedTensor``s, with their names and global shapes, for any optimizer.
    Gradients are averaged over the ranks. All ranks call this for the same modules in the same order.

    Args:
        module: the module; or a list of modules that are used together, as one unit.
        mesh: a DeviceMesh of one dimension; or of two for hybrid sharding: divided over the second, replicated over the
            first. By default all ranks of the job, or this process alone.
        reshard_after_forward: whether the buffer of the weights may be used for others between forward and backward;
            False gives the unit its own. The outermost unit and small ones always keep theirs.
        precision: element types of computation and reduction.
        ignored_params: parameters to leave as they are.
        whole_tensors: cut only between parameters, so that an optimizer that needs whole matrices has them.
        timeout: seconds to wait for another rank.
        debug: fill buffers with NaN when they are given up, and compare the order of what the ranks do.

    Returns:
        The same module, now of a class that has the methods of ``ShardedModule``.

    Raises:
        FlagstoneError: naming the parameter that cannot be sharded; nothing was changed.
    """
    if not isinstance(reshard_after_forward, (bool, NoneType)):
        raise FlagstoneError(f"reshard_after_forward is True, False or None, not {reshard_after_forward!r}")
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    rows, me, device = _ranks(mesh, modules)
    ignored = {id(p) for p in ignored_params or ()}
    places, ties = _unclaimed(modules, ignored)
    engine = _engine(modules, ties, mesh, rows, me, device, timeout)
    engine.debug |= debug
    unit = Unit(engine, modules, precision or MixedPrecision(), reshard_after_forward is not False)
    for stream, place, owner in ties:
        place.owners.append(owner)
        stream.resident = True
        place.put(place.parameter)
    groups: dict[tuple[torch.dtype, bool], list[ParameterPlace]] = {}
    for place in places:
        groups.setdefault((place.parameter.dtype, place.parameter.requires_grad), []).append(place)
    for group in groups.values():
        unit.streams.append(Stream(unit, engine, group, unit.precision, whole_tensors))
    engine.add(unit)
    for each in modules:
        _hook(each, unit)
    return module


class ShardedModule:
    """What a module has after ``fully_shard``. The names are those of torch's FSDP2."""

    _flagstone_unit: Unit

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make this unit's parameters whole, until ``reshard``. All ranks call it.

        Args:
            async_op: whether to begin only, and return a handle whose ``wait`` ends it.
        """
        unit = self._flagstone_unit
        unit.engine.begin_reading()
        unit.engine.begin_loading(unit)
        unit.pinned = True
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Let the module have its sharded parameters again."""
        unit = self._flagstone_unit
        unit.pinned = False
        if not unit.is_busy:
            unit.engine.release(unit)
            for stream in unit.streams:
                stream.views.remove()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Each rank keeps its own whole until one does."""
        for unit in _units(self, recurse):
            unit.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Hybrid sharding: whether backward sums over replicas too. What it did not is summed by the next that does."""
        for unit in _units(self, recurse):
            unit.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """For compatibility: every backward leaves the gradients complete."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the ranks' sum of gradients by this, instead of by their number."""
        self._flagstone_unit.divide = float(factor)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """See ``fully_shard``."""
        for unit in _units(self, recurse):
            unit.engine.set_reshard(unit, reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the sharded parameters come back as soon as the unit's backward is done, not at the end of all."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[ShardedModule]) -> None:
        """Gather these while this module computes, instead of what came after it the last time."""
        self._flagstone_unit.forward_prefetch = [weakref.ref(m._flagstone_unit) for m in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[ShardedModule]) -> None:
        """The same for backward."""
        self._flagstone_unit.backward_prefetch = [weakref.ref(m._flagstone_unit) for m in modules]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the module; sharded ones, unless it computes."""
        engine = self._flagstone_unit.engine
        if not engine.is_computing:
            engine.rest()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise FlagstoneError(
            "a sharded module cannot be copied; copy it before fully_shard, or copy the parameters: "
            "{name: p.detach().clone() for name, p in model.named_parameters()}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FlagstoneError("a sharded module cannot be pickled; save it with flagstone.save")


class UnshardHandle:
    """A unit whose parameters are on their way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Let the modules have them when they are there."""
        if self._unit.pinned:
            self._unit.engine.acquire(self._unit)


def _units(module: Any, recurse: bool) -> Iterator[Unit]:
    seen = set()
    for each in module.modules() if recurse else [module]:
        unit = getattr(each, "_flagstone_unit", None)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method do what ``forward`` does: have whole parameters while it runs.

    Raises:
        AttributeError: the module has no such method.
    """
    method = getattr(module, name)
    unit = getattr(module, "_flagstone_unit", None)
    if unit is None:
        return
    me = weakref.ref(module)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        owner = me()
        args, kwargs = _before(unit, owner, args, kwargs)
        output = None
        unit.methods += 1
        try:
            output = method.__func__(owner, *args, **kwargs)
        finally:
            unit.methods -= 1
            output = _after(unit, owner, args, kwargs, output)
        return output

    setattr(module, name, wrapped)


# What is sharded, and over which ranks.


def _ranks(mesh: Any, modules: Sequence[nn.Module]) -> tuple[tuple[tuple[int, ...], ...], int, torch.device]:
    """The mesh as rows of ranks, this rank, and the device of the buffers."""
    first = next((p for m in modules for p in m.parameters()), None)
    kind = first.device.type if first is not None and not first.is_meta else "cpu"
    if mesh is not None:
        grid = mesh.mesh
        if grid.dim() not in (1, 2):
            raise FlagstoneError(f"mesh has {grid.dim()} dimensions; one shards, and two replicate and shard")
        rows = tuple(tuple(row) for row in (grid.tolist() if grid.dim() == 2 else [grid.tolist()]))
        kind = mesh.device_type
    elif dist.is_available() and dist.is_initialized():
        rows = (tuple(range(dist.get_world_size())),)
    else:
        rows = ((0,),)
    me = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if not any(me in row for row in rows):
        raise FlagstoneError(f"rank {me} is not in the mesh {rows}")
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    return rows, me, device


Tie = tuple[Stream, ParameterPlace, tuple["weakref.ref[nn.Module]", str]]


def _unclaimed(modules: Sequence[nn.Module], ignored: set[int]) -> tuple[list[ParameterPlace], list[Tie]]:
    """The parameters that no unit has yet; and those that one has, but that these modules use too."""
    places: list[ParameterPlace] = []
    ties: list[Tie] = []
    seen: dict[int, ParameterPlace] = {}
    for i, module in enumerate(modules):
        if getattr(module, "_flagstone_unit", None) is not None:
            raise FlagstoneError(f"{type(module).__name__} is sharded already")
        for place in places_of(module, lambda _, p: id(p) not in ignored and not isinstance(p, ShardedTensor)):
            parameter = place.parameter
            home = getattr(parameter, "flagstone_home", None)
            if home is not None:
                stream = home[0]()
                if stream is None:
                    raise FlagstoneError(f"{place.fqn} was sharded with a module that is gone")
                ties += [(stream, home[1], owner) for owner in place.owners]
            elif id(parameter) in seen:
                seen[id(parameter)].owners += place.owners
            else:
                if place_of(parameter) is not None or parameter.layout != torch.strided:
                    raise FlagstoneError(
                        f"{place.fqn} cannot be sharded: it is {type(parameter).__name__}, {parameter.layout}"
                    )
                if hasattr(parameter, "device_mesh"):
                    raise FlagstoneError(f"{place.fqn} is a DTensor; flagstone shards plain parameters")
                seen[id(parameter)] = place
                places.append(place)
                if len(modules) > 1:
                    place.fqn = f"{i}.{place.fqn}"
    return places, ties


def _engine(
    modules: Sequence[nn.Module],
    ties: Sequence[Tie],
    mesh: Any,
    rows: tuple[tuple[int, ...], ...],
    me: int,
    device: torch.device,
    timeout: float,
) -> Engine:
    """The engine of the units inside of these modules, or tied to them; all of these become one."""
    found: dict[Engine, None] = {}
    for module in modules:
        for unit in _units(module, True):
            found[unit.engine] = None
    for stream, _, _ in ties:
        found[stream.unit.engine] = None
    for engine in found:
        if engine.mesh != rows or engine.device != device:
            raise FlagstoneError(
                f"a part of this module is sharded over ranks {engine.mesh} on {engine.device}; the rest cannot be "
                f"over {rows} on {device}"
            )
    engines = list(found) or [
        Engine(rows, me, _comm(mesh, rows, me, device), _replicas(mesh, rows, me, device), device)
    ]
    for other in engines[1:]:
        engines[0].absorb(other)
    for comm in (engines[0].comm, engines[0].replicas):
        if comm is not None:
            comm.timeout = timeout
    return engines[0]


def _comm(mesh: Any, rows: tuple[tuple[int, ...], ...], me: int, device: torch.device) -> Comm:
    """How the ranks exchange bytes that a parameter is divided over."""
    ranks = next(row for row in rows if me in row)
    if device.type != "cpu" and dist.is_initialized():
        return Native(dist.group.WORLD if mesh is None else mesh.get_group(mesh.ndim - 1), DeviceQueue(device))
    return Cpu(ranks, ranks.index(me))


def _replicas(mesh: Any, rows: tuple[tuple[int, ...], ...], me: int, device: torch.device) -> Comm | None:
    if len(rows) == 1:
        return None
    if device.type != "cpu":
        return Native(mesh.get_group(0), DeviceQueue(device))
    column = next(row.index(me) for row in rows if me in row)
    return Cpu([row[column] for row in rows], next(i for i, row in enumerate(rows) if me in row))


# Hooks.


def _hook(module: nn.Module, unit: Unit) -> None:
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})
    module._flagstone_unit = unit  # type: ignore[assignment]
    me = weakref.ref(module)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _before(unit, me(), args, kwargs)

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return _after(unit, me(), args, kwargs, output)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True, always_call=True)
    module.register_state_dict_pre_hook(lambda *_: unit.engine.show_sharded(me()))
    module.register_state_dict_post_hook(lambda *_: unit.engine.show_whole(me()))
    module.register_load_state_dict_pre_hook(_refuse_assign)


def _refuse_assign(module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    unit: Unit = module._flagstone_unit  # type: ignore[assignment]
    unit.engine.rest()
    if unit.is_busy:
        raise FlagstoneError(f"load_state_dict of {unit.name}, whose weights are whole and in use; reshard it first")
    if metadata.get("assign_to_params_buffers", False):
        raise FlagstoneError(
            "load_state_dict(assign=True) would replace sharded parameters; leave assign out, values are copied"
        )


def _before(unit: Unit, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
    if not unit.todo:
        unit.todo = {id(m) for m in unit.modules}
    unit.engine.enter(unit)
    dtype = unit.precision.param
    if dtype is not None and unit.precision.cast_forward_inputs:
        args, kwargs = _cast(args, dtype), _cast(kwargs, dtype)
    return args, kwargs


def _after(unit: Unit, module: nn.Module | None, args: Any, kwargs: Any, output: Any) -> Any:
    engine = unit.engine
    unit.todo.discard(id(module))
    results = [t for t in _tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
    if results and not unit.in_backward:
        epoch, call = engine.epoch, None
        inputs = [] if engine.comm.shares_weights else [t for t in _tensors((args, kwargs)) if t.grad_fn is not None]
        if inputs:
            call = object()
            # The first of them is enough: autograd goes backward through time, and all of this call came after its
            # inputs. And it must be told before the unit begins whose output it is.
            for tensor in inputs:
                hook = tensor.register_hook(lambda _: unit.engine.inputs_done(unit, call))
                hooks = cast(dict[int, Any], tensor._backward_hooks)
                ordered = {hook.id: hooks.pop(hook.id), **hooks}
                hooks.clear()
                hooks.update(ordered)
        for tensor in results:
            tensor.register_hook(lambda _: unit.engine.enter_backward(unit, epoch, call))
    engine.leave(unit, keep=bool(results), more=bool(unit.todo))
    if unit.precision.output is not None:
        output = _cast(output, unit.precision.output)
    return output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, value)


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            yield from _tensors(list(vars(leaf).values()), depth - 1)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer must have the sharded parameters: others change nothing, or what all ranks share."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if place_of(parameter) is not None or hasattr(parameter, "flagstone_home"):
                when = "while the model was computing" if place_of(parameter) is not None else "before fully_shard"
                raise FlagstoneError(
                    f"the optimizer was made {when}, and has other parameters than the sharded ones; make it after "
                    "fully_shard, from model.parameters()"
                )
    join_neighbours(optimizer)


register_optimizer_step_pre_hook(_before_step)
