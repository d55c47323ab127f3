"""The norm of all gradients, and its limit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flagstone.errors import FlagstoneError
from flagstone.sharding.tensor import Owner, ShardedTensor, combine


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm, taken as one vector, is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, for sharded parameters and others together. What several ranks have alike
    counts once. All ranks call it; parameters that are not sharded must have the same gradients on each.

    Args:
        parameters: those whose gradients to scale.
        max_norm: the limit.
        norm_type: a positive order of the norm, or inf.
        error_if_nonfinite: whether a norm of inf or NaN is an error, raised before anything is changed.
        foreach: as in torch; the same is done in both cases.

    Returns:
        The norm before scaling: one element, the same on every rank.

    Raises:
        FlagstoneError: an order that is not positive.
        RuntimeError: the norm is not finite, where that was asked for.
    """
    order = float(norm_type)
    if not order > 0:
        raise FlagstoneError(
            f"a norm of order {order} of sharded gradients is not supported; take a positive one, or inf"
        )
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in given if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    local = [g.local if isinstance(g, ShardedTensor) else g.detach() for g in gradients]
    with torch.no_grad():
        norms = torch._foreach_norm([g if g.numel() else g.new_zeros(1) for g in local], order)
        owners: list[Owner | None] = [g.placement.owner if isinstance(g, ShardedTensor) else None for g in gradients]
        total = combine([(owner, order, norm) for owner, norm in zip(owners, norms, strict=True)], order)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {order} of the gradients is {total.item()}, so they cannot be scaled"
            )
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        torch._foreach_mul_(local, scale)
    return total
