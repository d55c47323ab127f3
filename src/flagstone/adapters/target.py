"""From a state that is to be filled to the tensors and values that are wanted of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from flagstone.adapters.collect import (
    is_module,
    is_optimizer,
    is_stateful,
    is_tensor,
    optimizer_names,
    parameter_table,
)
from flagstone.adapters.per_rank import per_rank
from flagstone.checkpoint import tree
from flagstone.checkpoint.load import Target, View, Wanted
from flagstone.checkpoint.piece import ArrayPiece
from flagstone.checkpoint.talk import listed
from flagstone.checkpoint.values import Values
from flagstone.layout import DTYPES


class Targeter:
    """Finds out what a state wants of a checkpoint. Changes nothing; what it will change is in ``target.finish``."""

    def __init__(self, into: Any, view: View, values: Values, rank: int, size: int, ranks: Mapping[int, int]) -> None:
        self._into, self._view, self._values = into, view, values
        self._rank, self._size, self._ranks = rank, size, ranks
        self._table = parameter_table(into)
        self._modules: list[str] = []
        self._seen: dict[Hashable, str] = {}
        self._kept: list[Any] = []
        self.target = Target(fresh=values.wants)

    def collect(self) -> Target:
        into = self._into
        if type(into) is dict:
            for key in list(into):
                self._visit(into[key], str(key), _setter(into, key))
        else:
            self._visit(into, "", self._refuse_root)
        return self.target

    def _refuse_root(self, value: Any) -> None:
        raise TypeError("into must be something that can be changed in place: a dict, a module, a tensor")

    def _visit(self, value: Any, path: str, put: Callable[[Any], None]) -> None:
        if is_tensor(value):
            self._tensor(value, path)
        elif isinstance(value, np.ndarray):
            self._array(value, path)
        elif isinstance(value, per_rank):
            self._per_rank(value, path)
        elif is_module(value):
            self._module(value, path)
        elif is_optimizer(value):
            self._optimizer(value, path)
        elif is_stateful(value):
            self._value(path, value.load_state_dict)
        elif isinstance(value, dict) and value:
            self.target.strict.append(path)
            for key in list(value):
                self._visit(value[key], tree.join(path, key), _setter(value, key))
        elif isinstance(value, (list, tuple)) and _holds_tensors(value):
            self.target.strict.append(path)
            for i, item in enumerate(value):
                set_item = _setter(value, i) if isinstance(value, list) else self._refuse_item(path, i)
                self._visit(item, tree.join(path, i), set_item)
        else:
            self._value(path, put)

    def _refuse_item(self, path: str, i: int) -> Callable[[Any], None]:
        def refuse(value: Any) -> None:
            raise TypeError(f"{path}.{i}: an item of a tuple cannot be set; use a list")

        return refuse

    def _value(self, path: str, put: Callable[[Any], None]) -> None:
        """A plain value, or all that a thing with ``load_state_dict`` takes."""
        if not self._view.keeps(path) and not any(True for _ in self._view.below(path)):
            return
        found = self._view.node(path)
        if found is None:
            self.target.missing.append(path)
            return
        saved, node = found
        if isinstance(node, dict) and node.get("$") == "ranks":
            self.target.problems.append(f"{path} was saved for each rank alone; wrap it in per_rank() here too")
            return
        made = self._values.make(node, saved)
        self.target.values.append(path)
        self.target.finish.append(lambda: put(made))

    def _per_rank(self, value: per_rank[Any], path: str) -> None:
        if not self._view.keeps(path):
            return
        found = self._view.node(path)
        if found is None:
            self.target.missing.append(path)
            return
        saved, node = found
        if not (isinstance(node, dict) and node.get("$") == "ranks"):
            made = self._values.make(node, saved)
            self.target.notes.append(f"{path} was saved as one value for all ranks, and is set to it on each")
        else:
            count = self._view.folder.manifest.ranks
            self.target.values.append(path)
            if count > self._size and self._rank == 0:
                dropped = listed(range(self._size, count))
                self.target.notes.append(f"{path}: nobody here takes the values of rank {dropped} of the save")
            if self._rank >= count:
                self.target.notes.append(f"{path}: rank {self._rank} was not part of the save, and keeps what it has")
                return
            made = self._values.of_rank(saved, self._rank)
        self.target.finish.append(lambda: setattr(value, "value", made))

    # Tensors.

    def _tie(self, identity: Hashable, path: str) -> bool:
        first = self._seen.setdefault(identity, path)
        if first == path:
            return False
        self.target.ties[path] = first
        return True

    def _array(self, array: np.ndarray[Any, Any], path: str) -> None:
        if array.dtype.name not in DTYPES or array.dtype.byteorder == ">" or not array.flags.writeable:
            self.target.problems.append(f"{path}: a numpy array of {array.dtype} that can be written to is needed")
            return
        identity = ("numpy", array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)
        if not self._tie(identity if array.size else object(), path):
            name = array.dtype.name
            self.target.wanted[path] = Wanted(path, name, array.shape, None, ArrayPiece(array, name))

    def _tensor(self, tensor: Any, path: str, name: str = "") -> None:
        """A tensor to be filled; ``name`` is the checkpoint's, where it is another than the path."""
        from flagstone.adapters.pytorch import TorchPiece, Unfit, describe

        try:
            found = describe(tensor, self._ranks, write=True)
        except Unfit as error:
            self.target.problems.append(f"{path}: {error}")
            return
        local = found.local
        if any(n > 1 and s == 0 for n, s in zip(local.shape, local.stride(), strict=True)):
            self.target.problems.append(f"{path}: an expanded tensor, whose elements share memory, cannot be filled")
            return
        if tensor.is_conj() or tensor.is_neg():
            self.target.problems.append(f"{path}: a conjugated or negated view cannot be filled; resolve it first")
            return
        self._kept.append(local)
        name = name or path
        if not self._tie(found.identity, name):
            region = None if found.sharding is None else found.sharding.region(found.shape, self._rank)
            piece = TorchPiece(local) if found.sharding is None or region is not None else None
            self.target.wanted[name] = Wanted(name, found.dtype, found.shape, region, piece)

    # What holds tensors.

    def _module(self, module: Any, path: str) -> None:
        from flagstone.adapters.modules import state_of, storages

        own = storages(module)
        self._modules.append(path)
        self.target.strict.append(path)
        loaded: dict[str, Any] = {}  # by key of the state dict: what must be handed over, being no memory of the module
        state = state_of(module)
        self._kept.append(state)
        for name, (key, value) in state.items():
            at = tree.join(path, name)
            if not is_tensor(value):
                self._value(at, _setter(loaded, key))
                continue
            self._tensor(value, at)
            local = getattr(value, "_local_tensor", value)
            if local.device.type != "meta" and local.untyped_storage()._cdata not in own and local.numel():
                loaded[key] = value
        if loaded or any(not is_tensor(v) for _, v in state.values()):
            self.target.finish.append(lambda: _hand_over(module, loaded))

    def _optimizer(self, optimizer: Any, path: str) -> None:
        target = self.target
        try:
            names = optimizer_names(optimizer, path, self._table)
        except KeyError as error:
            target.problems.append(error.args[0])
            return
        found = self._view.node(path)
        if found is None:
            target.missing.append(path)
            return
        saved, node = found
        if not (isinstance(node, dict) and node.get("$") == "optimizer"):
            self._value(path, optimizer.load_state_dict)  # a plain state dict that was saved as such
            return
        target.strict.append(path)
        renamed = self._renamed_parameters(node, saved, path)
        parameters = {
            name: (p, group)
            for group, group_names in zip(optimizer.param_groups, names, strict=True)
            for p, name in zip(group["params"], group_names, strict=True)
        }
        fresh: dict[Any, dict[str, Any]] = {}
        known = {renamed(n) for group in node["groups"] for n in group["params"]}
        by_name = {renamed(n): (n, items) for n, items in node["state"].items()}
        for name, (parameter, group) in parameters.items():
            at = tree.join(path, f"state.{name}")
            if name in by_name:
                if self._view.keeps(at) or any(True for _ in self._view.below(at)):
                    old, items = by_name[name]
                    fresh[parameter] = self._state(optimizer, parameter, group, tree.join(saved, f"state.{old}"), items)
            elif name in known:
                fresh[parameter] = {}  # it had none when it was saved: no gradient yet
            elif self._view.keeps(at):
                target.missing.append(at)
        target.finish.append(lambda: _set_state(optimizer, fresh))
        self._groups(optimizer, names, node, saved, path, renamed)

    def _renamed_parameters(self, node: tree.Node, saved: str, path: str) -> Callable[[str], str]:
        """What a parameter of the checkpoint is called here, by a rule for the optimizer or one for its module."""
        view = self._view

        def renamed(name: str) -> str:
            before, head = tree.join(saved, f"state.{name}"), tree.join(path, "state.")
            after = view.renamed(before)
            if after != before and after.startswith(head):
                return after[len(head) :]
            for module in self._modules:
                after = view.renamed(tree.join(module, name))
                if after != tree.join(module, name) and after.startswith(f"{module}." if module else ""):
                    return after[len(module) + 1 if module else 0 :]
            return name

        return renamed

    def _state(self, optimizer: Any, parameter: Any, group: Any, saved: str, items: tree.Node) -> dict[str, Any]:
        """The state of one parameter, its tensors wanted: those that are there already, or new ones."""
        from flagstone.adapters.pytorch import is_distributed

        current = optimizer.state.get(parameter, {})
        state: dict[str, Any] = {}
        for key, node in items.items():
            name = self._view.renamed(tree.join(saved, key))
            kind = node.get("$") if isinstance(node, dict) else None
            if kind == "ranks":
                count = self._view.folder.manifest.ranks
                self.target.values.append(name)
                if count != self._size:
                    self.target.problems.append(
                        f"{name} was made from the shards of {count} ranks, and cannot be divided over {self._size}"
                    )
                    continue
                state[key] = self._values.of_rank(tree.join(saved, key), self._rank)
                continue
            if not self._view.keeps(name):
                if key in current:
                    state[key] = current[key]
                elif kind == "t":  # as an optimizer begins
                    manifest = self._view.folder.manifest
                    old = tree.join(saved, key)
                    state[key] = _like(
                        parameter, manifest.tensors[manifest.aliases.get(old, old)], on_device=key != "step"
                    )
                continue
            record = self._view.record(name) if kind == "t" else None
            if record is None:
                state[key] = self._values.make(node, tree.join(saved, key))
                self.target.values.append(name)
                continue
            there = current.get(key)
            if not (is_tensor(there) and _fits(there, record)):
                there = _like(parameter, record, on_device=key != "step" or _steps_on_device(group))
            elif is_distributed(there) != is_distributed(parameter) and there.ndim:
                there = _like(parameter, record, on_device=True)
            state[key] = there
            self._tensor(there, name)
        return state

    def _groups(
        self,
        optimizer: Any,
        names: list[list[str]],
        node: tree.Node,
        saved: str,
        path: str,
        renamed: Callable[[str], str],
    ) -> None:
        """The options of each group: from the one at its place, or where groups have changed from its members'."""
        groups = [([renamed(n) for n in g["params"]], g["options"], i) for i, g in enumerate(node["groups"])]
        same = len(groups) == len(names) and all(
            set(ours) == set(theirs) for ours, (theirs, _, _) in zip(names, groups, strict=True)
        )
        of_name = {n: i for theirs, _, i in groups for n in theirs}
        for i, ours in enumerate(names):
            sources = {i} if same else {of_name[n] for n in ours if n in of_name}
            if not sources:
                continue
            if len(sources) > 1:
                first, second = sorted(sources)[:2]
                if any(groups[j][1] != groups[first][1] for j in sources):
                    self.target.problems.append(
                        f"{path}: group {i} has parameters of the groups {first} and {second} of the checkpoint, "
                        "whose options differ"
                    )
                    continue
            options = groups[min(sources)][1]
            at = tree.join(saved, f"param_groups.{min(sources)}")
            self.target.values += [n for n, _ in tree.leaves(options, at)]
            made = self._values.make(options, at)
            group = optimizer.param_groups[i]
            lacking = [k for k in group if k not in made and k not in ("params", "param_names")]
            unknown = [k for k in made if k not in group]
            if lacking:
                self.target.notes.append(
                    f"{path}: group {i}: the checkpoint has no {', '.join(map(repr, lacking))}; kept as it is"
                )
            if unknown:
                self.target.notes.append(
                    f"{path}: group {i}: {', '.join(map(repr, unknown))} was not known, and is set"
                )
            self.target.finish.append(_updater(group, made))


