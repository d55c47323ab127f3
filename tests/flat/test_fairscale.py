"""The same as fairscale, where fairscale is right."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from fairscale.nn.misc import FlattenParamsWrapper as Theirs
from torch import nn

from flagstone import FlattenParamsWrapper as Ours


class Tied(nn.Module):
    """Two embeddings that are one, a layer that is used twice, buffers, and a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.again = self.body[0]
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.again(self.body(self.embed(tokens).flatten(0, 1)))
        return self.head(x * self.scale)


def linear():
    return nn.Linear(4, 3)


def stacked():
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8, bias=False)), nn.LayerNorm(8))


def half():
    return stacked().bfloat16()


def attention():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def convolution():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))


def recurrent():
    return nn.LSTM(4, 3)


INPUTS = {
    linear: lambda: torch.randn(5, 4),
    stacked: lambda: torch.randn(5, 4),
    half: lambda: torch.randn(5, 4).bfloat16(),
    attention: lambda: torch.randn(2, 3, 4),
    convolution: lambda: torch.randn(2, 1, 6, 6),
    recurrent: lambda: torch.randn(3, 2, 4),
    Tied: lambda: torch.randint(11, (4, 3)),
}

GROUPS = {
    "all": lambda m: None,
    "one list": lambda m: list(m.parameters())[::-1],
    "twice the same": lambda m: [*m.parameters(), *m.parameters()],
    "some": lambda m: list(m.parameters())[1:3],
    "two groups": lambda m: [list(m.parameters())[2:], list(m.parameters())[:2]],
    "empty group": lambda m: [[]],
    "empty among others": lambda m: [[], list(m.parameters())[1:]],
    "nothing": lambda m: [],
}

modules = pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
groups = pytest.mark.parametrize("group", GROUPS)


def pair(make, group="all", **kwargs):
    """A module wrapped by both."""
    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module)
    return Theirs(module, GROUPS[group](module), **kwargs), Ours(twin, GROUPS[group](twin), **kwargs)


def out(result):
    return result[0] if isinstance(result, tuple) else result


def same(a, b):
    """Equal names, and equal values bit for bit; fairscale mixes the order up."""
    assert sorted(a) == sorted(b)
    assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def other(state):
    """Other values for the same names; what is tied stays equal."""
    return {key: value + 1 for key, value in state.items()}


@modules
@groups
def test_flat_parameters_have_the_same_names_values_and_metadata(make, group):
    theirs, ours = pair(make, group)
    same(dict(theirs.named_parameters()), dict(ours.named_parameters()))
    assert ours.num_params_managed == theirs.num_params_managed
    assert ours.is_flattened == theirs.is_flattened
    assert ours.flat_param_names == theirs.flat_param_names
    assert len(ours.flat_params) == len(theirs.flat_params)
    for i, (a, b) in enumerate(zip(theirs.flat_params, ours.flat_params, strict=True)):
        names, shapes, numels = theirs.metadata(i)
        assert ours.metadata(i) == ([n.replace("_fpw_module.", "") for n in names], shapes, numels)
        assert b.metadata() == ours.metadata(i)
        assert all(torch.equal(x, y) for x, y in zip(a.get_param_views(), b.get_param_views(), strict=True))
    views = zip(theirs.get_param_views(), ours.get_param_views(), strict=True)
    assert all(torch.equal(x, y) and x.shape == y.shape for x, y in views)


@modules
@groups
def test_state_dicts_are_the_same_flat_and_not(make, group):
    theirs, ours = pair(make, group)
    same(theirs.state_dict(), ours.state_dict())
    same(theirs.flat_state_dict(), ours.flat_state_dict())
    same(nn.ModuleDict({"a": theirs}).state_dict(prefix="x."), nn.ModuleDict({"a": ours}).state_dict(prefix="x."))


@modules
@groups
def test_each_loads_what_the_other_saved(make, group):
    theirs, ours = pair(make, group)
    for save in ("state_dict", "flat_state_dict"):
        state = other(getattr(theirs, save)())
        ours.load_state_dict(state)
        same(getattr(ours, save)(), state)
        state = other(getattr(ours, save)())
        theirs.load_state_dict(dict(state))
        same(getattr(theirs, save)(), state)


@modules
@pytest.mark.parametrize("group", ["all", "some", "two groups", "nothing"])
def test_training_is_the_same_bit_for_bit(make, group):
    theirs, ours = pair(make, group)
    plain = make()
    plain.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in (theirs, ours, plain)]
    for _ in range(3):
        x = INPUTS[make]()
        outputs = []
        for module, optimizer in zip((theirs, ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(out(module(x)))
            outputs[-1].float().square().mean().backward()
            optimizer.step()
        assert torch.equal(outputs[0], outputs[1])
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a, b)
            assert a.grad is None if b.grad is None else torch.equal(a.grad, b.grad)
        torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()))


@modules
def test_parameters_are_the_same_inside_of_unflatten_params(make):
    theirs, ours = pair(make, "two groups")
    with theirs.unflatten_params(), ours.unflatten_params():
        same(dict(theirs.named_parameters()), dict(ours.named_parameters()))
        assert (theirs.is_flattened, theirs.flat_params) == (ours.is_flattened, ours.flat_params) == (False, [])
    data = [torch.randn_like(p) for p in theirs.flat_params]
    with theirs.unflatten_params(data), ours.unflatten_params(data):
        same(dict(theirs.named_parameters()), dict(ours.named_parameters()))


def test_names_of_ones_own():
    theirs, ours = pair(stacked, "two groups", flat_param_names=["rest", "first"])
    assert ours.flat_param_names == theirs.flat_param_names == ["flat_param_rest", "flat_param_first"]
    same(theirs.flat_state_dict(), ours.flat_state_dict())
    assert ours.flat_param_first is ours.flat_params[1]


def test_attributes_and_items_of_the_module():
    theirs, ours = pair(stacked)
    for wrapper in (theirs, ours):
        assert wrapper.module is wrapper._fpw_module
        assert wrapper[0] is wrapper.module[0]
        assert wrapper[0].in_features == 4
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = wrapper.no_such_thing


def test_a_fairscale_file_loads_without_fairscale_code():
    theirs, ours = pair(Tied, "two groups")
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(1)
    file = io.BytesIO()
    torch.save(theirs.flat_state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file, weights_only=True))
    same(ours.state_dict(), theirs.state_dict())
