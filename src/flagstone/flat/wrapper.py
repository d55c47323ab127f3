"""``FlattenParamsWrapper``: a module whose parameters are parts of a few flat ones.

    wrapper = FlattenParamsWrapper(model)
    optimizer = torch.optim.AdamW(wrapper.parameters())      # one tensor
    wrapper(x).sum().backward()                              # one gradient
    wrapper.state_dict()                                     # the names, shapes and values of the model

The modules stay what they are: same classes, same attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flagstone.errors import FlagstoneError
from flagstone.flat.groups import INNER, Use, groups_of, kinds_of, refuse_clashes, uses_of
from flagstone.flat.parameter import FlatParameter, make_flat, relaid, view_of
from flagstone.flat.views import Source, SourcedParameters
from flagstone.layout import Place

_saving_flat: ContextVar[bool] = ContextVar("saving_flat", default=False)


class FlattenParamsWrapper(nn.Module):
    """A module with its parameters in flat ones, to be used in its stead; names and behaviour are fairscale's.

    The wrapped modules read their weights as views of the flat parameters; those alone have gradients, and are what
    ``parameters()`` lists. The order in a flat parameter is that of the modules, whatever the order in ``param_list``.
    Parameters that differ in element type, device or ``requires_grad`` come into flat parameters of their own: those of
    the kind that is met first into ``flat_param_<name>``, the others into ``flat_param_<name>_1``, ``..._2`` and so on.

    A parameter that several modules share is kept once, also where it is in several groups: the first one has it. Wrap
    together what shares parameters: a module outside keeps what it had, and a second wrapper refuses it. The parameters
    of a ``FlattenParamsWrapper`` that is inside of ``module`` stay with that one.

    Args:
        module: the module; it is changed.
        param_list: parameters to flatten, or a list of groups of them, each flat on its own; nothing for an empty
            list. By default all, in one group.
        flat_param_names: a name for each group that is not empty, to come after ``flat_param_``; by default their
            numbers.

    Raises:
        FlagstoneError: naming the parameter that cannot be flattened, or the name that cannot be used; nothing was
            changed.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Iterable[nn.Parameter] | Iterable[Iterable[nn.Parameter]] | None = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        uses = uses_of(module)
        groups = groups_of(uses, param_list)
        names = [str(i) for i in range(len(groups))] if flat_param_names is None else list(flat_param_names)
        if len(names) != len(groups):
            raise FlagstoneError(f"{len(groups)} groups of parameters need as many names, not {names}")
        flats: dict[str, FlatParameter] = {}
        members: dict[str, list[list[Use]]] = {}
        for name, group in zip(names, groups, strict=True):
            for number, kind in enumerate(kinds_of(group, uses)):
                key = f"flat_param_{name}_{number}" if number else f"flat_param_{name}"
                if key in flats:
                    raise FlagstoneError(f"two flat parameters would have the name {key}; see flat_param_names")
                flats[key] = FlatParameter(
                    [use[0].parameter for use in kind],
                    kind[0][0].parameter.requires_grad,
                    [use[0].name for use in kind],
                )
                flats[key].aliases = {also.name: use[0].name for use in kind for also in use[1:]}
                members[key] = kind
        refuse_clashes(module, uses, flats)

        self._fpw_module = module
        self.num_params_managed = sum(len(flat.places) for flat in flats.values())
        self._sources = {key: Source(self._parameters, key, flat.places) for key, flat in flats.items()}
        self._aliases = {key: flat.aliases for key, flat in flats.items()}
        self._plain: dict[str, _Plain] | None = None
        self._loading: _Loading | None = None
        self._parameters.update(flats)
        for key, kind in members.items():
            for index, use in enumerate(kind):
                use[0].parameter.flagstone_flat = f"{use[0].name} in {key}"  # type: ignore[attr-defined]
                for owner, attribute in (u.owner for u in use):
                    if not isinstance(owner._parameters, SourcedParameters):
                        owner._parameters = SourcedParameters(owner._parameters, {})
                    owner._parameters.put(attribute, None)
                    owner._parameters.sources[attribute] = self._sources[key], index
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fpw_module

    @property
    def is_flattened(self) -> bool:
        """False inside of ``unflatten_params``."""
        return self._plain is None

    @property
    def flat_param_names(self) -> list[str]:
        """The names of the flat parameters, as attributes of this module and in ``flat_state_dict``."""
        return list(self._sources)

    @property
    def flat_params(self) -> list[FlatParameter]:
        """The flat parameters; none inside of ``unflatten_params``."""
        return list(self._parameters.values())  # type: ignore[arg-type]

    @property
    def flat_param(self) -> FlatParameter:
        """The flat parameter, where there is one.

        Raises:
            FlagstoneError: there are none or several.
        """
        if len(self.flat_params) != 1:
            raise FlagstoneError(f"there is not one flat parameter but {len(self.flat_params)}; see flat_params")
        return self.flat_params[0]

    def metadata(self, flat_param_idx: int) -> tuple[list[str], list[torch.Size], list[int]]:
        """Names, shapes and numbers of elements of the parameters in one flat parameter."""
        return self.flat_params[flat_param_idx].metadata()

    def get_param_views(self, external_data_list: Sequence[Tensor | None] | None = None) -> Iterator[Tensor]:
        """Views of all flat parameters, or of other flat data for some of them, in the parameters' shapes."""
        given = [None] * len(self.flat_params) if external_data_list is None else external_data_list
        if len(given) != len(self.flat_params):
            raise FlagstoneError(f"{len(self.flat_params)} flat parameters need as many tensors, not {len(given)}")
        views = [flat.get_param_views(data) for flat, data in zip(self.flat_params, given, strict=True)]
        return chain.from_iterable(views)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._end_load()
        sources = self._sources.values() if self.is_flattened else ()
        try:
            for source in sources:
                source.split()
            return self._fpw_module(*args, **kwargs)
        finally:
            for source in sources:
                source.join()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_fpw_module" not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fpw_module[key]  # type: ignore[index]

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Give the modules parameters of their own, with the names they had, for as long as the context lasts.

        They are views: a change in place is a change of the flat parameter. What was replaced is copied back at the
        end, and gradients that came are added to those of the flat parameters. Inside of another such context nothing
        happens.

        Args:
            flat_params: flat tensors to use instead, one for each flat parameter, for example averages of the weights.
                They take the changes; gradients are dropped.

        Raises:
            FlagstoneError: the tensors do not fit; or, at the end, naming parameters that cannot be copied back: of
                another shape, deleted, or no longer shared where they were. The others were.
        """
        if not self.is_flattened:
            if flat_params is not None:
                raise FlagstoneError("the parameters are not flat: other flat tensors cannot be used here")
            yield
            return
        self._unflatten(flat_params)
        try:
            yield
        finally:
            lost = self._flatten()
        if lost:
            raise FlagstoneError(f"what was done inside of unflatten_params is lost: {'; '.join(lost)}")

    def _unflatten(self, flat_params: Sequence[Tensor] | None = None) -> None:
        flats: dict[str, Any] = dict(self._parameters)
        given = list(flats.values()) if flat_params is None else list(flat_params)
        if [data.shape for data in given] != [flat.shape for flat in flats.values()]:
            raise FlagstoneError(
                f"flat tensors of shapes {[list(flat.shape) for flat in flats.values()]} are needed, "
                f"not {[list(data.shape) for data in given]}"
            )
        self._plain = {}
        for (key, flat), data in zip(flats.items(), given, strict=True):
            views = [view_of(data.detach(), place) for place in self._sources[key].places]
            self._plain[key] = _Plain(flat, data, [nn.Parameter(view, flat.requires_grad) for view in views])
        for parameters, name, source, index in self._reads():
            parameters.put(name, self._plain[source.key].parameters[index])
        self._parameters.clear()

    def _flatten(self) -> list[str]:
        """End ``_unflatten``; says what cannot be kept."""
        found: dict[tuple[str, int], list[nn.Parameter | None]] = {}
        for parameters, name, source, index in self._reads():
            found.setdefault((source.key, index), []).append(parameters.get(name))
            parameters.put(name, None)
        plain, self._plain = self._plain or {}, None
        self._parameters.update({key: was.flat for key, was in plain.items()})
        lost = []
        for (key, index), now in found.items():
            place = self._sources[key].places[index]
            problem = plain[key].take_back(index, place, now)
            if problem:
                lost.append(f"{place.name} {problem}")
        return lost

    def _reads(self) -> Iterator[tuple[SourcedParameters, str, Source, int]]:
        """What the modules read from the flat parameters of this wrapper."""
        for owner in self._fpw_module.modules():
            if isinstance(owner._parameters, SourcedParameters):
                for name, (source, index) in owner._parameters.sources.items():
                    if source.parameters is self._parameters:
                        yield owner._parameters, name, source, index

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the wrapped module: its names and shapes. Values share the memory of the flat parameters."""
        with nullcontext() if _saving_flat.get() else self.unflatten_params():
            state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for key in [k for k in state if k.startswith(prefix + INNER)]:
            state[prefix + key.removeprefix(prefix + INNER)] = state.pop(key)
        self._describe(getattr(state, "_metadata", {}), prefix)
        return state

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state with the flat parameters as they are, here and in wrappers inside; what is not flat as it is.

        Its ``_metadata`` says where each parameter lies, so it can be loaded where they lie in another order.

        Raises:
            FlagstoneError: the parameters are not flat now.
        """
        if not self.is_flattened:
            raise FlagstoneError("flat_state_dict: the parameters are not flat inside of unflatten_params")
        token = _saving_flat.set(True)
        try:
            return self.state_dict(*args, **kwargs)
        finally:
            _saving_flat.reset(token)

    def _describe(self, metadata: dict[str, Any], prefix: str) -> None:
        """Record versions of modules under their names without the wrapper, and the places in flat parameters."""
        for path in [p for p in metadata if f"{p}.".startswith(prefix + INNER)]:
            outside = prefix + f"{path}.".removeprefix(prefix + INNER)
            metadata[outside[:-1]] = dict(metadata[path])
        if metadata and _saving_flat.get():
            places = {key: [tuple(place) for place in source.places] for key, source in self._sources.items()}
            metadata[prefix[:-1]]["flat_params"] = places

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what ``state_dict`` or ``flat_state_dict`` gave, of this wrapper or of the module without it.

        Flat data of unknown origin is taken to be row-major, as fairscale writes it; also under its old name
        ``flat_param``.

        Raises:
            FlagstoneError: ``assign`` is asked for; values can only be copied into flat parameters.
            RuntimeError: as ``nn.Module.load_state_dict``, with the names of the wrapped module.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._end_load()

    def _load_from_state_dict(  # called by torch, for this module alone; it visits the wrapped one afterwards
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise FlagstoneError(
                f"{prefix}load_state_dict(assign=True): values are copied into flat parameters, never assigned; "
                'for a model on the device "meta", call to_empty() first'
            )
        self._end_load()
        errors: list[str] = rest[-1]
        flat = self.is_flattened and self._takes_flat(state_dict, prefix)
        self._loading = _Loading(errors, self.is_flattened and not flat)
        if flat:
            self._relay(state_dict, prefix, local_metadata.get("flat_params", {}), errors)
        elif self.is_flattened:
            self._unflatten()
        for key in [k for k in state_dict if k.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if not (flat and name in self._sources) and not name.startswith(INNER):
                state_dict[prefix + INNER + name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _takes_flat(self, state_dict: dict[str, Any], prefix: str) -> bool:
        """Whether a state dict has the flat parameters; a parameter of the module may have such a name too."""
        plain = {place.name for source in self._sources.values() for place in source.places}
        plain.update(*self._aliases.values())
        if len(self._sources) == 1 and f"{prefix}flat_param" in state_dict and "flat_param" not in plain:
            state_dict[prefix + self.flat_param_names[0]] = state_dict.pop(f"{prefix}flat_param")
        return any(
            prefix + key in state_dict and (key not in plain or state_dict[prefix + key].shape == (source.numel,))
            for key, source in self._sources.items()
        )

    def _relay(self, state_dict: dict[str, Any], prefix: str, recorded: dict[str, Any], errors: list[str]) -> None:
        """Bring flat data into the order of this wrapper."""
        for key, source in self._sources.items():
            data, flat = state_dict.get(prefix + key), self._parameters[key]
            if not isinstance(data, Tensor) or flat is None or data.shape != flat.shape:
                continue  # torch reports it
            places = [place._replace(order=()) for place in source.places]
            if key in recorded:
                places = [Place(name, tuple(shape), at, n, tuple(order)) for name, shape, at, n, order in recorded[key]]
            if {(p.name, p.shape) for p in places} != {(p.name, p.shape) for p in source.places}:
                names = [[p.name for p in known] for known in (places, source.places)]
                errors.append(f"{prefix}{key} was saved for the parameters {names[0]}, here it has {names[1]}")
                state_dict[prefix + key] = flat.detach()
            elif places != list(source.places):
                state_dict[prefix + key] = relaid(data, places, source.places)

    def _end_load(self) -> None:
        """Be flat again after a load, also after one that was broken off."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.errors[:] = [message.replace(INNER, "") for message in loading.errors]
            if loading.unflattened:
                self._flatten()

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenParamsWrapper:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for key, parameter in self._parameters.items():  # torch may have put plain ones there
            if parameter is not None and key in self._sources and not isinstance(parameter, FlatParameter):
                make_flat(parameter, self._sources[key].places, self._aliases[key])
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with torch.no_grad():  # an LSTM keeps the weights that it last read, and only leaves can be copied
            copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


