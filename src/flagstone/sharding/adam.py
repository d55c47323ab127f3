"""Adam and AdamW on flat tensors: what lies one behind the other in memory is stepped as one.

A step of many small parameters costs what calling the kernels costs, and one of large ones what going through memory
nine times costs. So neighbours are joined, and cut into pieces that stay in the processor's cache. The numbers are the
same, as every operation is elementwise; and the state stays where it is, by parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from flagstone.sharding.tensor import ShardedTensor

PIECE = 1 << 17  # elements, on a processor: weights, gradients and moments of a piece are 2 MiB in float32

Lists = list[list[Tensor]]


def join_neighbours(optimizer: torch.optim.Optimizer) -> None:
    """Let an Adam or AdamW with sharded parameters step as above; all others are left alone."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or "_init_group" in vars(optimizer):
        return
    if any(isinstance(p, ShardedTensor) for group in optimizer.param_groups for p in group["params"]):
        optimizer._init_group = _Joined(optimizer)  # type: ignore[attr-defined]


class _Joined:
    """In place of the optimizer's ``_init_group``, which makes the lists of tensors that a step works on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._plans: dict[int, _Plan] = {}  # by group

    def __call__(self, group: dict[str, Any], *args: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        result = type(optimizer)._init_group(optimizer, group, *args)  # type: ignore[attr-defined]
        lists = [a for a in args if isinstance(a, list) and a]
        if group.get("differentiable") or group.get("capturable") or len({len(x) for x in lists}) != 1:
            return result
        plan = self._plans.get(id(group))
        if plan is None or not plan.fits(lists):
            plan = self._plans[id(group)] = _Plan(lists)
        plan.apply(lists)
        return result


class _Plan:
    """Which entries of the lists are neighbours, and the pieces that they become. The last list is of steps."""

    def __init__(self, lists: Lists) -> None:
        self._lists = [list(x) for x in lists]
        *self._tensors, self._steps = self._lists
        self._runs = list(self._find_runs())
        self._pieces = [self._pieces_of(run) for run in self._runs]
        joined = {i for run in self._runs for i in run}
        self._others = [i for i in range(len(self._steps)) if i not in joined]

    def fits(self, lists: Lists) -> bool:
        """Whether these are the same tensors."""
        return len(lists) == len(self._lists) and all(
            len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(lists, self._lists, strict=True)
        )

    def apply(self, lists: Lists) -> None:
        """Put the pieces into the lists, where all steps of a run are equal."""
        for parameter in lists[0]:
            if isinstance(parameter, ShardedTensor):
                parameter.placement.before_write()
        others = list(self._others)
        made: Lists = [[] for _ in lists]
        for run, pieces in zip(self._runs, self._pieces, strict=True):
            steps = [self._steps[i] for i in run]
            if bool((torch.stack(steps) != steps[0]).any()):
                others += run
                continue
            for piece in pieces:
                for target, tensor in zip(made, (*piece, steps[0].clone()), strict=True):
                    target.append(tensor)
            torch._foreach_add_(steps, 1)
        for target, source, given in zip(made, self._lists, lists, strict=True):
            given[:] = target + [source[i] for i in others]

    def _find_runs(self) -> Iterator[list[int]]:
        """Runs of entries whose parameters and gradients are neighbours; what has nothing here joins the first."""
        known: list[tuple[tuple[int, int, str], int, int, int]] = []
        for i, (parameter, gradient) in enumerate(zip(*self._tensors[:2], strict=True)):
            if isinstance(parameter, ShardedTensor) and isinstance(gradient, ShardedTensor):
                p, g = parameter.local, gradient.local
                empty = not p.numel()
                known.append(
                    ((0 if empty else p.data_ptr(), 0 if empty else g.data_ptr(), str(p.dtype)), p.nbytes, g.nbytes, i)
                )
        known.sort()
        run: list[int] = []
        end: tuple[int, int, str] | None = None
        for here, p_bytes, g_bytes, i in known:
            if p_bytes and end is not None and end != here:
                yield run
                run = []
            run.append(i)
            if p_bytes:
                end = here[0] + p_bytes, here[1] + g_bytes, here[2]
        if run:
            yield run

    def _pieces_of(self, run: Sequence[int]) -> list[list[Tensor]]:
        flats = [_flat([x[i] for i in run], is_state=n >= 2) for n, x in enumerate(self._tensors)]
        length = PIECE if flats[0].device.type == "cpu" else max(flats[0].numel(), 1)
        return (
            [list(piece) for piece in zip(*(f.split(length) for f in flats), strict=True)] if flats[0].numel() else []
        )


def _flat(tensors: Sequence[Tensor], is_state: bool) -> Tensor:
    """Tensors that lie one behind the other as one; optimizer state is moved so that it does."""
    parts = [t.local for t in tensors if isinstance(t, ShardedTensor)]
    total = sum(p.numel() for p in parts)
    first = next((p for p in parts if p.numel()), parts[0])
    if not is_state:
        return first.as_strided((total,), (1,))
    flat = torch.cat(parts)
    at = 0
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.set_(flat.untyped_storage(), at, (part.numel(),), (1,))
            at += part.numel()
    return flat
