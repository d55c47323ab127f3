"""One rank of a training job that can be killed at any time, and goes on from its last checkpoint.

    python examples/train.py --root runs/gpt --until 40 --every 20
    torchrun --nproc-per-node 3 examples/train.py --root runs/gpt --until 80 --every 20

The number of ranks may be another one each time. Rank 0 tells what happens in lines of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flagstone as fs
from gpt import GPT, Batches, Config, loss_of, write_corpus

CORPUS = "corpus.bin"


def rank_and_world() -> tuple[int, int]:
    """Which rank this is, of how many; from what torchrun sets."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def config_of(checkpoint: Path) -> Config:
    """The model's shape, which was put beside its weights."""
    return Config(**json.loads((checkpoint / "config.json").read_bytes()))


def last_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint. Whatever is there is complete, so there is nothing more to ask."""
    return max(root.glob("step-*"), default=None)


class Job:
    """A rank's part of the job: what is trained, and where it stands."""

    def __init__(self, root: Path, resume: Path | None) -> None:
        self.rank, self.world = rank_and_world()
        self.root = root
        self.config = Config() if resume is None else config_of(resume)
        self.batch = Batches(root / CORPUS, self.config.context)
        torch.manual_seed(0 if resume is None else 999)  # resumed weights come from the checkpoint, not from the seed
        self.model = GPT(self.config)
        for block in self.model.blocks:
            fs.fully_shard(block)
        fs.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=10)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=200)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm_up, decay], milestones=[10])
        self.step = 0
        torch.manual_seed(self.rank if resume is None else 1000 + self.rank)  # a rank new to the job keeps the latter
        if resume is not None:
            self.load(resume)

    def state(self) -> dict[str, Any]:
        """All that makes the job go on as if nothing had happened."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "step": self.step,
            "rng": fs.rng_state(),
        }

    def load(self, path: Path) -> None:
        state = self.state()
        report = fs.load(path, into=state)
        fs.set_rng_state(state["rng"])
        self.step = state["step"]
        self.tell("loaded", path=str(path), step=self.step, nbytes=report.nbytes, random=random_digest())

    def save(self, die: bool = False) -> None:
        path = self.root / f"step-{self.step:08}"
        assets = {"config.json": json.dumps(asdict(self.config), indent=2).encode()}
        self.tell("saving", path=str(path), step=self.step, random=random_digest())
        report = fs.save(self.state(), path, assets=assets, progress=self.stall if die else None)
        self.tell("saved", path=str(path), step=self.step, nbytes=report.nbytes, files=len(report.files))

    def stall(self, written: int, total: int) -> None:
        """Stop for good when half of this rank's bytes are written: somebody is going to kill us here."""
        if written * 2 * self.world >= total:
            self.tell("stalled", written=written, total=total)
            time.sleep(60)
            raise TimeoutError("nobody killed us")

    def train_a_step(self) -> None:
        loss = loss_of(self.model, self.batch(self.step, self.rank, self.world))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / self.world  # all shares are of the same size
        if self.world > 1:
            dist.all_reduce(mean)
        self.tell("step", step=self.step, loss=mean.item(), rate=self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.step += 1

    def tell(self, event: str, **facts: Any) -> None:
        if self.rank == 0:
            print(json.dumps({"event": event, **facts}), flush=True)


def random_digest() -> str:
    """A name for the state of torch's generator."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the checkpoints, and of the text")
    parser.add_argument("--until", type=int, required=True, help="step to stop at")
    parser.add_argument("--every", type=int, required=True, help="steps from save to save")
    parser.add_argument("--die-at", type=int, help="step whose save never ends")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = rank_and_world()
    if world > 1:
        dist.init_process_group("gloo")
    if rank == 0 and not (given.root / CORPUS).exists():
        write_corpus(given.root / CORPUS)
    if world > 1:
        dist.barrier()
    job = Job(given.root, last_checkpoint(given.root))
    while job.step < given.until:
        job.train_a_step()
        if job.step % given.every == 0 or job.step == given.until:
            job.save(die=job.step == given.die_at)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
