"""What tests of sharded training share: models, data, and the plain model that a sharded one must equal."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import flagstone as fs
from flagstone.sharding import engine, host

CONNECTED = {"one host": None, "each rank a host": "each", "two hosts": "two"}
TWO_WAYS = ("one host", "each rank a host")


def connect(how: str | None, rank: int) -> None:
    """Before ``fully_shard``: ranks share memory, or have none in common, or are every second one on another host."""
    os.environ["FLAGSTONE_SHARED_MEMORY"] = "0" if how == "each" else "1"
    host._host_name = lambda: "a" if how != "two" else f"host {rank % 2}"


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


Backward = Callable[..., None]
Step = Callable[[nn.Module, int, int, Backward], Any]  # of a model, rank and step; what it returns is compared


def batch(rank: int, number: int, *shape: int) -> Tensor:
    """A rank's input of a step."""
    return torch.randn(shape or (4, 5), generator=torch.Generator().manual_seed(1000 * number + rank))


def one_step(model: nn.Module, rank: int, number: int, backward: Backward) -> Tensor:
    loss = model(batch(rank, number)).float().square().mean()
    backward(loss)
    return loss.detach()


def check_steps(
    rank: int,
    world: int,
    build: Callable[[], nn.Module],
    step: Step,
    how: str = "one host",
    *,
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    change: Callable[[nn.Module, int], None] = lambda model, number: None,
    units: Callable[[nn.Module], Iterable[Any]] = lambda model: model.blocks,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    **options: Any,
) -> nn.Module:
    """A sharded model does what plain ones do, one for each rank, that average the gradients of each backward.

    What ``step`` returns, gradients, weights and buffers are the same bits. ``change`` is applied before each step to
    all models; ``prepare`` only to the one that is then sharded.
    """
    connect(CONNECTED[how], rank)
    torch.manual_seed(0)
    plain = Plain(build(), world, optimizer)
    model = copy.deepcopy(plain.models[rank])
    prepare(model)
    shard(model, units=units(model), **options)
    opt = optimizer(model.parameters())
    for number in range(steps):
        for each in (model, *plain.models):
            change(each, number)
        expected = plain.gradients(step, number)[rank]
        torch.manual_seed(number)
        result = step(model, rank, number, torch.Tensor.backward)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert_same_gradients(model, plain.models[rank])
        opt.step()
        opt.zero_grad()
        plain.step()
    assert_same(model, plain.models[rank])
    return model


class Plain:
    """A plain model for each rank."""

    def __init__(self, model: nn.Module, world: int, optimizer: Callable[..., torch.optim.Optimizer] = adamw) -> None:
        self.models = [model, *(copy.deepcopy(model) for _ in range(world - 1))]
        self.optimizers = [optimizer(m.parameters()) for m in self.models]

    def gradients(self, step: Step, number: int) -> list[Any]:
        """Run a step on all, and add each backward's average to all gradients. Returns what the steps return."""
        world, results = len(self.models), []
        made: list[list[list[Tensor | None]]] = []  # by rank and backward
        for rank, model in enumerate(self.models):
            mine: list[list[Tensor | None]] = []
            parameters = list(model.parameters())
            before = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None

            def backward(loss: Tensor, parameters: Any = parameters, mine: Any = mine, **options: Any) -> None:
                loss.backward(**options)
                mine.append([p.grad for p in parameters])
                for p in parameters:
                    p.grad = None

            torch.manual_seed(number)
            results.append(step(model, rank, number, backward))
            made.append(mine)
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
        for several in zip(*made, strict=True):  # backward
            for parameters, gradients in zip(
                zip(*(m.parameters() for m in self.models), strict=True), zip(*several, strict=True), strict=True
            ):
                there = [g for g in gradients if g is not None]
                if there:
                    total = there[0].clone(memory_format=torch.contiguous_format)
                    for other in there[1:]:
                        total += other
                    total /= world
                    for p in parameters:
                        p.grad = total.clone() if p.grad is None else p.grad + total
        return results

    def step(self) -> None:
        for opt in self.optimizers:
            opt.step()
            opt.zero_grad()
