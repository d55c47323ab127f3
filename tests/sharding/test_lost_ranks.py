"""A rank that raises, is killed, or stands still in the middle of a step: the others say which, where, and in time."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from torch import nn

import flagstone as fs
from ranks import Died
from sharded import CONNECTED, TWO_WAYS, Block, adamw, batch, connect, shard

WIDTH = 5
TIMEOUT = 2.0


class Failure(Exception):
    pass


class Trap(nn.Module):
    """Does something on the way forward, or back."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = None

    def forward(self, x):
        if self.forwards is not None:
            self.forwards()
        return Sprung.apply(x, self.backwards)


class Sprung(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, backwards):
        ctx.backwards = backwards
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.backwards is not None:
            ctx.backwards()
        return gradient, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.trap = Trap()

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                x = self.trap(x)
        return x


def fail():
    raise Failure


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def lost(rank, world, how, what, where, timeout=TIMEOUT):
    """Two good steps, then one in which the last rank is lost. How long the others' error took, and its text."""
    connect(CONNECTED[how], rank)
    model = shard(Model(), timeout=timeout)
    opt = adamw(model.parameters())
    for number in range(3):
        if number == 2 and rank == world - 1 and where in ("forwards", "backwards"):
            setattr(model.trap, where, what)
        began = time.monotonic()
        try:
            loss = model(batch(rank, number)).square().mean()
            loss.backward()
            if number == 2 and rank == world - 1 and where == "step":
                what()
            opt.step()
            opt.zero_grad()
            model(batch(rank, number)).sum().backward()
        except Failure:
            return None
        except fs.RankError as error:
            return time.monotonic() - began, str(error)
    return "nothing happened"


def check(results, lost_rank, words, seconds):
    for result in results:
        assert isinstance(result, tuple), result
        took, text = result
        assert took < seconds, text
        assert re.search(words, text), text
        assert re.search(rf"rank {lost_rank}(?!\d)", text), text


# What the others were in the middle of.
VERB = (
    r"(gather of (blocks\.\d|trap) |reduce of (blocks\.\d|trap) |the first (use|change) of weights|the end of backward)"
)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize(("world", "where"), [(2, "forwards"), (3, "backwards")])
def test_an_exception_on_one_rank_ends_the_others(ranks, how, world, where):
    results = ranks.run(world, lost, how, fail, where, catch=True, seconds=20)
    assert results[-1] is None  # its own exception, not another
    check(results[:-1], 1 if world == 2 else r"\d", f"waited (for it )?in {VERB}", TIMEOUT + 2)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("where", ["forwards", "backwards", "step"])
def test_the_others_notice_a_rank_that_was_killed(ranks, how, where):
    timeout = 20.0 if how == "one host" else TIMEOUT
    *others, killed = ranks.run(3, lost, how, kill, where, timeout, catch=True, seconds=20)
    assert isinstance(killed, Died)
    words = rf"is gone; rank \d waited for it in {VERB}"
    if how == "one host":
        check(others, r"2 \(process \d+\)", words, 5.0)  # not after the timeout
    else:
        check(others, r"\d", rf"{words}|did not come within .* in {VERB}", TIMEOUT + 2)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("where", ["forwards", "backwards", "step"])
def test_the_others_notice_a_rank_that_stands_still(ranks, how, where):
    ranks.send(2, lost, how, stop, where)
    (result,) = ranks.results(1, 20)
    ranks.kill(1)
    check([result], 1, rf"rank 1 did not come within {TIMEOUT:g} s; rank 0 waited in {VERB}", TIMEOUT + 2)


def own_exception(rank, world, how):
    """The rank that fails raises its own error at once; not after it has waited for the others."""
    connect(CONNECTED[how], rank)
    model = shard(Model(), timeout=TIMEOUT)
    model(batch(rank, 0)).sum().backward()
    if rank == 0:
        model.trap.forwards = fail
    began = time.monotonic()
    with pytest.raises((Failure, fs.RankError)) as caught:
        model(batch(rank, 1)).sum().backward()
    if rank == 0:
        assert caught.type is Failure
        assert time.monotonic() - began < TIMEOUT / 2


@pytest.mark.parametrize("how", TWO_WAYS)
def test_the_rank_that_fails_does_not_wait(ranks, how):
    ranks.run(2, own_exception, how)
