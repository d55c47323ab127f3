"""A sharded run equals a plain one bit for bit, however its ranks are connected."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import flagstone as fs
from sharded import (
    CONNECTED,
    adamw,
    assert_same,
    check_training,
    connect,
    loss_of,
    net,
    shard,
    text,
    train,
    train_plain,
)


def twenty_steps(rank, world, how, small):
    connect(how, rank)
    check_training(rank, world, net, steps=20, small=small)


@pytest.mark.parametrize("how", CONNECTED)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_twenty_steps_of_adamw_equal_the_plain_model(ranks, world, how):
    ranks.run(world, twenty_steps, CONNECTED[how], 0)


def test_small_units_that_stay_resident_change_nothing(ranks):
    ranks.run(2, twenty_steps, None, 1 << 20)


def two_runs(rank, world):
    first, second = (shard(net()) for _ in range(2))
    assert train(first, rank, 5) == train(second, rank, 5)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


def test_two_runs_are_equal(ranks):
    ranks.run(3, two_runs)


def precise(rank, world, param, reduce):
    """fp32 masters, and computation in another type: as a plain model that is cast anew before each step."""
    plain = net()
    model = shard(copy.deepcopy(plain), precision=fs.MixedPrecision(param=param, reduce=reduce))
    opt, plain_opt = adamw(model.parameters()), adamw(plain.parameters())
    for step in range(3):
        copied = [copy.deepcopy(plain).to(param) for _ in range(world)]
        losses = []
        for r, cast in enumerate(copied):
            loss = loss_of(cast, text(step, r))
            loss.backward()
            losses.append(loss)
        with torch.no_grad():
            for parameter, *casts in zip(plain.parameters(), *(c.parameters() for c in copied), strict=True):
                total = casts[0].grad.to(reduce).float()
                for other in casts[1:]:
                    total += other.grad.to(reduce)
                parameter.grad = total.div_(world)
        plain_opt.step()
        loss = loss_of(model, text(step, rank))
        assert loss.dtype == param
        assert torch.equal(loss, losses[rank])
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        opt.step()
        opt.zero_grad()
    assert_same(model, plain)


@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float32])
def test_mixed_precision(ranks, reduce):
    ranks.run(2, precise, torch.bfloat16, reduce)


def hybrid(rank, world, how):
    connect(how, rank)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = net()
    model = shard(copy.deepcopy(plain), mesh=mesh)
    rows = [[0, 1], [2, 3]]
    opt = adamw(plain.parameters())
    mine = adamw(model.parameters())
    for step in range(4):
        totals = [torch.zeros_like(p) for p in plain.parameters()]
        for row in rows:  # a replica sums its own ranks first
            for r in row:
                loss_of(plain, text(step, r)).backward()
            for total, p in zip(totals, plain.parameters(), strict=True):
                total += p.grad
                p.grad = None
        for total, p in zip(totals, plain.parameters(), strict=True):
            p.grad = total.div_(world)
        opt.step()
        opt.zero_grad()
        for last in (False, True):  # two micro-batches of half the weight; replicas are summed after the second
            model.set_requires_all_reduce(last)
            (loss_of(model, text(step, rank)) / 2).backward()
            if not last:
                assert all(p.grad is None for p in model.parameters())
        mine.step()
        mine.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["one host", "each rank a host"])
def test_hybrid_sharding_sums_replicas_on_the_last_micro_batch(ranks, how):
    ranks.run(4, hybrid, CONNECTED[how])


def whole_tensors(rank, world):
    model = check_training(rank, world, net, whole_tensors=True)
    for parameter in model.parameters():
        assert parameter.local.numel() in (0, parameter.numel())
    assert any(p.local.numel() for p in model.parameters())


@pytest.mark.parametrize("world", [2, 3])
def test_whole_tensors_are_not_cut(ranks, world):
    ranks.run(world, whole_tensors)


def optimizers(rank, world, make):
    plain = net()
    model = shard(copy.deepcopy(plain))
    expected = train_plain(plain, world, 3, make)
    assert train(model, rank, 3, make) == [values[rank] for values in expected]
    assert_same(model, plain)


def fused(rank, world):
    """The fused kernel rounds the last elements of a tensor in another way, and cut tensors have more last elements."""
    make = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
    plain = net()
    model = shard(copy.deepcopy(plain))
    train_plain(plain, world, 3, make)
    train(model, rank, 3, make)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach(), rtol=1e-5, atol=1e-6)


def test_the_fused_optimizer_steps_as_on_the_plain_model(ranks):
    ranks.run(2, fused)


def grouped(parameters):
    first, *rest = parameters
    return torch.optim.AdamW(
        [
            {"params": [p for p in [first, *rest] if p.dim() > 1], "weight_decay": 0.3, "lr": 3e-3},
            {"params": [p for p in [first, *rest] if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        functools.partial(torch.optim.SGD, lr=0.1, foreach=True),
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
        functools.partial(torch.optim.Adagrad, lr=1e-2),
        functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
        functools.partial(torch.optim.NAdam, lr=1e-3),
        functools.partial(torch.optim.Adamax, lr=1e-3),
        functools.partial(torch.optim.RAdam, lr=1e-3),
        functools.partial(torch.optim.ASGD, lr=1e-3),
        functools.partial(torch.optim.Rprop, lr=1e-3),
        functools.partial(torch.optim.Adadelta, lr=1e-1),
        grouped,
    ],
    ids=lambda make: f"{getattr(make, 'func', make).__name__}-{'-'.join(getattr(make, 'keywords', {}))}",
)
def test_optimizers_step_as_on_the_plain_model(ranks, make):
    ranks.run(2, optimizers, make)
