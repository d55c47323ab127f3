"""Unusual ways through forward and backward: sharded training equals the plain model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flagstone as fs
from sharded import (
    CONNECTED,
    TWO_WAYS,
    Block,
    assert_same_gradients,
    batch,
    check_steps,
    connect,
    one_step,
    shard,
    whole,
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
    x = batch(rank, number, 4, WIDTH).requires_grad_()
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


class Result:
    """What pytree does not look into."""

    def __init__(self, x) -> None:
        self.inside = [x]


class Wraps(Block):
    def forward(self, result):
        return Result(super().forward(result.inside[0]))


class Objects(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wraps(WIDTH).requires_grad_(i > 1) for i in range(4))

    def forward(self, x):
        result = Result(self.first(x))
        for block in self.blocks:
            result = block(result)
        return self.last(result.inside[0])


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
    "tensors in objects, and frozen units": (Objects, one_step),
}


def step(rank, world, name, how):
    build, run = STEPS[name]
    check_steps(rank, world, build, run, how)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_plain_model(ranks, name, how):
    ranks.run(2, step, name, how)


@pytest.mark.parametrize(
    "name", ["a module called several times", "R015: two forwards, two backwards", "the root checkpoints its units"]
)
def test_a_step_between_two_hosts_with_two_ranks_and_one(ranks, name):
    ranks.run(3, step, name, "two hosts")


# Double backward.


def double_backward(rank, world, how, reshard):
    """Training with a gradient penalty."""
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Blocks()
    model = shard(copy.deepcopy(plain), reshard_after_forward=reshard)
    gradients = []
    for r in range(world):
        penalty(plain, r).backward()
        gradients.append([p.grad for p in plain.parameters()])
        plain.zero_grad()
    for p, *each in zip(plain.parameters(), *gradients, strict=True):
        if each[0] is not None:
            p.grad = sum(each) / world
    penalty(model, rank).backward()
    assert_same_gradients(model, plain)


def penalty(model, rank):
    x = batch(rank, 0, 4, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize(("how", "reshard"), [("one host", True), ("each rank a host", False)])
def test_the_gradient_of_a_gradient_equals_the_plain_model(ranks, how, reshard):
    ranks.run(2, double_backward, how, reshard)


def test_the_gradient_of_a_gradient_is_refused_where_units_share_buffers(ranks):
    for error in ranks.run(2, double_backward, "each rank a host", True, catch=True):
        assert isinstance(error, fs.FlagstoneError)
        assert "create_graph=True through blocks.2" in str(error)
        assert "reshard_after_forward=False" in str(error)


# Autocast and compile.


def autocast(model, rank, number, backward):
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean(model, rank, number)
    backward(loss)
    return loss.detach()


def autocast_twice(model, rank, number, backward):
    """Two forwards within one autocast, whose cache of cast weights must not outlive a gather."""
    with torch.autocast("cpu", torch.bfloat16):
        first, second = mean(model, rank, number), mean(model, rank, number + 100)
    backward(first + second)
    return first.detach(), second.detach()


def compiled(rank, world, how, backend):
    def compile_blocks(model):
        for block in model.blocks:
            block.compile(backend=backend)

    check_steps(rank, world, Blocks, one_step, how, prepare=compile_blocks)


def autocasts(rank, world, how):
    for run in (autocast, autocast_twice):
        check_steps(rank, world, Blocks, run, how)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_autocast(ranks, how):
    ranks.run(2, autocasts, how)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(ranks, how, backend):
    ranks.run(2, compiled, how, backend)


class Inner(Blocks):
    """Units whose inner module is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(WIDTH)) for _ in range(3))


def inner_compiled(rank, world, how):
    def compile_inner(model):
        for block in model.blocks:
            block[0].compile(backend="aot_eager")

    check_steps(rank, world, Inner, one_step, how, prepare=compile_inner)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_compiled_module_inside_of_a_unit(ranks, how):
    ranks.run(2, inner_compiled, how)


# Other ways in.


class Generator(Blocks):
    def generate(self, x):
        return self(x).tanh() @ self.last.weight

    def read(self):
        return self.first.weight.t() @ self.first.weight

    def half(self, x):
        return self.blocks[0](self.first(x))


def entry_points(rank, world, how):
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Generator()
    model = shard(copy.deepcopy(plain))
    x = batch(rank, 0, 4, WIDTH)
    with pytest.raises(fs.FlagstoneError, match=r"first\.weight.*register_forward_method"):
        model.read()
    with pytest.raises(fs.FlagstoneError, match=r"first\.weight.*register_forward_method"):
        model.half(x)
    for name in ("read", "half", "generate"):
        fs.register_forward_method(model, name)
    with torch.no_grad():
        assert torch.equal(model.generate(x), plain.generate(x))  # it calls forward
        assert torch.equal(model.read(), plain.read())
    model.half(x).square().mean().backward()
    gradients = []
    for r in range(world):
        plain.zero_grad()
        plain.half(batch(r, 0, 4, WIDTH)).square().mean().backward()
        gradients.append([p.grad for p in plain.parameters()])
    for p, *each in zip(plain.parameters(), *gradients, strict=True):
        if each[0] is not None:
            p.grad = sum(each) / world
    assert_same_gradients(model, plain)
    with pytest.raises(AttributeError):
        fs.register_forward_method(model, "missing")


@pytest.mark.parametrize("how", TWO_WAYS)
def test_other_methods_than_forward(ranks, how):
    ranks.run(2, entry_points, how)


# Hooks and copies.


def hooks(rank, world, how):
    connect(CONNECTED[how], rank)
    model = shard(Blocks())
    mean(model, rank, 0).backward()
    model.zero_grad()
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.__setitem__(n, whole(p.grad)))
        with pytest.raises(fs.FlagstoneError, match=f"{name}.*register_post_accumulate_grad_hook"):
            parameter.register_hook(print)
    mean(model, rank, 0).backward()
    assert set(seen) == {n for n, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(seen[name], whole(parameter.grad))


@pytest.mark.parametrize("how", TWO_WAYS)
def test_hooks_of_parameters_see_the_reduced_gradient(ranks, how):
    ranks.run(2, hooks, how)


def optimizer_in_backward(rank, world, how):
    """One optimizer for each parameter, that steps in a hook, is refused: others still compute with the weights."""
    connect(CONNECTED[how], rank)
    model = shard(Blocks())
    for parameter in model.parameters():
        opt = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, o=opt: o.step())
    with pytest.raises(fs.FlagstoneError, match="cannot be changed while forward or backward is under way"):
        mean(model, rank, 0).backward()


@pytest.mark.parametrize("how", TWO_WAYS)
def test_weights_cannot_be_changed_within_backward(ranks, how):
    ranks.run(2, optimizer_in_backward, how)
