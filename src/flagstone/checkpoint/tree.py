"""Plain Python values as typed JSON, exactly: what went in comes out, types included. Never code.

JSON's own values stand for themselves; everything else is an object with the key ``$``:

    {"$": "t"}  a tensor, {"$": "a"} a numpy array: its name is its dotted path
    {"$": "tuple", "v": [...]}, "set", "frozenset", "dict" (pairs), "odict", "counter"
    {"$": "float", "v": "nan"}, {"$": "int", "v": "-0x1f"}, "bytes" and "complex", {"$": "np", "dtype": "<f8", "v": ...}
    {"$": "optimizer", "state": {...}, "groups": [{"params": [...], "options": {...}}]}
    {"$": "ranks", "n": 2}      each rank's own value, in the files rank-00000.safetensors ...
    {"$": "pickle"}             a uint8 tensor that only allow_pickle=True opens
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from flagstone.errors import LoadError, SaveError

Node = Any  # what msgspec reads from JSON
UNKNOWN = object()  # what a leaf function returns for a kind that it does not know
_INT64 = 1 << 63


def join(path: str, key: object) -> str:
    """The dotted path of what lies below ``path`` under ``key``."""
    return f"{path}.{key}" if path else str(key)


def encode(value: Any, path: str, leaf: Callable[[Any, str], Node | None]) -> Node:
    """A value as typed JSON. ``leaf`` is asked about everything that is not plain, and returns its node or None."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value, path)
    if kind is int:
        return value if -_INT64 <= value < _INT64 else {"$": "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if kind is dict:
        return _encode_dict(value, path, leaf)
    if kind is list:
        return [encode(v, join(path, i), leaf) for i, v in enumerate(value)]
    if kind is tuple:
        return {"$": "tuple", "v": [encode(v, join(path, i), leaf) for i, v in enumerate(value)]}
    if kind is OrderedDict or kind is Counter:
        name = "odict" if kind is OrderedDict else "counter"
        return {"$": name, "v": _pairs(value, path, leaf)}
    if kind is bytes or kind is bytearray:
        return {"$": kind.__name__, "v": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
    if kind is set or kind is frozenset:
        nodes = [encode(v, path, leaf) for v in value]
        return {"$": kind.__name__, "v": sorted(nodes, key=msgspec.json.encode)}  # the same on every rank
    node = leaf(value, path)
    if node is None:
        raise SaveError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} is not a tensor, a plain value or a thing with "
            "state_dict() and load_state_dict(); save what it consists of, or pass allow_pickle=True"
        )
    return node


