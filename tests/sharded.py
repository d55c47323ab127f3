"""What tests of sharded training share: models, data, and the plain model that a sharded one must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import flagstone as fs
from flagstone.sharding import engine


class Block(nn.Module):
    """A norm, a wide layer and back, added to the input; odd sizes."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 3 * width + 1)
        self.narrow = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.narrow(F.gelu(self.widen(self.norm(x))))
        return x + wide


class Net(nn.Module):
    """Tokens in, scores out; the head is tied to the embedding."""

    def __init__(self, blocks: int = 4, width: int = 37, tokens: int = 53) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def net(**sizes: int) -> Net:
    torch.manual_seed(0)
    return Net(**sizes)


def shard(model: nn.Module, *, units: Iterable[nn.Module] | None = None, small: int = 0, **options: Any) -> nn.Module:
    """Shard blocks, then the model. Streams below ``small`` bytes are resident: by default only the root's, so that the
    small blocks of tests go the way of large ones."""
    engine.RESIDENT_BYTES = small
    options.setdefault("timeout", 20.0)
    for unit in model.blocks if units is None else units:
        fs.fully_shard(unit, **options)
    return fs.fully_shard(model, **options)


def text(step: int, rank: int, tokens: int = 53) -> Tensor:
    """A rank's micro-batch of a step."""
    return torch.randint(tokens, (3, 11), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    model: nn.Module,
    rank: int,
    steps: int = 4,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    loss: Callable[..., Tensor] = loss_of,
) -> list[float]:
    """Train as one of several ranks; the losses."""
    opt = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        value = loss(model, text(step, rank))
        value.backward()
        opt.step()
        opt.zero_grad()
        losses.append(value.item())
    return losses


def train_plain(
    model: nn.Module,
    world: int,
    steps: int = 4,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    loss: Callable[..., Tensor] = loss_of,
) -> list[list[float]]:
    """Train in one process as all ranks: the sum of their gradients, in rank order, divided by their number."""
    opt = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        values = []
        for rank in range(world):
            value = loss(model, text(step, rank))
            value.backward()
            values.append(value.item())
        average_gradients(model, world)
        opt.step()
        opt.zero_grad()
        losses.append(values)
    return losses


def average_gradients(model: nn.Module, world: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(world)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, fs.ShardedTensor) else tensor


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Both have the same names and the same bits."""
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        assert value.shape == theirs[name].shape
        torch.testing.assert_close(
            whole(value), theirs[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_gradients(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = theirs[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(
                whole(parameter.grad),
                gradient,
                **(tolerance or {"rtol": 0, "atol": 0}),
                msg=lambda m, n=name: f"{n}: {m}",
            )


def check_training(rank: int, world: int, build: Callable[[], nn.Module], steps: int = 4, **options: Any) -> nn.Module:
    """A sharded model trains as the plain one does, bit for bit."""
    plain = build()
    model = shard(copy.deepcopy(plain), **options)
    expected = train_plain(plain, world, steps)
    assert train(model, rank, steps) == [values[rank] for values in expected]
    assert_same(model, plain)
    return model
