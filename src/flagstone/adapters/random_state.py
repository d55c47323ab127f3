"""The state of the random number generators, as a rank has it."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from flagstone.adapters.per_rank import per_rank


def rng_state() -> per_rank[dict[str, Any]]:
    """The state of Python's, numpy's and torch's generators, of this rank and for it alone.

    torch's, CUDA's among them, is in it when torch has been imported.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
    }
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state["numpy"] = {"kind": kind, "keys": np.array(keys), "position": position, "gauss": [has_gauss, cached]}
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return per_rank(state)


def set_rng_state(state: per_rank[dict[str, Any]] | dict[str, Any]) -> None:
    """Set the generators to what ``rng_state`` gave, here or in the run that was loaded."""
    values = state.value if isinstance(state, per_rank) else state
    python = values["python"]
    random.setstate((python["version"], tuple(int(w) for w in python["words"]), python["gauss"]))
    numpy = values["numpy"]
    np.random.set_state((numpy["kind"], np.asarray(numpy["keys"]), numpy["position"], *numpy["gauss"]))
    if "torch" in values:
        import torch

        torch.set_rng_state(torch.as_tensor(values["torch"]))
        if "cuda" in values and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(list(values["cuda"]))
