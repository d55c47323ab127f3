"""Which parameters of a module come into which flat parameter."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from flagstone.adapters.modules import Names
from flagstone.errors import FlagstoneError
from flagstone.flat.parameter import FlatParameter

INNER = "_fpw_module."  # fairscale's name of the wrapped module; state dicts and messages are without it


class Use(NamedTuple):
    """A parameter as a module has it: full name, module and attribute."""

    name: str
    owner: tuple[nn.Module, str]
    parameter: nn.Parameter


def uses_of(module: nn.Module) -> dict[int, list[Use]]:
    """All parameters by id, in the order of the modules, each with all its uses."""
    names = Names(module)
    uses: dict[int, list[Use]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                name = names.fqn(f"{path}.{attribute}" if path else attribute).replace(INNER, "")
                uses.setdefault(id(parameter), []).append(Use(name, (owner, attribute), parameter))
    return uses


def groups_of(uses: dict[int, list[Use]], param_list: Any) -> list[list[int]]:
    """The ids of the parameters of every group that is not empty; of one that is in several, in the first."""
    if param_list is None:
        given = [[u[0].parameter for u in uses.values() if not isinstance(u[0].parameter, FlatParameter)]]
    else:
        items = list(param_list)
        given = [items] if items and isinstance(items[0], Tensor) else [list(group) for group in items]
    groups, taken = [], set[int]()
    for number, group in enumerate(given):
        for parameter in group:
            if id(parameter) not in uses:
                shape = list(getattr(parameter, "shape", ()))
                raise FlagstoneError(
                    f"param_list: group {number} has a {type(parameter).__name__} of shape {shape} "
                    "that is no parameter of the module"
                )
            if hasattr(parameter, "flagstone_flat"):
                raise FlagstoneError(
                    f"{uses[id(parameter)][0].name} is shared with another wrapper, which has it as "
                    f"{parameter.flagstone_flat}; wrap what shares parameters together"
                )
        wanted = {id(parameter) for parameter in group}
        if wanted:
            groups.append([i for i in uses if i in wanted - taken])
            taken |= wanted
    return groups


def kinds_of(group: list[int], uses: dict[int, list[Use]]) -> list[list[list[Use]]]:
    """A group divided by element type, device, and whether trainable."""
    kinds: dict[tuple[Any, ...], list[list[Use]]] = {}
    for i in group:
        parameter = uses[i][0].parameter
        kinds.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(uses[i])
    return list(kinds.values())


def refuse_clashes(module: nn.Module, uses: dict[int, list[Use]], flats: dict[str, FlatParameter]) -> None:
    """A flat parameter's name must be no name of anything that stays as it is beside it in a state dict."""
    managed = {place.name for flat in flats.values() for place in flat.places}
    names = Names(module)
    staying = {use[0].name for use in uses.values()} - managed
    staying.update(names.fqn(name).replace(INNER, "") for name, _ in module.named_buffers())
    for key in flats:
        if key in staying or "." in key:
            raise FlagstoneError(f"a flat parameter cannot have the name {key} here; choose others in flat_param_names")
