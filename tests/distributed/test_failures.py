"""Whatever goes wrong on whichever rank: one error on all, in time, nothing published, the old as it was."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flagstone as fs
from flagstone.storage import local
from ranks import Died, Ranks


def _state(rank: int, world: int, value: float = 1.0, rows: int = 3000) -> dict[str, Any]:
    from test_sharded import _sharded
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.full((rows, 700), value)
    return {
        "m": {"rows": _sharded(whole, mesh, [Shard(0)]), "columns": _sharded(whole, mesh, [Shard(1)])},
        "plain": torch.full((5000,), value),
        "own": fs.per_rank(torch.full((3,), value)),
        "value": value,
    }


def _is(path: Path, value: float) -> bool:
    state = fs.load(path)
    return all(bool((t == value).all()) for t in (*state["m"].values(), state["plain"], *state["own"])) and (
        state["value"] == value
    )


def _broken(rank: int, world: int, path: Path, kind: str, bad: int, timeout: float) -> float:
    """Save 2.0 over 1.0 while one rank's system calls fail."""
    fs.save(_state(rank, world), path)
    state = _state(rank, world, 2.0)
    real_write, real_sync = os.pwrite, os.fsync

    def write(fd: int, data: Any, offset: int) -> int:
        if kind == "disk full":
            real_write(fd, memoryview(data)[: len(data) // 2 // 4096 * 4096], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stopped":
            local.os.pwrite = real_write  # type: ignore[assignment]
            os.kill(os.getpid(), signal.SIGSTOP)
        return real_write(fd, data, offset)

    def sync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def join(self: Any, folder: str, token: str) -> Any:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)

    def collect(self: Any) -> Any:
        raise fs.SaveError("the state is broken here")

    began = time.monotonic()
    if rank == bad:
        if kind == "bad sync":
            local.os.fsync = sync  # type: ignore[assignment]
        elif kind == "not shared":
            local.LocalDisk.join = join  # type: ignore[method-assign]
        elif kind == "absent":
            time.sleep(timeout + 1)
            return 0.0
        elif kind == "state":
            from flagstone import api

            api.Collector.collect = collect  # type: ignore[method-assign]
        else:
            local.os.pwrite = write  # type: ignore[assignment]
    try:
        fs.save(state, path, overwrite=True, timeout=timeout)
    finally:
        seconds = time.monotonic() - began
        if rank == bad:
            local.os.pwrite, local.os.fsync = real_write, real_sync  # type: ignore[assignment]
    return seconds


@pytest.fixture
def own_ranks() -> Any:
    """Ranks for tests that leave their processes broken."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("disk full", r"rank {bad}: .*\.flagstone-.*safetensors: OSError: \[Errno 28\] No space left on device"),
        ("bad sync", r"rank {bad}: .*safetensors: OSError: \[Errno 5\] Input/output error"),
        ("state", r"rank {bad}: the state is broken here"),
    ],
)
def test_an_error_on_one_rank_is_the_error_on_all(
    kind: str, words: str, bad: int, own_ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    errors = own_ranks.run(2, _broken, path, kind, bad, 20.0, catch=True)
    assert [type(e) for e in errors] == [fs.SaveError] * 2, errors
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(fs.SaveError, match=words.format(bad=bad)):
        raise errors[0]
    assert _is(path, 1.0)
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_system_that_is_not_shared_is_told_in_words(own_ranks: Ranks, tmp_path: Path) -> None:
    errors = own_ranks.run(2, _broken, tmp_path / "a", "not shared", 1, 20.0, catch=True)
    assert all(isinstance(e, fs.SaveError) and "do not share this file system" in str(e) for e in errors)
    assert str(errors[0]) == str(errors[1])
    assert _is(tmp_path / "a", 1.0)


@pytest.mark.parametrize("bad", [1, 2])
def test_a_rank_that_dies_is_named(bad: int, own_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a"
    errors = own_ranks.run(3, _broken, path, "killed", bad, 2.0, catch=True)
    assert isinstance(errors.pop(bad), Died)
    assert [type(e) for e in errors] == [fs.SaveError] * 2, errors
    assert str(errors[0]) == str(errors[1])
    assert f"rank {bad}" in str(errors[0])
    assert _is(path, 1.0)


def test_when_rank_0_dies_the_others_are_told(own_ranks: Ranks, tmp_path: Path) -> None:
    """It holds the job's store here too: nobody can be asked any more."""
    path = tmp_path / "a"
    errors = own_ranks.run(3, _broken, path, "killed", 0, 2.0, catch=True)
    assert isinstance(errors[0], Died)
    assert [type(e) for e in errors[1:]] == [fs.SaveError] * 2, errors
    assert _is(path, 1.0)
    fs.save({"x": 1}, tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]  # the leftover is gone


def test_a_rank_that_hangs_is_named_in_time(own_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a"
    own_ranks.send(3, _broken, path, "stopped", 1, 2.0)
    first, third = own_ranks._result(0, 30.0), own_ranks._result(2, 30.0)
    assert isinstance(first, fs.SaveError), first
    assert isinstance(third, fs.SaveError), third
    assert str(first) == str(third)
    assert "rank 1" in str(first)
    assert _is(path, 1.0)
    os.kill(own_ranks.pid(1), signal.SIGCONT)  # it wakes up when all is over
    late = own_ranks._result(1, 30.0)
    assert isinstance(late, fs.SaveError), late
    assert _is(path, 1.0)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_does_not_call_is_named(bad: int, own_ranks: Ranks, tmp_path: Path) -> None:
    results = own_ranks.run(2, _broken, tmp_path / "a", "absent", bad, 1.5, catch=True)
    error = results[1 - bad]
    assert isinstance(error, fs.SaveError)
    assert f"rank {bad} was silent" in str(error)
    assert _is(tmp_path / "a", 1.0)


def _again(rank: int, world: int, folder: Path) -> None:
    """A save that failed on one rank leaves the ranks in step: the next one works."""
    state: dict[str, Any] = {"x": torch.ones(3)}
    for i in range(3):
        broken = {**state, "bad": object()} if rank == i % world else state
        with pytest.raises(fs.SaveError, match="bad"):
            fs.save(broken, folder / f"bad{i}")
        fs.save(state, folder / f"good{i}")
        with pytest.raises(fs.LoadError):
            fs.load(folder / f"good{i}", into={"x": torch.zeros(3 + (rank == 1))})
        fs.load(folder / f"good{i}", into={"x": torch.zeros(3)})


def test_after_a_failure_ranks_save_and_load_as_before(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _again, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["good0", "good1", "good2"]


def _load_broken(rank: int, world: int, path: Path, kind: str) -> None:
    target = _state(rank, world, 0.0)
    if rank == 2:
        if kind == "unreadable":

            def opened(self: Any, folder: str, file: str) -> Any:
                if file == "m.safetensors":
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{folder}/{file}")
                return real(self, folder, file)

            real = local.LocalDisk.open
            local.LocalDisk.open = opened  # type: ignore[method-assign]
        else:

            def read(fd: int, data: Any, offset: int, *flags: int) -> int:
                if offset > 1 << 20:
                    raise Unpicklable
                return real_read(fd, data, offset, *flags)

            real_read = os.preadv
            local.os.preadv = read  # type: ignore[assignment]
    try:
        fs.load(path, into=target)
    finally:
        if rank == 2:
            if kind == "unreadable":
                local.LocalDisk.open = real  # type: ignore[method-assign]
            else:
                local.os.preadv = real_read  # type: ignore[assignment]
        if kind == "unreadable":
            assert bool((target["m"]["rows"].to_local() == 0).all())


class Unpicklable(OSError):
    def __init__(self) -> None:
        super().__init__(errno.EIO, "an error that cannot be sent")
        self.open_file: Callable[[], None] = lambda: None


def _save_state(rank: int, world: int, path: Path) -> None:
    fs.save(_state(rank, world), path)


@pytest.mark.parametrize(
    ("kind", "words"), [("unreadable", "m.safetensors"), ("unpicklable", "an error that cannot be sent")]
)
def test_a_rank_that_cannot_read_is_named_on_all(kind: str, words: str, own_ranks: Ranks, tmp_path: Path) -> None:
    """R049."""
    own_ranks.run(4, _save_state, tmp_path / "a")
    errors = own_ranks.run(4, _load_broken, tmp_path / "a", kind, catch=True)
    assert [type(e) for e in errors] == [fs.LoadError] * 4, errors
    assert len({str(e) for e in errors}) == 1
    assert "rank 2" in str(errors[0])
    assert words in str(errors[0])


def _killed_somewhere(rank: int, world: int, path: Path, value: float, victim: int, call: int) -> None:
    """Die at the n-th write-type call of this process; with victim -1 on all ranks."""
    calls = 0

    def counted(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call and victim in (rank, -1):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    saved = {}
    for name in ("pwrite", "fsync", "rename", "mkdir", "open", "close"):
        saved[name] = getattr(os, name)
        setattr(os, name, counted(saved[name]))
    real_swap = local._swap
    local._swap = counted(real_swap)
    try:
        fs.save(_state(rank, world, value, 40), path, overwrite=True, timeout=1.5)
    finally:
        local._swap = real_swap
        for name, function in saved.items():
            setattr(os, name, function)


@pytest.mark.parametrize("victim", [-1, 0, 1])
def test_killed_at_any_point_there_is_the_old_or_the_new(victim: int, own_ranks: Ranks, tmp_path: Path) -> None:
    """R037: a kill at every call that changes something, until a save gets through."""
    path = tmp_path / "a"
    own_ranks.run(2, _killed_somewhere, path, 0.0, 5, 0)
    value, killed = 0.0, 0
    for call in (*range(1, 12, 3), *range(13, 60, 7), 100_000):
        results = own_ranks.run(2, _killed_somewhere, path, value + 1, victim, call, catch=True)
        assert all(r is None or isinstance(r, (Died, fs.SaveError)) for r in results), results
        killed += any(isinstance(r, Died) for r in results)
        fs.verify(path)
        now = fs.load(path)["value"]
        assert now in (value, value + 1)
        assert _is(path, now)
        if None in results:
            assert now == value + 1  # who was told that it is saved was told the truth
        value = now
    assert results == [None, None]
    assert killed >= 3
    assert os.listdir(tmp_path) == ["a"]


def _load_damaged(rank: int, world: int, path: Path) -> tuple[bool, tuple[str, ...]]:
    target = _state(rank, world, 0.0)
    try:
        fs.load(path, into=target)
    except fs.DamagedError as error:
        return bool(target["plain"].any()), error.overwritten
    raise AssertionError("damage was not found")


def test_every_rank_is_told_what_was_overwritten_on_it(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a"
    ranks.run(2, _save_state, path)
    with fs.open(path) as checkpoint:
        place = checkpoint.place("m.rows")
    with (path / place.file).open("r+b") as file:  # in what rank 1 alone reads
        file.seek(place.begin + place.nbytes * 3 // 4)
        file.write(b"\x77")
    for changed, overwritten in ranks.run(2, _load_damaged, path):
        assert changed == ("plain" in overwritten)
    assert ranks.run(2, _load_damaged, path)[0][1]  # rank 0 met no damage, and has changed its tensors


class _Strange(torch.nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("a strange module")


def _load_strange(rank: int, world: int, path: Path) -> None:
    model = _Strange(2, 2) if rank else torch.nn.Linear(2, 2)
    fs.load(path, into={"model": model}, timeout=20.0)


def test_any_exception_of_one_rank_is_the_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    fs.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "a")
    errors = ranks.run(2, _load_strange, tmp_path / "a", catch=True)
    assert [type(e) for e in errors] == [fs.LoadError] * 2, errors
    assert str(errors[0]) == str(errors[1])
    assert "rank 1: KeyError: 'a strange module'" in str(errors[0])
