"""Sharded training on two ranks against FSDP2, DDP and plain compute: ``python -m bench.training``.

Everything is measured in one run. In each repeat the modes take turns, each in new processes, so that none inherits the
memory of another. Ratios are medians of the ratios of each repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
import torch.multiprocessing as mp
from examples.gpt import GPT, Config, loss_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import flagstone as fs
from bench import measure
from bench.checkpoint import Bench, shuffled

RANKS = 2
WARM_UP = 2  # steps
SAVES = 5  # repeats
MIB = 1 << 20
IDLE, FROM_START, LOOP = range(3)  # what memory is sampled for


@dataclass(frozen=True)
class Language:
    """A GPT over random tokens."""

    title: str
    config: Config
    batch: int

    def module(self) -> nn.Module:
        return GPT(self.config)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(step * RANKS + rank)
        text = torch.randint(self.config.vocabulary, (self.batch, self.config.context + 1), generator=generator)
        return loss_of(model, text)


class SmallBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(50))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Small:
    """2,000 small parameters in 20 blocks."""

    title = "2,000 small parameters"

    def module(self) -> nn.Module:
        return SmallModel()

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * RANKS + rank))
        loss: Tensor = model(x).square().mean()
        return loss


WORKLOADS: dict[str, Language | Small] = {
    "comm": Language("communication-bound", Config(vocabulary=8000, context=128, width=768, heads=12, depth=24), 1),
    "compute": Language("compute-bound", Config(vocabulary=8000, context=256, width=512, heads=8, depth=12), 4),
    "small": Small(),
}

# What each part trains: a workload in a mode.
PEERS, OURS, OURS_GLOO = ["plain", "DDP", "FSDP2"], "flagstone", "flagstone, gloo"
MODES = [*PEERS, OURS, OURS_GLOO]
CASES = {
    "comm": [("comm", mode) for mode in [*PEERS, OURS]],
    "compute": [("compute", mode) for mode in [*PEERS, OURS]],
    "gloo": [(workload, mode) for workload in ("comm", "compute") for mode in ("FSDP2", OURS_GLOO)],
    "small": [("small", mode) for mode in ("FSDP2", OURS)],
}

# Each ratio: what it says, the most it may be, and whose figure is divided by whose.
RATIOS = [
    ("step time against FSDP2, communication-bound", "0.50", "step", "comm", OURS, "FSDP2"),
    ("step time against DDP, communication-bound", "0.85", "step", "comm", OURS, "DDP"),
    ("peak memory in the loop against FSDP2, communication-bound", "0.50", "peak", "comm", OURS, "FSDP2"),
    ("step time against FSDP2, compute-bound", "0.87", "step", "compute", OURS, "FSDP2"),
    ("step time against DDP, compute-bound", "0.97", "step", "compute", OURS, "DDP"),
    ("step time against FSDP2, communication-bound, plain gloo", "0.75", "step", "comm", OURS_GLOO, "FSDP2"),
    ("step time against FSDP2, compute-bound, plain gloo", "0.92", "step", "compute", OURS_GLOO, "FSDP2"),
    ("optimizer step against FSDP2, 2,000 small parameters", "0.20", "optimizer_step", "small", OURS, "FSDP2"),
]


@dataclass(frozen=True)
class Run:
    """One mode in one repeat: times of the slowest rank, memory of all ranks together above ``base``."""

    workload: str
    mode: str
    steps: list[float]  # seconds
    optimizer_steps: list[float]  # seconds, part of ``steps``
    losses: list[list[float]]  # of each rank, of each step from the first
    base: int  # bytes before there was a model
    peak: int  # bytes in a step after the measured ones
    peak_from_start: int  # bytes while the model was made, sharded and warmed up
    exposed: float | None  # share of the step that the slower rank waited for an exchange
    bound: int | None  # bytes that sharding needs by the library's formula, of all ranks
    moments: int  # bytes of AdamW's state, of all ranks
    passing: (
        int  # bytes of gradients on their way to where they are kept: of a tied parameter both at once, of all ranks
    )
    activations: int | None  # bytes that forward keeps for backward, of all ranks; counted in plain compute

    @property
    def step(self) -> float:
        return statistics.median(self.steps)

    @property
    def optimizer_step(self) -> float:
        return statistics.median(self.optimizer_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="comm,compute,gloo,small,allocations,save")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a mode in a repeat")
    parser.add_argument("--json", type=Path, help="where to write every figure")
    options = parser.parse_args()
    parts = options.parts.split(",")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {RANKS} ranks", flush=True)

    wanted = {case for part in parts for case in CASES.get(part, [])}
    runs = []
    for repeat in range(options.repeats):
        cases = {str(case): partial(measured, *case, options.steps) for case in sorted(wanted) if can_run(case[1])}
        runs += [run() for _, run in shuffled(cases, repeat)]
    if runs:
        report(runs, options)
    counts = allocations() if "allocations" in parts else {}
    saves = save() if "save" in parts else {}
    if options.json:
        figures = {"runs": [asdict(run) for run in runs], "allocations": counts, "saves": saves}
        options.json.write_text(json.dumps(figures, indent=1))


def can_run(mode: str) -> bool:
    """Whether this version of the library has what a mode needs."""
    return mode in PEERS or hasattr(fs, "fully_shard")


# Processes


def run_ranks(work: Callable[..., Any], *args: Any, between: Callable[[list[int]], Any] | None = None) -> list[Any]:
    """What ``work(rank, *args)`` returned on each new process; till they end, ``between`` is called with their ids."""
    results = mp.get_context("spawn").SimpleQueue()
    port = random.randint(20_000, 60_000)
    context = mp.spawn(_rank, (port, results, work, args), nprocs=RANKS, join=False)
    while not context.join(timeout=0.01):
        if between:
            with suppress(OSError, KeyError):  # a process has just ended
                between(context.pids())
    return [result for _, result in sorted(results.get() for _ in range(RANKS))]


def _rank(rank: int, port: int, results: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo")
    dist.barrier()
    results.put((rank, work(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()


# Training


def sharded(module: nn.Module, mode: str) -> nn.Module:
    if mode == "plain":
        return module
    if mode == "DDP":
        return DistributedDataParallel(module)
    shard = fsdp.fully_shard if mode == "FSDP2" else fs.fully_shard
    for block in module.blocks:
        shard(block)
    shard(module)
    return module


class Trainer:
    """One rank's model, optimizer and loop."""

    def __init__(self, rank: int, workload: str, mode: str) -> None:
        self.rank, self.workload, self.mode = rank, WORKLOADS[workload], mode
        os.environ["FLAGSTONE_SHARED_MEMORY"] = "0" if mode == OURS_GLOO else "1"
        torch.manual_seed(0)
        module = self.workload.module()
        self.numel = sum(p.numel() for p in module.parameters())
        self.model = sharded(module, mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.losses: list[float] = []

    def forward_backward(self) -> None:
        loss = self.workload.loss(self.model, len(self.losses), self.rank)
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> tuple[float, float]:
        """Seconds of a step, and of the optimizer in it. Ranks begin it together."""
        dist.barrier()
        began = time.perf_counter()
        self.forward_backward()
        optimizer_began = time.perf_counter()
        self.optimizer.step()
        optimizer_ended = time.perf_counter()
        self.optimizer.zero_grad()
        return time.perf_counter() - began, optimizer_ended - optimizer_began

    def steps(self, count: int) -> list[tuple[float, float]]:
        return [self.step() for _ in range(count)]

    def told(self, function: str, figure: str) -> Any:
        """A figure that the library gives of a model it sharded; None of others."""
        if self.mode in PEERS or not hasattr(fs, function):
            return None
        return getattr(fs, function)(self.model)[figure]


def measured(workload: str, mode: str, count: int) -> Run:
    """Train; memory is sampled from here, and only outside the steps whose time counts."""
    phase = mp.get_context("spawn").Value("i", IDLE)
    peaks = {FROM_START: 0, LOOP: 0}

    def sample(pids: list[int]) -> None:
        now = phase.value
        if now != IDLE:
            peaks[now] = max(peaks[now], sum(map(measure.pss, pids)))

    ranks = run_ranks(_train, workload, mode, count, phase, between=sample)
    base = sum(rank["base"] for rank in ranks)
    slowest = [tuple(map(max, *times)) for times in zip(*(rank["times"] for rank in ranks), strict=True)]
    run = Run(
        workload,
        mode,
        steps=[step for step, _ in slowest],
        optimizer_steps=[optimizer for _, optimizer in slowest],
        losses=[rank["losses"] for rank in ranks],
        base=base,
        peak=peaks[LOOP] - base,
        peak_from_start=max(peaks.values()) - base,
        exposed=None if ranks[0]["exposed"] is None else max(rank["exposed"] for rank in ranks),
        bound=ranks[0]["bound"],
        moments=ranks[0]["moments"] * (RANKS if mode in ("plain", "DDP") else 1),
        passing=sum(2 * rank["largest"] for rank in ranks),
        activations=sum(rank["activations"] for rank in ranks) if mode == "plain" else None,
    )
    print(f"{workload}, {mode}: {measure.spread(run.steps)} s a step", flush=True)
    return run


def _train(rank: int, workload: str, mode: str, count: int, phase: Any) -> dict[str, Any]:
    warm_up_torch()
    base = measure.pss()
    dist.barrier()
    phase.value = FROM_START
    trainer = Trainer(rank, workload, mode)
    trainer.steps(WARM_UP)
    dist.barrier()
    phase.value = IDLE
    before = trainer.told("sharding_stats", "exposed_seconds")
    times = trainer.steps(count)
    after = trainer.told("sharding_stats", "exposed_seconds")
    dist.barrier()
    phase.value = LOOP
    trainer.steps(1)
    dist.barrier()
    phase.value = IDLE
    return {
        "base": base,
        "times": times,
        "losses": trainer.losses,
        "exposed": None if before is None else (after - before) / sum(step for step, _ in times),
        "bound": trainer.told("memory_report", "bound_bytes"),
        "moments": 2 * 4 * trainer.numel,
        "largest": 4 * max(p.numel() for p in trainer.model.parameters()),
        "activations": activations(trainer) if mode == "plain" else None,
    }


def warm_up_torch() -> None:
    """Train something tiny, so that torch has loaded what every training loads."""
    model = GPT(Config(vocabulary=64, context=32, width=64, heads=2, depth=1))
    loss_of(model, torch.zeros(1, 33, dtype=torch.long)).backward()
    torch.optim.AdamW(model.parameters()).step()


def activations(trainer: Trainer) -> int:
    """Bytes that forward keeps for backward, parameters aside; of a model that is not sharded."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trainer.workload.loss(trainer.model, 0, trainer.rank)
    del loss  # held the graph, so that no address was used twice
    parameters = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    return sum(nbytes for address, nbytes in kept.items() if address not in parameters)


def report(runs: list[Run], options: Namespace) -> None:
    def of(workload: str, mode: str) -> list[Run]:
        return [run for run in runs if (run.workload, run.mode) == (workload, mode)]

    for workload in [name for name in WORKLOADS if any(run.workload == name for run in runs)]:
        print(f"\n### {WORKLOADS[workload].title}, {options.repeats} repeats of {options.steps} steps\n")
        print("| mode | step, s | optimizer in it, s | peak in the loop, MiB | peak from the start, MiB |")
        print("|---|---|---|---|---|")
        for mode in MODES:
            if mine := of(workload, mode):
                times = ([t for run in mine for t in run.steps], [t for run in mine for t in run.optimizer_steps])
                peaks = ([run.peak / MIB for run in mine], [run.peak_from_start / MIB for run in mine])
                cells = [measure.spread(values) for values in times] + [measure.spread(values, 4) for values in peaks]
                print(f"| {mode} | {' | '.join(cells)} |")

    print("\n| figure | at most | measured |\n|---|---|---|")
    for what, bar, figure, workload, ours, theirs in RATIOS:
        pairs = list(zip(of(workload, ours), of(workload, theirs), strict=False))
        if pairs:
            print(f"| {what} | {bar} | {measure.spread([getattr(a, figure) / getattr(b, figure) for a, b in pairs])} |")
    shares = [run.exposed for run in of("compute", OURS) if run.exposed is not None]
    if shares:
        print(f"| share of the step in exposed exchange, compute-bound | 0.10 | {measure.spread(shares)} |")
    for ours, plain in zip(of("comm", OURS)[:1], of("comm", "plain")[:1], strict=False):
        if ours.bound is not None and plain.activations is not None:
            parts = [ours.bound, ours.moments, plain.activations, ours.passing]
            what = "bound {:.0f} + moments {:.0f} + activations {:.0f} + gradients on their way {:.0f} MiB".format(
                *(part / MIB for part in parts)
            )
            over = measure.spread([run.peak / sum(parts) for run in of("comm", OURS)])
            print(f"| peak memory in the loop against {what}, communication-bound | 1.05 | {over} |")
    for workload in WORKLOADS:
        for mode in MODES:
            if mode != "FSDP2" and (mine := of(workload, mode)):
                far = max(map(distance, mine, of(workload, "FSDP2")))
                print(f"| farthest loss from FSDP2's, {WORKLOADS[workload].title}, {mode} | 1e-4 | {far:.1e} |")
    sys.stdout.flush()


def distance(run: Run, other: Run) -> float:
    """The largest difference between losses. Plain ranks exchange nothing, so only their first one counts."""
    steps = 1 if "plain" in (run.mode, other.mode) else None
    return max(
        abs(a - b)
        for ours, theirs in zip(run.losses, other.losses, strict=True)
        for a, b in zip(ours[:steps], theirs[:steps], strict=True)
    )


# Allocations


def allocations() -> dict[str, list[int]]:
    """Allocations of over 1 MiB in a step: of forward and backward, and of the optimizer."""
    counts = {}
    for mode in filter(can_run, ("plain", "FSDP2", OURS)):
        counts[mode] = [max(both) for both in zip(*run_ranks(_allocations, mode), strict=True)]
    plain = counts["plain"][0]
    print("\n### Allocations of over 1 MiB in a step, communication-bound\n")
    print("| mode | forward and backward | above plain, at most 0 | optimizer |\n|---|---|---|---|")
    for mode, (in_gradients, in_optimizer) in counts.items():
        print(f"| {mode} | {in_gradients} | {in_gradients - plain} | {in_optimizer} |")
    return counts


def _allocations(rank: int, mode: str) -> tuple[int, int]:
    trainer = Trainer(rank, "comm", mode)
    trainer.steps(WARM_UP)
    return large_allocations(trainer.forward_backward), large_allocations(trainer.optimizer.step)


def large_allocations(work: Callable[[], Any]) -> int:
    """How often torch's allocator is asked for over 1 MiB, also by kernels and by the autograd engine."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > MIB for event in events)


# Save


def save() -> dict[str, list[float]]:
    """Seconds of durable saves of model and optimizer."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as folder:
        times: dict[str, list[float]] = run_ranks(_save, Namespace(dir=folder, repeats=SAVES))[0]
    return times


def _save(rank: int, options: Namespace) -> dict[str, list[float]]:
    """Both runs live in the same processes, and their saves take turns."""
    bench = Bench(rank, RANKS, options)
    runs = {mode: Trainer(rank, "comm", mode) for mode in ("FSDP2", OURS) if can_run(mode)}
    for trainer in runs.values():
        trainer.steps(1)

    def dcp_save() -> None:
        model, optimizer = get_state_dict(runs["FSDP2"].model, runs["FSDP2"].optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=bench.root / "dcp")

    def fs_save(mode: str) -> None:
        fs.save({"model": runs[mode].model, "optimizer": runs[mode].optimizer}, bench.root / mode)

    saves: dict[str, Callable[[], Any]] = {"dcp.save of FSDP2": dcp_save}
    saves |= {f"fs.save of {mode}": partial(fs_save, mode) for mode in runs}
    for repeat in range(options.repeats + 1):
        if repeat == 1:  # the first was to warm up
            bench.times.clear()
        for name, work in shuffled(saves, repeat):
            bench.timed(name, work)
            bench.alone(lambda: [measure.remove(path) for path in bench.root.iterdir()])
    if rank == 0:
        print(f"\n### Save of model and optimizer, communication-bound, {options.repeats} repeats\n")
        print("| what | seconds |\n|---|---|")
        for name, values in bench.times.items():
            print(f"| {name} | {measure.spread(values)} |")
        print("\n| how many times as fast | at least | measured |\n|---|---|---|")
        for mode in runs:
            bench.ratio(f"save of {mode} against dcp.save of FSDP2", "1.6", "dcp.save of FSDP2", f"fs.save of {mode}")
        sys.stdout.flush()
    return dict(bench.times)


if __name__ == "__main__":
    main()
