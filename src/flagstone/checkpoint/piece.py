"""The bytes of one rank's part of a tensor, wherever it lies: what save reads from and load writes to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flagstone.errors import LoadError
from flagstone.layout import DTYPES, Box, Span, span_boxes
from flagstone.storage import base


class Piece(ABC):
    """A rank's part of a tensor. Offsets count bytes of the part's own row-major flattening.

    Attributes:
        dtype: name of the element type in memory.
        shape: of this part.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].size

    def flat(self) -> base.Bytes | None:
        """The memory itself, when it is contiguous memory of the host; else None, and bytes are copied by box."""
        return None

    @abstractmethod
    def read_box(self, box: Box, out: base.Bytes) -> None:
        """Copy the elements of a box of this part to ``out``, row-major."""

    @abstractmethod
    def write_box(self, box: Box, data: base.Bytes) -> None:
        """Set the elements of a box of this part from ``data``, row-major."""

    def cast_from(self, dtype: str) -> Piece:
        """The same memory, written to in elements of another type, which are converted. Raises LoadError: cannot be."""
        raise LoadError(f"{dtype} cannot be converted to {self.dtype} here")

    def read(self, start: int, out: base.Bytes) -> None:
        """Copy ``out.nbytes`` bytes from byte ``start`` on; whole elements."""
        for box, data in self._boxes(start, out):
            self.read_box(box, data)

    def write(self, start: int, data: base.Bytes) -> None:
        """Set the bytes from byte ``start`` on; whole elements."""
        for box, part in self._boxes(start, data):
            self.write_box(box, part)

    def _boxes(self, start: int, data: base.Bytes) -> list[tuple[Box, base.Bytes]]:
        size = DTYPES[self.dtype].size
        found, at = [], 0
        for box in span_boxes(Span(start // size, data.nbytes // size), self.shape):
            length = box.numel * size
            found.append((box, data[at : at + length]))
            at += length
        return found


_WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


def words(data: base.Bytes, size: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Bytes as an array of elements of ``size`` bytes that are only ever moved, never computed with."""
    return data.view(_WORDS[size]).reshape(shape)


class ArrayPiece(Piece):
    """A numpy array, of any strides."""

    def __init__(self, array: NDArray[Any], dtype: str) -> None:
        self._array = array
        self.dtype, self.shape = dtype, array.shape
        self._flat: base.Bytes | None = None
        if array.flags.c_contiguous:
            self._flat = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
        self._words = array.view(_WORDS[array.dtype.itemsize])

    def flat(self) -> base.Bytes | None:
        return self._flat

    def read_box(self, box: Box, out: base.Bytes) -> None:
        words(out, self._words.itemsize, box.sizes)[...] = self._words[box.slices]

    def write_box(self, box: Box, data: base.Bytes) -> None:
        self._words[box.slices] = words(data, self._words.itemsize, box.sizes)

    def cast_from(self, dtype: str) -> Piece:
        return _CastArray(self._array, self.dtype, dtype)


class _CastArray(Piece):
    """An array that converts what is written to it."""

    def __init__(self, array: NDArray[Any], to: str, dtype: str) -> None:
        if dtype.startswith("complex") and not to.startswith("complex"):
            raise LoadError(f"{dtype} to {to} would drop the imaginary part")
        self._array, self.dtype, self.shape = array, dtype, array.shape

    def read_box(self, box: Box, out: base.Bytes) -> None:
        raise LoadError("a converting piece is only written to")

    def write_box(self, box: Box, data: base.Bytes) -> None:
        self._array[box.slices] = data.view(numpy_dtype(self.dtype)).reshape(box.sizes).astype(self._array.dtype)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of an element type; ml_dtypes has those that numpy has not. Raises LoadError: there is none."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        made = getattr(ml_dtypes, name, None)
        if made is None:
            raise LoadError(f"numpy has no element type {name}; read it with torch") from None
        return np.dtype(made)
