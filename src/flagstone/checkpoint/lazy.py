"""A checkpoint as a mapping, read only where it is looked at."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from flagstone.checkpoint import tree
from flagstone.checkpoint.manifest import Manifest
from flagstone.checkpoint.reading import Folder, Place, Reader, Want
from flagstone.checkpoint.values import Frame, NumpyFrame, Values
from flagstone.errors import LoadError
from flagstone.layout import DTYPES, Box

_SLACK = 64 << 10  # bytes


class LazyTensor:
    """A tensor on disk: shape and element type are known, elements are read by indexing.

    ``t[:128]`` reads the bytes of these rows only; ``t[...]`` all of it. Integers, slices, ``...`` and ``None`` are
    understood. The result is a tensor of the framework that it was saved from, where that is installed, else numpy.
    """

    def __init__(self, folder: Folder, name: str, frame: Frame, verify: bool | None) -> None:
        self._folder, self._frame, self._verify = folder, frame, verify
        record = folder.manifest.tensors[folder.manifest.aliases.get(name, name)]
        self.name = name
        self.shape = record.shape
        self.dtype = record.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).numel * DTYPES[self.dtype].size

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def __getitem__(self, index: Any) -> Any:
        return self._read(index, self._frame)

    def numpy(self, index: Any = ...) -> NDArray[Any]:
        """The elements, or a part of them, as a numpy array."""
        array: NDArray[Any] = self._read(index, NumpyFrame())
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def _read(self, index: Any, frame: Frame) -> Any:
        box, rest = _box(index, self.shape)
        made, piece = frame.empty(self.dtype, box.sizes)
        want = Want(self._folder.place(self.name), piece, box)
        Reader(self._folder, [want], self._checks(want)).run()
        return made[rest] if rest else made

    def _checks(self, want: Want) -> bool | None:
        """Whether to check all runs that the bytes lie in: where that means to read little more. Else those within."""
        if self._verify is not None:
            return self._verify
        ranges = want.ranges()
        exact = sum(high - low for low, high in ranges)
        place = self._folder.place(self.name)
        if exact >= place.nbytes:
            return True
        runs = {r[0]: r[1] - r[0] for low, high in ranges for r in self._folder.runs(place.file, low, high)}
        return True if sum(runs.values()) <= exact * 1.1 + _SLACK else None


class Checkpoint(Mapping[str, Any]):
    """A checkpoint as a mapping from dotted names to lazy tensors and plain values. Close it, or use ``with``.

    Attributes:
        path: its folder.
        step: the step that it was saved at, when that was said.
        metadata: what the user gave.
        save_id: names the save.
    """

    def __init__(self, folder: Folder, frame: Frame, *, verify: bool | None, allow_pickle: bool) -> None:
        self._folder, self._frame, self._verify, self._allow_pickle = folder, frame, verify, allow_pickle
        self.path = folder.folder
        self.step = folder.manifest.step
        self.metadata = folder.manifest.metadata
        self.save_id = folder.manifest.save_id
        self._leaves = dict(tree.leaves(folder.manifest.state))

    @property
    def manifest(self) -> Manifest:
        """Everything that is known about the checkpoint."""
        return self._folder.manifest

    def __getitem__(self, name: str) -> Any:
        node = self._leaves[name] if name in self._leaves else tree.find(self.manifest.state, name)
        if node is tree.UNKNOWN:
            near = difflib.get_close_matches(name, self._leaves, 3)
            raise KeyError(f"{name}: not in {self.path}" + (f"; near: {', '.join(near)}" if near else ""))
        kind = node.get("$") if isinstance(node, dict) else None
        if kind in ("t", "a"):
            return LazyTensor(self._folder, name, NumpyFrame() if kind == "a" else self._frame, self._verify)
        values = Values(self._folder, self._frame, self._allow_pickle)
        made = values.make(node, name)
        Reader(self._folder, values.wants, verify=True).run()
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def place(self, name: str) -> Place:
        """The file and the bytes that hold a tensor."""
        return self._folder.place(name)

    def close(self) -> None:
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _box(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The box that an index touches, and the index that takes from that box what was asked for."""
    items = list(index) if isinstance(index, tuple) else [index]
    given = sum(i is not None and i is not Ellipsis for i in items)
    if given > len(shape):
        raise IndexError(f"{given} indices for a tensor of shape {list(shape)}")
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[slice | int | None] = []
    for item in items:
        dim = len(offsets)
        if item is None:
            rest.append(None)
        elif item is Ellipsis:
            for extent in shape[dim : dim + len(shape) - given]:
                offsets.append(0)
                sizes.append(extent)
                rest.append(slice(None))
        elif isinstance(item, slice):
            start, stop, step = item.indices(shape[dim])
            picked = range(start, stop, step)
            low, high = (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if picked else (0, 0)
            offsets.append(low)
            sizes.append(high - low)
            if step > 0:
                rest.append(slice(None, None, step))
            else:
                raise IndexError("a slice with a negative step: read forwards, and flip what you get")
        else:
            try:
                at = operator.index(item)
            except TypeError:
                raise IndexError(
                    f"a lazy tensor is indexed by integers and slices, not {item!r}; read it first"
                ) from None
            if not -shape[dim] <= at < shape[dim]:
                raise IndexError(f"index {at} is outside dimension {dim} of size {shape[dim]}")
            offsets.append(at % shape[dim])
            sizes.append(1)
            rest.append(0)
    plain = all(isinstance(r, slice) and r.step in (None, 1) for r in rest)
    return Box(tuple(offsets), tuple(sizes)), () if plain else tuple(rest)


def open_checkpoint(folder: Folder, frame: Frame, *, verify: bool | None, allow_pickle: bool) -> Checkpoint:
    """See ``flagstone.open``."""
    try:
        return Checkpoint(folder, frame, verify=verify, allow_pickle=allow_pickle)
    except LoadError:
        folder.close()
        raise
