"""Where each tensor's bytes lie: whole tensors in plain safetensors files, the same whatever the number of ranks.

    byte 0        8                   a multiple of 4096
    | length u64 | JSON header, spaces | tensors of k * 4096 bytes ... | all the others ... | end

Tensors whose size is a multiple of 4096 bytes come first, so that each of them starts on a block; the others follow,
those with the larger elements first, so that each is aligned to its elements. There are no holes, which the format
forbids. A group of tensors is spread over several files when it is larger than ``FILE_BYTES``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import msgspec

from flagstone.layout.box import Shape
from flagstone.layout.dtypes import DTYPES

BLOCK = 4096  # bytes: what direct I/O wants to be aligned to, and a page
FILE_BYTES = 4 << 30  # few, large files: parallel file systems like 1 to 4 GiB
HEADER_BYTES = 80 << 20  # safetensors allows a header of 100 MB

_HEADER_METADATA = {"format": "pt"}  # transformers asks for it
_RESERVED = re.compile(r"rank-\d+|.*-\d+-of-\d+", re.IGNORECASE)  # what a rank alone has; one of several volumes


class TensorSpec(NamedTuple):
    """A tensor as a file sees it: ``key`` is its name inside the files of ``group``."""

    name: str
    group: str
    key: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].size


class Slot(NamedTuple):
    """A tensor's place in a file: ``begin`` is the absolute byte, ``nbytes`` its length in bytes."""

    name: str
    key: str
    dtype: str
    shape: Shape
    begin: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One safetensors file: its header, as bytes, and its tensors in the order of their bytes."""

    file: str
    header: bytes
    slots: tuple[Slot, ...]
    size: int
    group: str = ""


def lay_out(tensors: Iterable[TensorSpec], file_bytes: int = FILE_BYTES) -> list[FileLayout]:
    """Give every tensor its place. A pure function: every rank that knows the same tensors gets the same files."""
    groups: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.group, []).append(tensor)
    layouts = []
    for name, group in _file_names(groups).items():
        volumes = _volumes(groups[group], file_bytes)
        for number, volume in enumerate(volumes, 1):
            numbered = f"-{number:05}-of-{len(volumes):05}" if len(volumes) > 1 else ""
            layouts.append(replace(lay_out_file(f"{name}{numbered}.safetensors", volume), group=group))
    return layouts


def index_of(layouts: Sequence[FileLayout]) -> tuple[str, bytes]:
    """The index file of a group with several files, as transformers reads it: its name and its bytes."""
    total = sum(s.nbytes for f in layouts for s in f.slots)
    where = {s.key: f.file for f in layouts for s in f.slots}
    stem = layouts[0].file.rsplit("-00001-of-", 1)[0]
    index = {"metadata": {"total_size": total}, "weight_map": where}
    return f"{stem}.safetensors.index.json", msgspec.json.format(msgspec.json.encode(index), indent=2)


def _file_names(groups: Iterable[str]) -> dict[str, str]:
    """A file name for each group: safe everywhere, and different even where case does not count."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for group in groups:
        base = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in group)[:80].strip(".-") or "_"
        if _RESERVED.fullmatch(base):
            base += "_"
        name, number = base, 1
        while name.lower() in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name.lower())
        names[name] = group
    return names


def _volumes(tensors: list[TensorSpec], file_bytes: int) -> list[list[TensorSpec]]:
    volumes: list[list[TensorSpec]] = [[]]
    filled = header = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        entry = len(msgspec.json.encode(tensor.key)) + 21 * len(tensor.shape) + 128  # at most
        if volumes[-1] and (filled + nbytes > file_bytes or header + entry > HEADER_BYTES):
            volumes.append([])
            filled = header = 0
        volumes[-1].append(tensor)
        filled += nbytes
        header += entry
    return volumes


def lay_out_file(file: str, tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """The layout of one file, with strings of one's own in its header."""
    sized = [(t, t.nbytes) for t in tensors]
    blocks = [(t, n) for t, n in sized if n % BLOCK == 0]
    tails = [(t, n) for t, n in sized if n % BLOCK]
    tails.sort(key=lambda tn: -DTYPES[tn[0].dtype].size)  # stable: the state's order within a size
    entries: dict[str, Any] = {"__metadata__": {**_HEADER_METADATA, **(metadata or {})}}
    at = 0
    placed: list[tuple[TensorSpec, int, int]] = []
    for tensor, nbytes in blocks + tails:
        dtype = DTYPES[tensor.dtype]
        if tensor.key in entries:
            raise ValueError(f"two tensors of {file} have the name {tensor.key!r}")
        entries[tensor.key] = {
            "dtype": dtype.stored,
            "shape": tensor.shape + dtype.tail,
            "data_offsets": (at, at + nbytes),
        }
        placed.append((tensor, at, nbytes))
        at += nbytes
    text = msgspec.json.encode(entries)
    length = -(-(8 + len(text)) // BLOCK) * BLOCK - 8
    header = length.to_bytes(8, "little") + text.ljust(length, b" ")
    base = len(header)
    slots = tuple(Slot(t.name, t.key, t.dtype, t.shape, base + a, n) for t, a, n in placed)
    return FileLayout(file, header, slots, base + at)
