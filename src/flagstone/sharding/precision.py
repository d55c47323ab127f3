"""Element types of a training step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Which element types a unit computes and reduces with. The optimizer sees parameters in the type that they had.

    Attributes:
        param: of the parameters in forward and backward; None leaves them as they are.
        reduce: in which gradients are accumulated on a rank and given to the others; None for that of the parameters in
            forward. Sums over ranks are made in float32, or float64, whatever this is.
        output: that floating tensors which forward returns are converted to; None leaves them as they are.
        cast_forward_inputs: whether floating tensors given to forward are converted to ``param``.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_forward_inputs: bool = True
