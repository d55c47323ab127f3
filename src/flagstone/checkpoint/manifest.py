"""What a checkpoint is: ``manifest.json`` and ``checksums.json``. docs/format.md specifies both, byte for byte."""

from __future__ import annotations

import binascii
import re
from typing import Any

import msgspec
import xxhash

from flagstone.checkpoint import tree
from flagstone.errors import DamagedError, LoadError
from flagstone.layout import DTYPES
from flagstone.storage.base import Bytes

VERSION = 1
MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"
RUN = 1 << 20  # bytes under one checksum
_DIGEST = re.compile(rb',"digest":"([0-9a-f]{32})"\}\n')
_DIGEST_LENGTH = len(',"digest":""}\n') + 32
_DIGEST_BYTES = 16
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def digest(data: Any) -> str:
    """The xxh3-128 of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def run_digest(data: Bytes) -> bytes:
    """The xxh3-128 of a run of bytes: 16 bytes."""
    return xxhash.xxh3_128_digest(data.data)


class TensorRecord(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """A tensor: element type, shape, number of its file in ``Manifest.files``, its name there if it is another."""

    dtype: str
    shape: tuple[int, ...]
    file: int
    key: str = ""


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file: its size in bytes, and for one without checksums of its runs the digest of the whole."""

    name: str
    size: int
    digest: str = ""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is known about a checkpoint, but for its bytes."""

    flagstone: int
    save_id: str
    created: str
    tensors: dict[str, TensorRecord]
    files: list[FileRecord]
    state: Any
    checksums: str
    aliases: dict[str, str] = {}
    step: int | None = None
    metadata: Any = None
    ranks: int = 1

    def encode(self) -> bytes:
        body = msgspec.json.encode(self)[:-1]
        return body + b',"digest":"' + digest(body).encode() + b'"}\n'

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Read and check a manifest. Trusts nothing: it may be damaged, or come from an enemy.

        Raises:
            DamagedError: it is not what was written.
            LoadError: it is of another version, or states what cannot be.
        """
        match = _DIGEST.fullmatch(data[-_DIGEST_LENGTH:])
        if match is None:
            raise DamagedError(f"{where}: the end of the manifest is damaged or missing")
        body = data[:-_DIGEST_LENGTH]
        if digest(body).encode() != match[1]:
            raise DamagedError(f"{where}: the manifest is damaged: its digest does not fit it")
        try:
            version = msgspec.json.decode(body + b"}", type=_Version).flagstone
            if version != VERSION:
                raise LoadError(f"{where}: format version {version}; this Flagstone reads version {VERSION}")
            manifest = msgspec.json.decode(body + b"}", type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise LoadError(f"{where}: the manifest is not one: {error}") from error
        manifest._check(where)
        return manifest

    def _check(self, where: str) -> None:
        names = [f.name for f in self.files]
        for file in self.files:
            if not FILE_NAME.fullmatch(file.name) or file.name in (MANIFEST, CHECKSUMS) or file.size < 0:
                raise LoadError(f"{where}: {file.name!r} with {file.size} bytes cannot be a file of a checkpoint")
        if len(set(names)) != len(names):
            raise LoadError(f"{where}: a file is listed twice")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                raise LoadError(f"{where}: {name} has the unknown element type {tensor.dtype!r}")
            if not 0 <= tensor.file < len(names) or any(not 0 <= n < 1 << 63 for n in tensor.shape):
                raise LoadError(f"{where}: {name} has the impossible shape {tensor.shape} or file {tensor.file}")
        tree.check(self.state, where)
        for alias, name in self.aliases.items():
            if name not in self.tensors or alias in self.tensors:
                raise LoadError(f"{where}: {alias} is said to be another name of {name}, which cannot be")


class _Version(msgspec.Struct):
    flagstone: int


class Extent(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive runs of a file: first byte, one past the last, digests one after the other.

    Every run has ``Checksums.run`` bytes, but for the last one, which may be shorter.
    """

    begin: int
    end: int
    digests: bytes  # base64 in JSON

    def count(self, run: int) -> int:
        return -(-(self.end - self.begin) // run)


class Checksums(msgspec.Struct, frozen=True):
    """The xxh3-128 of every run of every data file. The extents of a file lie end to end, from its first byte on."""

    run: int
    files: dict[str, list[Extent]]

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def decode(cls, data: bytes, manifest: Manifest, where: str) -> Checksums:
        """Read and check the checksums that belong to a manifest. Raises DamagedError, LoadError."""
        if digest(data) != manifest.checksums:
            raise DamagedError(f"{where}: the checksums are damaged: the manifest's digest does not fit them")
        try:
            sums = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, binascii.Error) as error:
            raise LoadError(f"{where}: the checksums are none: {error}") from error
        if sums.run <= 0 or sums.run > 64 << 20:
            raise LoadError(f"{where}: runs of {sums.run} bytes cannot be")
        for file in manifest.files:
            if file.digest:
                continue
            fault = tiling_fault(sums.files.get(file.name, []), file.size, sums.run)
            if fault:
                raise LoadError(f"{where}: {file.name}: {fault}")
        return sums


def tiling_fault(extents: list[Extent], size: int, run: int) -> str:
    """Why these extents do not cover a file of ``size`` bytes once and wholly; empty when they do."""
    at = 0
    for extent in extents:
        if extent.begin != at or extent.end <= at:
            return f"bytes from {at:,} on are covered twice or not at all"
        if len(extent.digests) != extent.count(run) * _DIGEST_BYTES:
            return f"bytes {extent.begin:,} to {extent.end:,} have {len(extent.digests)} bytes of checksums"
        at = extent.end
    return "" if at == size else f"bytes {at:,} to {size:,} are not covered"
