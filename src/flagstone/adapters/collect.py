"""From a state of any nesting to a tree of values and tensors with names: what save works on."""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from flagstone.adapters.per_rank import per_rank
from flagstone.checkpoint import tree
from flagstone.checkpoint.piece import ArrayPiece, Piece
from flagstone.checkpoint.state import Entry, State
from flagstone.errors import SaveError
from flagstone.layout import DTYPES, Sharding, TensorSpec

LOOSE = "tensors."  # the files of tensors at the top of the state; the dot goes, and sets it apart from a key "tensors"


def is_stateful(value: Any) -> bool:
    """Whether a thing has a state that it gives and takes."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def modules_in(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The modules of a state with their paths."""
    if is_module(state):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from modules_in(value, tree.join(path, key))
    elif type(state) in (list, tuple):
        for i, value in enumerate(state):
            yield from modules_in(value, tree.join(path, i))


def parameter_table(state: Any) -> dict[int, tuple[str, str]]:
    """The module's path and the name of every parameter of a state, by its identity."""
    table: dict[int, tuple[str, str]] = {}
    for path, module in modules_in(state):
        from flagstone.adapters.modules import parameter_names

        for parameter, name in parameter_names(module):
            table.setdefault(id(parameter), (path, name))
    return table


def optimizer_names(optimizer: Any, path: str, table: Mapping[int, tuple[str, str]]) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group: their module's, which must be part of the state too.

    Raises:
        KeyError: a parameter belongs to no module of the state; the message says which.
    """
    found: list[list[tuple[str, str]]] = []
    for i, group in enumerate(optimizer.param_groups):
        names = []
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in table:
                raise KeyError(
                    f"{path}: parameter {j} of group {i}, of shape {list(parameter.shape)}, belongs to no module of "
                    "the state; optimizer state is kept by parameter name, so pass the module along with its optimizer"
                )
            names.append(table[id(parameter)])
        found.append(names)
    several = len({module for names in found for module, _ in names}) > 1
    return [[tree.join(module, name) if several else name for module, name in names] for names in found]


class Collector:
    """Collects one state. ``ranks`` maps the job's ranks to those of the group that saves."""

    def __init__(self, state: Any, ranks: Mapping[int, int], allow_pickle: bool) -> None:
        self._state, self._ranks, self._allow_pickle = state, ranks, allow_pickle
        self._table = parameter_table(state)
        self._root = ""
        self._into: Callable[[str], tuple[str, str]] = self._by_root
        self._alone = False
        self._names: set[str] = set()
        self._keys: set[tuple[str, str]] = set()
        self._seen: dict[Hashable, str] = {}
        self._kept: list[Any] = []  # what was made on the way must outlive the identities taken from it
        self.result = State()

    def collect(self) -> State:
        """Raises SaveError: something in the state cannot be saved; it is named."""
        state = self._state
        if type(state) is dict and all(type(k) is str for k in state) and "$" not in state:
            self.result.tree = {}
            for key, value in state.items():
                self._root = key
                self.result.tree[key] = self._encode(value, key)
        else:
            self.result.tree = self._encode(state, "")
        self._check_names()
        return self.result

    def _encode(self, value: Any, path: str) -> tree.Node:
        try:
            return tree.encode(value, path, self._leaf)
        except RecursionError:
            raise SaveError(f"{path}: the state contains itself, or is nested too deeply") from None

    def _check_names(self) -> None:
        """No two leaves may have one dotted path."""
        seen: set[str] = set()
        for name, _ in tree.leaves(self.result.tree):
            if name in seen:
                raise SaveError(f"two things in the state have the name {name!r}; rename one of the keys")
            seen.add(name)

    def _leaf(self, value: Any, path: str) -> tree.Node | None:
        if is_tensor(value):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic):
            if value.dtype.kind not in "biufcMm":
                return self._pickle(value, path)
            return {"$": "np", "dtype": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode()}
        if isinstance(value, per_rank):
            return self._per_rank(value, path)
        if is_module(value):
            return self._module(value, path)
        if is_optimizer(value):
            return self._optimizer(value, path)
        if is_stateful(value):
            inner = value.state_dict()
            self._kept.append(inner)
            return self._encode(inner, path)
        if isinstance(value, tuple) and type(value).__name__ == "Size":
            return self._encode(tuple(value), path)
        return self._pickle(value, path)

    def _pickle(self, value: Any, path: str) -> tree.Node | None:
        if not self._allow_pickle:
            return None
        try:
            data = np.frombuffer(pickle.dumps(value), np.uint8)
        except Exception as error:
            raise SaveError(f"{path}: a {type(value).__qualname__} cannot be pickled: {error}") from error
        with self._in_group(lambda name: ("pickled", name)):
            self._add(path, "uint8", data.shape, None, ArrayPiece(data, "uint8"), True)
        return {"$": "pickle"}

    # Tensors.

    def _by_root(self, path: str) -> tuple[str, str]:
        if path == self._root or not self._root:
            return LOOSE, path
        return self._root, path[len(self._root) + 1 :]

    @contextmanager
    def _in_group(self, into: Callable[[str], tuple[str, str]]) -> Iterator[None]:
        before, self._into = self._into, into
        try:
            yield
        finally:
            self._into = before

    def _add(
        self, name: str, dtype: str, shape: tuple[int, ...], sharding: Sharding | None, piece: Piece, on_host: bool
    ) -> None:
        group, key = ("", name) if self._alone else self._into(name)
        if not key or key == "__metadata__" or (group, key) in self._keys:
            raise SaveError(
                f"{name}: a tensor cannot have this name; another one has it, or the file format forbids it"
            )
        self._keys.add((group, key))
        entry = Entry(TensorSpec(name, group, key, dtype, shape), sharding, piece, on_host)
        (self.result.rank_entries if self._alone else self.result.entries)[name] = entry

    def _array(self, array: np.ndarray[Any, Any], path: str) -> tree.Node | None:
        if array.dtype.name not in DTYPES:
            if array.dtype.hasobject and self._allow_pickle:
                return self._pickle(array, path)
            raise SaveError(f"{path}: a numpy array of {array.dtype} cannot be saved")
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        identity = ("numpy", native.__array_interface__["data"][0], native.shape, native.strides, native.dtype.str)
        if not self._tie(identity if native.size else object(), path):
            self._kept.append(native)
            self._add(path, native.dtype.name, native.shape, None, ArrayPiece(native, native.dtype.name), True)
        return {"$": "a"}

    def _tensor(self, tensor: Any, path: str) -> tree.Node:
        from flagstone.adapters.pytorch import TorchPiece, Unfit, describe

        try:
            found = describe(tensor, self._ranks)
        except Unfit as error:
            raise SaveError(f"{path}: {error}") from error
        self._kept.append(found.local)
        if not self._tie(found.identity, path):
            on_host = found.local.device.type == "cpu"
            self._add(path, found.dtype, found.shape, found.sharding, TorchPiece(found.local), on_host)
        return {"$": "t"}

    def _tie(self, identity: Hashable, path: str) -> bool:
        """Whether the same memory is saved already; then only the name is."""
        if self._alone:
            return False
        first = self._seen.setdefault(identity, path)
        if first == path:
            return False
        self.result.aliases[path] = first
        return True

    # What holds tensors.

    def _per_rank(self, value: per_rank[Any], path: str) -> tree.Node:
        if self._alone:
            return self._encode(value.value, path)
        self._alone = True
        try:
            self.result.rank_tree[path] = self._encode(value.value, path)
        finally:
            self._alone = False
        return {"$": "ranks"}

    def _module(self, module: Any, path: str) -> tree.Node:
        from flagstone.adapters.modules import state_of

        group = path or "model"
        skip = len(path) + 1 if path else 0
        try:
            state = state_of(module)
        except ValueError as error:
            raise SaveError(f"{path}: {error}") from error
        self._kept.append(state)
        with self._in_group(lambda name: (group, name[skip:])):
            return {name: self._encode(value, tree.join(path, name)) for name, (_, value) in state.items()}

    def _optimizer(self, optimizer: Any, path: str) -> tree.Node:
        from flagstone.adapters.pytorch import is_distributed, is_sharded

        try:
            names = optimizer_names(optimizer, path, self._table)
        except KeyError as error:
            raise SaveError(error.args[0]) from error
        known = {
            id(p): name
            for group, group_names in zip(optimizer.param_groups, names, strict=True)
            for p, name in zip(group["params"], group_names, strict=True)
        }
        state: dict[str, tree.Node] = {}
        for parameter, items in optimizer.state.items():
            name = known.get(id(parameter))
            if name is None:
                raise SaveError(f"{path}: the optimizer has state for something that is in none of its groups")
            at = tree.join(path, f"state.{name}")
            sharded = is_sharded(parameter)
            state[name] = {}
            for key, item in items.items():
                if sharded and is_tensor(item) and not is_distributed(item) and item.ndim:
                    item = per_rank(item)  # made from this rank's shard: nobody else can have it
                with self._in_group(_state_group(path, at, name)):
                    state[name][str(key)] = self._encode(item, tree.join(at, key))
        if known and not optimizer.state:
            self.result.notes.append(f"{path or 'the optimizer'} has no state, or none yet")
        groups = []
        for i, (group, group_names) in enumerate(zip(optimizer.param_groups, names, strict=True)):
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            with self._in_group(lambda name: (f"{path or 'optimizer'}-options", name)):
                encoded = self._encode(options, tree.join(path, f"param_groups.{i}"))
            groups.append({"params": group_names, "options": encoded})
        return {"$": "optimizer", "state": state, "groups": groups}


def _state_group(path: str, at: str, name: str) -> Callable[[str], tuple[str, str]]:
    """Optimizer state lies in files by its kind, each under the name of its parameter."""
    return lambda tensor: (f"{path or 'optimizer'}-{tensor[len(at) + 1 :]}", name)
