"""A tensor of which this rank has one span, with the shape of the whole.

To Python it has the global shape; the memory under it, and all that torch's kernels see, is this rank's 1-D span. So an
elementwise operation costs what it costs on the span, and whatever would take the span for the tensor is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flagstone.errors import FlagstoneError
from flagstone.layout import FLAT, Sharding, Span


class Owner(Protocol):
    """What a sharded tensor asks of the engine that its memory belongs to."""

    mesh: tuple[tuple[int, ...], ...]  # ranks of the job, a row for each replica

    def before_write(self) -> None:
        """A weight is about to be changed."""

    def flags_changed(self) -> None:
        """A weight was made trainable, or frozen."""

    def gather(self, shard: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        """The whole of a flat tensor of which each rank has a span."""

    def total(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        """The sum of small tensors over the ranks, or their maximum; the same on all."""


class Placement:
    """Which part of a tensor this rank has.

    Attributes:
        name: the parameter's FQN.
        shape: of the whole tensor.
        spans: for each rank of the owner its span of the tensor's row-major flattening.
        span: this rank's.
        offset: of the tensor in the flat one that it is part of.
        owner: the engine.
        is_weight: whether the memory is what forward computes with, so that writing to it needs an order.
        is_unset: whether the values are still those of memory that nobody has written to.
    """

    __slots__ = ("_value", "is_unset", "is_weight", "name", "offset", "owner", "shape", "span", "spans")

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        spans: tuple[Span, ...],
        span: Span,
        offset: int,
        owner: Owner,
        is_weight: bool = False,
    ) -> None:
        self.name, self.shape, self.spans, self.span = name, shape, spans, span
        self.offset, self.owner = offset, owner
        self.is_weight, self.is_unset = is_weight, False
        self._value: Placement | None = None

    def of_value(self) -> Placement:
        """The placement of a tensor that is divided alike and is not a weight: a gradient, a moment, a copy."""
        if not self.is_weight:
            return self
        if self._value is None:
            self._value = Placement(self.name, self.shape, self.spans, self.span, self.offset, self.owner)
        self._value.name = self.name
        return self._value

    def reshaped(self, shape: torch.Size) -> Placement:
        return Placement(self.name, shape, self.spans, self.span, self.offset, self.owner, self.is_weight)

    def move(self, owner: Owner) -> None:
        self.owner = owner
        if self._value is not None:
            self._value.owner = owner

    def before_write(self) -> None:
        if self.is_weight:
            self.owner.before_write()
        self.is_unset = False


class ShardedTensor(torch.Tensor):
    """One rank's span of a tensor. ``shape`` is the whole tensor's; ``local`` is what is here, flat."""

    placement: Placement

    @staticmethod
    def of(local: Tensor, placement: Placement, requires_grad: bool = False) -> ShardedTensor:
        """Wrap this rank's flat part; it stays the memory."""
        made: ShardedTensor = torch.Tensor._make_subclass(ShardedTensor, local, requires_grad)
        made.placement = placement
        return made

    @property
    def local(self) -> Tensor:
        """This rank's part: 1-D, a view. Whoever writes to it must keep other ranks from reading: see ``to_local``."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(torch.Tensor)

    def to_local(self) -> Tensor:
        """This rank's part to read or write: 1-D, a view. All ranks call it: it waits until none reads weights."""
        self.placement.before_write()
        return self.local

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank: a new one. All ranks of the mesh call it."""
        place = self.placement
        return place.owner.gather(self.local, place.spans, f"full_tensor of {place.name}").view(place.shape)

    @property
    def flagstone_sharding(self) -> Sharding:
        """How it is divided, as checkpoints see it; ranks are those of the job."""
        mesh = self.placement.owner.mesh
        cuts = (*(s.start for s in self.placement.spans), self.numel())
        return Sharding((len(mesh), len(mesh[0])), tuple(r for row in mesh for r in row), ((1, FLAT),), cuts)

    @property
    def global_shape(self) -> torch.Size:
        return self.placement.shape

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.placement.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.placement.shape)

    def dim(self) -> int:
        return len(self.placement.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.placement.shape if dim is None else self.placement.shape[dim]

    def numel(self) -> int:
        return self.placement.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if not self.placement.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.placement.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place = self.placement
        return (
            f"ShardedTensor({place.name}, shape={list(place.shape)}, dtype={self.dtype}, "
            f"elements {place.span.start} to {place.span.stop} of {self.numel()} here)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        copied = _wrap(self.local.clone(), self.placement.of_value())
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FlagstoneError(
            f"{self.placement.name} is sharded: a pickle would have this rank's part only. Save it with "
            "flagstone.save, or pickle its full_tensor()"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            handler = _PROPERTIES.get(func.__self__.__name__, _refuse)  # type: ignore[attr-defined]
        else:
            handler = _FUNCTIONS.get(name, _refuse)
        return handler(func, args, kwargs or {})


_Handler = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
_plainly = torch._C.DisableTorchFunctionSubclass


def _wrap(local: Tensor, placement: Placement) -> ShardedTensor:
    made: ShardedTensor = local.as_subclass(ShardedTensor)
    made.placement = placement
    return made


def _name(func: Callable[..., Any]) -> str:
    name = func.__name__
    owner = getattr(func, "__self__", None)
    return f"Tensor.{owner.__name__}" if name in ("__get__", "__set__", "__delete__") and owner is not None else name


def _sharded(args: Iterable[Any]) -> Iterable[ShardedTensor]:
    for arg in args:
        if isinstance(arg, ShardedTensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _sharded(arg)


def _refuse(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = [t.placement.name for t in _sharded([*args, *kwargs.values()])][:3]
    raise FlagstoneError(
        f"{_name(func)} cannot be done on {', '.join(names)}, of which this rank has a part only. Elementwise "
        "operations and norms can; inside of the module's forward the parameter is whole (for another method, name it "
        "with flagstone.register_forward_method); else use full_tensor(), or to_local() for this rank's part"
    )


def _as_is(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with _plainly():
        return func(*args, **kwargs)


def _check_alike(func: Callable[..., Any], first: Placement, args: Iterable[Any]) -> None:
    """Every tensor beside the first must be the same span of as many elements, or a single number."""
    for arg in args:
        if isinstance(arg, ShardedTensor):
            other = arg.placement
            if other is not first and (other.span != first.span or other.shape != first.shape):
                raise FlagstoneError(
                    f"{_name(func)}: {other.name} {list(other.shape)} is divided otherwise than {first.name} "
                    f"{list(first.shape)}"
                )
        elif isinstance(arg, Tensor) and arg.dim():
            raise FlagstoneError(
                f"{_name(func)}: a plain tensor of shape {list(arg.shape)} cannot be combined with this rank's part of "
                f"{first.name}"
            )


def _pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    first = _check_tensors(func, args, kwargs)
    out = kwargs.get("out")
    if out is not None:
        if not isinstance(out, ShardedTensor):
            return _refuse(func, args, kwargs)
        out.placement.before_write()
    with _plainly():
        result = func(*args, **kwargs)
    return out if out is not None else _wrap(result, first.of_value())


def _pointwise_(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, ShardedTensor):
        return _refuse(func, args, kwargs)
    _check_tensors(func, args, kwargs)
    target.placement.before_write()
    with _plainly():
        func(*args, **kwargs)
    return target


def _set_where(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``t[mask] = number``."""
    target, mask, value = args
    if not isinstance(target, ShardedTensor) or not isinstance(mask, ShardedTensor) or mask.dtype != torch.bool:
        return _refuse(func, args, kwargs)
    return target.masked_fill_(mask, value)


