"""Sharded training: parameters in flat buffers that are divided over ranks."""

from flagstone.sharding.clip import clip_grad_norm_
from flagstone.sharding.fully_shard import ShardedModule, fully_shard, register_forward_method
from flagstone.sharding.host import RankError
from flagstone.sharding.precision import MixedPrecision
from flagstone.sharding.stats import memory_report, sharding_stats
from flagstone.sharding.tensor import ShardedTensor

__all__ = [
    "MixedPrecision",
    "RankError",
    "ShardedModule",
    "ShardedTensor",
    "clip_grad_norm_",
    "fully_shard",
    "memory_report",
    "register_forward_method",
    "sharding_stats",
]