def _setter(container: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _updater(group: dict[str, Any], made: dict[str, Any]) -> Callable[[], None]:
    return lambda: group.update(made)


def _hand_over(module: Any, loaded: dict[str, Any]) -> None:
    if loaded:
        module.load_state_dict(loaded, strict=False)


def _set_state(optimizer: Any, fresh: dict[Any, dict[str, Any]]) -> None:
    for parameter, state in fresh.items():
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(_holds_tensors(v) for v in (value.values() if isinstance(value, dict) else value))
    return is_tensor(value) or isinstance(value, (np.ndarray, per_rank)) or is_stateful(value)


def _fits(tensor: Any, record: Any) -> bool:
    from flagstone.adapters.pytorch import NAMES

    return tuple(tensor.shape) == record.shape and NAMES.get(tensor.dtype) == record.dtype


def _steps_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _like(parameter: Any, record: Any, *, on_device: bool) -> Any:
    """A new tensor for optimizer state: divided like its parameter when it has its shape, else whole."""
    import torch

    from flagstone.adapters.pytorch import TORCH_DTYPES, is_dtensor

    dtype = TORCH_DTYPES[record.dtype]
    if tuple(parameter.shape) == record.shape and (record.shape or on_device):
        with torch.no_grad():
            if is_dtensor(parameter):
                from torch.distributed.tensor import DTensor

                local = torch.zeros_like(parameter.to_local(), dtype=dtype, requires_grad=False)
                return DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if on_device else "cpu"
    return torch.zeros(record.shape, dtype=dtype, device=device)
