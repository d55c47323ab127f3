"""Sharded training on GPUs, checked and timed in two minutes: ``python -m bench.gpu_check``. One rank a GPU.

Each line says what held. The process ends with 1 when something did not.
"""

from __future__ import annotations

import copy
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from examples.gpt import GPT, Config, loss_of
from torch import Tensor, nn

import flagstone as fs

SMALL = Config(vocabulary=512, context=64, width=256, heads=4, depth=4)
LARGE = Config(vocabulary=8192, context=512, width=1024, heads=16, depth=12)


def text(config: Config, step: int, rank: int, batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator).cuda()


def model_of(config: Config) -> nn.Module:
    torch.manual_seed(0)
    return GPT(config).cuda()


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fs.fully_shard(block, **options)
    return fs.fully_shard(model, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def check_training(rank: int, world: int) -> None:
    """Losses and weights are those of a plain model that has the gradients of all ranks."""
    plain = model_of(SMALL)
    model = sharded(copy.deepcopy(plain))
    ours, theirs = adamw(model), adamw(plain)
    for step in range(10):
        for r in range(world):
            loss = loss_of(plain, text(SMALL, step, r)) / world
            loss.backward()
            if r == rank:
                expected = loss.item() * world
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        loss = loss_of(model, text(SMALL, step, rank))
        loss.backward()
        torch.testing.assert_close(fs.clip_grad_norm_(model.parameters(), 1.0), norm, rtol=1e-4, atol=1e-5)
        ours.step()
        ours.zero_grad()
        assert abs(loss.item() - expected) < 1e-3 * expected, (step, loss.item(), expected)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach(), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def check_checkpoint(rank: int, world: int) -> None:
    """A run goes on from a checkpoint as if it had not been away."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, device=torch.device("cuda"))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, low: int, high: int) -> list[float]:
        losses = []
        for step in range(low, high):
            loss = loss_of(model, text(SMALL, step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = sharded(model_of(SMALL))
    optimizer = adamw(model)
    steps(model, optimizer, 0, 3)
    fs.save({"model": model, "optimizer": optimizer, "step": 3}, Path(folder[0]) / "step-3")
    expected = steps(model, optimizer, 3, 6)
    other = sharded(model_of(SMALL))
    state = {"model": other, "optimizer": adamw(other), "step": 0}
    fs.load(Path(folder[0]) / "step-3", into=state)
    assert steps(other, state["optimizer"], 3, 6) == expected


def check_allocations(rank: int, world: int) -> None:
    """The steady loop asks the allocator for as many large blocks as a plain model's does, and for no new memory."""

    def count(model: nn.Module) -> tuple[int, int]:
        for step in range(5):
            if step == 3:
                before = torch.cuda.memory_stats()
            loss_of(model, text(SMALL, step, rank)).backward()
            for parameter in model.parameters():
                parameter.grad = None
        after = torch.cuda.memory_stats()
        keys = ("allocation.large_pool.allocated", "num_device_alloc")
        large, new = (after.get(k, 0) - before.get(k, 0) for k in keys)
        return large, new

    plain = count(model_of(SMALL))
    ours = count(sharded(model_of(SMALL)))
    assert ours[0] <= plain[0], (ours, plain)
    assert ours[1] == 0, ours


def time_against_fsdp2(rank: int, world: int) -> str:
    """Step times, in turns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = model_of(LARGE)
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    ours = sharded(model_of(LARGE), precision=fs.MixedPrecision(param=torch.bfloat16, reduce=torch.float32))
    models = {"FSDP2": (theirs, adamw(theirs)), "flagstone": (ours, adamw(ours))}
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in range(12):
        for name, (model, optimizer) in models.items():
            batch = text(LARGE, step, rank)
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if step >= 2:
                times[name].append(time.perf_counter() - began)
    return ", ".join(
        f"{name} {1e3 * statistics.median(t):.1f} ms [{1e3 * min(t):.1f}-{1e3 * max(t):.1f}]"
        for name, t in times.items()
    )


CHECKS: list[Callable[[int, int], object]] = [check_training, check_checkpoint, check_allocations, time_against_fsdp2]


def run(rank: int, world: int, port: int) -> None:
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    failed = False
    for check in CHECKS:
        try:
            said = check(rank, world)
            if rank == 0:
                print(f"ok      {(check.__doc__ or '').splitlines()[0]} {said or ''}", flush=True)
        except Exception as error:
            failed = True
            print(f"FAILED  rank {rank}: {check.__name__}: {type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(1)


def main() -> None:
    world = torch.cuda.device_count()
    if not world:
        raise SystemExit("no GPU here")
    print(f"torch {torch.__version__}, {world} x {torch.cuda.get_device_name()}")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, (world, port), nprocs=world)


if __name__ == "__main__":
    main()
