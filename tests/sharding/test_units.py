"""Which modules are units, and which parameters they have: sharded training equals the plain model for all of these."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flagstone as fs
from sharded import CONNECTED, TWO_WAYS, adamw, batch, check_steps, connect, net, one_step, shard, text, whole

WIDTH = 5


def layers(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


class Stage(nn.Module):
    """Own parameters before and after modules that may be units."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.ModuleList(inside)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.before(x)
        for module in self.inside:
            x = x + module(x)
        return x * self.scale


def three_levels():
    return Stage(Stage(nn.Linear(5, 5), Stage(nn.Linear(5, 5))), Stage(nn.Linear(5, 5), nn.Linear(5, 5)))


def all_stages_and_layers(model):
    first, second = model.inside
    return [first.inside[0], first.inside[1].inside[0], first.inside[1], first, *second.inside, second]


def tied_inside():
    model = Stage(layers(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 5))
    model.inside[0][2].weight = model.inside[0][0].weight
    return model


def tied_siblings():
    model = Stage(layers(nn.Linear(5, 5), nn.Tanh()), layers(nn.Linear(5, 5), nn.Tanh()))
    model.inside[1][0].weight = model.inside[0][0].weight
    return model


def tied_to_root():
    model = Stage(layers(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 5))
    model.inside[1].weight = model.before.weight
    return model


class Scaled(nn.Module):
    """Buffers only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x):
        return x * self.factor


def without_own():
    tied = Stage(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Tanh(), Scaled())
    tied.inside[1].weight = tied.inside[0].weight
    return tied


class Shapes(nn.Module):
    """R016's shapes, an empty one, and one that is smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate([(1,), (2,), (1, 1), (), (0, 3), (1, 2, 1)]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return x * sum(p.sum() for p in self.parameters())


def shapes():
    return Stage(Shapes(), layers(Shapes(), nn.Linear(5, 5)))


def uneven():
    return Stage(
        layers(nn.Linear(5, 2), nn.Linear(2, 5)), layers(nn.Linear(5, 999), nn.Linear(999, 5)), nn.Linear(5, 5)
    )


