"""Save and load against the disk's limit and against the peers: ``python -m bench.checkpoint``.

Everything is measured in one run, interleaved, so that ratios hold on a noisy machine. Ratios are medians of the ratios
of each repeat.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import random
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import flagstone as fs
from bench import measure

Times = dict[str, list[float]]


def state(nbytes: int, rank: int, world: int) -> dict[str, Any]:
    """About 200 float32 tensors of a GPT; on several ranks each holds its rows of them, as FSDP2 does."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    width = 1024
    layers = max(round(nbytes / (12 * width * width * 4)), 1)
    shapes = {"embedding.weight": (nbytes // 4 // width - layers * 12 * width, width)}
    for i in range(layers):
        shapes |= {
            f"blocks.{i}.attention.qkv.weight": (3 * width, width),
            f"blocks.{i}.attention.out.weight": (width, width),
            f"blocks.{i}.mlp.up.weight": (4 * width, width),
            f"blocks.{i}.mlp.down.weight": (width, 4 * width),
            f"blocks.{i}.norm.weight": (width,),
        }
    shapes["embedding.weight"] = (max(shapes["embedding.weight"][0], 8), width)
    generator = torch.Generator().manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        rows = len(range(shape[0])[rank * -(-shape[0] // world) : (rank + 1) * -(-shape[0] // world)])
        local = torch.empty((rows, *shape[1:])).uniform_(generator=generator)
        if mesh is None:
            tensors[name] = local
        else:
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            tensors[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
    return tensors


class Bench:
    """One rank's part of the run. Ranks begin each measurement together; a time is that of the slowest."""

    def __init__(self, rank: int, world: int, options: argparse.Namespace) -> None:
        self.rank, self.world, self.options = rank, world, options
        self.root = Path(options.dir)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.peaks: dict[str, list[float]] = defaultdict(list)
        self.buffers = [measure.huge(measure.CHUNK) for _ in range(2)]
        self.base = 0  # bytes that the process has with its state, before anything is measured

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def timed(self, name: str, work: Callable[[], Any], *, alone: bool = False) -> None:
        """Measure something that all ranks do, or that rank 0 does while the others wait."""
        self.barrier()
        measure.reset_peak()
        began = time.perf_counter()
        if not alone or self.rank == 0:
            with quiet():
                work()
        seconds = torch.tensor([time.perf_counter() - began, float(max(measure.peak() - self.base, 0))])
        if self.world > 1:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.times[name].append(seconds[0].item())
        self.peaks[name].append(seconds[1].item())

    def alone(self, work: Callable[[], Any]) -> None:
        """Something between measurements, on rank 0."""
        self.barrier()
        if self.rank == 0:
            work()
        self.barrier()

    def large(self) -> None:
        """Save and load of ``gib``."""
        tensors = state(int(self.options.gib * (1 << 30)), self.rank, self.world)
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        target = {name: t.clone() for name, t in tensors.items()}
        root, one = self.root, self.world == 1
        copies = (
            ([t.view(-1).numpy() for t in tensors.values()], [t.view(-1).numpy() for t in target.values()])
            if one
            else ([], [])
        )
        gc.collect()
        self.base = measure.reset_peak()
        for repeat in range(self.options.repeats + 1):
            if repeat == 1:  # the first was to warm up
                self.times.clear()
                self.peaks.clear()
            saves: dict[str, Callable[[], Any]] = {
                "flagstone save": lambda: fs.save({"model": tensors}, root / "flagstone"),
                "dcp.save": lambda: dcp.save(tensors, checkpoint_id=root / "dcp", no_dist=one),
            }
            if one:
                saves["torch.save + fsync"] = lambda: _torch_save(tensors, root / "torch.pt")
                saves["safetensors + fsync"] = lambda: _safetensors_save(tensors, root / "plain.safetensors")
            self.timed("disk write", lambda: measure.disk_write(root / "limit", nbytes, self.buffers), alone=True)
            for name, work in shuffled(saves, repeat):
                self.timed(name, work)
            loads: dict[str, Callable[[], Any]] = {
                "flagstone load": lambda: fs.load(root / "flagstone", into={"model": target}),
                "dcp.load": lambda: dcp.load(target, checkpoint_id=root / "dcp", no_dist=one),
            }
            self.alone(lambda: measure.evict(root))
            self.timed("disk read", lambda: measure.disk_read(root / "limit", self.buffers), alone=True)
            for name, work in shuffled(loads, repeat):
                self.alone(lambda: measure.evict(root))
                self.timed(f"{name}, cold", work)
            for a, b in zip(tensors.values(), target.values(), strict=True):
                if not torch.equal(*(getattr(t, "_local_tensor", t) for t in (a, b))):
                    raise SystemExit("what was loaded is not what was saved")
            if one:
                self.timed("memory copy", lambda: measure.memory_copy(*copies))
                self.alone(lambda: measure.warm(root / "flagstone"))
                self.timed("flagstone load, warm", loads["flagstone load"])
            self.alone(lambda: [measure.remove(p) for p in root.iterdir()])
        if self.rank == 0:
            self.report_large(nbytes, len(tensors))

    def report_large(self, nbytes: int, count: int) -> None:
        plural = "s" if self.world > 1 else ""
        print(
            f"\n### {nbytes / 1e9:.2f} GB, {count} tensors, {self.world} rank{plural}, {self.options.repeats} repeats\n"
        )
        print("| what | seconds | GB/s | peak above the state, MiB a rank |\n|---|---|---|---|")
        for name, values in self.times.items():
            rates = [nbytes / v / 1e9 for v in values]
            peaks = [p / (1 << 20) for p in self.peaks[name]]
            print(f"| {name} | {measure.spread(values)} | {measure.spread(rates)} | {measure.spread(peaks)} |")
        print("\n| ratio | bar | measured |\n|---|---|---|")
        one = self.world == 1
        self.ratio("save against the disk's write limit", "0.85", "disk write", "flagstone save")
        self.ratio("save against dcp.save", "2.2" if one else "1.6", "dcp.save", "flagstone save")
        if one:
            self.ratio("save against torch.save + fsync", "2.2", "torch.save + fsync", "flagstone save")
            self.ratio("save against safetensors + fsync", "2.2", "safetensors + fsync", "flagstone save")
        self.ratio("load, cold, verified, against the disk's read limit", "0.85", "disk read", "flagstone load, cold")
        self.ratio("load, cold, against dcp.load", "2" if one else "1.6", "dcp.load, cold", "flagstone load, cold")
        if one:
            self.ratio("load, warm, verified, against one copy of memory", "0.5", "memory copy", "flagstone load, warm")

    def ratio(self, what: str, bar: str, theirs: str, ours: str) -> None:
        ratios = [a / b for a, b in zip(self.times[theirs], self.times[ours], strict=True)]
        print(f"| {what} | {bar} | {measure.spread(ratios)} |")

    def tiny(self) -> None:
        """10,000 tensors of 32 bytes."""
        tensors = {f"layer.{i}.scale": torch.full((8,), float(i)) for i in range(10_000)}
        target = {name: torch.zeros(8) for name in tensors}
        root = self.root
        for repeat in range(self.options.repeats + 1):
            if repeat == 1:
                self.times.clear()
            pairs: dict[str, Callable[[], Any]] = {
                "flagstone": lambda: (
                    fs.save({"model": tensors}, root / "flagstone"),
                    fs.load(root / "flagstone", into={"model": target}),
                ),
                "dcp": lambda: (
                    dcp.save(tensors, checkpoint_id=root / "dcp", no_dist=True),
                    dcp.load(target, checkpoint_id=root / "dcp", no_dist=True),
                ),
            }
            for name, work in shuffled(pairs, repeat):
                self.timed(name, work)
            sizes = {name: sum(p.stat().st_size for p in (root / name).iterdir()) for name in pairs}
            self.alone(lambda: [measure.remove(p) for p in root.iterdir()])
        payload = 10_000 * 32
        print(f"\n### 10,000 tensors of 32 B, 1 rank, {self.options.repeats} repeats\n")
        print("| what | save + load, seconds | files, bytes |\n|---|---|---|")
        for name, values in self.times.items():
            print(f"| {name} | {measure.spread(values)} | {sizes[name]:,} |")
        print("\n| ratio | bar | measured |\n|---|---|---|")
        self.ratio("save + load against DCP", "4", "dcp", "flagstone")
        print(f"| files, bytes | under {2 * payload + 2_000_000:,} | {sizes['flagstone']:,} |")

    def rows(self) -> None:
        """1 % of the rows of a tensor."""
        print("\n### Reading 1 % of the rows of a tensor\n")
        print("| tensor, bytes | rows, bytes | read from the file, bytes | bar |\n|---|---|---|---|")
        for rows in (2_500, 25_000, 250_000):
            tensor = torch.rand(rows, 1024)
            fs.save({"model": {"w": tensor}}, self.root / "rows")
            measure.evict(self.root)
            with fs.open(self.root / "rows") as checkpoint:
                lazy = checkpoint["model.w"]
                lazy[:1]  # opens the file, and reads its header
                measure.evict(self.root)
                low, high = rows // 2, rows // 2 + rows // 100
                before = _read_bytes()
                part = lazy[low:high]
                read = _read_bytes() - before
            if not torch.equal(part, tensor[low:high]):
                raise SystemExit("wrong rows")
            want = part.numel() * 4
            print(f"| {tensor.numel() * 4:,} | {want:,} | {read:,} | {int(want * 1.1) + 65536:,} |")
            measure.remove(self.root / "rows")


def shuffled(work: dict[str, Callable[[], Any]], seed: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The same order on every rank, another one in every repeat."""
    items = list(work.items())
    random.Random(seed).shuffle(items)
    return iter(items)


@contextmanager
def quiet() -> Iterator[None]:
    """Peers warn on every call."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _torch_save(tensors: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _safetensors_save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _read_bytes() -> int:
    """Bytes that this process had fetched from storage."""
    text = Path("/proc/self/io").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes"))


def _run(rank: int, world: int, port: int, part: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(max((os.cpu_count() or 2) // world, 1))
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    getattr(Bench(rank, world, options), part)()
    sys.stdout.flush()
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", default=None, help="where to write; a new folder here by default")
    parser.add_argument("--parts", default="large1,large2,tiny,rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir or ".") as folder:
        options.dir = folder
        print(f"torch {torch.__version__}, numpy {np.__version__}, {os.cpu_count()} cores")
        sys.stdout.flush()
        for part in options.parts.split(","):
            world = int(part[-1]) if part[-1].isdigit() else 1
            port = random.randint(20_000, 60_000)
            mp.spawn(_run, (world, port, part.rstrip("0123456789"), options), nprocs=world)


if __name__ == "__main__":
    main()
