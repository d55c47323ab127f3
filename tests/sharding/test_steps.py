"""What happens between and within steps: evaluation, exceptions, accumulation, other orders, another model."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flagstone as fs
from sharded import (
    CONNECTED,
    TWO_WAYS,
    Block,
    adamw,
    assert_same,
    batch,
    check_steps,
    check_training,
    connect,
    loss_of,
    net,
    shard,
    text,
    train,
    train_plain,
    whole,
)

WIDTH = 5


class Blocks(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.drop = nn.Dropout(0.25)
        self.order = list(range(blocks))
        self.fail = ""
        self.recompute = False

    def forward(self, x):
        x = self.first(x)
        for i in self.order:
            if self.fail == f"forward {i}":
                raise Failure
            x = checkpoint(self.blocks[i], x, use_reentrant=False) if self.recompute else self.blocks[i](x)
            if self.fail == f"backward {i}":
                x = Fails.apply(x)
        return self.drop(x)


class Failure(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Failure


def mean(model, rank, number):
    return model(batch(rank, number)).square().mean()


# Evaluation.


def evaluate(model, rank, number):
    """Twice, and once with an exception."""
    values = []
    model.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            values.append(mean(model, rank, number).clone())
    if number % 2:
        model.fail = "forward 2"
        with pytest.raises(Failure), torch.no_grad():
            mean(model, rank, number)
        model.fail = ""
    values.append(mean(model, rank, number).detach())  # with a graph that is dropped
    model.train()
    return values


def with_evaluation(model, rank, number, backward):
    before = evaluate(model, rank, 100 + number)
    loss = mean(model, rank, number)
    after = evaluate(model, rank, 100 + number)
    backward(loss)
    return *before, loss.detach(), *after, *evaluate(model, rank, 100 + number)


def evaluated(rank, world, how, recompute):
    def build():
        model = Blocks()
        model.recompute = recompute
        return model

    check_steps(rank, world, build, with_evaluation, how, steps=4)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("recompute", [False, True])
def test_evaluation_before_within_and_after_steps_changes_nothing(ranks, how, recompute):
    """R008"""
    ranks.run(2, evaluated, how, recompute)


def inference_first(rank, world, how):
    connect(CONNECTED[how], rank)
    for context in (torch.inference_mode, torch.no_grad):
        plain = net()
        model = shard(copy.deepcopy(plain))
        with context():
            assert torch.equal(model(text(0, rank)), plain(text(0, rank)))
        train_plain(plain, world, 2)
        train(model, rank, 2)
        assert_same(model, plain)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_the_first_forward_may_be_without_gradients(ranks, how):
    ranks.run(2, inference_first, how)


# Exceptions.


def with_exceptions(model, rank, number, backward):
    """All ranks fail in the same places and go on."""
    for fail in ("forward 1", "backward 3", "forward 0", "backward 0"):
        model.fail = fail
        with pytest.raises(Failure):
            mean(model, rank, number).backward()
        model.fail = ""
        for parameter in model.parameters():
            parameter.grad = None
    loss = mean(model, rank, number)
    backward(loss)
    return loss.detach()


def excepted(rank, world, how):
    check_steps(rank, world, Blocks, with_exceptions, how)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("world", [1, 2])
def test_steps_go_on_after_exceptions_on_all_ranks(ranks, how, world):
    ranks.run(world, excepted, how)


def without_recovery(rank, world, how):
    """An optimizer step, a save or an evaluation may come right after the exception."""
    connect(CONNECTED[how], rank)
    plain = Blocks()
    model = shard(plain)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {k: whole(v).clone() for k, v in model.state_dict().items()}
    for fail in ("forward 1", "backward 3"):
        for follow in ("step", "read", "eval"):
            model.fail = fail
            with pytest.raises(Failure):
                mean(model, rank, 0).backward()
            model.fail = ""
            if follow == "step":
                opt.step()
            elif follow == "read":
                assert all(isinstance(p, fs.ShardedTensor) for p in model.parameters())
                assert all(torch.equal(whole(v), before[k]) for k, v in model.state_dict().items())
            else:
                with torch.no_grad():
                    mean(model, rank, 0)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_anything_may_follow_an_exception(ranks, how):
    ranks.run(2, without_recovery, how)


# Accumulation.


def accumulation(rank, world, how, kind):
    """Three micro-batches a step. Held ones are summed on a rank first; so the plain model does that too."""
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Blocks()
    plain.drop.p = 0.0
    model = shard(copy.deepcopy(plain))
    opt, plain_opt = adamw(model.parameters()), adamw(plain.parameters())
    held = {"all": [True, True, False], "none": [False] * 3, "mixed": [False, True, False]}[kind]
    for step in range(3):
        waiting = [[None] * len(list(plain.parameters())) for _ in range(world)]
        for micro in range(3):
            model.set_requires_gradient_sync(not held[micro])
            mean(model, rank, 10 * step + micro).backward()
            for r in range(world):
                given = [p.grad for p in plain.parameters()]
                plain.zero_grad()
                mean(plain, r, 10 * step + micro).backward()
                for i, p in enumerate(plain.parameters()):
                    # the newest comes first, as in the engine
                    waiting[r][i] = p.grad if waiting[r][i] is None else p.grad + waiting[r][i]
                    p.grad = given[i]
            if not held[micro]:
                for p, *each in zip(plain.parameters(), *waiting, strict=True):
                    total = sum(each[1:], each[0]) / world
                    p.grad = total if p.grad is None else p.grad + total
                waiting = [[None] * len(each) for each in waiting]
        opt.step()
        plain_opt.step()
        opt.zero_grad()
        plain_opt.zero_grad()
    assert_same(model, plain)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("kind", ["all", "none", "mixed"])
def test_accumulated_gradients_are_the_sum(ranks, how, kind):
    """R013"""
    ranks.run(2, accumulation, how, kind)


# Methods of sharded modules.


def methods(rank, world, how):
    connect(CONNECTED[how], rank)
    plain = net()
    model = shard(copy.deepcopy(plain))
    gradients = []
    for r in range(world):
        plain.zero_grad()
        loss_of(plain, text(0, r)).backward()
        gradients.append([p.grad for p in plain.parameters()])

    parameters = list(model.parameters())

    def check(factor):
        for parameter in parameters:
            parameter.grad = None
        loss_of(model, text(0, rank)).backward()
        for parameter, *each in zip(parameters, *gradients, strict=True):
            assert torch.equal(whole(parameter.grad), sum(each[1:], each[0]) / factor)

    check(world)
    for reshard in (False, True):
        model.set_reshard_after_forward(reshard)
        check(world)
        model.blocks[1].set_reshard_after_forward(not reshard)
        check(world)
        model.set_reshard_after_backward(reshard)
        check(world)
    for unit in (model, *model.blocks):
        unit.set_gradient_divide_factor(1.0)
    check(1)
    for unit in (model, *model.blocks):
        unit.set_gradient_divide_factor(world)
    model.blocks[2].unshard()
    check(world)
    assert not isinstance(model.blocks[2].norm.weight, fs.ShardedTensor)
    model.blocks[2].reshard()
    check(world)
    model.set_requires_gradient_sync(False, recurse=False)  # the root's are held, those of the blocks are not
    model.zero_grad()
    loss_of(model, text(0, rank)).backward()
    assert model.norm.weight.grad is None
    assert model.blocks[0].norm.weight.grad is not None


@pytest.mark.parametrize("how", TWO_WAYS)
def test_methods_of_sharded_modules(ranks, how):
    ranks.run(2, methods, how)


# Orders.


def shuffle(model, number):
    model.order = [(2 * i + number) % 5 for i in range(5)] if number % 2 else list(range(5))


def other_orders(rank, world, how):
    check_steps(rank, world, Blocks, plain_step, how, steps=5, change=shuffle)


def plain_step(model, rank, number, backward):
    loss = mean(model, rank, number)
    backward(loss)
    return loss.detach()


@pytest.mark.parametrize("how", TWO_WAYS)
def test_the_order_of_units_may_change_between_steps(ranks, how):
    """What is fetched ahead is then another unit."""
    ranks.run(2, other_orders, how)


def explicit_prefetch(rank, world, how):
    connect(CONNECTED[how], rank)
    plain = net(blocks=5)
    model = shard(copy.deepcopy(plain))
    for ahead in (1, 2):
        for i, block in enumerate(model.blocks):
            block.set_modules_to_forward_prefetch(list(model.blocks[i + 1 : i + 1 + ahead]))
            block.set_modules_to_backward_prefetch(list(model.blocks[max(i - ahead, 0) : i][::-1]))
        train_plain(plain, world, 2)
        train(model, rank, 2)
        assert_same(model, plain)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_the_order_of_fetching_ahead_can_be_given(ranks, how):
    ranks.run(2, explicit_prefetch, how)


# Debug mode.


def debug(rank, world, how):
    connect(CONNECTED[how], rank)
    model = check_training(rank, world, net, debug=True)
    model.state_dict()
    weights = [s.full for s in model._flagstone_unit.engine.streams if s.weight_slot is not None]
    assert all(w.isnan().all() for w in weights)
    assert (how == "one host") == (not weights)
    gradients = [s.gradients.flat for s in model._flagstone_unit.engine.streams]
    assert all(g.isnan().all() for g in gradients)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_debug_mode_poisons_what_is_given_up_and_changes_nothing(ranks, how):
    ranks.run(2, debug, how)


class TwoWays(Blocks):
    def forward(self, x):
        first, second = self.blocks[self.order[0]](x), self.blocks[self.order[1]](x)
        return first + second if self.order[0] == 0 else second + first


def other_order(rank, world):
    connect(None, rank)
    model = shard(TwoWays(2), debug=True)
    mean(model, rank, 0).backward()
    model.order = [rank, 1 - rank]
    mean(model, rank, 1).backward()


def test_debug_mode_finds_ranks_in_another_order(ranks):
    for error in ranks.run(2, other_order, catch=True):
        assert isinstance(error, fs.FlagstoneError)
        assert "not begun the same in the same order" in str(error)
        assert "reduce blocks.0" in str(error)


# Another model.


def segments():
    with open("/proc/self/maps") as maps:
        return sum("memfd:flagstone" in line for line in maps)


def rebuilt(rank, world, how):
    connect(CONNECTED[how], rank)
    adamw(nn.Linear(1, 1).parameters())  # torch's first one is kept by its imports until a collection
    gc.collect()
    before = segments()
    gc.disable()
    try:
        for round_ in range(3):
            model = shard(net())
            opt = adamw(model.parameters())
            for number in range(2):
                loss_of(model, text(number, rank)).backward()
                fs.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            if round_ == 1:
                loss = loss_of(model, text(0, rank))  # a graph without a backward
                del loss
            if round_ == 2:
                with torch.no_grad():
                    model(text(0, rank))
            model.state_dict()
            if how == "one host":
                assert segments() > before
            alive = [weakref.ref(p) for p in model.parameters()]
            alive += [weakref.ref(model), weakref.ref(model._flagstone_unit), weakref.ref(model._flagstone_unit.engine)]
            del model, opt
            left = [r for r in alive if r() is not None]
            assert not left, [type(r()) for r in left]
            assert segments() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_model_that_is_gone_leaves_no_memory(ranks, how):
    """At once, without a garbage collection."""
    ranks.run(2, rebuilt, how)