def _after_load(wrapper: FlattenParamsWrapper, incompatible: Any) -> None:
    wrapper._end_load()
    for keys in incompatible:
        keys[:] = [key.replace(INNER, "") for key in keys]


class _Loading(NamedTuple):
    """A load that torch is in the middle of: its messages, and whether it is to be flat again afterwards."""

    errors: list[str]
    unflattened: bool


class _Plain(NamedTuple):
    """A flat parameter while the modules have their own: views of ``data``, most often of the flat parameter itself."""

    flat: Any
    data: Tensor
    parameters: list[nn.Parameter]

    def take_back(self, index: int, place: Place, now: list[nn.Parameter | None]) -> str:
        """Copy what the modules have now at ``place`` to the data; says what is wrong where that is impossible."""
        current, view = now[0], view_of(self.data.detach(), place)
        if current is None:
            return "was deleted"
        if any(other is not current for other in now):
            return "is no longer shared"
        if current.shape != view.shape:
            return f"has shape {list(current.shape)}, not {list(view.shape)}"
        if current.is_meta != view.is_meta:
            return f"is on {current.device}, not on {view.device}"
        if current is not self.parameters[index] or _memory(current) != _memory(view):
            view.copy_(current.detach())
        if current.grad is not None and self.data is self.flat:
            if self.flat.grad is None:
                self.flat.grad = torch.zeros_like(self.flat)
            view_of(self.flat.grad, place).add_(current.grad)
        return ""


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.stride()
