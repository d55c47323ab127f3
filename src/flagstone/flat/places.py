"""Parameters as views of one flat buffer, for one process, without an engine.

    places = places_of(block)                          # which parameters, and where each lies in a flat buffer
    weights, gradients = torch.empty(numel_of(places)), torch.empty(numel_of(places))
    copy_to(places, weights)
    with materialize(places, weights, gradients):      # block.linear.weight is now a view of weights
        block(x).sum().backward()                      # copies each gradient into its place on first use, adds after
    gradients                                          # what backward left; the block has its own parameters again

The idea is YaFSDP's (``MetaParam`` and ``Narrow``); ``flagstone.sharding`` is built on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flagstone.adapters.modules import Names, parameter_names
from flagstone.errors import FlagstoneError
from flagstone.layout import Span

Select = Callable[[str, nn.Parameter], bool]


@dataclass(eq=False)
class ParameterPlace:
    """Where a parameter lives: in its module, and in a flat buffer.

    Attributes:
        fqn: its name below the module that was asked.
        owners: the modules that have it and its name in each; several when it is tied. The first has the FQN.
        parameter: what the owners have while it is not materialized.
        shape: of the whole parameter.
        offset: elements before it in the flat buffer.
    """

    fqn: str
    owners: list[tuple[weakref.ref[nn.Module], str]]
    parameter: nn.Parameter = field(repr=False)
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def module(self) -> nn.Module:
        module = self.owners[0][0]()
        if module is None:
            raise FlagstoneError(f"the module of {self.fqn} is gone")
        return module

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def span(self) -> Span:
        return Span(self.offset, self.numel)

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in its shape; a view."""
        return flat.narrow(0, self.offset, self.numel).view(self.shape)

    def put(self, parameter: nn.Parameter) -> None:
        """Make it what all owners have."""
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                module._parameters[name] = parameter


def places_of(module: nn.Module, select: Select | None = None) -> list[ParameterPlace]:
    """The places of a module's parameters one after the other, in the order of the modules; a tied one once.

    Args:
        module: the module.
        select: called with name and parameter; says which ones. By default all.
    """
    owners = dict(_owners(module))
    places: dict[int, ParameterPlace] = {}
    offset = 0
    for parameter, fqn in parameter_names(module):
        if select is not None and not select(fqn, parameter):
            continue
        if id(parameter) in places:
            places[id(parameter)].owners.append(owners[fqn])
            continue
        place = ParameterPlace(fqn, [owners[fqn]], parameter, tuple(parameter.shape), offset)
        places[id(parameter)] = place
        offset += place.numel
    return list(places.values())


def _owners(module: nn.Module) -> Iterator[tuple[str, tuple[weakref.ref[nn.Module], str]]]:
    """Every name of a parameter, with the module and the attribute that it is."""
    names = Names(module)
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield names.fqn(f"{prefix}.{name}" if prefix else name), (weakref.ref(child), name)


def numel_of(places: Sequence[ParameterPlace]) -> int:
    """Elements of the flat buffer that the places need."""
    return max((p.span.stop for p in places), default=0)


def copy_to(places: Sequence[ParameterPlace], flat: Tensor) -> None:
    """Copy the parameters' values to their places in a flat tensor, converted to its type."""
    with torch.no_grad():
        for place in places:
            place.of(flat).copy_(place.parameter)


