"""How a module reads parameters that are parts of a flat one.

    module._parameters   {"weight": None, "bias": None}      torch sees no parameters of its own ...
    module.weight        view_of(wrapper.flat_param_0, ...)  ... and who reads gets a view of what is flat just now

A view is made when it is read, so none is stale: not after ``.to``, not after a step of an optimizer, not while
``torch.func.functional_call`` has put another tensor in the flat parameter's stead.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from flagstone.errors import FlagstoneError
from flagstone.flat.parameter import shaped, view_of
from flagstone.layout import Place


class Source:
    """A flat parameter as the modules see it that read from it.

    Args:
        parameters: the ``_parameters`` of the wrapper; what it has there under ``key`` is the flat parameter.
        key: name of the flat parameter.
        places: the parameters in it.
    """

    def __init__(self, parameters: dict[str, Any], key: str, places: tuple[Place, ...]) -> None:
        self.parameters, self.key, self.places = parameters, key, places
        self._split: tuple[Tensor, int, list[Tensor]] | None = None

    @property
    def is_flat(self) -> bool:
        """Whether the wrapper has its flat parameter, and the modules none."""
        return self.key in self.parameters

    @property
    def numel(self) -> int:
        return sum(place.numel for place in self.places)

    def read(self, index: int) -> Tensor:
        """The parameter at ``places[index]``, as a view."""
        flat = self.parameters[self.key]
        split = self._split  # once: another thread may end its forward
        if split is not None and is_grad_enabled():
            whole, version, views = split
            if whole is flat and (is_compiling() or version == flat._version):  # a graph has no versions
                return views[index]
        return view_of(flat, self.places[index])

    def split(self) -> None:
        """Until ``join``, give out views of one split: backward then joins their gradients in one piece of work.

        The gradient of a view on its own is as large as all that is flat. Views of a split must not be used after the
        flat parameter was changed in place, so those are dropped then.
        """
        flat = self.parameters[self.key]
        if is_grad_enabled() and flat.requires_grad:
            parts = flat.split([place.numel for place in self.places])
            views = [shaped(part, place) for part, place in zip(parts, self.places, strict=True)]
            self._split = flat, flat._version, views

    def join(self) -> None:
        self._split = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.parameters, self.key, self.places)


class SourcedParameters(dict[str, Any]):
    """The ``_parameters`` of a module, some of which are read from a source; those are None to all who list them."""

    def __init__(self, parameters: dict[str, Any], sources: dict[str, tuple[Source, int]]) -> None:
        super().__init__(parameters)
        self.sources = sources

    def __getitem__(self, name: str) -> Any:
        source, index = self.sources.get(name, (None, 0))
        if source is not None and source.is_flat:
            return source.read(index)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._refuse_if_flat(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse_if_flat(name)
        super().__delitem__(name)

    def put(self, name: str, parameter: nn.Parameter | None) -> None:
        """Set a parameter that has a source; None where the source has it."""
        super().__setitem__(name, parameter)

    def _refuse_if_flat(self, name: str) -> None:
        source, index = self.sources.get(name, (None, 0))
        if source is not None and source.is_flat:
            raise FlagstoneError(
                f"{source.places[index].name} is a part of {source.key}; replace or delete it inside of "
                "unflatten_params(), or change its values in place"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return SourcedParameters, (dict(self), self.sources)
