"""Flagstone: training state in one layout, from memory to disk.

import flagstone as fs

fs.save({"model": model, "optimizer": optimizer, "step": 300}, "runs/a/step-00000300")
fs.load("runs/a/step-00000300", into={"model": model, "optimizer": optimizer, "step": 0})
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flagstone.errors import Damage, DamagedError, FlagstoneError, FlagstoneWarning, LoadError, SaveError

if TYPE_CHECKING:
    from flagstone.adapters.per_rank import per_rank
    from flagstone.adapters.random_state import rng_state, set_rng_state
    from flagstone.api import (
        Checkpoint,
        LazyTensor,
        LoadReport,
        SaveReport,
        VerifyReport,
        load,
        open,  # noqa: A004
        save,
        verify,
    )
    from flagstone.flat import FlatParameter, FlattenParamsWrapper
    from flagstone.flat.places import (
        FlatViews,
        ParameterPlace,
        copy_to,
        dematerialize,
        materialize,
        numel_of,
        place_of,
        places_of,
    )
    from flagstone.sharding import (
        MixedPrecision,
        RankError,
        ShardedModule,
        ShardedTensor,
        clip_grad_norm_,
        fully_shard,
        memory_report,
        register_forward_method,
        sharding_stats,
    )

__version__ = "0.1.0"

# Loaded when first used: `import flagstone` needs neither torch nor numpy.
_HOMES = {
    "per_rank": "flagstone.adapters.per_rank",
    **dict.fromkeys(("FlatParameter", "FlattenParamsWrapper"), "flagstone.flat"),
    **dict.fromkeys(
        ("FlatViews", "ParameterPlace", "copy_to", "dematerialize", "materialize", "numel_of", "place_of", "places_of"),
        "flagstone.flat.places",
    ),
    **dict.fromkeys(
        (
            "MixedPrecision",
            "RankError",
            "ShardedModule",
            "ShardedTensor",
            "clip_grad_norm_",
            "fully_shard",
            "memory_report",
            "register_forward_method",
            "sharding_stats",
        ),
        "flagstone.sharding",
    ),
    "rng_state": "flagstone.adapters.random_state",
    "set_rng_state": "flagstone.adapters.random_state",
    **dict.fromkeys(
        ("Checkpoint", "LazyTensor", "LoadReport", "SaveReport", "VerifyReport", "load", "open", "save", "verify"),
        "flagstone.api",
    ),
}

__all__ = [
    "Checkpoint",
    "Damage",
    "DamagedError",
    "FlagstoneError",
    "FlagstoneWarning",
    "FlatParameter",
    "FlatViews",
    "FlattenParamsWrapper",
    "LazyTensor",
    "LoadError",
    "LoadReport",
    "MixedPrecision",
    "ParameterPlace",
    "RankError",
    "SaveError",
    "SaveReport",
    "ShardedModule",
    "ShardedTensor",
    "VerifyReport",
    "clip_grad_norm_",
    "copy_to",
    "dematerialize",
    "fully_shard",
    "load",
    "materialize",
    "memory_report",
    "numel_of",
    "open",
    "per_rank",
    "place_of",
    "places_of",
    "register_forward_method",
    "rng_state",
    "save",
    "set_rng_state",
    "sharding_stats",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flagstone' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