class Cast(nn.Module):
    """A bf16 layer between fp32 ones, and an integer buffer, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return self.layer(self.norm(x).bfloat16()).float()


def mixed_types():
    return Stage(Cast(), Cast())


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, 7))
        self.conv = nn.Conv2d(3, 4, 2)

    def forward(self, x):
        image = (x @ self.turned).repeat(1, 3).view(-1, 3, 1, 7).expand(-1, 3, 2, 7)
        return self.conv(image).sum((1, 2))[:, :WIDTH] * self.turned[:WIDTH, :WIDTH].sum()


def batch_norm():
    return Stage(layers(nn.Linear(5, 5), nn.BatchNorm1d(5)), nn.BatchNorm1d(5))


def children(model):
    return list(model.inside)


def one_list(model):
    return [[*model.inside]]


CASES = {
    "units in units, three levels": (three_levels, all_stages_and_layers),
    "parameters of the root around units": (three_levels, children),
    "tied inside of a unit": (tied_inside, children),
    "R001: tied across units": (tied_siblings, children),
    "tied between root and unit": (tied_to_root, children),
    "R002: units without own parameters": (without_own, children),
    "R016: tiny and empty parameters": (shapes, lambda m: [m.inside[0], m.inside[1][0], m.inside[1]]),
    "sizes of units from 10 to 10,000": (uneven, children),
    "bf16 and fp32 in one unit": (mixed_types, children),
    "batch norm": (batch_norm, children),
    "a list of modules as one unit": (tied_siblings, one_list),
    "only the root": (three_levels, lambda m: []),
}


def case(rank, world, name, how):
    build, units = CASES[name]
    check_steps(rank, world, build, one_step, how, units=units)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_plain_model(ranks, name, how):
    ranks.run(2, case, name, how)


@pytest.mark.parametrize("world", [1, 3])
def test_tiny_parameters_on_other_numbers_of_ranks(ranks, world):
    """R016: one rank, and more ranks than elements."""
    for how in TWO_WAYS:
        ranks.run(world, case, "R016: tiny and empty parameters", how)


def turn(model):
    for inside in model.inside:
        inside.turned.data = inside.turned.data.t().contiguous().t()
        inside.conv.to(memory_format=torch.channels_last)
        assert not inside.turned.is_contiguous()
        assert not inside.conv.weight.is_contiguous()


def strided(rank, world, how):
    check_steps(rank, world, lambda: Stage(Strided(), Strided()), one_step, how, units=children, prepare=turn)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_parameters_that_were_not_contiguous_are_as_contiguous_ones(ranks, how):
    """Transposed and channels_last."""
    ranks.run(2, strided, how)


def tied(rank, world, path):
    connect(None, rank)
    model = tied_siblings()
    shard(model, units=children(model))
    opt = adamw(model.parameters())
    one_step(model, rank, 0, torch.Tensor.backward)
    opt.step()
    assert model.inside[1][0].weight is model.inside[0][0].weight
    fs.save({"model": model}, path)


def test_tied_weights_of_two_units_are_saved_under_both_names(ranks, tmp_path):
    """R001"""
    ranks.run(2, tied, tmp_path / "a")
    state = fs.load(tmp_path / "a")["model"]
    assert set(state) == set(tied_siblings().state_dict())
    assert torch.equal(state["inside.0.0.weight"], state["inside.1.0.weight"])
    fresh = tied_siblings()
    fs.load(tmp_path / "a", into={"model": fresh})
    assert fresh.inside[1][0].weight is fresh.inside[0][0].weight
    assert torch.equal(fresh.inside[1][0].weight, state["inside.1.0.weight"])


def without_own_saved(rank, world, path):
    connect(None, rank)
    model = without_own()
    shard(model, units=children(model))
    one_step(model, rank, 0, torch.Tensor.backward)
    fs.save({"model": model}, path)
    before = {k: whole(v).clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fs.load(path, into={"model": model})
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), before[name])


@pytest.mark.parametrize("world", [1, 2])
def test_units_without_own_parameters_are_saved_and_loaded(ranks, world, tmp_path):
    """R002"""
    ranks.run(world, without_own_saved, tmp_path / "a")


def auto_wrapped(rank, world, how):
    """Every Embedding and Linear is a unit; the head is tied to the embedding."""
    plain = net(blocks=1)
    model = copy.deepcopy(plain)
    connect(CONNECTED[how], rank)
    shard(model, units=[m for m in model.modules() if isinstance(m, (nn.Embedding, nn.Linear))])
    assert torch.equal(model(text(0, rank)), plain(text(0, rank)))


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_rule_that_makes_units_by_type_may_part_tied_weights(ranks, how):
    """R017"""
    ranks.run(2, auto_wrapped, how)


def huge_embedding(rank, world, how):
    connect(CONNECTED[how], rank)
    model = net(blocks=6, width=8, tokens=4000)
    model.head = nn.Linear(8, 3)
    shard(model, units=[model.embed, *model.blocks])
    report = fs.memory_report(model)
    embedding, block = 4000 * 8 * 4, sum(p.numel() for p in model.blocks[0].parameters()) * 4
    for kind, nbytes, users in report["buffers"]:
        largest = embedding if any("embed" in u for u in users) else block
        assert nbytes < 2 * largest, (kind, users)
    turns = [line for line in report["buffers"] if line[0].endswith("in turn")]
    assert sum(nbytes for _, nbytes, _ in turns) <= 2 * (embedding + 2 * block)
    every = sum(p.numel() for p in model.parameters()) * 4
    if how == "one host":
        assert report["shared_bytes"] <= every + 64 * len(report["buffers"])
    for _ in range(2):  # and nothing is added by steps
        loss = model(text(0, rank, 4000)).square().sum()
        loss.backward()
        assert fs.memory_report(model) == report


@pytest.mark.parametrize("how", TWO_WAYS)
def test_buffers_follow_the_units_that_share_them(ranks, how):
    """R020: a huge embedding does not make the buffers of small blocks larger."""
    ranks.run(2, huge_embedding, how)


class FourBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scales", torch.rand(3, 2))
        self.register_buffer("indices", torch.arange(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(41.5, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x)


def four_buffers(rank, world, path):
    connect(None, rank)
    plain = Stage(FourBuffers(), nn.Linear(5, 5))
    before = {k: v.clone() for k, v in plain.named_buffers()}
    model = shard(plain, units=children(plain), precision=fs.MixedPrecision(param=torch.bfloat16))
    one_step(model, rank, 0, torch.Tensor.backward)
    fs.save({"model": model}, path)
    state = model.state_dict()
    for name, value in before.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value)


def test_buffers_keep_values_and_types_under_mixed_precision(ranks, tmp_path):
    """R010"""
    ranks.run(2, four_buffers, tmp_path / "a")
    state = fs.load(tmp_path / "a")["model"]
    for name in ("scales", "indices", "mask", "count"):
        assert state[f"inside.0.{name}"].dtype == getattr(FourBuffers(), name).dtype
    assert state["inside.0.count"] == 41.5


def plain_keys(rank, world, path):
    connect(None, rank)
    model = three_levels()
    shard(model, units=all_stages_and_layers(model))
    assert list(model.state_dict()) == list(three_levels().state_dict())
    fs.save(model, path)
    three_levels().load_state_dict({k: whole(v) for k, v in model.state_dict().items()}, strict=True)


def test_the_exported_keys_are_those_of_the_plain_model(ranks, tmp_path):
    """R020"""
    ranks.run(2, plain_keys, tmp_path / "a")
    three_levels().load_state_dict(fs.load(tmp_path / "a"), strict=True)


def test_one_process_without_a_group_needs_no_ranks():
    plain = three_levels()
    model = shard(copy.deepcopy(plain), units=[])
    x = batch(0, 0)
    assert torch.equal(model(x), plain(x))
