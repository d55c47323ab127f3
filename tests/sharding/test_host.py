"""Memory that the ranks of a host share, and the board on which they wait for each other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import flagstone as fs
from flagstone.sharding.host import Board, neighbours
from ranks import Died
from sharded import connect


def host_of(world, timeout=20.0):
    connect(None, 0)
    host, _ = neighbours(range(world))
    host.timeout = timeout
    return host


def share(rank, world):
    host = host_of(world)
    board = Board(host, 1)
    segment = host.segment(10_000)
    assert segment.numel() == 12_288
    assert not segment.any()
    board.barrier("looked")
    segment[rank] = rank + 1
    board.barrier("written")
    assert segment[:world].tolist() == list(range(1, world + 1))
    for other, theirs in enumerate(host.segments(5)):
        theirs[0] = other if other == rank else theirs[0]
    mapped = Path("/proc/self/maps").read_text().count("memfd:flagstone")
    del segment
    assert Path("/proc/self/maps").read_text().count("memfd:flagstone") == mapped - 1
    descriptors = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    assert not [d for d in descriptors if "flagstone" in d], "what is mapped keeps no file open"


def test_a_segment_is_shared_and_freed_with_its_tensor(ranks):
    ranks.run(3, share)


def test_nothing_is_put_into_a_folder(ranks):
    before = set(os.listdir("/dev/shm"))
    ranks.run(2, share)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "flagstone" in name]


def different_sizes(rank, world):
    with pytest.raises(fs.RankError, match=r"have not sharded the same modules|not all of ranks"):
        host_of(world, timeout=3.0).segment(4096 * (rank + 1))


def test_segments_of_different_sizes_are_told(ranks):
    ranks.run(2, different_sizes)


def different_barriers(rank, world):
    board = Board(host_of(world), 1)
    with pytest.raises(fs.RankError, match=rf"rank {rank} is at .* and rank {1 - rank} is not"):
        board.barrier("the first use" if rank else "the first change")


def test_ranks_at_different_barriers_are_told(ranks):
    ranks.run(2, different_barriers)


def late(rank, world):
    board = Board(host_of(world, timeout=0.5), 1)
    if rank:
        time.sleep(2)
    else:
        began = time.monotonic()
        with pytest.raises(fs.RankError, match=r"rank 1 did not come within 0.5 s; rank 0 waited in the sum"):
            board.wait(lambda r: board.read(r, 0) > 0 or r == 0, lambda: "the sum")
        assert time.monotonic() - began < 2


def test_a_rank_that_does_not_come_is_named_within_the_timeout(ranks):
    ranks.run(2, late)


def killed(rank, world):
    board = Board(host_of(world), 1)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fs.RankError, match=r"rank 1 \(process \d+\) is gone; rank 0 waited for it in the sum"):
        board.wait(lambda r: r == 0, lambda: "the sum")


def test_a_rank_that_is_killed_is_named_long_before_the_timeout(ranks):
    began = time.monotonic()
    survivor, died = ranks.run(2, killed, catch=True)
    assert survivor is None
    assert isinstance(died, Died)
    assert time.monotonic() - began < 15


def left(rank, world):
    board = Board(host_of(world), 1)
    if rank == 0:
        with pytest.raises(fs.RankError, match="rank 1 has left this step with an exception; rank 0 waited in the sum"):
            board.barrier("the sum")
    board.regroup()
    board.barrier("again")
    board.publish(0, 1)
    board.wait(lambda r: board.read(r, 0) == 1, lambda: "what comes after")


def test_a_rank_that_gives_up_is_not_waited_for_and_may_come_back(ranks):
    ranks.run(2, left)


def counting(rank, world):
    board = Board(host_of(world), world)
    total = torch.zeros(1)
    for n in range(1, 400):
        board.publish(rank, n)
        board.wait(lambda r, n=n: board.read(r, r) >= n, lambda: "the count")
        assert all(board.read(r, r) in (n, n + 1) for r in range(world))
        total += 1
    return total.item()


def test_many_waits_lose_nobody(ranks):
    assert ranks.run(4, counting) == [399.0] * 4
