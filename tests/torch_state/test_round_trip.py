"""One process: what goes in comes out, exactly, whatever it is."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import flagstone as fs
from flagstone.adapters.pytorch import TORCH_DTYPES
from ranks import fresh


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    words = torch.randint(0, high, (math.prod(shape) * size,), dtype=torch.uint8)
    return words.view(dtype).reshape(shape)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


@pytest.mark.parametrize("name", list(TORCH_DTYPES))
def test_every_element_type_keeps_its_bits(name: str, tmp_path: Path) -> None:
    dtype = TORCH_DTYPES[name]
    state = {"m": {"a": _random(dtype, 5, 7), "zero": _random(dtype), "empty": _random(dtype, 3, 0, 2)}}
    fs.save(state, tmp_path / "a")
    loaded = fs.load(tmp_path / "a")["m"]
    target = {k: torch.zeros_like(v) for k, v in state["m"].items()}
    fs.load(tmp_path / "a", into={"m": target})
    for key, tensor in state["m"].items():
        assert _same(loaded[key], tensor)
        assert _same(target[key], tensor)
    with fs.open(tmp_path / "a") as checkpoint:
        assert _same(checkpoint["m.a"][1:3], state["m"]["a"][1:3])


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, 1:4],
        lambda t: t[::2],
        lambda t: t[3:4].expand(6, 8),
        lambda t: t.reshape(2, 2, 2, 4).contiguous(memory_format=torch.channels_last),
        lambda t: t.as_strided((3, 3), (8, 2), 1),
        lambda t: t[2, 3],
        lambda t: t[4:4],
    ],
    ids=["transposed", "columns", "strided", "expanded", "channels-last", "as_strided", "element", "no rows"],
)
def test_any_strides_are_saved_and_filled(view: Any, tmp_path: Path) -> None:
    tensor = view(torch.arange(32.0).reshape(4, 8))
    fs.save({"x": {"t": tensor}}, tmp_path / "a")
    assert torch.equal(fs.load(tmp_path / "a")["x"]["t"], tensor)
    if 0 in tensor.stride() and tensor.numel() > 1:
        with pytest.raises(fs.LoadError, match=r"x\.t: an expanded tensor"):
            fs.load(tmp_path / "a", into={"x": {"t": tensor}})
        return
    target = view(torch.zeros(4, 8))
    fs.load(tmp_path / "a", into={"x": {"t": target}})
    assert torch.equal(target, tensor)
    assert target.stride() == tensor.stride()


def test_a_large_tensor_of_strange_strides_passes_through_bounded_buffers(tmp_path: Path) -> None:
    tensor = torch.rand(700, 33, 500).permute(2, 0, 1)
    target = torch.zeros(33, 500, 700).permute(1, 2, 0)
    fs.save({"m": {"t": tensor}}, tmp_path / "a")
    fs.load(tmp_path / "a", into={"m": {"t": target}})
    assert torch.equal(tensor, target)


def test_a_view_stores_its_own_elements_only(tmp_path: Path) -> None:
    flat = torch.rand(1_000_000)
    views = {f"v{i}": flat[i * 10_000 : (i + 1) * 10_000] for i in range(100)}
    one = fs.save({"m": {"v": views["v7"]}}, tmp_path / "one").files
    every = fs.save({"m": views}, tmp_path / "all").files
    assert one["m.safetensors"] <= 40_000 + 4096
    assert every["m.safetensors"] < 1.1 * flat.nbytes


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 16)
            self.head = torch.nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

    model, other = Tied(), Tied()
    report = fs.save({"model": model}, tmp_path / "a")
    assert report.files["model.safetensors"] == 4096 + 50 * 16 * 4
    assert list(load_file(tmp_path / "a" / "model.safetensors")) == ["embedding.weight"]
    state = fs.load(tmp_path / "a")["model"]
    assert state["head.weight"] is state["embedding.weight"]
    fs.load(tmp_path / "a", into={"model": other})
    assert torch.equal(other.head.weight, model.embedding.weight)
    other.head.weight = torch.nn.Parameter(torch.zeros(50, 16))
    fs.load(tmp_path / "a", into={"model": other})  # tied when saved, two tensors here: both are filled
    assert torch.equal(other.head.weight, model.embedding.weight)


def test_two_different_tensors_do_not_go_into_one(tmp_path: Path) -> None:
    fs.save({"m": {"a": torch.ones(3), "b": torch.zeros(3)}}, tmp_path / "a")
    tied = torch.full((3,), 7.0)
    with pytest.raises(fs.LoadError, match=r"m\.b and m\.a are one tensor in the target, but two"):
        fs.load(tmp_path / "a", into={"m": {"a": tied, "b": tied}})
    assert torch.equal(tied, torch.full((3,), 7.0))
    fs.load(tmp_path / "a", into={"m": {"a": tied, "b": tied}}, exclude="m.b")
    assert torch.equal(tied, torch.ones(3))


PLAIN = {
    "none": None,
    "flags": [True, False],
    "ints": [0, -1, 2**63, -(2**200)],
    "floats": [0.1, -0.0, float("inf"), float("-inf"), 1e308],
    "text": "äöü \n\"'",
    "bytes": b"\x00\xff",
    "tuple": (1, (2, [3])),
    "keys": {1: "a", "1b": "b", (1, 2): "c", None: "d", 2.5: "e"},
    "dots": {"a.b": 1, "c": {"d": 2}},
    "set": {1, 2, 3},
    "odict": OrderedDict(b=1, a=2),
    "counter": Counter("hello"),
    "complex": 1 - 2j,
    "empty": [{}, [], ()],
    "scalar": np.float32(1.5),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
}


def test_plain_values_keep_type_and_value(tmp_path: Path) -> None:
    fs.save(PLAIN, tmp_path / "a")
    loaded = fs.load(tmp_path / "a")
    assert loaded.keys() == PLAIN.keys()
    for key, value in PLAIN.items():
        if isinstance(value, np.ndarray):
            assert loaded[key].dtype == value.dtype
            assert np.array_equal(loaded[key], value)
        else:
            assert repr(loaded[key]) == repr(value)
    target = dict.fromkeys(PLAIN)
    fs.load(tmp_path / "a", into=target)
    assert repr(target) == repr(PLAIN)


def test_nan_stays(tmp_path: Path) -> None:
    fs.save({"x": float("nan"), "t": torch.tensor([float("nan"), float("inf")])}, tmp_path / "a")
    loaded = fs.load(tmp_path / "a")
    assert math.isnan(loaded["x"])
    assert torch.equal(torch.isnan(loaded["t"]), torch.tensor([True, False]))


def test_int_keys_of_tensors_stay_int(tmp_path: Path) -> None:
    state = {"by_layer": {0: torch.ones(2), 1: (torch.zeros(3), 5)}, 7: torch.arange(3)}
    fs.save(state, tmp_path / "a")
    loaded = fs.load(tmp_path / "a")
    assert list(loaded) == ["by_layer", 7]
    assert list(loaded["by_layer"]) == [0, 1]
    assert isinstance(loaded["by_layer"][1], tuple)
    assert torch.equal(loaded["by_layer"][1][0], torch.zeros(3))


@pytest.mark.parametrize(
    "state",
    [{"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, {"a": {1: 1, "1": 2}}, {"x.y": 1, "x": {"y": 2}}],
    ids=["tensors", "int and str", "values"],
)
def test_two_paths_with_one_name_are_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(fs.SaveError, match="name"):
        fs.save(state, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, "function"),
        (object(), "object"),
        (torch.ones(2).to_sparse(), "layout"),
        (torch.ones(2, device="meta"), "meta device"),
        (np.array([{}], dtype=object), "object"),
        (np.array(["a"]), "<U1"),
    ],
    ids=["function", "object", "sparse", "meta", "object array", "text array"],
)
def test_what_cannot_be_saved_is_refused_by_name(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(fs.SaveError, match=words) as caught:
        fs.save({"outer": {"inner": [1, value]}}, tmp_path / "a")
    assert "outer.inner.1" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(fs.SaveError):
        fs.save(state, tmp_path / "a")


def test_pickles_are_only_for_those_who_ask_twice(tmp_path: Path) -> None:
    state = {"plain": 1, "odd": {"path": Path("x")}}
    with pytest.raises(fs.SaveError, match=r"odd\.path.*allow_pickle"):
        fs.save(state, tmp_path / "a")
    fs.save(state, tmp_path / "a", allow_pickle=True)
    with pytest.raises(fs.LoadError, match=r"odd\.path.*allow_pickle"):
        fs.load(tmp_path / "a")
    assert fs.load(tmp_path / "a", exclude="odd")["plain"] == 1
    assert fs.load(tmp_path / "a", allow_pickle=True) == state


def test_big_endian_and_strided_numpy_arrays(tmp_path: Path) -> None:
    big = np.arange(4, dtype=">i4")
    strided = np.arange(24.0).reshape(4, 6)[:, ::2]
    fs.save({"n": {"big": big, "strided": strided}}, tmp_path / "a")
    target = {"big": np.zeros(4, np.int32), "strided": np.zeros((4, 6))[:, ::2]}
    fs.load(tmp_path / "a", into={"n": target})
    assert np.array_equal(target["big"], big)
    assert np.array_equal(target["strided"], strided)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TORCH_DTYPES)),
            st.lists(st.integers(0, 9), max_size=4),
        ),
        max_size=12,
    )
)
def test_any_set_of_tensors_comes_back(tmp_path: Path, tensors: list[tuple[str, list[int]]]) -> None:
    path = fresh(tmp_path)
    state = {f"t{i}": _random(TORCH_DTYPES[d], *s) for i, (d, s) in enumerate(tensors)}
    fs.save({"group": state}, path)
    loaded = fs.load(path)["group"]
    target = {k: torch.zeros_like(v) for k, v in state.items()}
    fs.load(path, into={"group": target})
    for key, tensor in state.items():
        assert _same(loaded[key], tensor)
        assert _same(target[key], tensor)
    fs.verify(path)


def test_a_lazy_slice_equals_the_slice(tmp_path: Path) -> None:
    tensor = torch.arange(5 * 6 * 7).reshape(5, 6, 7)
    fs.save({"t": tensor, "d": {"x": 3}}, tmp_path / "a")
    with fs.open(tmp_path / "a") as checkpoint:
        lazy = checkpoint["t"]
        assert (lazy.shape, lazy.dtype, len(lazy), lazy.ndim, lazy.nbytes) == ((5, 6, 7), "int64", 5, 3, 1680)
        for index in (
            ...,
            2,
            -1,
            slice(1, 3),
            (slice(None), 3),
            (1, 2, 3),
            (..., slice(2, 6, 2)),
            (None, 1),
            slice(4, 4),
        ):
            assert torch.equal(lazy[index], tensor[index]), index
        assert np.array_equal(lazy.numpy((slice(1, 2),)), tensor[1:2].numpy())
        assert np.array_equal(np.asarray(lazy), tensor.numpy())
        for bad in (5, (0, 0, 0, 0), slice(None, None, -1), "a", [1, 2]):
            with pytest.raises(IndexError):
                lazy[bad]
        assert checkpoint["d.x"] == 3
        assert checkpoint["d"] == {"x": 3}
        assert list(checkpoint) == ["t", "d.x"]
        with pytest.raises(KeyError, match=r"near: d\.x"):
            checkpoint["d.y"]


def test_memory_folders_hold_checkpoints_too() -> None:
    state = {"w": torch.rand(100), "n": 5}
    fs.save(state, "memory://round/trip", overwrite=True)
    assert torch.equal(fs.load("memory://round/trip")["w"], state["w"])
    assert fs.verify("memory://round/trip").tensors == 1
