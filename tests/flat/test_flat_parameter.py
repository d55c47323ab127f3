"""A flat parameter on its own."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import flagstone as fs


def saved(value, **kwargs):
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **kwargs)


def three():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((2, 3), (), (0, 4))]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool]),
    st.randoms(),
)
def test_views_are_the_parameters_whatever_their_shapes_strides_and_types(shapes, dtype, random):
    params = []
    for shape in shapes:
        order = random.sample(range(len(shape)), len(shape))
        lying = torch.randint(100, [shape[d] for d in order]).to(dtype)
        params.append(lying.permute([order.index(d) for d in range(len(shape))]))
    flat = fs.FlatParameter(params, requires_grad=False)
    assert flat.shape == (sum(p.numel() for p in params),)
    assert flat.dtype == dtype
    for view, param in zip(flat.get_param_views(), params, strict=True):
        assert torch.equal(view, param)
        assert view._base is flat
        sizes = [d for d in range(param.dim()) if param.shape[d] > 1]
        if param.numel():
            assert [view.stride(d) for d in sizes] == [param.stride(d) for d in sizes]


def test_contiguous_parameters_lie_row_major_one_after_the_other():
    params = three()
    flat = fs.FlatParameter(params)
    assert torch.equal(flat, torch.cat([p.flatten() for p in params]))
    assert (flat.requires_grad, flat.is_leaf) == (True, True)
    assert flat.metadata() == (["0", "1", "2"], [p.shape for p in params], [6, 1, 0])


def test_a_parameter_with_gaps_or_repeats_is_packed():
    gaps, repeats = torch.randn(4, 6)[:, ::2], torch.randn(3).expand(2, 3)
    flat = fs.FlatParameter([gaps, repeats])
    assert flat.numel() == 18
    assert [torch.equal(v, p) for v, p in zip(flat.get_param_views(), (gaps, repeats), strict=True)] == [True, True]


def test_views_of_other_data():
    flat = fs.FlatParameter(three())
    other = torch.arange(7)
    first, second, third = flat.get_param_views(other)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (second.item(), third.shape) == (6, (0, 4))
    for wrong in (torch.zeros(6), torch.zeros(7, 1)):
        with pytest.raises(fs.FlagstoneError, match=r"the parameters need \[7\]"):
            flat.get_param_views(wrong)
    flat.data = flat.data[:3]  # a shard
    assert len(list(flat.get_param_views(other))) == 3
    with pytest.raises(fs.FlagstoneError, match=r"shape \[3\]"):
        flat.get_param_views()


def test_its_metadata_is_plain_and_survives_json():
    flat = fs.FlatParameter(three(), names=["a.w", "a.s", "b"])
    assert json.loads(json.dumps(flat.metadata())) == [["a.w", "a.s", "b"], [[2, 3], [], [0, 4]], [6, 1, 0]]
    assert json.loads(json.dumps(flat.places))[0] == ["a.w", [2, 3], 0, 6, []]
    assert flat.half().dtype == torch.float16
    assert flat.flat_layout.dtype == "float32"


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda flat: pickle.loads(pickle.dumps(flat))])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_copy_is_equal_and_apart(copied, trainable):
    flat = fs.FlatParameter([torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)], trainable, names=["w"])
    flat.note = "kept"
    twin = copied(flat)
    assert type(twin) is fs.FlatParameter
    assert torch.equal(twin, flat)
    assert (twin.requires_grad, twin.places, twin.aliases, twin.note) == (trainable, flat.places, {}, "kept")
    twin.data.zero_()
    assert flat.any()


def test_deepcopy_keeps_what_is_one_thing_one_thing():
    flat = fs.FlatParameter(three())
    a, b = copy.deepcopy([flat, flat])
    assert a is b


def test_its_file_loads_in_a_process_that_does_not_know_the_module(tmp_path):
    class Local(nn.Linear):
        """No other process could unpickle it."""

    module = nn.ModuleDict({"a": Local(2, 3), "b": nn.Linear(2, 3)})
    module["b"].weight = module["a"].weight
    wrapper = fs.FlattenParamsWrapper(module)
    torch.save(wrapper.flat_param, tmp_path / "flat.pt")
    code = f"""
        import torch, flagstone
        from flagstone.flat import FlatParameter
        flat = torch.load({str(tmp_path / "flat.pt")!r}, weights_only=True)
        assert type(flat) is FlatParameter and flat.metadata()[0] == ["a.weight", "a.bias", "b.bias"]
        assert flat.aliases == {{"b.weight": "a.weight"}}
        print(flat.sum().item())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout == f"{wrapper.flat_param.sum().item()}\n", done.stderr


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "not empty"),
        (torch.zeros(3), "needs a list"),
        ([torch.zeros(2), "x"], "1 is str"),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.half)], "0 is torch.float32 on cpu, 1 is torch.float16"),
        ([torch.zeros(2), torch.zeros(2, device="meta")], "1 is torch.float32 on meta"),
        ([fs.FlatParameter([torch.zeros(2)])], "0 is flat already"),
        ([nn.UninitializedParameter()], "0 is UninitializedParameter"),
        ([torch.zeros(2).to_sparse()], "0 is torch.float32, torch.sparse_coo"),
    ],
)
def test_what_cannot_be_flattened_is_named(params, message):
    with pytest.raises(fs.FlagstoneError, match=message):
        fs.FlatParameter(params)


def test_names_must_be_different_and_as_many():
    for names in (["a"], ["a", "a"]):
        with pytest.raises(fs.FlagstoneError, match="as many different names"):
            fs.FlatParameter([torch.zeros(1), torch.zeros(1)], names=names)
