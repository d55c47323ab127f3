"""Adam and AdamW on flat tensors: what lies one behind the other in memory is stepped as one.

A step of many small parameters costs what calling the kernels costs, and one of large ones what going through memory
nine times costs. So neighbours are joined, and cut into pieces that stay in the processor's cache. The numbers are the
same, as every operation is elementwise; and the state stays where it is, by parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from flagstone.sharding.tensor import ShardedTensor, zeros_for

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
        new = [p for p in group["params"] if isinstance(p, ShardedTensor) and not optimizer.state.get(p)]
        zeros_for.append(_Zeros(new))
        try:
            result = type(optimizer)._init_group(optimizer, group, *args)  # type: ignore[attr-defined]
        finally:
            zeros_for.pop()
        lists = [a for a in args if isinstance(a, list) and a]
        if group.get("differentiable") or group.get("capturable") or len({len(x) for x in lists}) != 1:
            return result
        plan = self._plans.get(id(group))
        if plan is None or not plan.fits(lists):
            plan = self._plans[id(group)] = _Plan(lists)
        plan.apply(lists)
        return result


class _Zeros:
    """Zeros for optimizer state that lie as the parameters do."""

    def __init__(self, parameters: Sequence[ShardedTensor]) -> None:
        self._place: dict[ShardedTensor, tuple[int, int]] = {}  # which run, and where in it
        self._runs: list[tuple[int, torch.dtype, torch.device]] = []
        self._flat: dict[tuple[int, int], Tensor] = {}  # by run, and by how many there were before
        self._calls: dict[ShardedTensor, int] = {}
        for run in _neighbours([p.local] for p in parameters):
            at = 0
            for i in run:
                self._place[parameters[i]] = len(self._runs), at
                at += parameters[i].local.numel()
            self._runs.append((at, parameters[run[0]].dtype, parameters[run[0]].device))

    def __call__(self, parameter: ShardedTensor) -> Tensor | None:
        if parameter not in self._place:
            return None
        run, at = self._place[parameter]
        call = self._calls[parameter] = self._calls.get(parameter, -1) + 1
        if (run, call) not in self._flat:
            total, dtype, device = self._runs[run]
            self._flat[run, call] = torch.zeros(total, dtype=dtype, device=device)
        return self._flat[run, call].narrow(0, at, parameter.local.numel())


class _Plan:
    """Which entries of the lists are neighbours, and the pieces that they become. The last list is of steps."""

    def __init__(self, lists: Lists) -> None:
        self._lists = [list(x) for x in lists]
        *self._tensors, self._steps = self._lists
        sharded = [i for i in range(len(self._steps)) if all(isinstance(x[i], ShardedTensor) for x in self._tensors)]
        found = _neighbours([_local(x[i]) for x in self._tensors[:2]] for i in sharded)
        self._runs = [[sharded[i] for i in run] for run in found]
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

    def _pieces_of(self, run: Sequence[int]) -> list[list[Tensor]]:
        flats = [_flat([x[i] for i in run]) for x in self._tensors]
        length = PIECE if flats[0].device.type == "cpu" else max(flats[0].numel(), 1)
        return (
            [list(piece) for piece in zip(*(f.split(length) for f in flats), strict=True)] if flats[0].numel() else []
        )


def _neighbours(rows: Iterable[Sequence[Tensor]]) -> list[list[int]]:
    """The numbers of rows in runs: what a row has lies right behind what the one before it has. Empty ones join any."""
    known = sorted(
        (tuple(t.data_ptr() if t.numel() else 0 for t in row), str(row[0].dtype), tuple(t.nbytes for t in row), i)
        for i, row in enumerate(rows)
    )
    runs: list[list[int]] = []
    end: tuple[tuple[int, ...], str] | None = None
    for begin, dtype, nbytes, i in known:
        if not runs or (any(nbytes) and end is not None and end != (begin, dtype)):
            runs.append([])
        runs[-1].append(i)
        if any(nbytes):
            end = tuple(a + n for a, n in zip(begin, nbytes, strict=True)), dtype
    return runs


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors that lie one behind the other as one; optimizer state that does not is moved so that it does."""
    parts = [_local(t) for t in tensors]
    total = sum(p.numel() for p in parts)
    if len(_neighbours([p] for p in parts)) == 1:
        return next((p for p in parts if p.numel()), parts[0]).as_strided((total,), (1,))
    flat = torch.cat(parts)
    at = 0
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.set_(flat.untyped_storage(), at, (part.numel(),), (1,))
            at += part.numel()
    return flat
