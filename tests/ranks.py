"""Real ranks for tests: processes that stay, and run what they are given."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Forked from a server that has imported what all of them need.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.optim", "flagstone.api"]
)
_numbers = itertools.count()


class Died(Exception):
    """The rank's process ended without a word."""


class Ranks:
    """A pool of processes. ``run`` gives each of the first ``world`` of them a rank of a gloo group."""

    def __init__(self) -> None:
        self._workers: dict[int, tuple[Any, Any]] = {}

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, catch: bool = False, seconds: float = 60.0
    ) -> list[Any]:
        """What ``function(rank, world, *args)`` returned on each rank; its exception with ``catch``, else raised."""
        self.send(world, function, *args)
        results = self.results(world, seconds)
        for result in results:
            if isinstance(result, BaseException) and not catch:
                raise result
        return results

    def send(self, world: int, function: Callable[..., Any], *args: Any) -> None:
        """Begin without waiting; ``results`` waits."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(world):
            pipe = self._worker(rank)[1]
            pipe.send(sys.path)  # apart, as the function is found by it
            pipe.send((function, args, rank, world, port))

    def results(self, world: int, seconds: float = 60.0) -> list[Any]:
        """What each rank returned, or the exception that it raised."""
        return [self._result(rank, seconds) for rank in range(world)]

    def pid(self, rank: int) -> int:
        return int(self._worker(rank)[0].pid)

    def kill(self, rank: int) -> None:
        """End a process, also one that stands still. The next run begins another."""
        process, _ = self._workers[rank]
        process.kill()
        process.join()

    def close(self) -> None:
        for process, pipe in self._workers.values():
            pipe.close()
            process.kill()
            process.join()

    def _worker(self, rank: int) -> tuple[Any, Any]:
        known = self._workers.get(rank)
        if known is None or not known[0].is_alive():
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            known = self._workers[rank] = process, ours
        return known

    def _result(self, rank: int, seconds: float) -> Any:
        process, pipe = self._workers[rank]
        if not pipe.poll(seconds):
            os.kill(process.pid, signal.SIGUSR1)  # it prints where it is
            process.join(1)
            process.kill()
            process.join()
            return TimeoutError(f"rank {rank} hung for {seconds} s")
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            return Died(f"rank {rank} ended with {process.exitcode}")


def _serve(pipe: Any) -> None:
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = pipe.recv()
            function, args, rank, world, port = pipe.recv()
        except EOFError:
            return
        environment = dict(os.environ)
        try:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
            result = function(rank, world, *args)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            result = error
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        try:
            pipe.send(result)
        except Exception as error:
            pipe.send(RuntimeError(f"{result!r} cannot be sent: {error}"))


def fresh(folder: Path) -> Path:
    """A path in a folder that was not used yet."""
    return folder / f"step-{next(_numbers):08}"