def decode(node: Node, path: str, leaf: Callable[[dict[str, Any], str], Any]) -> Any:
    """The value of a node. ``leaf`` makes what is not plain: tensors, arrays, optimizers, values of ranks, pickles."""
    if isinstance(node, list):
        return [decode(v, join(path, i), leaf) for i, v in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kind = node.get("$")
    if kind is None:
        return {k: decode(v, join(path, k), leaf) for k, v in node.items()}
    value = node.get("v")
    try:
        match kind:
            case "dict" | "odict" | "counter":
                pairs = [(decode(k, path, leaf), v) for k, v in value]  # type: ignore[union-attr]
                made = {k: decode(v, join(path, k), leaf) for k, v in pairs}
                return {"dict": dict, "odict": OrderedDict, "counter": Counter}[kind](made)
            case "tuple":
                return tuple(decode(v, join(path, i), leaf) for i, v in enumerate(value))  # type: ignore[arg-type]
            case "set":
                return {decode(v, path, leaf) for v in value}  # type: ignore[union-attr]
            case "frozenset":
                return frozenset(decode(v, path, leaf) for v in value)  # type: ignore[union-attr]
            case "int":
                return int(value, 16)  # type: ignore[arg-type]
            case "float":
                return float(value)  # type: ignore[arg-type]
            case "complex":
                return complex(float(value[0]), float(value[1]))  # type: ignore[index]
            case "bytes":
                return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
            case "bytearray":
                return bytearray(base64.b64decode(value, validate=True))  # type: ignore[arg-type]
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise LoadError(f"{path}: the manifest holds a {kind} that is none: {type(error).__name__}") from error
    made = leaf(node, path)
    if made is UNKNOWN:
        raise LoadError(f"{path}: the manifest holds a value of kind {kind!r}, which this version does not know")
    return made


def children(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """The nodes right below one, with their dotted paths; none for a leaf."""
    if isinstance(node, list):
        yield from ((join(path, i), v) for i, v in enumerate(node))
    elif isinstance(node, dict):
        kind = node.get("$")
        if kind is None:
            yield from ((join(path, k), v) for k, v in node.items())
        elif kind == "tuple":
            yield from ((join(path, i), v) for i, v in enumerate(node["v"]))
        elif kind in ("dict", "odict", "counter"):
            yield from ((join(path, k if isinstance(k, str) else decode(k, path, _no_leaf)), v) for k, v in node["v"])
        elif kind == "optimizer":
            yield join(path, "state"), node["state"]
            for i, group in enumerate(node["groups"]):
                yield join(path, f"param_groups.{i}"), group["options"]


def find(node: Node, path: str) -> Node:
    """The node at a dotted path; ``UNKNOWN`` when there is none."""
    at = ""
    while at != path:
        for name, child in children(node, at):
            if path == name or path.startswith(f"{name}."):
                node, at = child, name
                break
        else:
            return UNKNOWN
    return node


def leaves(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """All leaves below a node with their dotted paths; an empty container is a leaf."""
    stack = [(path, node)]
    while stack:
        at, current = stack.pop()
        below = list(children(current, at))
        if below:
            stack.extend(reversed(below))
        else:
            yield at, current


_PAIRS = ("dict", "odict", "counter")
_ITEMS = ("tuple", "set", "frozenset")


def check(node: Node, where: str) -> None:
    """Raise LoadError unless a node from a file has the form that the other functions take for granted."""
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, list):
            stack.extend(current)
        elif isinstance(current, dict):
            kind = current.get("$")
            if kind is None:
                stack.extend(current.values())
                continue
            value = current.get("v")
            if kind in _PAIRS or kind in _ITEMS:
                if not isinstance(value, list):
                    raise LoadError(f"{where}: a {kind} without items in the manifest")
                if kind in _PAIRS and not all(isinstance(p, list) and len(p) == 2 for p in value):
                    raise LoadError(f"{where}: a {kind} whose items are not pairs in the manifest")
                stack.extend(value)
            elif kind == "optimizer":
                state, groups = current.get("state"), current.get("groups")
                if not isinstance(state, dict) or "$" in state or not isinstance(groups, list):
                    raise LoadError(f"{where}: an optimizer without state or groups in the manifest")
                for group in groups:
                    if not (
                        isinstance(group, dict)
                        and isinstance(group.get("options"), dict)
                        and isinstance(group.get("params"), list)
                        and all(isinstance(p, str) for p in group["params"])
                    ):
                        raise LoadError(f"{where}: an optimizer with a group that is none in the manifest")
                    stack.append(group["options"])
                stack.append(state)
            elif not isinstance(kind, str):
                raise LoadError(f"{where}: a value of kind {kind!r} in the manifest")


def merge(a: Node, b: Node, path: str, conflict: Callable[[str], None]) -> Node:
    """The union of two ranks' trees; ``conflict`` is told the path of every difference that is not a missing key."""
    if msgspec.json.encode(a) == msgspec.json.encode(b):  # Python takes 1, 1.0 and True for equal
        return a
    if isinstance(a, dict) and isinstance(b, dict) and {a.get("$"), b.get("$")} == {None, "dict"}:
        a, b = _as_pairs(a), _as_pairs(b)  # on one rank all keys are strings, on the other not
    if isinstance(a, dict) and isinstance(b, dict) and a.get("$") == b.get("$"):
        kind = a.get("$")
        if kind is None:
            return _merge_keys(a, b, path, conflict)
        if kind == "optimizer":
            return _merge_optimizers(a, b, path, conflict)
        if kind in ("dict", "odict"):
            left, right = _keyed(a), _keyed(b)
            for k in left.keys() & right.keys():
                if msgspec.json.encode(left[k][0]) != msgspec.json.encode(right[k][0]):
                    conflict(join(path, k))
            merged = _merge_keys(
                {k: v for k, (_, v) in left.items()}, {k: v for k, (_, v) in right.items()}, path, conflict
            )
            return {"$": kind, "v": [[{**left, **right}[k][0], v] for k, v in merged.items()]}
        if kind == "tuple" and len(a["v"]) == len(b["v"]):
            return {"$": kind, "v": _merge_items(a["v"], b["v"], path, conflict)}
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return _merge_items(a, b, path, conflict)
    conflict(path)
    return a


def _as_pairs(node: Node) -> Node:
    return node if "$" in node else {"$": "dict", "v": [[k, v] for k, v in node.items()]}


def _keyed(node: Node) -> dict[str, tuple[Node, Node]]:
    """The pairs of a dict node under their keys' names."""
    return {k if isinstance(k, str) else str(decode(k, "", _no_leaf)): (k, v) for k, v in node["v"]}


def _merge_keys(a: dict[str, Node], b: dict[str, Node], path: str, conflict: Callable[[str], None]) -> Node:
    merged = dict(a)
    for key, value in b.items():
        merged[key] = merge(a[key], value, join(path, key), conflict) if key in a else value
    return merged


def _merge_items(a: list[Node], b: list[Node], path: str, conflict: Callable[[str], None]) -> list[Node]:
    return [merge(x, y, join(path, i), conflict) for i, (x, y) in enumerate(zip(a, b, strict=True))]


def _merge_optimizers(a: Node, b: Node, path: str, conflict: Callable[[str], None]) -> Node:
    if len(a["groups"]) != len(b["groups"]):
        conflict(join(path, "param_groups"))
        return a
    groups = []
    for i, (x, y) in enumerate(zip(a["groups"], b["groups"], strict=True)):
        options = merge(x["options"], y["options"], join(path, f"param_groups.{i}"), conflict)
        groups.append({"params": list(dict.fromkeys([*x["params"], *y["params"]])), "options": options})
    return {
        "$": "optimizer",
        "state": _merge_keys(a["state"], b["state"], join(path, "state"), conflict),
        "groups": groups,
    }


def _encode_dict(value: dict[Any, Any], path: str, leaf: Callable[[Any, str], Node | None]) -> Node:
    if all(type(k) is str for k in value) and "$" not in value:
        return {_text(k, path): encode(v, f"{path}.{k}" if path else k, leaf) for k, v in value.items()}
    return {"$": "dict", "v": _pairs(value, path, leaf)}


def _pairs(value: dict[Any, Any], path: str, leaf: Callable[[Any, str], Node | None]) -> list[Node]:
    for key in value:
        if not _is_key(key):
            raise SaveError(f"{path}: the key {key!r} of a dict is neither text nor number nor a tuple of these")
    return [[encode(k, path, _no_leaf), encode(v, join(path, k), leaf)] for k, v in value.items()]


def _is_key(key: Any) -> bool:
    """Whether a key's name is the same in every process: a frozenset's is not."""
    if type(key) is tuple:
        return all(_is_key(k) for k in key)
    return key is None or type(key) in (str, int, float, bool, bytes, complex)


def _no_leaf(value: Any, path: str) -> Node:
    return None


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SaveError(f"{path}: the string {value!r} is not valid Unicode: {error.reason}") from error
    return value
