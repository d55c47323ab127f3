"""Unusual ways through forward and backward: sharded training equals the plain model."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sharded import (
    TWO_WAYS,
    Block,
    batch,
    check_steps,
    one_step,
)

WIDTH = 5


class Blocks(nn.Module):
    """Blocks that are units, within parameters of the root."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def mean(model, rank, number, *more):
    return model(batch(rank, number, 4, WIDTH), *more).square().mean()


# What happens within a step.


class Twice(Blocks):
    def forward(self, x):
        for block in (*self.blocks, self.blocks[0], *self.blocks[::-1], self.blocks[0]):
            x = block(x)
        return x


def two_forwards_then_two_backwards(model, rank, number, backward):
    """R015"""
    first, second = mean(model, rank, number), mean(model, rank, number + 100)
    backward(first)
    backward(second)
    return first.detach(), second.detach()


def two_forwards_then_one_backward(model, rank, number, backward):
    first, second = mean(model, rank, number), mean(model, rank, number + 100)
    backward(first + second)
    return first.detach(), second.detach()


def second_loss_first(model, rank, number, backward):
    first, second = mean(model, rank, number), mean(model, rank, number + 100)
    backward(second)
    backward(first)
    return first.detach()


def twice_through_one_graph(model, rank, number, backward):
    """R015"""
    loss = mean(model, rank, number)
    backward(loss, retain_graph=True)
    backward(loss)
    return loss.detach()


def part_of_the_graph(model, rank, number, backward):
    """Backward from the middle: the last blocks get no gradient."""
    x = model.blocks[0](batch(rank, number, 4, WIDTH))
    model.blocks[1](x)
    loss = x.square().mean()
    backward(loss)
    return loss.detach()


def named_inputs(model, rank, number, backward):
    """Backward that computes the gradient of the input alone, then one of all."""
    x = batch(rank, number, 4, WIDTH).requires_grad_()
    loss = model(x).square().mean()
    (given,) = torch.autograd.grad(loss, x, retain_graph=True)
    backward(loss)
    return loss.detach(), given, x.grad


def checkpoint_around(model, rank, number, backward, reentrant):
    x = model.first(batch(rank, number, 4, WIDTH)) if False else batch(rank, number, 4, WIDTH).requires_grad_()
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    loss = x.square().mean()
    backward(loss)
    return loss.detach()


def checkpoint_around_the_root(model, rank, number, backward, reentrant):
    x = batch(rank, number, 4, WIDTH).requires_grad_()
    loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
    backward(loss)
    return loss.detach()


class Inside(Blocks):
    """Checkpoints inside of each unit."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = functools.partial(within, block, reentrant)


def within(block, reentrant, x):
    wide = checkpoint(lambda y: nn.functional.gelu(block.widen(block.norm(y))), x, use_reentrant=reentrant)
    return x + block.narrow(wide)


class RootCheckpoints(Blocks):
    """The root's forward checkpoints its units."""

    reentrant = False

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class ReentrantRootCheckpoints(RootCheckpoints):
    reentrant = True


class Keep(torch.autograd.Function):
    """Saves a view of a weight, and one that is no leaf."""

    @staticmethod
    def forward(ctx, x, weight, other):
        ctx.save_for_backward(x, weight, other)
        return x @ weight.t() + x @ other

    @staticmethod
    def backward(ctx, grad):
        x, weight, other = ctx.saved_tensors
        return grad @ weight + grad @ other.t(), grad.t() @ x, x.t() @ grad


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x):
        first, second = self.both.unbind()
        x = Keep.apply(x, first, (second * 2).t())
        return x @ self.both[0].t() + self.both.transpose(0, 1)[:, 1].sum() * x * self.both.view(-1)[:WIDTH]


class SavedViews(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Views() for _ in range(4))


class Structured(Blocks):
    """Units that give and take tuples and dicts, with None and several tensors in them."""

    def forward(self, x):
        state = {"x": self.first(x), "also": [None, x]}
        for block in self.blocks:
            state = block(state)
        return self.last(state["x"]) + state["also"][1].sum()


class Dicts(Block):
    def forward(self, state):
        x = super().forward(state["x"])
        return {"x": x, "also": [None, state["also"][1] + x.mean()]}


def structured():
    model = Structured()
    model.blocks = nn.ModuleList(Dicts(WIDTH) for _ in range(3))
    return model


STEPS = {
    "a module called several times": (Twice, one_step),
    "R015: two forwards, two backwards": (Blocks, two_forwards_then_two_backwards),
    "two forwards, one backward": (Blocks, two_forwards_then_one_backward),
    "backward of the second first": (Blocks, second_loss_first),
    "R015: two backwards through one graph": (Blocks, twice_through_one_graph),
    "backward of a part of the graph": (Blocks, part_of_the_graph),
    "the gradient of the input, then all": (Blocks, named_inputs),
    "a checkpoint around units": (Blocks, functools.partial(checkpoint_around, reentrant=False)),
    "a reentrant checkpoint around units": (Blocks, functools.partial(checkpoint_around, reentrant=True)),
    "a checkpoint around the root": (Blocks, functools.partial(checkpoint_around_the_root, reentrant=False)),
    "a reentrant checkpoint around the root": (Blocks, functools.partial(checkpoint_around_the_root, reentrant=True)),
    "checkpoints inside of units": (functools.partial(Inside, False), one_step),
    "reentrant checkpoints inside of units": (functools.partial(Inside, True), one_step),
    "the root checkpoints its units": (RootCheckpoints, one_step),
    "the root checkpoints its units, reentrant": (ReentrantRootCheckpoints, one_step),
    "saved views of weights": (SavedViews, one_step),
    "tensors in dicts and lists": (structured, one_step),
}


def step(rank, world, name, how):
    build, run = STEPS[name]
    check_steps(rank, world, build, run, how)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_plain_model(ranks, name, how):
    ranks.run(2, step, name, how)
