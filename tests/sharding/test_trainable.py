"""Parameters that are frozen, that are thawed later, and that a step does not use."""

from __future__ import annotations

import copy
import functools
import pickle
import re

import pytest
import torch
from torch import nn

import flagstone as fs
from sharded import (
    CONNECTED,
    TWO_WAYS,
    Block,
    assert_same,
    assert_same_gradients,
    batch,
    check_steps,
    connect,
    one_step,
    shard,
    whole,
)

WIDTH = 5
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)


class Trunk(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def freeze_trunk(model, number=0):
    if number == 0:
        model.blocks.requires_grad_(False)


def toggle(model, number):
    """Other parameters in each step, also some of a unit."""
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_((i + number) % 3 > 0)


def thaw(model, number):
    model.blocks.requires_grad_(number > 1)


class Adapter(nn.Module):
    """R003: a frozen layer, and a trainable one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.layer(x) + self.up(self.down(x)))


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapter() for _ in range(3))

    def forward(self, x):
        x = nn.functional.pad(x, (0, 3))
        for block in self.blocks:
            x = block(x)
        return x


def frozen_trunk():
    model = Trunk()
    freeze_trunk(model)
    return model


CASES = {
    "R004: frozen before": (frozen_trunk, {}),
    "R004: frozen after": (Trunk, {"change": freeze_trunk}),
    "thawed after two steps": (Trunk, {"change": thaw, "steps": 4}),
    "other parameters in each step": (Trunk, {"change": toggle, "steps": 4}),
    "R003: adapters": (Adapters, {"steps": 5}),
}


def case(rank, world, name, how):
    build, options = CASES[name]
    for optimizer in (sgd, adamw):
        check_steps(rank, world, build, one_step, how, optimizer=optimizer, **options)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("name", CASES)
def test_frozen_parameters_are_as_in_the_plain_model(ranks, name, how):
    ranks.run(2, case, name, how)


def adapters(rank, world, how, path):
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Adapters()
    model = shard(copy.deepcopy(plain))
    opt = adamw(model.parameters())
    for number in range(5):
        one_step(model, rank, number, torch.Tensor.backward)
        opt.step()
        opt.zero_grad()
    before = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter in opt.state) == parameter.requires_grad
        assert torch.equal(whole(parameter), before[name].detach()) != parameter.requires_grad
    buffers = fs.memory_report(model)["buffers"]
    mine = [nbytes for kind, nbytes, _ in buffers if kind == "gradients of this rank"]
    assert sum(mine) == sum(p.local.nbytes for p in model.parameters() if p.requires_grad)
    assert max(nbytes for kind, nbytes, _ in buffers if kind == "gradients, in turn") < 2 * 4 * (8 * 2 + 2 * 8)
    fs.save({"model": model, "optimizer": opt}, path)
    fresh = shard(Adapters())
    new = adamw(fresh.parameters())
    fs.load(path, into={"model": fresh, "optimizer": new})
    for each, o in ((model, opt), (fresh, new)):
        one_step(each, rank, 9, torch.Tensor.backward)
        o.step()
    assert_same(fresh, copied(model, Adapters()))


def copied(model, plain):
    plain.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    return plain


@pytest.mark.parametrize("how", TWO_WAYS)
def test_frozen_weights_of_a_unit_have_neither_gradients_nor_state(ranks, how, tmp_path):
    """R003"""
    ranks.run(2, adapters, how, tmp_path / "a")


def all_frozen(rank, world, how):
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Trunk(4).requires_grad_(False)
    model = shard(copy.deepcopy(plain))
    for _ in range(2):
        inputs = []
        for each in (model, plain):
            x = batch(rank, 0).requires_grad_()
            each(x).square().mean().backward()
            inputs.append(x.grad)
        assert torch.equal(*inputs)
    assert all(p.grad is None for p in model.parameters())
    report = fs.memory_report(model)
    assert not [line for line in report["buffers"] if "gradient" in line[0]]


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_frozen_model_gives_its_input_a_gradient_and_needs_no_buffer_for_any(ranks, how):
    """R019"""
    ranks.run(2, all_frozen, how)


# Parameters and units that a step does not use.


class Branches(nn.Module):
    """R014: a step takes one of two blocks; ``spare`` is never used, and half of ``partly`` neither."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH), Block(WIDTH), Partly()])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, which):
        if which is not None:
            x = self.blocks[which](x)
        return self.blocks[3](x) * self.scale


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x)


def branch(model, rank, number, backward, which):
    loss = model(batch(rank, number), which(rank, number)).square().mean()
    backward(loss)
    return loss.detach()


def by_step(rank, number):
    return number % 2


def by_rank(rank, number):
    return (rank + number) % 2


def none_on_one(rank, number):
    return None if rank == number % 2 else 0


def branches(rank, world, how, which, timeout=20.0):
    step = functools.partial(branch, which=which)
    model = check_steps(rank, world, Branches, step, how, steps=4, optimizer=adamw, timeout=timeout)
    with_state = torch.optim.AdamW(model.parameters())
    branch(model, rank, 0, torch.Tensor.backward, which)
    with_state.step()
    assert {n for n, p in model.named_parameters() if p.grad is None} >= {"unused", "blocks.3.unused.weight"}
    assert model.unused not in with_state.state


