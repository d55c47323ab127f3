"""A small GPT over bytes, and its data: which text a step trains on depends on the step, and on nothing else."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Config:
    """The shape of the model."""

    vocabulary: int = 256
    context: int = 96
    width: int = 128
    heads: int = 4
    depth: int = 4


class Block(nn.Module):
    """Attention over what came before, then a wide layer; each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.norm_wide = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        wide: Tensor = self.narrow(F.gelu(self.widen(self.norm_wide(x))))
        return x + wide


class GPT(nn.Module):
    """Bytes in, scores of the next byte out. One matrix embeds the bytes and scores them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._init)
        self.head.weight = self.bytes.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """How surprised the model is by each next byte, on average. ``text`` is [sequences, context + 1]."""
    scores = model(text[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def write_corpus(path: Path) -> int:
    """Write the sources of Python's standard library into one file; the number of sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(p.read_bytes() for p in sources))
    return len(sources)


class Batches:
    """The batch of every step: the same sequences in the same order, however many ranks share them."""

    def __init__(self, corpus: Path, context: int, sequences: int = 12) -> None:
        self._text = np.memmap(corpus, np.uint8, mode="r")
        self._context, self._sequences = context, sequences

    def __call__(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """A rank's equal share of a step's batch: [sequences / world, context + 1]."""
        if self._sequences % world:
            raise ValueError(f"{self._sequences} sequences cannot be shared equally by {world} ranks")
        starts = np.random.default_rng([7, step]).integers(0, len(self._text) - self._context, self._sequences)
        share = [self._text[at : at + self._context + 1] for at in starts[rank::world]]
        return torch.from_numpy(np.stack(share)).long()
