"""Parameters in flat buffers: as one parameter of their own, or as views of a buffer."""

from flagstone.flat.parameter import FlatParameter
from flagstone.flat.wrapper import FlattenParamsWrapper

__all__ = ["FlatParameter", "FlattenParamsWrapper"]
