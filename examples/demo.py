"""A training job's worst day: killed in the middle of a save, resumed on other numbers of ranks, opened by other tools.

    python examples/demo.py

Everything that is said on the screen has been checked. The first claim that does not hold ends the demo with an error.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from safetensors.torch import load_file

import flagstone as fs
from gpt import GPT, Batches, loss_of, write_corpus
from train import CORPUS, config_of, last_checkpoint

ROOT = Path("runs/demo")
TRAIN = Path(__file__).with_name("train.py")
LOGS = ROOT / "logs"
SAVED, BETWEEN, KILLED = 30, 45, 60  # steps of the three saves; the last one is killed, and made good later
EXACT = 1e-5  # relative: the same weights and the same batch, summed up in another order
CLOSE = 1e-3  # relative: the same after steps in which that has grown
PATIENCE = 120  # seconds for one run

console = Console(highlight=False)


class DemoError(Exception):
    """A claim that does not hold, or a run that did not do what it was started for."""


def check(holds: bool, claim: str, found: str = "") -> None:
    """Say what has been found to be true; stop when it is not. ``found`` is what was seen."""
    if not holds:
        raise DemoError(f"not true: {claim}" + (f" ({found})" if found else ""))
    more = f" [dim]({escape(found)})[/]" if found else ""
    console.print(f"  [green]✓[/] {escape(claim)}{more}", soft_wrap=True)


def chapter(title: str) -> None:
    console.print(f"\n[bold]{title}[/]")


def folder(step: int) -> Path:
    return ROOT / f"step-{step:08}"


def leftovers() -> list[Path]:
    """What saves that never ended have left behind."""
    return sorted(ROOT.glob(".step-*"))


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in path.iterdir())


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


@dataclass
class Run:
    """What rank 0 of a run told: its losses and learning rates by step, and the other events by name."""

    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def hear(self, line: str) -> str:
        """Note what a line tells; the name of the event."""
        if not line.startswith("{"):
            return ""  # not ours: gloo likes to talk
        told = json.loads(line)
        if told["event"] == "step":
            self.losses[told["step"]], self.rates[told["step"]] = told["loss"], told["rate"]
        else:
            self.events.setdefault(told["event"], []).append(told)
        return str(told["event"])


def start(ranks: int, options: list[str]) -> list[subprocess.Popen[str]]:
    """Start the ranks of a job, as torchrun would; they find each other at a free port of this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(TRAIN), "--root", str(ROOT), *options]
    processes = []
    for rank in range(ranks):
        here = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        with log_of(options, rank).open("w") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **{k: str(v) for k, v in here.items()}},
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=log,
                    text=True,
                )
            )
    return processes


def log_of(options: list[str], rank: int) -> Path:
    LOGS.mkdir(parents=True, exist_ok=True)
    return LOGS / f"until-{options[1]}-rank-{rank}.log"


def train(title: str, ranks: int, begin: int, until: int, every: int, kill: bool = False) -> Run:
    """Train from the last checkpoint on. With ``kill``, end all ranks by SIGKILL in the middle of the last save."""
    run = Run()
    options = ["--until", str(until), "--every", str(every), *(["--die-at", str(until)] if kill else [])]
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    processes = start(ranks, options)
    watchdog = threading.Timer(PATIENCE, kill_all, [processes])
    watchdog.start()
    stalled = False
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(title, total=until - begin, loss="-")
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                event = run.hear(line)
                if event == "step":
                    *_, loss = run.losses.values()
                    progress.update(bar, completed=len(run.losses), loss=f"{loss:.3f}")
                if event == "stalled":
                    stalled = all(p.poll() is None for p in processes)
                    break
        if stalled:
            kill_all(processes)
        statuses = [p.wait() for p in processes]
    finally:
        watchdog.cancel()
        kill_all(processes)
    if statuses != [-signal.SIGKILL if kill else 0] * ranks or stalled != kill:
        logs = "\n".join(tail(log_of(options, rank)) for rank in range(ranks))
        raise DemoError(f"the run '{title}' ended with the statuses {statuses}\n{logs}")
    return run


