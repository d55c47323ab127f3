"""What an optimizer sees: groups, schedules, cleared gradients, scaling, clipping, averages."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import flagstone as fs
from sharded import (
    CONNECTED,
    TWO_WAYS,
    Block,
    Plain,
    adamw,
    assert_same,
    batch,
    connect,
    one_step,
    shard,
    whole,
)

WIDTH = 5


class Body(nn.Module):
    """Blocks that are units, and a head; one parameter is smaller than the number of ranks, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def both(rank, world, how, optimizer=adamw, build=Body, **options):
    """A sharded model with its optimizer, and plain ones."""
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Plain(build(), world, optimizer)
    model = shard(copy.deepcopy(plain.models[rank]), **options)
    return model, optimizer(model.parameters()), plain


def backward(model, plain, rank, number, step=one_step):
    plain.gradients(step, number)
    step(model, rank, number, torch.Tensor.backward)


# Groups, schedules, and gradients that are cleared.


def by_name(model):
    body = [p for n, p in model.named_parameters() if n.startswith("blocks")]
    head = [p for n, p in model.named_parameters() if not n.startswith("blocks")]
    return torch.optim.Adam([{"params": body, "lr": 1e-3}, {"params": head, "lr": 1e-1}])


def within_units(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )


def grouped(rank, world, how, make, path=None):
    """Ten steps; with a path, saved after five and loaded into new ones."""
    model, _, plain = both(rank, world, how)
    opt, plain.optimizers = make(model), [make(m) for m in plain.models]
    every = [opt, *plain.optimizers]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=12) for o in every]
    for number in range(10):
        if number == 5 and path is not None:
            fs.save({"model": model, "optimizer": opt, "schedule": schedules[0]}, path)
            model = shard(Body())
            opt = make(model)
            schedules[0] = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=12)
            fs.load(path, into={"model": model, "optimizer": opt, "schedule": schedules[0]})
            assert [g["weight_decay"] for g in opt.param_groups] == [
                g["weight_decay"] for g in plain.optimizers[0].param_groups
            ]
            assert all(whole(opt.state[p]["exp_avg"]).any() for n, p in model.named_parameters() if n != "unused")
        backward(model, plain, rank, number)
        opt.step()
        plain.step()
        opt.zero_grad(set_to_none=bool(number % 2))
        for schedule in schedules:
            schedule.step()
    assert_same(model, plain.models[rank])


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("make", [by_name, within_units])
def test_groups_and_schedules_apply_to_the_parameters_that_were_named(ranks, how, make):
    """R006"""
    ranks.run(2, grouped, how, make)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("make", [by_name, within_units])
def test_training_goes_on_after_a_load_with_all_groups(ranks, how, make, tmp_path):
    """R007: bit for bit."""
    ranks.run(2, grouped, how, make, tmp_path / "a")


def clearing(rank, world, how, optimizer, method):
    """For five steps one name of a unit gets no update, or a gradient of zero; then all get theirs."""
    torch.use_deterministic_algorithms(True)
    try:
        model, opt, plain = both(rank, world, how, optimizer)
        for number in range(10):
            backward(model, plain, rank, number)
            for each in (model, *plain.models) if number < 5 else ():
                weight = each.blocks[1].widen.weight
                if method == "none":
                    weight.grad = None
                else:
                    weight.grad.zero_()
            opt.step()
            opt.zero_grad(set_to_none=method == "none")
            for o in plain.optimizers:
                o.step()
                o.zero_grad(set_to_none=method == "none")
        assert_same(model, plain.models[rank])
        for value in model.state_dict().values():
            assert whole(value).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("method", ["none", "zero"])