class FlatViews:
    """Parameters that are views of a flat buffer of weights, and whose gradients go to a flat buffer of gradients.

    Each is made once and stays the same object, marked by an attribute ``flagstone_place``. ``install`` puts them into
    their modules, ``remove`` puts back what was there.

    Args:
        places: the parameters.
        weights: flat; what is written to it later is seen by the views, and does not disturb autograd.
        arrived: called with a place and its gradient, in the parameter's shape and type, whenever autograd has one.
    """

    def __init__(
        self, places: Sequence[ParameterPlace], weights: Tensor, arrived: Callable[[ParameterPlace, Tensor], None]
    ) -> None:
        self.places = list(places)
        self.parameters: list[nn.Parameter] = []
        self.installed = False
        for place in self.places:
            # .data: a version counter of its own
            view = nn.Parameter(place.of(weights).data, requires_grad=False)
            view.flagstone_place = place  # type: ignore[attr-defined]
            if view.is_floating_point() or view.is_complex():
                view.requires_grad_()
                view.register_post_accumulate_grad_hook(_giver(arrived, place))
            self.parameters.append(view)
        self.follow()

    def follow(self) -> None:
        """Let the views be trainable where the modules' own parameters are."""
        for place, view in zip(self.places, self.parameters, strict=True):
            view.requires_grad_(place.parameter.requires_grad)

    def install(self) -> None:
        if not self.installed:
            for place, view in zip(self.places, self.parameters, strict=True):
                place.put(view)
            self.installed = True

    def remove(self) -> None:
        if self.installed:
            for place in self.places:
                place.put(place.parameter)
            self.installed = False


def _giver(arrived: Callable[[ParameterPlace, Tensor], None], place: ParameterPlace) -> Callable[[Tensor], None]:
    def give(view: Tensor) -> None:
        gradient, view.grad = view.grad, None
        if gradient is not None:
            arrived(place, gradient)

    return give


class FlatGradients:
    """A flat buffer that gradients are copied to on first use, and added to after."""

    def __init__(self, places: Sequence[ParameterPlace], flat: Tensor) -> None:
        self.places, self.flat = places, flat
        self._views = {place: place.of(flat) for place in places}
        self.filled: set[ParameterPlace] = set()

    def add(self, place: ParameterPlace, gradient: Tensor) -> None:
        """Converts to the buffer's type on the way."""
        view = self._views[place]
        if place in self.filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.filled.add(place)

    def close(self) -> None:
        """Zero the places that no gradient came to: what lay in the buffer before is not theirs."""
        for place, view in self._views.items():
            if place not in self.filled:
                view.zero_()

    def clear(self) -> None:
        """Begin anew: the next gradient of each place is copied."""
        self.filled.clear()


class Materialized:
    """A module whose parameters are views of a flat buffer; a context manager that ends it."""

    def __init__(self, views: FlatViews, gradients: FlatGradients | None) -> None:
        self.views, self.gradients = views, gradients

    def __enter__(self) -> Materialized:
        return self

    def __exit__(self, *exception: object) -> None:
        dematerialize(self)


def materialize(places: Sequence[ParameterPlace], weights: Tensor, gradients: Tensor | None = None) -> Materialized:
    """Make the parameters views of ``weights``, until ``dematerialize`` or the end of the ``with`` statement.

    Args:
        places: the parameters, from ``places_of``.
        weights: 1-D, at least ``numel_of(places)`` elements.
        gradients: the same, of any floating type: a gradient is copied to its place on first use and added after; what
            got none is zero in the end. Without it, a gradient is an error.

    Raises:
        FlagstoneError: a buffer is too small or not flat.
    """
    needed = numel_of(places)
    for what, flat in (("weights", weights), ("gradients", gradients)):
        if flat is not None and (flat.dim() != 1 or flat.numel() < needed):
            raise FlagstoneError(f"{what} has shape {list(flat.shape)}; it needs {needed} elements in one dimension")
    sink = FlatGradients(places, gradients) if gradients is not None else None

    def arrived(place: ParameterPlace, gradient: Tensor) -> None:
        if sink is None:
            raise FlagstoneError(f"{place.fqn} got a gradient, but there is no buffer for gradients")
        sink.add(place, gradient)

    views = FlatViews(places, weights, arrived)
    views.install()
    return Materialized(views, sink)


def dematerialize(materialized: Materialized) -> None:
    """Give the modules their own parameters back, and zero the gradients of those that got none."""
    if materialized.views.installed:
        materialized.views.remove()
        if materialized.gradients is not None:
            materialized.gradients.close()


def place_of(tensor: Tensor) -> ParameterPlace | None:
    """The place of a parameter that is a view of a flat buffer; None for all others."""
    return getattr(tensor, "flagstone_place", None)
