"""The backend for devices, on a fake one: gloo's collectives, and a queue that notes its order."""

from __future__ import annotations

import contextlib
import copy
import sys

import pytest
import torch
import torch.distributed as dist

import flagstone as fs
from flagstone.layout import Span
from flagstone.sharding.native import Native
from sharded import assert_same, net, shard, train, train_plain


class NotedQueue:
    """A queue that does everything at once, and notes what was begun and what was waited for."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun = 0

    @contextlib.contextmanager
    def run(self):
        self.begun += 1
        self.notes.append(f"begin {self.begun}")
        yield

    def mark(self):
        number = self.begun
        return lambda: self.notes.append(f"wait {number}")


def on_a_device(rank, world, small):
    sharding = sys.modules["flagstone.sharding.fully_shard"]
    queue = NotedQueue()
    before, sharding._comm = sharding._comm, lambda *_: Native(dist.group.WORLD, queue)
    try:
        plain = net()
        model = shard(copy.deepcopy(plain), small=small)
    finally:
        sharding._comm = before
    expected = train_plain(plain, world, 3)
    losses = train(model, rank, 3)
    return losses, [values[rank] for values in expected], queue.notes, model, plain


def equal(rank, world, small):
    losses, expected, notes, model, plain = on_a_device(rank, world, small)
    assert losses == expected
    assert_same(model, plain)
    begun = {n for n in notes if n.startswith("begin")}
    waited = {n.replace("wait", "begin") for n in notes if n.startswith("wait")}
    assert begun == waited, "everything that is begun is waited for, by computation"
    first_wait = {n: notes.index(n.replace("begin", "wait")) for n in begun}
    assert any(notes[i + 1] != n.replace("begin", "wait") for n in begun for i in [notes.index(n)]), "some run ahead"
    assert all(first_wait[n] > notes.index(n) for n in begun)


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("world", [1, 2])
def test_training_equals_the_plain_model(ranks, world, small):
    ranks.run(world, equal, small)


def gone(rank, world):
    def broken(*_, **__):
        raise RuntimeError("the communicator was aborted\nand more")

    dist.all_reduce = broken
    try:
        with pytest.raises(fs.RankError, match=f"rank {rank}: the sum failed: the communicator was aborted$"):
            Native(dist.group.WORLD, NotedQueue()).all_reduce(torch.zeros(1), "the sum")
    finally:
        dist.all_reduce = dist.distributed_c10d.all_reduce


def test_a_failed_collective_names_rank_and_verb(ranks):
    ranks.run(1, gone)


def test_small_exchanges(ranks):
    ranks.run(3, small_exchanges)


def small_exchanges(rank, world):
    comm = Native(dist.group.WORLD, NotedQueue())
    assert comm.all_reduce(torch.tensor([rank + 1.0]), "a sum").item() == 6.0
    assert comm.all_reduce(torch.tensor([rank + 1.0]), "a maximum", maximum=True).item() == 3.0
    spans = [Span(0, 4), Span(4, 1), Span(5, 0)]
    whole = torch.arange(5.0)
    mine = whole[spans[rank].start : spans[rank].stop]
    assert torch.equal(comm.gather_flat(mine, spans, "a tensor"), whole)
