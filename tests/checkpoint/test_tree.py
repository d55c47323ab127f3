"""Plain values as typed JSON: round trips, refusals, what a bad file may hold, and the union of two ranks' trees."""

import contextlib
import enum
import math
from collections import Counter, OrderedDict, namedtuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.checkpoint import tree
from flagstone.errors import LoadError, SaveError

fast = settings(deadline=None, max_examples=200)


def no_leaf(value, path):
    return None


def unknown(node, path):
    return tree.UNKNOWN


def through_json(value, path="state"):
    node = msgspec.json.decode(msgspec.json.encode(tree.encode(value, path, no_leaf)))
    tree.check(node, "manifest.json")
    return tree.decode(node, path, unknown)


def exact(value):
    """A value with all its types, so that == tells 1 from True, 0.0 from -0.0, and finds NaN in NaN."""
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)
    if kind in (list, tuple):
        return kind, [exact(v) for v in value]
    if kind in (set, frozenset):
        return kind, sorted(repr(exact(v)) for v in value)
    if kind in (dict, OrderedDict, Counter):
        return kind, [(exact(k), exact(v)) for k, v in value.items()]
    return kind, value


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.sampled_from([0, -1, 1 << 53, (1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64]),
    st.floats(),
    st.sampled_from([-0.0, math.inf, -math.inf, math.nan, 1e16, 1e300, 5e-324, 1.0]),
    st.complex_numbers(),
    st.sampled_from([complex(-0.0, math.nan), complex(math.inf, -0.0)]),
    st.text(max_size=10),
    st.sampled_from(["", "$", "a.b", "nan", "0x1", "\x00", "😀", "tuple"]),
    st.binary(max_size=10),
)
hashables = st.recursive(
    scalars,
    lambda below: st.one_of(st.lists(below, max_size=3).map(tuple), st.frozensets(below, max_size=3)),
    max_leaves=4,
)
plain_keys = st.recursive(scalars, lambda below: st.lists(below, max_size=3).map(tuple), max_leaves=4)
keys = st.one_of(st.sampled_from(["$", "v", "a.b", "", "0", 0, True, None, 1.5, (1, "a"), b"k"]), plain_keys)
names = st.one_of(st.sampled_from(["$", "v", "a.b", "", "a", "b"]), st.text(max_size=5))
values = st.recursive(
    st.one_of(scalars, st.binary(max_size=5).map(bytearray), st.sets(hashables, max_size=3), hashables),
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=4).map(tuple),
        st.dictionaries(names, below, max_size=4),
        st.dictionaries(keys, below, max_size=4),
        st.dictionaries(keys, below, max_size=4).map(OrderedDict),
        st.dictionaries(plain_keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


# What goes in comes out.


@settings(deadline=None, max_examples=250)
@given(values)
def test_a_plain_value_comes_back_the_same_types_and_order_included(value):
    assert exact(through_json(value)) == exact(value)


@fast
@given(values)
def test_a_value_is_encoded_in_one_way(value):
    first, second = (msgspec.json.encode(tree.encode(value, "", no_leaf)) for _ in range(2))
    assert first == second


@fast
@given(st.sets(scalars, max_size=6), st.randoms(use_true_random=False))
def test_a_set_is_encoded_in_one_order(items, rng):
    shuffled = list(items)
    rng.shuffle(shuffled)
    assert repr(tree.encode(set(shuffled), "", no_leaf)) == repr(tree.encode(items, "", no_leaf))


def test_a_set_of_sets_is_encoded_in_one_order_whatever_the_order_within():
    low, high = frozenset([0, 8]), frozenset([8, 0])  # equal, but made and therefore iterated differently
    assert list(low) != list(high)
    first, second = (tree.encode({inner, frozenset([1])}, "", no_leaf) for inner in (low, high))
    assert first == second


@fast
@given(st.dictionaries(st.text(max_size=5).filter(lambda k: k != "$"), st.integers(-9, 9), max_size=4))
def test_a_dict_with_plain_keys_is_its_own_json(value):
    assert tree.encode(value, "", no_leaf) == value


def test_numbers_in_the_json_are_finite_and_fit_into_64_bits():
    for value in (1 << 63, -(1 << 63) - 1, 10**30, math.inf, math.nan):
        assert isinstance(tree.encode(value, "", no_leaf), dict)
    for value in ((1 << 63) - 1, -(1 << 63), 1e308):
        assert tree.encode(value, "", no_leaf) == value


def test_a_key_that_marks_our_own_nodes_is_no_such_node():
    for value in ({"$": "t"}, {"$": "tuple", "v": [1]}, {"$": None}, {"a": {"$": 1}}):
        assert through_json(value) == value


def test_what_is_not_plain_is_asked_for_by_its_path():
    asked = []

    def leaf(value, path):
        asked.append(path)
        return {"$": "t"}

    thing = object()
    value = {"a": [1, thing], "b.c": (thing,), 3: {"x": thing}}
    node = tree.encode({"m": value, "n": thing}, "", leaf)
    assert asked == ["m.a.1", "m.b.c.0", "m.3.x", "n"]
    made = []
    tree.decode(node, "", lambda node, path: made.append(path))
    assert made == asked


def test_subclasses_of_plain_types_are_not_taken_for_them():
    pair = namedtuple("pair", "a b")
    kind = enum.IntEnum("kind", "ONE")
    asked = []
    for value in (pair(1, 2), kind.ONE, type("Text", (str,), {})("x"), type("Mine", (dict,), {})(a=1)):
        tree.encode(value, "x", lambda value, path: asked.append(value) or {"$": "t"})
        assert asked.pop() is value


# Refusals.


@pytest.mark.parametrize("thing", [lambda: 0, object(), print, type, range(3), memoryview(b""), slice(1), 1j.__class__])
def test_what_is_not_plain_is_refused_by_its_path_and_type(thing):
    with pytest.raises(SaveError, match=rf"^trainer\.b\.1: a [\w.]*{type(thing).__qualname__} is not"):
        tree.encode({"a": 1, "b": [2, thing]}, "trainer", no_leaf)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("\ud800", "x"),
        (["a", "b\udfff"], "x.1"),
        ({"\ud800": 1}, "x"),
        ({"a": {1: "\ud800"}}, "x.a.1"),
        ({"\ud800"}, "x"),
    ],
)
def test_a_string_that_is_no_unicode_is_refused_by_its_path(value, path):
    with pytest.raises(SaveError, match=rf"^{path}: the string .* is not valid Unicode"):
        tree.encode(value, "x", no_leaf)


