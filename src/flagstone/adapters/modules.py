"""Modules and their names: fully qualified, whatever has been wrapped around what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"})


class Names:
    """The names of a module's parameters and buffers without the prefixes of DDP, compile, checkpointing and FSDP."""

    def __init__(self, module: nn.Module) -> None:
        self._known: dict[str, tuple[str, nn.Module | None]] = {"": ("", module)}

    def fqn(self, key: str) -> str:
        """The name of what ``state_dict`` or ``named_parameters`` call ``key``."""
        head, _, last = key.rpartition(".")
        return _dotted(self._resolve(head)[0], last)

    def _resolve(self, path: str) -> tuple[str, nn.Module | None]:
        if path not in self._known:
            head, _, last = path.rpartition(".")
            name, module = self._resolve(head)
            while module is not None and last not in module._modules and _wrapped(module) is not None:
                module = _wrapped(module)  # a wrapper that hides its own prefix
            child = module._modules.get(last) if module is not None else None
            is_wrapper = last in _WRAPPERS or (last == "module" and _is_parallel(module))
            self._known[path] = (name if is_wrapper else _dotted(name, last)), child
        return self._known[path]


def _dotted(head: str, last: str) -> str:
    return f"{head}.{last}" if head else last


def _wrapped(module: nn.Module) -> nn.Module | None:
    for name in _WRAPPERS:
        if name in module._modules:
            return module._modules[name]
    return None


def _is_parallel(module: nn.Module | None) -> bool:
    return isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))


def state_of(module: nn.Module) -> dict[str, tuple[str, Any]]:
    """The state dict of a module under fully qualified names; with each value its key in the state dict."""
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
        raise ValueError("FullyShardedDataParallel (FSDP1) is not supported; shard the model with fully_shard (FSDP2)")
    names = Names(module)
    state: dict[str, tuple[str, Any]] = {}
    for key, value in module.state_dict().items():
        fqn = names.fqn(key)
        if fqn in state:
            raise ValueError(f"{state[fqn][0]} and {key} have the same name {fqn} without their wrappers")
        state[fqn] = key, value
    return state


def parameter_names(module: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """The parameters of a module with their names; a tied one under each."""
    names = Names(module)
    for key, parameter in module.named_parameters(remove_duplicate=False):
        yield parameter, names.fqn(key)


def storages(module: nn.Module) -> set[int]:
    """The memory that the module's parameters and buffers are in."""
    found = set()
    for tensor in (*module.parameters(), *module.buffers()):
        local = getattr(tensor, "_local_tensor", tensor)
        if isinstance(local, torch.Tensor) and local.device.type != "meta":
            found.add(local.untyped_storage()._cdata)
    return found