def _check_tensors(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Placement:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    first = next(t.placement for t in tensors if isinstance(t, ShardedTensor))
    if len(tensors) > 1:
        _check_alike(func, first, tensors)
    return first


def _lists(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``_foreach_`` and ``_fused_`` functions: the i-th tensors of all lists belong together."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    for row in zip(*lists, strict=False):
        first = next((t.placement for t in row if isinstance(t, ShardedTensor)), None)
        if first is not None:
            _check_alike(func, first, row)
    if func.__name__.endswith("_"):
        for tensor in _sharded(lists):
            tensor.placement.before_write()
    with _plainly():
        result = func(*args, **kwargs)
    if not isinstance(result, (list, tuple)):
        return result
    sources = lists[0]
    wrapped = [
        _wrap(r, s.placement.of_value()) if isinstance(s, ShardedTensor) else r
        for r, s in zip(result, sources, strict=True)
    ]
    return type(result)(wrapped)


def _like(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with _plainly():
        result = func(*args, **kwargs)
    source: ShardedTensor = args[0]
    if result is source or not isinstance(result, Tensor):  # type() gives a name
        return result
    placement = source.placement.of_value()
    if func.__name__ == "empty_like":
        placement = placement.reshaped(source.shape)
        placement.is_unset = True
    return _wrap(result, placement)


zeros_for: list[Callable[[ShardedTensor], Tensor | None]] = []  # who says where ``zeros_like`` puts what it makes


def _zeros_like(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if zeros_for and len(args) == 1 and kwargs.keys() <= {"memory_format"}:
        local = zeros_for[-1](args[0])
        if local is not None:
            return _wrap(local, args[0].placement.of_value())
    return _like(func, args, kwargs)


def _alias(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same memory: what writes to it writes to the weight."""
    with _plainly():
        return _wrap(func(*args, **kwargs), args[0].placement)


def _reshaped(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, *rest = args
    if func.__name__ in ("view_as", "reshape_as"):
        shape = rest[0].shape
    elif func.__name__ == "flatten":
        if rest or kwargs:
            return _refuse(func, args, kwargs)
        shape = torch.Size([source.numel()])
    elif len(rest) == 1 and isinstance(rest[0], torch.dtype):
        return _refuse(func, args, kwargs)
    else:
        sizes = rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest
        shape = torch.empty(source.shape, device="meta").view(tuple(sizes)).shape
    if shape.numel() != source.numel():
        return _refuse(func, args, kwargs)
    with _plainly():
        return _wrap(source.view(-1), source.placement.reshaped(shape))


def _new(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``new_empty`` and the like make plain tensors of the shape that is asked for."""
    with _plainly():
        return func(*args, **kwargs).as_subclass(Tensor)


def _drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw the whole tensor's numbers and keep this rank's, so that they do not depend on the number of ranks."""
    target = kwargs.get("tensor", args[0] if args else None)
    if not isinstance(target, ShardedTensor):
        return _refuse(func, args, kwargs)
    with _plainly():
        whole = torch.empty(target.placement.shape, dtype=target.dtype, device=target.device)
        if "tensor" in kwargs:
            func(*args, **{**kwargs, "tensor": whole})
        else:
            func(whole, *args[1:], **kwargs)
    return _filled(target, whole)


def _filled(target: ShardedTensor, whole: Tensor) -> ShardedTensor:
    place = target.placement
    place.before_write()
    with torch.no_grad(), _plainly():
        target.detach().copy_(whole.reshape(-1)[place.span.start : place.span.stop])
    return target


def _copied(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target, source = args[0], kwargs.get("src", args[1] if len(args) > 1 else None)
    whole = isinstance(source, Tensor) and not isinstance(source, ShardedTensor) and source.dim() > 0
    if isinstance(target, ShardedTensor) and whole and source.shape == target.shape:
        return _filled(target, source)
    return _pointwise_(func, args, kwargs)


def _set_data(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``p.data = t``: values are taken over, memory is not."""
    target, value = args
    if value.dtype != target.dtype or value.device != target.device:
        raise FlagstoneError(
            f"{target.placement.name} is sharded as {target.dtype} on {target.device} and cannot become {value.dtype} "
            f"on {value.device}; convert or move the module before fully_shard, or set precision="
        )
    if isinstance(value, ShardedTensor) and value.local.data_ptr() == target.local.data_ptr():
        return None
    is_unset = target.placement.is_unset
    with torch.no_grad():
        target.copy_(value)
    target.placement.is_unset = is_unset and value.placement.is_unset if isinstance(value, ShardedTensor) else False
    return None


def _set_grad(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target, value = args
    if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
        raise FlagstoneError(
            f"the gradient of {target.placement.name} must be sharded as it is; got {list(value.shape)}"
        )
    return _as_is(func, args, kwargs)


def _flag(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``requires_grad``: what forward sees follows at its next beginning."""
    if args[0].placement.is_weight:
        args[0].placement.owner.flags_changed()
    return _as_is(func, args, kwargs)


def _no_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise FlagstoneError(
        f"{args[0].placement.name} is sharded, and autograd never sees its gradient; use "
        "register_post_accumulate_grad_hook, which is called with the reduced gradient"
    )


def _unscaled(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """GradScaler: an overflow on one rank is one on all."""
    with _plainly():
        func(*args, **kwargs)
    gradients, found = args[0], args[1]
    for owner in dict.fromkeys(t.placement.owner for t in _sharded(gradients)):  # in the same order on all ranks
        found.copy_(owner.total(found, "unscale", maximum=True))


# Norms and sums.


class PartialNorm(torch.Tensor):
    """Norms of spans, which become norms of tensors when they are combined into one number."""

    parts: list[tuple[Owner | None, float, Tensor]]  # owner of a span, or None for a whole tensor; order; its norm

    @staticmethod
    def of(parts: list[tuple[Owner | None, float, Tensor]], shape: Sequence[int]) -> PartialNorm:
        norms = torch.stack([norm.as_subclass(Tensor).reshape(()) for _, _, norm in parts])
        made: PartialNorm = norms.reshape(tuple(shape)).as_subclass(PartialNorm)
        made.parts = parts
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__" or (name == "to" and isinstance(args[0], PartialNorm)):
            with _plainly():
                return args[0] if name == "to" else func(*args)
        if name == "stack" and len(args) == 1 and not kwargs:
            parts: list[tuple[Owner | None, float, Tensor]] = []
            for norm in args[0]:
                parts += norm.parts if isinstance(norm, PartialNorm) else [(None, 0.0, norm)]
            return PartialNorm.of(parts, [len(parts)])
        if name in ("linalg_vector_norm", "vector_norm", "norm"):
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0)))
            if all(known in (order, 0.0) for _, known, _ in args[0].parts):
                return combine(args[0].parts, order)
        whole = [a.resolved() if isinstance(a, PartialNorm) else a for a in args]
        return func(*whole, **{k: v.resolved() if isinstance(v, PartialNorm) else v for k, v in kwargs.items()})

    def resolved(self) -> Tensor:
        """The norm of each tensor on its own. All ranks call it."""
        norms = [norm if owner is None else combine([(owner, order, norm)], order) for owner, order, norm in self.parts]
        return torch.stack([n.as_subclass(Tensor).reshape(()) for n in norms]).reshape(self.shape)


def combine(parts: Iterable[tuple[Owner | None, float, Tensor]], order: float) -> Tensor:
    """The norm of all that the parts are norms of; each span counts once. The same on every rank of the owners."""
    groups: dict[Owner | None, list[Tensor]] = {}
    for owner, _, norm in parts:
        groups.setdefault(owner, []).append(norm)
    totals = []
    for owner, norms in groups.items():
        stacked = torch.stack([n.as_subclass(Tensor).reshape(()) for n in norms])
        stacked = stacked.max() if order == torch.inf else stacked.pow(order).sum()
        if owner is not None:
            stacked = owner.total(stacked, "the norm of the gradients", maximum=order == torch.inf)
        totals.append(stacked)
    whole = torch.stack(totals)
    return whole.max() if order == torch.inf else whole.sum().pow(1.0 / order)


def local_norm(tensor: ShardedTensor, order: float) -> tuple[Owner | None, float, Tensor]:
    """The norm of this rank's span. Raises FlagstoneError: an order that does not add up over parts."""
    if not (order > 0):
        raise FlagstoneError(
            f"a norm of order {order} of a sharded tensor is not supported; use a positive one, or inf"
        )
    with torch.no_grad():
        here = tensor.local
        norm = torch.linalg.vector_norm(here, order) if here.numel() else here.new_zeros(())
    return tensor.placement.owner, order, norm


def _norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    extra = [k for k, v in kwargs.items() if k not in ("ord", "p") and v not in (None, False)]
    if len(args) > 2 or extra or (source.requires_grad and torch.is_grad_enabled()):
        return _refuse(func, args, kwargs)
    order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else 2.0))
    part = local_norm(source, float(2.0 if order in (None, "fro") else order))
    if func.__name__ == "norm":
        return combine([part], part[1])
    return PartialNorm.of([part], [])


def _foreach_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))
    norms: list[Tensor] = []
    for tensor in args[0]:
        if isinstance(tensor, ShardedTensor):
            norms.append(PartialNorm.of([local_norm(tensor, order)], []))
        else:
            norms.append(torch.linalg.vector_norm(tensor, order))
    return norms


def _sum(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    if len(args) > 1 or kwargs or (source.requires_grad and torch.is_grad_enabled()):
        return _refuse(func, args, kwargs)
    place = source.placement
    with torch.no_grad():
        total = place.owner.total(source.local.sum(), f"the sum of {place.name}")
        return total / source.numel() if func.__name__ == "mean" else total


def _any(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if len(args) > 1 or kwargs:
        return _refuse(func, args, kwargs)
    place, local = args[0].placement, args[0].local.bool()
    wanted = func.__name__ == "any"
    found = (local if wanted else ~local).any().to(torch.int64)
    return place.owner.total(found, f"{func.__name__} of {place.name}", maximum=True).bool() == wanted


def _extreme(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    if len(args) > 1 or kwargs or (source.requires_grad and torch.is_grad_enabled()):
        return _refuse(func, args, kwargs)
    place, sign = source.placement, 1 if func.__name__ in ("max", "amax") else -1
    with torch.no_grad():
        signed = source.local * sign
        least = -torch.inf if signed.is_floating_point() else torch.iinfo(signed.dtype).min
        here = signed.max() if signed.numel() else signed.new_full((), least)
        return place.owner.total(here, f"{func.__name__} of {place.name}", maximum=True) * sign


def _by(handler: _Handler, names: str) -> dict[str, _Handler]:
    return dict.fromkeys(names.split(), handler)


_POINTWISE = """
    abs acos add addcdiv addcmul and asin atan bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min
    clip copysign cos cosh div divide eq erf erfc erfinv exp expm1 fill float_power floor fmod frac ge gt hypot isfinite
    isinf isnan le lerp lgamma log log10 log1p log2 logical_and logical_not logical_or lt masked_fill maximum minimum
    mul multiply nan_to_num ne neg negative pow reciprocal relu remainder round rsqrt rsub sigmoid sign sin sinh sqrt
    square sub subtract tan tanh true_divide trunc where xlogy zero
"""
_OPERATORS = """
    __and__ __or__ __rsub__ __rdiv__ __rtruediv__ __rpow__ __ror__ __rmul__ __radd__ __eq__ __ne__ __pow__ __truediv__
    __neg__ __invert__
"""
_LIKE = """
    empty_like ones_like full_like clone contiguous to type float double half bfloat16 int long bool cpu cuda pin_memory
    type_as
"""
_DRAWN = "normal_ uniform_ bernoulli_ exponential_ random_ log_normal_ cauchy_ geometric_ kaiming_uniform_ constant_"
_PLAIN = """
    is_floating_point is_complex is_contiguous is_pinned is_shared element_size data_ptr untyped_storage is_same_size
    register_post_accumulate_grad_hook get_device is_inference is_conj is_neg is_signed storage_offset
    _has_compatible_shallow_copy_type
"""
_PLAIN_PROPERTIES = """
    dtype device layout is_leaf grad_fn _version is_sparse is_cpu is_cuda is_meta is_quantized is_mps is_xpu is_nested
    _base itemsize _post_accumulate_grad_hooks _backward_hooks is_mkldnn is_sparse_csr is_xla is_mtia is_hpu is_ipu
    is_maia
"""
_FUNCTIONS: dict[str, _Handler] = {
    **_by(_pointwise, _POINTWISE + _OPERATORS),
    **{f"{name}_": _pointwise_ for name in _POINTWISE.split()},
    **_by(_pointwise_, "__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__"),
    **{f"_foreach_{name}{end}": _lists for name in (_POINTWISE + "clone copy").split() for end in ("", "_")},
    **_by(_lists, "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_"),
    **_by(_like, _LIKE),
    **_by(_alias, "detach alias"),
    **_by(_reshaped, "view reshape view_as reshape_as flatten"),
    **_by(_new, "new_empty new_zeros new_ones new_full new_tensor new"),
    **_by(_drawn, _DRAWN),
    **_by(_norm, "linalg_vector_norm vector_norm norm"),
    **_by(_sum, "sum mean"),
    **_by(_any, "any all"),
    **_by(_extreme, "max amax min amin"),
    **_by(_no_hook, "register_hook retain_grad"),
    **_by(_as_is, _PLAIN),
    "_foreach_norm": _foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscaled,
    "__setitem__": _set_where,
    "copy_": _copied,
    "requires_grad_": _flag,
    "zeros_like": _zeros_like,
}
_PROPERTIES: dict[str, _Handler] = {
    **_by(_as_is, _PLAIN_PROPERTIES),
    "requires_grad": lambda f, a, k: _flag(f, a, k) if f.__name__ == "__set__" else _as_is(f, a, k),
    "data": lambda f, a, k: _set_data(f, a, k) if f.__name__ == "__set__" else _alias(f, a, k),
    "grad": lambda f, a, k: _set_grad(f, a, k) if f.__name__ == "__set__" else _as_is(f, a, k),
}