def test_a_key_that_is_not_plain_is_refused_even_where_a_value_would_be_taken():
    with pytest.raises(SaveError, match=r"^x: the key <object object"):
        tree.encode({object(): 1}, "x", lambda value, path: {"$": "t"})


# What a bad file may hold.

kinds = ["dict", "odict", "counter", "tuple", "set", "frozenset", "int", "float", "complex", "bytes", "bytearray", "t"]
kinds += ["a", "np", "optimizer", "ranks", "pickle", "what", "", None, 1, ["dict"], {"$": "dict"}]
json_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([10**400, -(10**400)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["nan", "1e5", "0x10", "-0x", "AAAA", "=", "é"]),
)


def marked(below):
    fields = {
        "v": st.one_of(
            below, st.lists(below, max_size=3), st.lists(st.lists(below, min_size=2, max_size=2), max_size=3)
        ),
        "state": st.dictionaries(names, below, max_size=2),
        "groups": st.lists(
            st.fixed_dictionaries(
                {}, optional={"params": st.lists(st.one_of(st.text(max_size=3), below), max_size=2), "options": below}
            ),
            max_size=2,
        ),
    }
    return st.fixed_dictionaries({"$": st.sampled_from(kinds)}, optional=fields)


nodes = st.recursive(
    json_scalars,
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(names, below, max_size=3), marked(below)),
    max_leaves=10,
)


def checked(node):
    """A node as it is read from a file, or None when it is refused there."""
    read = msgspec.json.decode(msgspec.json.encode(node))
    try:
        tree.check(read, "manifest.json")
    except LoadError:
        return None
    return read


def leaf_of(node, path):
    """As values.py does: optimizers are looked into, other leaves made."""
    if node["$"] == "optimizer":
        return [
            tree.decode(node["state"], path, leaf_of),
            [tree.decode(g["options"], path, leaf_of) for g in node["groups"]],
        ]
    return tree.UNKNOWN if node["$"] == "what" else path


@settings(deadline=None, max_examples=700)
@given(nodes)
def test_whatever_a_manifest_holds_it_is_a_value_or_a_load_error(node):
    read = checked(node)
    if read is not None:
        with contextlib.suppress(LoadError):
            tree.decode(read, "state", leaf_of)


@settings(deadline=None, max_examples=250)
@given(nodes, names)
def test_whatever_a_manifest_holds_it_can_be_walked(node, name):
    read = checked(node)
    if read is not None:
        with contextlib.suppress(LoadError):
            tree.find(read, name)
            assert all(path.startswith("state") for path, _ in tree.leaves(read, "state"))


