"""torch tensors as bytes: plain ones of any device and strides, DTensors, and our own sharded ones."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from flagstone.checkpoint.piece import Piece
from flagstone.errors import FlagstoneError, LoadError
from flagstone.layout import DTYPES, Box, Sharding
from flagstone.storage.base import Bytes

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Unfit(FlagstoneError):
    """A tensor that a checkpoint cannot hold, and why; who collects says where it is."""


class TorchPiece(Piece):
    """A plain tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.dtype, self.shape = NAMES[tensor.dtype], tuple(tensor.shape)
        self._flat: Bytes | None = None
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            numel = prod(self.shape)
            self._flat = self._tensor.view(-1).view(torch.uint8).numpy() if numel else np.empty(0, np.uint8)

    def flat(self) -> Bytes | None:
        return self._flat

    def read_box(self, box: Box, out: Bytes) -> None:
        with torch.no_grad():
            _typed(out, self._tensor.dtype, box.sizes).copy_(self._tensor[box.slices])

    def write_box(self, box: Box, data: Bytes) -> None:
        with torch.no_grad():
            self._tensor[box.slices].copy_(_typed(data, self._tensor.dtype, box.sizes))

    def cast_from(self, dtype: str) -> Piece:
        return _CastTensor(self._tensor, dtype)


class _CastTensor(Piece):
    """A tensor that converts what is written to it."""

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        if dtype not in TORCH_DTYPES:
            raise LoadError(f"this torch has no element type {dtype}")
        if TORCH_DTYPES[dtype].is_complex and not tensor.dtype.is_complex:
            raise LoadError(f"{dtype} to {NAMES[tensor.dtype]} would drop the imaginary part")
        self._tensor, self.dtype, self.shape = tensor, dtype, tuple(tensor.shape)

    def read_box(self, box: Box, out: Bytes) -> None:
        raise LoadError("a converting piece is only written to")

    def write_box(self, box: Box, data: Bytes) -> None:
        with torch.no_grad():
            self._tensor[box.slices].copy_(_typed(data, TORCH_DTYPES[self.dtype], box.sizes))


def _typed(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data.flags.writeable:
        data = data.copy()  # a source: what is written to is writeable
    return torch.from_numpy(data).view(dtype).view(shape)


class TorchFrame:
    """Makes plain tensors in host memory."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, Piece]:
        if dtype not in TORCH_DTYPES:
            raise LoadError(f"this torch has no element type {dtype}; read it as numpy")
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        return tensor, TorchPiece(tensor)


class Described(NamedTuple):
    """A tensor as a checkpoint sees it.

    Attributes:
        dtype: its element type.
        shape: of the whole tensor.
        sharding: None for a plain tensor.
        local: what this rank has of it.
        identity: equal for two tensors that are the same memory.
    """

    dtype: str
    shape: tuple[int, ...]
    sharding: Sharding | None
    local: torch.Tensor
    identity: Hashable


def describe(tensor: torch.Tensor, ranks: Mapping[int, int] | None, *, write: bool = False) -> Described:
    """What a tensor is. ``ranks`` maps the ranks of the world to those of the group at work.

    Args:
        write: whether its memory is going to be written to.

    Raises:
        Unfit: it is of a kind that cannot be saved or filled.
    """
    sharding, local, shape = None, tensor, tuple(tensor.shape)
    if is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()  # type: ignore[attr-defined]
        if hasattr(local, "wait"):
            local = local.wait()
        sharding = sharding_of(tensor, ranks)
    elif is_flat(tensor):
        local = tensor.to_local() if write else tensor.local  # type: ignore[attr-defined]
        sharding = _flat_sharding(tensor, ranks)
    if local.layout != torch.strided or local.is_quantized or local.is_nested:
        raise Unfit(f"a tensor of layout {local.layout} cannot be saved or filled; save its parts")
    if local.device.type == "meta":
        raise Unfit("the tensor is on the meta device and has no values; materialize it first, with to_empty()")
    if hasattr(type(local), "__tensor_flatten__"):
        raise Unfit(f"a {type(local).__name__} wraps other tensors; save those")
    if local.dtype not in NAMES:
        raise Unfit(f"tensors of {local.dtype} cannot be saved")
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    storage = local.untyped_storage()._cdata
    memory = (storage, local.storage_offset(), tuple(local.shape), local.stride(), local.dtype, shape, sharding)
    identity: Hashable = memory
    if is_flat(tensor):  # of several, this rank may have nothing, at one address
        identity = (*memory, id(tensor.placement.of_value()))  # type: ignore[attr-defined]
    return Described(NAMES[local.dtype], shape, sharding, local, identity)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing what that needs."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a span of a flat one: a ``ShardedTensor``, of a part of this library above this one."""
    return hasattr(type(tensor), "flagstone_sharding")


def is_distributed(tensor: torch.Tensor) -> bool:
    return is_dtensor(tensor) or is_flat(tensor)


def is_sharded(tensor: Any) -> bool:
    """Whether this rank may have a part only."""
    return is_flat(tensor) or (is_dtensor(tensor) and any(not p.is_replicate() for p in tensor.placements))


def _flat_sharding(tensor: Any, ranks: Mapping[int, int] | None) -> Sharding:
    found: Sharding = tensor.flagstone_sharding
    if ranks is None:
        return found
    return replace(found, ranks=_members(found.ranks, ranks))


def _members(world: Sequence[int], ranks: Mapping[int, int]) -> tuple[int, ...]:
    if any(r not in ranks for r in world):
        raise Unfit(f"its mesh has ranks {list(world[:16])}, which are not all in the group that saves or loads")
    return tuple(ranks[r] for r in world)


def sharding_of(tensor: Any, ranks: Mapping[int, int] | None) -> Sharding:
    """How a DTensor is divided. Raises Unfit for partial sums, and for ranks outside of the group."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    world = mesh.mesh.flatten().tolist()
    extents = tuple(mesh.mesh.shape)
    order: list[tuple[int, int]] = []  # as cut; built from the last mesh dimension to the first
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise Unfit(f"it has the placement {placement}, which is not a value yet; redistribute it first")
        dim %= max(len(shape), 1)
        factor = getattr(placement, "split_factor", 1)
        at, before = 0, 1
        while before < factor and at < len(order):  # a strided shard is cut after `factor` others of its dimension
            other, other_dim = order[at]
            before *= extents[other] if other_dim == dim else 1
            at += 1
        if before != factor:
            raise Unfit(f"it has the placements {placements}, whose order of cuts is not to be told")
        order.insert(at, (mesh_dim, dim))
    members = _members(world, ranks) if ranks is not None else tuple(world)
    sharding = Sharding(extents, members, tuple(order))
    if mesh.get_coordinate() is not None:
        me = world[_flat_index(mesh.get_coordinate(), extents)]
        box = sharding.box(shape, ranks[me] if ranks is not None else me)
        local = tuple(tensor._local_tensor.shape)
        if box is None or (box.sizes != local and (box.numel or prod(local))):
            expected = None if box is None else list(box.sizes)
            raise Unfit(f"its local shape is {list(local)}, but mesh and placements make it {expected}")
    return sharding


def _flat_index(coordinate: Any, extents: tuple[int, ...]) -> int:
    at = 0
    for index, extent in zip(coordinate, extents, strict=True):
        at = at * extent + index
    return at