def kill_all(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()  # SIGKILL: they have no time for last words


def tail(log: Path) -> str:
    return f"--- {log}\n" + "\n".join(log.read_text().splitlines()[-15:])


def apart(a: float, b: float) -> float:
    """Relative difference."""
    return abs(a - b) / abs(b)


def train_and_kill() -> Run:
    chapter("1. Train on 2 ranks, and kill them in the middle of a save")
    run = train("2 ranks, sharded", 2, 0, KILLED, SAVED, kill=True)
    saved, stalled = run.events["saved"][0], run.events["stalled"][0]
    check(
        saved["step"] == SAVED and max(run.losses) == KILLED - 1,
        f"step {SAVED} was saved, and training went on to step {KILLED}",
        f"{mb(saved['nbytes'])} of tensors",
    )
    check(
        0 < stalled["written"] < stalled["total"],
        f"the save of step {KILLED} was under way when both ranks got SIGKILL",
        f"rank 0 had written {mb(stalled['written'])} of {mb(stalled['total'])}",
    )
    left = leftovers()
    check(
        len(left) == 1 and size_of(left[0]) > 0,
        "it left a hidden folder behind",
        f"{left[0].name[:32]}…" if left else "none",
    )
    check(not folder(KILLED).exists(), f"no folder has the name {folder(KILLED).name}")
    check(last_checkpoint(ROOT) == folder(SAVED), f"the newest checkpoint is {folder(SAVED).name}")
    report = fs.verify(folder(SAVED))
    check(report.tensors > 0, "every byte of it is what was written", f"{report.files} files, {mb(report.nbytes)}")
    try:
        fs.open(left[0])
        opened = True
    except fs.LoadError:
        opened = False
    check(not opened, "the leftover cannot be opened by mistake")
    return run


def resume(reference: Run) -> tuple[Run, Run]:
    chapter("2. Go on with 1 rank, then with 3, from the last checkpoint each time")
    left = leftovers()
    one = train("1 rank, not sharded", 1, SAVED, BETWEEN, KILLED)
    check(not any(p.exists() for p in left), "the first save after the kill removed the leftover of the killed one")
    three = train("3 ranks, sharded", 3, BETWEEN, KILLED, KILLED)
    check(not leftovers(), f"{folder(KILLED).name}, whose save was killed, is there now, and nothing is left over")
    for name, run, step, before in (("1 rank", one, SAVED, reference), ("3 ranks", three, BETWEEN, one)):
        loaded = run.events["loaded"][0]
        saving = next(e for e in before.events["saving"] if e["step"] == step)
        check(loaded["step"] == step == min(run.losses), f"{name}: went on at step {step}")
        check(
            loaded["random"] == saving["random"],
            f"{name}: rank 0 draws the random numbers that were next",
        )
        check(
            all(run.rates[s] == reference.rates[s] for s in run.rates),
            f"{name}: the learning rates are those of the run that went straight on",
        )
    return one, three


def compare(reference: Run, one: Run, three: Run) -> None:
    chapter("3. The loss curve goes on as if nothing had happened")
    resumed = {**one.losses, **three.losses}
    ranks = {**dict.fromkeys(one.losses, 1), **dict.fromkeys(three.losses, 3)}
    check(sorted(resumed) == list(range(SAVED, KILLED)), f"every step from {SAVED} to {KILLED - 1} was trained again")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("  step", "straight on, 2 ranks", "resumed", "ranks", "difference"):
        table.add_column(title, justify="right")
    for step in (
        SAVED,
        SAVED + 1,
        (SAVED + BETWEEN) // 2,
        BETWEEN - 1,
        BETWEEN,
        BETWEEN + 1,
        (BETWEEN + KILLED) // 2,
        KILLED - 1,
    ):
        there, here = reference.losses[step], resumed[step]
        table.add_row(f"{step}", f"{there:.6f}", f"{here:.6f}", f"{ranks[step]}", f"{here - there:+.1e}")
    console.print(table)
    first = apart(one.losses[SAVED], reference.losses[SAVED])
    check(first < EXACT, f"the first loss after the resume agrees to {EXACT:g}", f"relative difference {first:.1e}")
    worst = max(apart(resumed[s], reference.losses[s]) for s in resumed)
    check(worst < CLOSE, f"all of them agree to {CLOSE:g}", f"largest relative difference {worst:.1e}")
    fell = sum(reference.losses[s] for s in range(5)) / 5 - sum(resumed[s] for s in range(KILLED - 5, KILLED)) / 5
    check(fell > 1, "and the model has learned something", f"the loss fell by {fell:.2f}")


def open_elsewhere(reference: Run, one: Run, three: Run) -> None:
    chapter("4. The same folders, for programs that know nothing of Flagstone")
    for step in (SAVED, BETWEEN, KILLED):
        fs.verify(folder(step))
    check(True, "all three checkpoints are whole: saved by 2 ranks, by 1, and by 3")
    path = folder(SAVED)
    plain = load_file(path / "model.safetensors")
    mine = fs.load(path)["model"]
    torch.manual_seed(1)
    model = GPT(config_of(path))
    own_names = [name for name, _ in model.named_parameters()]  # a tied parameter once
    check(
        list(mine) == list(model.state_dict()),
        "fs.load gives the names of the plain model's state dict",
        f"{len(mine)} names",
    )
    check(
        sorted(plain) == sorted(own_names),
        "safetensors.load_file the same, a tied tensor once",
        f"{len(plain)} tensors",
    )
    same = all(torch.equal(plain[n], mine[n]) and plain[n].dtype == mine[n].dtype for n in plain)
    check(same, "and every tensor is equal, bit for bit")
    absent, unknown = model.load_state_dict(plain, strict=False)
    check(
        absent == ["head.weight"] and not unknown,
        "a plain model loads that file",
        "head.weight is tied to bytes.weight",
    )
    other = GPT(config_of(path))
    fs.load(path, into={"model": other})
    batches = Batches(ROOT / CORPUS, config_of(path).context)
    with torch.no_grad():
        loss, again = loss_of(model, batches(SAVED)).item(), loss_of(other, batches(SAVED)).item()
        fs.load(folder(BETWEEN), into={"model": other})
        between = loss_of(other, batches(BETWEEN)).item()
    check(loss == again, "its loss is that of a model filled by fs.load", f"{loss:.6f}")
    check(
        apart(loss, reference.losses[SAVED]) < EXACT,
        "and the one that the 2 ranks had",
        f"{reference.losses[SAVED]:.6f}",
    )
    check(
        apart(between, three.losses[BETWEEN]) < EXACT,
        "what 1 rank saved gave the 3 ranks the loss that it gives a plain model",
        f"{three.losses[BETWEEN]:.6f}, {between:.6f}",
    )


def show() -> None:
    chapter("5. What is in a checkpoint")
    path = folder(KILLED)
    command = [sys.executable, "-m", "flagstone", "show", str(path)]
    console.print(f"  [dim]$ flagstone show {path}[/]")
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise DemoError(f"flagstone show ended with {shown.returncode}: {shown.stderr.strip()}")
    lines = [line.rstrip() for line in shown.stdout.rstrip().splitlines()]
    head, foot = (lines, []) if len(lines) < 30 else (lines[:12], lines[-12:])
    cut = [f"… {len(lines) - len(head) - len(foot)} more lines …"] if foot else []
    for line in (*head, *cut, *foot):
        console.print(f"  {escape(line)}", soft_wrap=True)
    with fs.open(path) as checkpoint:
        tensors = [name for name in checkpoint if isinstance(checkpoint[name], fs.LazyTensor)]
        named = {line.split()[0] for line in lines if line.strip()}
        check(named.issuperset(tensors), "it names all that fs.open finds", f"{len(tensors)} tensors")
        check(checkpoint.step == KILLED == checkpoint["step"], f"the step is {KILLED}")


def main() -> None:
    began = time.perf_counter()
    torch.set_num_threads(1)
    if ROOT.exists():
        shutil.rmtree(ROOT)
    sources = write_corpus(ROOT / CORPUS)
    nbytes = (ROOT / CORPUS).stat().st_size
    console.print(f"A small GPT learns Python from the {sources} sources of the standard library, {mb(nbytes)}.")
    reference = train_and_kill()
    one, three = resume(reference)
    compare(reference, one, three)
    open_elsewhere(reference, one, three)
    show()
    seconds = time.perf_counter() - began
    binaries = Path(os.path.relpath(sys.executable)).parent if sys.prefix != sys.base_prefix else Path()
    console.print(f"\n[bold green]All of it held[/], in {seconds:.0f} s. The checkpoints are in {ROOT}. Try:")
    for line in (
        f"{binaries / 'flagstone'} show {folder(KILLED)}",
        f"{binaries / 'flagstone'} verify {folder(SAVED)}",
        f"{binaries / 'torchrun'} --nproc-per-node 2 {os.path.relpath(TRAIN)} --root {ROOT} --until 90 --every 15",
    ):
        console.print(f"  {line}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except (DemoError, fs.FlagstoneError) as failure:
        Console(stderr=True, highlight=False).print(f"[bold red]FAILED[/] {escape(str(failure))}", soft_wrap=True)
        sys.exit(1)