@pytest.mark.parametrize(
    "node",
    [
        {"$": "tuple"},
        {"$": "tuple", "v": {"a": 1}},
        {"$": "set", "v": "abc"},
        {"$": "dict", "v": [1]},
        {"$": "dict", "v": [[1, 2, 3]]},
        {"$": "counter", "v": None},
        {"$": 1},
        {"$": ["t"]},
        {"$": "optimizer"},
        {"$": "optimizer", "state": {"$": "t"}, "groups": []},
        {"$": "optimizer", "state": {}, "groups": [{}]},
        {"$": "optimizer", "state": {}, "groups": [{"options": {}, "params": [1]}]},
        {"$": "optimizer", "state": {"a": {"$": "tuple"}}, "groups": []},
        {"$": "optimizer", "state": {}, "groups": [{"options": {"a": {"$": "set"}}, "params": []}]},
        {"a": [{"$": "dict", "v": [[{"$": "tuple"}, 1]]}]},
    ],
)
def test_a_node_without_its_form_is_refused_before_it_is_used(node):
    with pytest.raises(LoadError, match=r"manifest\.json"):
        tree.check(node, "manifest.json")


@pytest.mark.parametrize(
    "node",
    [
        {"$": "int", "v": "x"},
        {"$": "int"},
        {"$": "float", "v": []},
        {"$": "float", "v": 10**400},
        {"$": "complex", "v": ["1"]},
        {"$": "complex", "v": {}},
        {"$": "complex", "v": [10**400, 1]},
        {"$": "bytes", "v": "é"},
        {"$": "bytes", "v": -(10**5000)},
        {"$": "bytearray", "v": "A"},
        {"$": "set", "v": [[1]]},
        {"$": "frozenset", "v": [{}]},
        {"$": "dict", "v": [[[], 1]]},
        {"$": "what"},
    ],
)
def test_a_value_that_cannot_be_is_a_load_error_that_names_its_path(node):
    tree.check(node, "manifest.json")
    with pytest.raises(LoadError, match=r"^a\.b: the manifest holds"):
        tree.decode({"b": node}, "a", unknown)


# Paths.


named = st.recursive(
    st.none(),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b.c", "$", "", 1, None, (2, "x")]), below, max_size=4),
    ),
)


@fast
@given(named)
def test_every_leaf_is_found_at_its_path(value):
    node = tree.encode({"s": value}, "", no_leaf)
    paths = [path for path, _ in tree.leaves(node)]
    assert paths
    for path in paths:
        # A path that is that of two things, or the beginning of another, is refused when a state is collected.
        if paths.count(path) == 1 and not any(other.startswith(f"{path}.") for other in paths):
            assert tree.find(node, path) in (None, {}, [], {"$": "tuple", "v": []}, {"$": "dict", "v": []})
    assert tree.find(node, "no such path") is tree.UNKNOWN


def test_keys_with_dots_and_of_other_types_are_found():
    node = tree.encode({"a": {"b.c": 1, 2: (3, {"d": 4})}, "e": {}}, "", no_leaf)
    assert dict(tree.leaves(node)) == {"a.b.c": 1, "a.2.0": 3, "a.2.1.d": 4, "e": {}}
    assert tree.find(node, "a.b.c") == 1
    assert tree.find(node, "a.2.1.d") == 4
    assert tree.find(node, "a.b") is tree.UNKNOWN
    assert tree.find(node, "") == node


# The union of two ranks' trees.


def union(a, b):
    conflicts = []
    return tree.merge(a, b, "", conflicts.append), conflicts


encoded = values.map(lambda value: tree.encode(value, "", no_leaf))
trees = st.recursive(
    st.integers(0, 2),
    lambda below: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "c"]), below, max_size=3),
        st.dictionaries(st.sampled_from(["a", 1, (2,), None]), below, max_size=3),
        st.lists(below, max_size=2),
        st.lists(below, max_size=2).map(tuple),
    ),
    max_leaves=8,
).map(lambda value: tree.encode(value, "", no_leaf))