@pytest.mark.parametrize("how", TWO_WAYS)
def test_units_that_no_rank_uses_have_no_gradient(ranks, how):
    """R014: nor weight decay."""
    ranks.run(2, branches, how, by_step)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("which", [by_rank, none_on_one])
def test_units_that_some_ranks_use_have_the_sum_of_theirs(ranks, world, which):
    """R014"""
    ranks.run(world, branches, "one host", which, 5.0)


@pytest.mark.parametrize("which", [by_rank, none_on_one])
def test_units_that_some_ranks_use_are_refused_by_name_without_shared_memory(ranks, which):
    """R014"""
    for error in ranks.run(2, branches, "each rank a host", which, 2.0, catch=True, seconds=20):
        assert isinstance(error, fs.RankError), error
        assert re.search(r"rank \d (did not come within 2 s|is gone); .* in (reduce|gather) of \w+", str(error))


class LongBranches(nn.Module):
    """Each of the two ways has more units than there are buffers for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(9))

    def forward(self, x, which):
        for i, block in enumerate(self.blocks):
            if i in (0, 8) or i % 2 == which:
                x = block(x)
        return x


def long_branches(rank, world):
    step = functools.partial(branch, which=by_rank)
    check_steps(rank, world, LongBranches, step, "one host", steps=2, optimizer=adamw, timeout=2.0)


def test_ranks_that_take_long_ways_apart_are_right_or_refused_by_name(ranks):
    """R014: each holds buffers that the other would have to sum before it goes on."""
    for result in ranks.run(2, long_branches, catch=True):
        if result is not None:
            assert isinstance(result, fs.RankError), result
            assert re.search(r"did not come within 2 s; rank \d waited in reduce of blocks\.\d", str(result))


def without_memory_cleared(rank, world, how, path):
    """R018"""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        branches(rank, world, how, by_step)
        model = shard(Branches())
        opt = adamw(model.parameters())
        for number in range(3):
            loss = model(batch(rank, number), number % 2).square().mean()
            loss.backward()
            norm = fs.clip_grad_norm_(model.parameters(), 0.1)
            assert norm.isfinite()
            for parameter in model.parameters():
                assert parameter.grad is None or whole(parameter.grad).isfinite().all()
            opt.step()
            opt.zero_grad()
        for parameter in model.parameters():
            assert whole(parameter.detach()).isfinite().all()
        fs.save({"model": model, "optimizer": opt}, path)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_what_lies_in_fresh_memory_reaches_nothing(ranks, how, tmp_path):
    """R018"""
    for name in "ab":
        ranks.run(2, without_memory_cleared, how, tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a").iterdir() if p.suffix == ".safetensors")
    assert files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# What is not about trainable parameters is refused, or changes nothing.


def refused(rank, world, how):
    connect(CONNECTED[how], rank)
    plain = Trunk()
    early = adamw(plain.parameters())
    plain_values = copy.deepcopy(plain)
    model = shard(plain)
    one_step(model, rank, 0, torch.Tensor.backward)
    with pytest.raises(fs.FlagstoneError, match="made before fully_shard"):
        early.step()
    model.zero_grad()
    model.unshard()
    late = adamw(model.parameters())
    model.reshard()
    with pytest.raises(fs.FlagstoneError, match="while the model was computing"):
        late.step()
    for copier in (copy.deepcopy, copy.copy):
        with pytest.raises(fs.FlagstoneError, match=r"cannot be (copied|pickled)"):
            copier(model)
    with pytest.raises(fs.FlagstoneError, match="cannot be pickled"):
        pickle.dumps(model)
    with pytest.raises(fs.FlagstoneError, match=r"flagstone\.save"):
        pickle.dumps(next(model.parameters()))
    before = [(p, p.data_ptr()) for p in model.parameters()]
    assert model.to("cpu") is model
    assert model.float() is model
    assert all(p is q and p.data_ptr() == at for p, (q, at) in zip(model.parameters(), before, strict=True))
    for convert in (model.half, model.double, functools.partial(model.to, torch.bfloat16)):
        with pytest.raises(fs.FlagstoneError, match="cannot become"):
            convert()
    with pytest.raises(fs.FlagstoneError, match="assign=True"):
        model.load_state_dict(plain_values.state_dict(), assign=True)
    with pytest.raises(fs.FlagstoneError, match="is sharded already"):
        fs.fully_shard(model)
    assert_same(model, plain_values)  # all of this has changed nothing
    for number in range(2):
        gradients = []
        for r in range(world):
            one_step(plain_values, r, number, torch.Tensor.backward)
            gradients.append([p.grad for p in plain_values.parameters()])
            plain_values.zero_grad()
        one_step(model, rank, number, torch.Tensor.backward)
        for p, *each in zip(plain_values.parameters(), *gradients, strict=True):
            p.grad = sum(each) / world
        assert_same_gradients(model, plain_values)
        model.zero_grad()
        plain_values.zero_grad()


@pytest.mark.parametrize("how", TWO_WAYS)
def test_what_would_break_a_sharded_model_is_refused(ranks, how):
    """Optimizers of other parameters, copies, pickles, conversions, assignment."""
    ranks.run(2, refused, how)
