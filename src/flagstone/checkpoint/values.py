"""From the manifest's nodes to Python values: tensors made and filled, or looked at later."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flagstone.checkpoint import tree
from flagstone.checkpoint.piece import ArrayPiece, Piece, numpy_dtype
from flagstone.checkpoint.reading import Folder, Place, Reader, Want, rank_values
from flagstone.errors import LoadError


class Frame(Protocol):
    """What makes tensors of a framework: the thing itself, and the piece that fills it."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Piece]: ...


class NumpyFrame:
    """numpy arrays; ml_dtypes has the element types that numpy has not."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> tuple[NDArray[Any], Piece]:
        array = np.empty(shape, numpy_dtype(dtype))
        return array, ArrayPiece(array, dtype)


class Values:
    """Makes values of a checkpoint. Tensors are made empty; ``wants`` is what a Reader then fills."""

    def __init__(
        self, folder: Folder, frame: Frame, allow_pickle: bool, place: Callable[[str], Place] | None = None
    ) -> None:
        self._folder, self._frame, self._allow_pickle = folder, frame, allow_pickle
        self._place = place or folder.place
        self._made: dict[str, Any] = {}
        self.wants: list[Want] = []

    def make(self, node: tree.Node, path: str) -> Any:
        """The value of a node at its dotted path."""
        try:
            return tree.decode(node, path, self._leaf)
        except RecursionError as error:
            raise LoadError(f"{path or 'the state'} is nested too deeply") from error

    def of_rank(self, path: str, rank: int) -> Any:
        """What one rank alone had at a path. Raises LoadError: it had nothing."""
        nodes, places = rank_values(self._folder, rank)
        if path not in nodes:
            raise LoadError(f"{path}: rank {rank} of the save has no value of its own")
        own = Values(self._folder, self._frame, self._allow_pickle, lambda name: places[name])
        own.wants = self.wants
        return own.make(nodes[path], path)

    def _leaf(self, node: dict[str, Any], path: str) -> Any:
        kind = node["$"]
        if kind in ("t", "a"):
            return self._tensor(path, NumpyFrame() if kind == "a" else self._frame)
        if kind == "np":
            return _scalar(node, path)
        if kind == "optimizer":
            return {
                "state": self.make(node["state"], tree.join(path, "state")),
                "param_groups": [
                    {**self.make(g["options"], tree.join(path, f"param_groups.{i}")), "params": list(g["params"])}
                    for i, g in enumerate(node["groups"])
                ],
            }
        if kind == "ranks":
            return [self.of_rank(path, rank) for rank in range(self._folder.manifest.ranks)]
        if kind == "pickle":
            return self._unpickled(path)
        return tree.UNKNOWN

    def _tensor(self, name: str, frame: Frame) -> Any:
        try:
            place = self._place(name)
        except KeyError:
            raise LoadError(f"{name}: the manifest has no such tensor") from None
        if place.name not in self._made:
            try:
                made, piece = frame.empty(place.dtype, place.shape)
            except (ValueError, RuntimeError, MemoryError) as error:
                raise LoadError(f"{name} of shape {list(place.shape)} cannot be made: {error}") from error
            self._made[place.name] = made
            self.wants.append(Want(place, piece))
        return self._made[place.name]

    def _unpickled(self, path: str) -> Any:
        if not self._allow_pickle:
            raise LoadError(
                f"{path} was saved as a pickle, which can run code; pass allow_pickle=True if you trust who wrote it, "
                "or leave it out with exclude"
            )
        values = Values(self._folder, NumpyFrame(), False)
        data = values._tensor(path, NumpyFrame())
        Reader(self._folder, values.wants, verify=True).run()
        return pickle.loads(data.tobytes())


def _scalar(node: dict[str, Any], path: str) -> Any:
    try:
        dtype = np.dtype(node["dtype"])
        if dtype.kind not in "biufcMm":
            raise ValueError(f"{dtype} is no number")
        return np.frombuffer(base64.b64decode(node["v"], validate=True), dtype)[0]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LoadError(f"{path}: the manifest holds a numpy scalar that is none: {error}") from error