def test_the_gradient_of_one_name_can_be_cleared(ranks, how, method):
    """R005, and R018: fresh memory is filled with NaN."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    for optimizer in (sgd, functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)):
        ranks.run(2, clearing, how, optimizer, method)


class ManyNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))])

    def forward(self, x):
        return self.blocks[0](x)


def own_steps(rank, world, path):
    model, opt, _ = both(rank, world, "one host", build=ManyNames)
    one_step(model, rank, 0, torch.Tensor.backward)
    opt.step()
    for state in (opt.state_dict()["state"], dict(enumerate(opt.state.values()))):
        assert len({s["step"].data_ptr() for s in state.values()}) == len(state) == 4
    fs.save({"model": model, "optimizer": opt}, path / "a")
    first = next(iter(opt.state.values()))
    first["step"] += 1
    assert [int(s["step"]) for s in opt.state.values()] == [2, 1, 1, 1]
    fs.save({"model": model, "optimizer": opt}, path / "b")


def test_each_name_has_its_own_step(ranks, tmp_path):
    """R009"""
    ranks.run(2, own_steps, tmp_path)
    steps = [
        {name: int(value["step"]) for name, value in fs.load(tmp_path / which)["optimizer"]["state"].items()}
        for which in "ab"
    ]
    assert sorted(steps[0].values()) == [1, 1, 1, 1]
    assert sorted(steps[1].values()) == [1, 1, 1, 2]


def other_steps(rank, world, how):
    """Steps of names that differ are kept apart when neighbours are stepped as one."""
    model, opt, plain = both(rank, world, how, build=ManyNames)
    for number in range(4):
        backward(model, plain, rank, number)
        opt.step()
        opt.zero_grad()
        plain.step()
        if number == 1:
            for o in (opt, *plain.optimizers):
                next(iter(o.state.values()))["step"] += 10
    assert_same(model, plain.models[rank])


@pytest.mark.parametrize("how", TWO_WAYS)
def test_steps_that_differ_within_a_unit(ranks, how):
    """R009"""
    ranks.run(2, other_steps, how)


# Clipping.


def clipping(rank, world, how, order, clip):
    model, opt, plain = both(rank, world, how)
    for number in range(3):
        backward(model, plain, rank, number)
        expected, *_ = [nn.utils.clip_grad_norm_(m.parameters(), 1e-2, order) for m in plain.models]
        assert expected > 1e-2
        norm = clip(model.parameters(), 1e-2, order)
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        norms = [torch.zeros(()) for _ in range(world)]
        torch.distributed.all_gather(norms, norm)
        assert all(torch.equal(n, norm) for n in norms)
        assert clip([p for p in model.parameters() if p.grad is None], 1.0, order) == 0
        for (name, p), q in zip(model.named_parameters(), plain.models[rank].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (name == "unused")
            if q.grad is not None:
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-9)
        opt.step()
        opt.zero_grad()
        plain.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.models[rank].parameters(), strict=True):
                torch.testing.assert_close(whole(p), q.detach(), rtol=1e-4, atol=1e-5)
                p.copy_(q)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("clip", [fs.clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["flagstone", "torch"])
def test_clipping_is_by_the_norm_of_all_gradients(ranks, how, world, clip):
    """R011"""
    for order in (1.0, 2.0, float("inf")):
        ranks.run(world, clipping, how, order, clip)


def replicated(rank, world, how):
    """The head is on all ranks alike; its gradients are averaged by hand."""
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Plain(Body(), world)
    model = copy.deepcopy(plain.models[rank])
    ignored = [*model.head.parameters()]
    shard(model, ignored_params=ignored)
    assert all(any(p is q for q in model.parameters()) for p in ignored)
    opt = adamw(model.parameters())
    for number in range(3):
        backward(model, plain, rank, number)
        for parameter in ignored:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world
        norm = fs.clip_grad_norm_(model.parameters(), 1e-2)
        expected, *_ = [nn.utils.clip_grad_norm_(m.parameters(), 1e-2) for m in plain.models]
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        opt.step()
        opt.zero_grad()
        plain.step()


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_all_ranks_have_alike_counts_once(ranks, how, world):
    """R012"""
    ranks.run(world, replicated, how)


# Scaling, and averages.


def scaled(rank, world, how):
    """An overflow on one rank: all skip that step."""
    model, opt, plain = both(rank, world, how, functools.partial(torch.optim.SGD, lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for number in range(4):
        plain.gradients(one_step, number)
        loss = model(batch(rank, number)).square().mean()
        if number == 1 and rank == world - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if number == 2:
            scaler.unscale_(opt)
            fs.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if number == 1:
            for o in plain.optimizers:
                o.zero_grad()
        else:
            plain.step()
        assert scaler.get_scale() == (4.0 if number < 1 else 2.0)
        for p, q in zip(model.parameters(), plain.models[rank].parameters(), strict=True):
            torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_an_overflow_on_one_rank_is_one_on_all(ranks, how):
    ranks.run(2, scaled, how)


def half(rank, world, how):
    """fp16 computation over fp32 masters, where a gradient overflows on one rank."""
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    model = shard(Body(), precision=fs.MixedPrecision(param=torch.float16, reduce=torch.float32))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)
    before = {n: whole(p.detach()) for n, p in model.named_parameters()}
    scale = 1e4 if rank == 0 else 1.0
    scaler.scale(model(batch(rank, 0)).float().sum() * scale).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    assert scaler.get_scale() == 2.0**13
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.detach()), before[name])
    scaler.scale(model(batch(rank, 1)).float().sum() * 1e-3).backward()
    scaler.step(opt)
    assert not torch.equal(whole(model.head.weight.detach()), before["head.weight"])


@pytest.mark.parametrize("how", TWO_WAYS)
def test_an_fp16_overflow_skips_the_step_on_all_ranks(ranks, how):
    ranks.run(2, half, how)


def averaged(rank, world, how):
    model, opt, plain = both(rank, world, how)
    averages = []
    for each in (model, *plain.models):
        averages.append({n: p.detach().clone() for n, p in each.named_parameters()})
    for number in range(3):
        backward(model, plain, rank, number)
        opt.step()
        opt.zero_grad()
        plain.step()
        with torch.no_grad():
            for average, each in zip(averages, (model, *plain.models), strict=True):
                for name, parameter in each.named_parameters():
                    average[name].lerp_(parameter, 0.1)
    for name, average in averages[0].items():
        assert torch.equal(whole(average), averages[1][name])
    with torch.no_grad():  # and they can be put in
        for name, parameter in model.named_parameters():
            parameter.copy_(averages[0][name])
        for name, parameter in plain.models[rank].named_parameters():
            parameter.copy_(averages[1][name])
        assert torch.equal(model(batch(rank, 0)), plain.models[rank](batch(rank, 0)))


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_moving_average_of_the_weights(ranks, how):
    ranks.run(2, averaged, how)


def zeroed(rank, world, how, set_to_none):
    """By the model, between forward and backward."""
    model, opt, plain = both(rank, world, how, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    for number in range(3):
        plain.gradients(one_step, number)
        plain.step()
        loss = model(batch(rank, number)).square().mean()
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        opt.step()
    assert_same(model, plain.models[rank])


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward(ranks, how, set_to_none):
    ranks.run(2, zeroed, how, set_to_none)
