"""Sharded training: parameters in flat buffers that are divided over ranks."""

from flagstone.sharding.fully_shard import ShardedModule, fully_shard, register_forward_method
from flagstone.sharding.host import RankError
from flagstone.sharding.precision import MixedPrecision
from flagstone.sharding.tensor import ShardedTensor

__all__ = [
    "MixedPrecision",
    "RankError",
    "ShardedModule",
    "ShardedTensor",
    "fully_shard",
    "register_forward_method",
]
