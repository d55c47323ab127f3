"""``FlatParameter``: several parameters as one, which knows where each of them lies.

    parameters      weight (2, 3)             bias (2,)
    flat            | w w w w w w             | b b |       8 elements, one leaf, one gradient

Names and behaviour are fairscale's. What it knows is plain data, so it can be copied, pickled and sent on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flagstone.adapters.pytorch import NAMES
from flagstone.errors import FlagstoneError
from flagstone.layout import FlatLayout, Place


class FlatParameter(nn.Parameter):
    """Parameters of one element type, copied one after the other into a new tensor of one dimension.

    A contiguous parameter lies row-major. One whose dimensions lie in another order, such as channels-last, keeps it.

    Args:
        params: tensors; of one element type, on one device.
        requires_grad: whether the flat parameter is trainable.
        names: a name for each; by default their numbers.

    Attributes:
        places: the place of each parameter.
        aliases: further names of parameters, from the wrapper: tied name to the name in ``places``.

    Raises:
        FlagstoneError: no parameters, one that is no plain tensor or is flat already, or several types or devices.
    """

    places: tuple[Place, ...]
    aliases: dict[str, str]

    def __new__(
        cls, params: Sequence[Tensor], requires_grad: bool = True, names: Sequence[str] | None = None
    ) -> FlatParameter:
        if not isinstance(params, (list, tuple)) or not params:
            raise FlagstoneError("a flat parameter needs a list of parameters that is not empty")
        names = [str(i) for i in range(len(params))] if names is None else names
        if len(set(names)) != len(params):
            raise FlagstoneError(f"{len(params)} parameters need as many different names: {list(names)}")
        first = params[0]
        for name, param in zip(names, params, strict=True):
            _check_one(name, param)
            if (param.dtype, param.device) != (first.dtype, first.device):
                raise FlagstoneError(
                    f"{names[0]} is {first.dtype} on {first.device}, {name} is {param.dtype} on {param.device}: "
                    "parameters of one flat parameter have one type and one device"
                )
        shapes = [(name, tuple(param.shape)) for name, param in zip(names, params, strict=True)]
        layout = FlatLayout.of(NAMES[first.dtype], shapes, blocks_first=False)
        places = [place._replace(order=_order(param)) for place, param in zip(layout.places, params, strict=True)]
        data = torch.empty(layout.numel, dtype=first.dtype, device=first.device)
        for place, param in zip(places, params, strict=True):
            view_of(data, place).copy_(param.detach())
        return _rebuild(data, requires_grad, places, {}, {})

    @property
    def flat_layout(self) -> FlatLayout:
        """The places, with the element type as it is now."""
        return FlatLayout(NAMES[self.dtype], self.places)

    def metadata(self) -> tuple[list[str], list[torch.Size], list[int]]:
        """Names, shapes and numbers of elements of the parameters, in order."""
        return [p.name for p in self.places], [torch.Size(p.shape) for p in self.places], [p.numel for p in self.places]

    def get_param_views(self, external_data: Tensor | None = None) -> Iterator[Tensor]:
        """Views of the flat data in the parameters' shapes, in order.

        Args:
            external_data: flat data to view instead of one's own, of any type: gradients, an optimizer's state.

        Raises:
            FlagstoneError: the data does not have one dimension and all the elements.
        """
        data = self if external_data is None else external_data
        numel = self.flat_layout.numel
        if data.shape != (numel,):
            raise FlagstoneError(f"the flat data has shape {list(data.shape)}, but the parameters need [{numel}]")
        return (view_of(data, place) for place in self.places)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        made, (data, *known) = self.__reduce_ex__(2)
        return made(data.clone(), *deepcopy(known, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        places = [tuple(place) for place in self.places]
        others = {k: v for k, v in self.__dict__.items() if k not in ("places", "aliases")}
        return _rebuild, (self.data, self.requires_grad, places, self.aliases, others)


def _rebuild(
    data: Tensor,
    requires_grad: bool,
    places: Sequence[tuple[Any, ...]],
    aliases: dict[str, str],
    others: dict[str, Any],
) -> FlatParameter:
    flat = nn.Parameter(data, requires_grad)
    flat.__dict__.update(others)
    return make_flat(flat, tuple(Place(*place) for place in places), aliases)


torch.serialization.add_safe_globals([_rebuild])


def make_flat(parameter: nn.Parameter, places: tuple[Place, ...], aliases: dict[str, str]) -> FlatParameter:
    """Let a parameter that is flat be a ``FlatParameter``: the same object."""
    parameter.__class__ = FlatParameter
    assert isinstance(parameter, FlatParameter)
    parameter.places, parameter.aliases = places, aliases
    return parameter


def view_of(flat: Tensor, place: Place) -> Tensor:
    """A parameter's part of a flat tensor, in its shape and its order of dimensions."""
    return shaped(flat.narrow(0, place.offset, place.numel), place)


def shaped(part: Tensor, place: Place) -> Tensor:
    if not place.order:
        return part.view(place.shape)
    lying = part.view([place.shape[dim] for dim in place.order])
    return lying.permute([place.order.index(dim) for dim in range(len(place.order))])


def relaid(flat: Tensor, places: Sequence[Place], wanted: Sequence[Place]) -> Tensor:
    """A copy of flat data in which every parameter lies where ``wanted`` has it; both know the same parameters."""
    at = {place.name: place for place in places}
    copied = torch.empty_like(flat)
    for place in wanted:
        view_of(copied, place).copy_(view_of(flat, at[place.name]))
    return copied


def _check_one(name: str, param: Any) -> None:
    if isinstance(param, FlatParameter):
        raise FlagstoneError(f"{name} is flat already; a flat parameter holds no other")
    if not isinstance(param, Tensor) or is_lazy(param) or type(param.data) is not Tensor:
        raise FlagstoneError(f"{name} is {type(param).__name__}; only plain tensors with values can be flattened")
    if param.layout != torch.strided or param.dtype not in NAMES:
        raise FlagstoneError(f"{name} is {param.dtype}, {param.layout}; it cannot be flattened")


def _order(tensor: Tensor) -> tuple[int, ...]:
    """How a tensor's dimensions lie in memory, as a clone would keep them; empty for row-major."""
    if tensor.is_contiguous():
        return ()
    stride = torch.empty_like(tensor, device="meta").stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
    return () if order == list(range(tensor.dim())) else tuple(order)