def unordered(node):
    """A node without regard to the order of keys, which is the first rank's."""
    if isinstance(node, list):
        return [unordered(n) for n in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") == "dict":
        return {"$": "dict", "v": sorted(([unordered(k), unordered(v)] for k, v in node["v"]), key=repr)}
    return {k: unordered(v) for k, v in node.items()}


@fast
@given(encoded)
def test_a_tree_and_itself_are_itself(a):
    assert union(a, msgspec.json.decode(msgspec.json.encode(a))) == (a, [])


@settings(deadline=None, max_examples=250)
@given(trees, trees)
def test_two_trees_agree_or_not_in_either_order_and_their_union_is_the_same(a, b):
    (ab, left), (ba, right) = union(a, b), union(b, a)
    assert left == right or sorted(left) == sorted(right)
    if not left:
        assert unordered(ab) == unordered(ba)


@settings(deadline=None, max_examples=250)
@given(trees, trees, trees)
def test_the_union_of_three_trees_does_not_depend_on_who_is_first(a, b, c):
    ab, first = union(a, b)
    bc, second = union(b, c)
    left, third = union(ab, c)
    right, fourth = union(a, bc)
    if not first + second + third + fourth:
        assert unordered(left) == unordered(right)


@settings(deadline=None, max_examples=250)
@given(trees, trees)
def test_a_union_without_conflict_holds_all_leaves_of_both_trees(a, b):
    merged, conflicts = union(a, b)
    if not conflicts:
        paths = {path for path, _ in tree.leaves(merged)}
        for part in (a, b):
            for path, leaf in tree.leaves(part):
                assert leaf in ({}, []) or path in paths or any(p.startswith(f"{path}.") for p in paths)


def test_keys_that_one_rank_alone_has_are_taken_over():
    a = tree.encode({"m": {"x": 1}, "k": {1: "a"}}, "", no_leaf)
    b = tree.encode({"m": {"y": 2}, "k": {2: "b"}, "n": (3,)}, "", no_leaf)
    merged, conflicts = union(a, b)
    assert not conflicts
    assert tree.decode(merged, "", unknown) == {"m": {"x": 1, "y": 2}, "k": {1: "a", 2: "b"}, "n": (3,)}


def test_an_empty_dict_and_one_whose_keys_are_no_strings_are_united():
    for a, b in (({}, {0: "a"}), ({"x": 1}, {"x": 1, 0: "a"}), ({"$": 1}, {"x": 2})):
        for first, second in ((a, b), (b, a)):
            merged, conflicts = union(tree.encode(first, "", no_leaf), tree.encode(second, "", no_leaf))
            assert not conflicts
            assert tree.decode(merged, "", unknown) == a | b


@pytest.mark.parametrize(
    ("a", "b", "paths"),
    [
        ({"a": 1}, {"a": 2}, ["a"]),
        ({"a": {"b": 1, "c": 1}}, {"a": {"b": 2, "c": "1"}}, ["a.b", "a.c"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a.1"]),
        ({"a": (1,)}, {"a": [1]}, ["a"]),
        ({"a": {1: 1}}, {"a": {1: 2}}, ["a.1"]),
        ({"a": {1}}, {"a": {2}}, ["a"]),
        ({"a": Counter(x=1)}, {"a": Counter(x=2)}, ["a"]),
        ({"a": {"b": 1}}, {"a": 1}, ["a"]),
        ({"a": math.nan}, {"a": math.inf}, ["a"]),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": [0, 0.0]}, {"a": [0, -0.0]}, ["a.1"]),
    ],
)
def test_a_difference_is_named_by_its_path(a, b, paths):
    assert union(tree.encode(a, "", no_leaf), tree.encode(b, "", no_leaf))[1] == paths


def test_keys_that_have_one_name_and_two_types_are_a_difference():
    for a, b in (({1: 0}, {"1": 0}), ({1: 0, "x": 0}, {"1": 0, "x": 0, None: 0}), ({None: 0}, {"None": 0})):
        name = next(iter(b))
        assert union(tree.encode({"k": a}, "", no_leaf), tree.encode({"k": b}, "", no_leaf))[1] == [f"k.{name}"]


def test_the_groups_of_optimizers_are_joined_by_their_number():
    def optimizer(state, groups):
        return {"$": "optimizer", "state": state, "groups": [{"params": p, "options": o} for p, o in groups]}

    a = optimizer({"w": {"step": 1}}, [(["w", "both"], {"lr": 1}), ([], {"lr": 2})])
    b = optimizer({"v": {"step": 1}}, [(["v", "both"], {"lr": 1}), (["u"], {"lr": 3})])
    merged, conflicts = union(a, b)
    assert conflicts == ["param_groups.1.lr"]
    assert merged["state"] == {"w": {"step": 1}, "v": {"step": 1}}
    assert [g["params"] for g in merged["groups"]] == [["w", "both", "v"], ["u"]]
    assert union(a, optimizer({}, []))[1] == ["param_groups"]
