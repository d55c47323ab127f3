"""A checkpoint's folder, opened: what it holds, where, and its bytes, checked on the way."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from flagstone.checkpoint import tree
from flagstone.checkpoint.manifest import CHECKSUMS, MANIFEST, Checksums, Manifest, digest, run_digest
from flagstone.checkpoint.piece import Piece, words
from flagstone.errors import Damage, DamagedError, LoadError
from flagstone.layout import BLOCK, DTYPES, Box, Span, box_span, box_spans, intersect, span_boxes
from flagstone.storage import ReadFile, Storage, base, buffers

_MANIFEST_BYTES = 1 << 30
_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_CHUNK = buffers.CHUNK - 2 * BLOCK  # so that it fits into a buffer wherever it begins
_MAX_DAMAGE = 1000


def rank_file(rank: int) -> str:
    """The file of what one rank alone has."""
    return f"rank-{rank:05}.safetensors"


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of a checkpoint. Raises LoadError, DamagedError."""
    data = _read_all(storage, folder, MANIFEST, _MANIFEST_BYTES)
    return Manifest.decode(data, f"{folder}/{MANIFEST}")


def _read_all(storage: Storage, folder: str, file: str, limit: int) -> bytes:
    try:
        with storage.open(folder, file) as opened:
            if opened.size > limit:
                raise LoadError(f"{folder}/{file} has {opened.size:,} bytes, more than any such file needs")
            data = np.empty(opened.size, np.uint8)
            opened.read(0, data)
            return data.tobytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LoadError(_absent(storage, folder, file)) from error
    except OSError as error:
        raise LoadError(f"{folder}/{file} cannot be read: {error}") from error


def _absent(storage: Storage, folder: str, file: str) -> str:
    try:
        there = storage.list(folder)
    except OSError:
        return f"there is no checkpoint at {folder}: no such folder"
    if file != MANIFEST:
        return f"{folder}/{file} is missing"
    kind = "an empty folder" if not there else f"a folder with {len(there)} files, but no {MANIFEST}"
    return f"there is no checkpoint at {folder}: it is {kind}"


class Place(NamedTuple):
    """Where a tensor's bytes are: [begin, begin + nbytes) of a file."""

    name: str
    file: str
    begin: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Folder:
    """A checkpoint's folder. Opening one reads its manifest and its checksums."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.manifest = read_manifest(storage, folder)
        sums = _read_all(storage, folder, CHECKSUMS, _MANIFEST_BYTES)
        self.checksums = Checksums.decode(sums, self.manifest, f"{folder}/{CHECKSUMS}")
        self._files: dict[str, ReadFile] = {}
        self._places: dict[str, dict[str, Place]] = {}
        self._headers: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._of_file: dict[int, list[str]] = {}
        for name, record in self.manifest.tensors.items():
            self._of_file.setdefault(record.file, []).append(name)
        self._numbers = {f.name: i for i, f in enumerate(self.manifest.files)}

    def faults(self, files: Collection[str] | None = None) -> list[Damage]:
        """Files, all or these, that are missing or have another size than they should."""
        there = self.storage.list(self.folder)
        found = []
        for number, file in enumerate(self.manifest.files):
            size = there.get(file.name)
            if size != file.size and (files is None or file.name in files):
                is_now = "is missing" if size is None else f"has {size:,} bytes instead of {file.size:,}"
                tensors = tuple(self._of_file.get(number, ()))
                found.append(Damage(file.name, min(size or 0, file.size), file.size, tensors, f"the file {is_now}"))
        return found

    def open(self, file: str) -> ReadFile:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = self.storage.open(self.folder, file)
                except OSError as error:
                    raise LoadError(f"{self.folder}/{file} cannot be opened: {error}") from error
            return self._files[file]

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def place(self, name: str) -> Place:
        """Where a tensor, or what it is another name of, is. Checks the header of its file first."""
        name = self.manifest.aliases.get(name, name)
        file = self.manifest.files[self.manifest.tensors[name].file].name
        return self.places(file)[name]

    def places(self, file: str) -> dict[str, Place]:
        """The places of all tensors of a file, in the order of their bytes; its header is read, and trusted little."""
        if file not in self._places:
            number = self._numbers[file]
            keys = {}
            for name in self._of_file.get(number, ()):
                record = self.manifest.tensors[name]
                keys[record.key or name] = (name, record.dtype, record.shape)
            self._places[file] = self._parse(file, keys)
        return self._places[file]

    def rank_places(self, file: str) -> tuple[dict[str, Place], str]:
        """The same of a file that is one rank's alone, and what its header says of the values in it."""
        if file not in self._places:
            self._places[file] = self._parse(file, None)
        return self._places[file], self._headers[file].get("flagstone", "{}")

    def _parse(self, file: str, keys: dict[str, tuple[str, str, tuple[int, ...]]] | None) -> dict[str, Place]:
        where = f"{self.folder}/{file}"
        faults = self.faults([file])
        if faults:
            raise DamagedError(f"{self.folder} is damaged: {faults[0]}", tuple(faults))
        opened = self.open(file)
        length = np.zeros(8, np.uint8)
        opened.read(0, length)
        end = 8 + int.from_bytes(length.tobytes(), "little")
        if end > min(opened.size, _HEADER_BYTES):
            raise DamagedError(f"{where}: bytes 0 to 8: a header of {end - 8:,} bytes cannot be in {opened.size:,}")
        damage = self.check(file, 0, end)
        if damage:
            raise DamagedError(f"{self.folder} is damaged: {damage[0]}", tuple(damage))
        text = np.empty(end - 8, np.uint8)
        opened.read(8, text)
        try:
            raw = msgspec.json.decode(text.tobytes(), type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
            entries = {k: msgspec.json.decode(v, type=_HeaderEntry) for k, v in raw.items()}
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise LoadError(f"{where}: the header is not one: {error}") from error
        self._headers[file] = metadata
        if keys is None:
            names = {d.stored: d.name for d in reversed(DTYPES.values()) if not d.tail}
            keys = {k: (k, names.get(e.dtype, ""), e.shape) for k, e in entries.items()}
        places, at = {}, 0
        for key, entry in sorted(entries.items(), key=lambda ke: ke[1].data_offsets):
            if key not in keys:
                raise LoadError(f"{where}: the header has a tensor {key!r} that the manifest does not know")
            name, dtype_name, shape = keys[key]
            dtype = DTYPES.get(dtype_name)
            if dtype is None or entry.dtype != dtype.stored or entry.shape != shape + dtype.tail:
                raise LoadError(
                    f"{where}: {key} is {entry.dtype}{list(entry.shape)} in the header, but {dtype_name}{list(shape)}"
                )
            low, high = entry.data_offsets
            if low != at or high - low != prod(shape) * dtype.size or any(n < 0 for n in shape):
                raise LoadError(f"{where}: {key} of shape {list(shape)} cannot lie at bytes {low} to {high}")
            places[name] = Place(name, file, end + low, high - low, dtype_name, shape)
            at = high
        if len(entries) != len(keys) or end + at != opened.size:
            raise LoadError(f"{where}: the header describes {len(entries)} tensors to byte {end + at:,}, not the file")
        return places

    # Checksums.

    def runs(self, file: str, begin: int, end: int) -> Iterator[tuple[int, int, bytes]]:
        """The runs that overlap [begin, end) of a file, with their digests."""
        extents = self.checksums.files[file]
        size = self.checksums.run
        i = max(bisect_right(extents, begin, key=lambda e: e.begin) - 1, 0)
        while i < len(extents) and extents[i].begin < end:
            extent = extents[i]
            first = max(begin - extent.begin, 0) // size
            for n in range(first, extent.count(size)):
                low = extent.begin + n * size
                if low >= end:
                    break
                yield low, min(low + size, extent.end), extent.digests[n * 16 : n * 16 + 16]
            i += 1

    def check(self, file: str, begin: int, end: int) -> list[Damage]:
        """What is damaged in the runs that overlap [begin, end)."""
        found: list[Damage] = []
        opened = self.open(file)
        for low, high, expected in self.runs(file, begin, end):
            data = np.empty(high - low, np.uint8)
            opened.read(low, data)
            if run_digest(data) != expected:
                found.append(self.damage(file, low, high))
        return found

    def damage(self, file: str, begin: int, end: int, reason: str = "") -> Damage:
        """Describe a damaged range; the tensors in it are known when the file's header has been read."""
        places = self._places.get(file, {})
        if places:
            tensors = tuple(p.name for p in places.values() if p.begin < end and begin < p.begin + p.nbytes)
        else:
            tensors = tuple(self._of_file.get(self._numbers.get(file, -1), ())) if begin == 0 else ()
        return Damage(file, begin, end, tensors, reason or "the checksum does not fit")

    def check_small(self) -> list[Damage]:
        """What is damaged among the files that are under one digest: assets and index files."""
        found = []
        for file in self.manifest.files:
            if file.digest:
                data = _read_all(self.storage, self.folder, file.name, file.size)
                if digest(data) != file.digest:
                    found.append(Damage(file.name, 0, file.size, (), "the checksum does not fit"))
        return found


class Want:
    """A part of a tensor, and the memory that it goes to."""

    __slots__ = ("_lock", "_size", "box", "flat", "piece", "place", "received", "start", "stop", "touched")

    def __init__(self, place: Place, piece: Piece, region: Box | Span | None = None) -> None:
        self.place, self.piece = place, piece
        self.box = region if isinstance(region, Box) else None
        self._size = DTYPES[place.dtype].size
        self._lock = threading.Lock()
        self.received = 0  # bytes
        self.touched = False
        if region is None:
            self.start, self.stop = 0, place.nbytes
        elif isinstance(region, Span):
            self.start, self.stop = region.start * self._size, region.stop * self._size
        else:
            box = region
            span = box_span(box, place.shape)
            if span is not None or box.numel == 0:
                self.box = None
                span = span or Span(0, 0)
                self.start, self.stop = span.start * self._size, span.stop * self._size
            else:
                self.start, self.stop = 0, place.nbytes
        # The memory itself, where the wanted bytes of the tensor lie in it in the same order.
        self.flat = piece.flat() if self.box is None else None

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes

    def ranges(self) -> list[tuple[int, int]]:
        """The bytes of the file that are needed; small gaps are read over."""
        first = self.place.begin
        if self.box is None:
            return [(first + self.start, first + self.stop)] if self.start < self.stop else []
        found: list[tuple[int, int]] = []
        for span in _rough_spans(self.box, self.place.shape, self._size):
            low, high = first + span.start * self._size, first + span.stop * self._size
            if found and low - found[-1][1] < 1 << 20:
                found[-1] = found[-1][0], high
            else:
                found.append((low, high))
        return found

    def put(self, low: int, data: base.Bytes) -> None:
        """Take what is wanted of bytes from ``low`` on, counted from the tensor's first."""
        self.touched = True
        if self.box is None:
            begin, end = max(low, self.start), min(low + data.nbytes, self.stop)
            if begin >= end:
                return
            part = data[begin - low : end - low]
            if self.flat is not None:
                self.flat[begin - self.start : end - self.start] = part
            else:
                self.piece.write(begin - self.start, part)
            self.count(end - begin)
            return
        at = 0
        for part_box in span_boxes(Span(low // self._size, data.nbytes // self._size), self.place.shape):
            length = part_box.numel * self._size
            shared = intersect(part_box, self.box)
            if shared is not None:
                view = words(data[at : at + length], self._size, part_box.sizes)
                cut = np.ascontiguousarray(view[shared.relative_to(part_box).slices]).reshape(-1).view(np.uint8)
                self.piece.write_box(shared.relative_to(self.box), cut)
                self.count(cut.nbytes)
            at += length

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.received += nbytes


def _rough_spans(box: Box, shape: tuple[int, ...], size: int) -> Iterable[Span]:
    """The spans of a box; one over all of them, when little else lies between."""
    stride, first, last = 1, 0, 0
    for offset, count, extent in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        first += offset * stride
        last += (offset + count - 1) * stride
        stride *= extent
    cover = Span(first, last + 1 - first)
    if cover.length * size <= 16 << 20 or cover.length <= 8 * box.numel:
        return [cover]
    return box_spans(box, shape)


class _Chunk(NamedTuple):
    file: str
    begin: int
    end: int
    runs: list[tuple[int, int, bytes]]


class Reader:
    """Reads what is wanted of a folder: large reads, a few at a time, each run checked before it is believed.

    With ``verify=None`` only the runs that are wanted wholly are checked, and no byte more is read than is wanted.
    """

    def __init__(
        self,
        folder: Folder,
        wants: Sequence[Want],
        verify: bool | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._folder, self._verify, self._progress = folder, verify, progress
        self._by_file: dict[str, list[tuple[int, list[Want]]]] = {}
        grouped: dict[str, dict[int, list[Want]]] = {}
        for want in wants:
            if want.start < want.stop:
                grouped.setdefault(want.place.file, {}).setdefault(want.place.begin, []).append(want)
        self._by_file = {file: sorted(at.items()) for file, at in grouped.items()}
        self._begins = {file: [b for b, _ in items] for file, items in self._by_file.items()}
        self._wants = wants
        self._lock = threading.Lock()
        self._done = 0
        self.damage: list[Damage] = []

    def run(self) -> None:
        """Read all. Raises DamagedError, LoadError; and an error of ours when not every byte came exactly once."""
        chunks = [c for file in self._by_file for c in self._chunks(file, self._ranges(file))]
        self._process(chunks, self._deliver, stop=True)
        if self.damage:
            touched = tuple(dict.fromkeys(w.place.name for w in self._wants if w.touched))
            changed = (
                f"{len(touched)} tensors of the target were already overwritten, among them {touched[0]}"
                if touched
                else "nothing of the target was changed"
            )
            shown = "; ".join(map(str, self.damage[:8]))
            raise DamagedError(f"{self._folder.folder} is damaged: {shown}; {changed}", tuple(self.damage), touched)
        for want in self._wants:
            if want.received != want.nbytes:
                raise LoadError(
                    f"{want.place.name}: {want.received:,} of {want.nbytes:,} bytes were read, a defect of Flagstone"
                )

    def check(self, whole: Sequence[str] = ()) -> list[Damage]:
        """Check the runs of all that is wanted, and of ``whole`` files, without giving anything to anybody."""
        chunks = [c for file in self._by_file if file not in whole for c in self._chunks(file, self._ranges(file))]
        for file in whole:
            chunks += self._chunks(file, [(0, self._folder.open(file).size)])
        self._process(chunks, lambda chunk, total: self._bounce(chunk, deliver=False), stop=False)
        return sorted(self.damage, key=lambda d: (d.file, d.start))

    def _ranges(self, file: str) -> list[tuple[int, int]]:
        ranges = sorted(r for _, wants in self._by_file[file] for w in wants for r in w.ranges())
        merged: list[tuple[int, int]] = []
        for low, high in ranges:
            if merged and low <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(high, merged[-1][1])
            else:
                merged.append((low, high))
        return merged

    def _chunks(self, file: str, ranges: Sequence[tuple[int, int]]) -> Iterator[_Chunk]:
        pending: list[tuple[int, int, bytes]] = []
        last = -1
        for begin, end in ranges:
            pieces: Iterable[tuple[int, int, bytes]]
            if self._verify:
                pieces = self._folder.runs(file, begin, end)
            elif self._verify is None:
                runs = self._folder.runs(file, begin, end)
                pieces = (r if begin <= r[0] and r[1] <= end else (max(r[0], begin), min(r[1], end), b"") for r in runs)
            else:
                # Cut where blocks begin, and so never inside an element.
                cuts = [begin, *range(begin - begin % BLOCK + _CHUNK, end, _CHUNK), end]
                pieces = ((low, high, b"") for low, high in pairwise(cuts))
            for run in pieces:
                if run[0] < last:
                    continue  # two ranges share a run
                if pending and (run[0] != last or run[1] - pending[0][0] > _CHUNK):
                    yield _Chunk(file, pending[0][0], last, pending)
                    pending = []
                pending.append(run)
                last = run[1]
        if pending:
            yield _Chunk(file, pending[0][0], last, pending)

    def _process(self, chunks: Sequence[_Chunk], work: Callable[[_Chunk, int], None], *, stop: bool) -> None:
        total = sum(c.end - c.begin for c in chunks)
        failed: list[BaseException] = []

        def guarded(chunk: _Chunk) -> None:
            if failed or (stop and self.damage) or len(self.damage) > _MAX_DAMAGE:
                return
            try:
                work(chunk, total)
            except OSError as error:
                failed.append(LoadError(f"{self._folder.folder}/{chunk.file} cannot be read: {error}"))
            except BaseException as error:
                failed.append(error)
            if self._progress is not None:
                with self._lock:
                    self._done += chunk.end - chunk.begin
                    self._progress(self._done, total)

        if sum(c.end - c.begin for c in chunks) <= 1 << 20:
            for chunk in chunks:  # threads would cost more than they bring
                guarded(chunk)
        else:
            with ThreadPoolExecutor(buffers.READERS, thread_name_prefix="flagstone-read") as pool:
                list(pool.map(guarded, chunks))
        if failed:
            raise failed[0]

    def _deliver(self, chunk: _Chunk, total: int) -> None:
        if not self._cached(chunk):
            self._bounce(chunk, deliver=True)

    def _overlapping(self, file: str, begin: int, end: int) -> Iterator[list[Want]]:
        items, begins = self._by_file.get(file, []), self._begins.get(file, [])
        i = max(bisect_right(begins, begin) - 1, 0)
        while i < len(items) and items[i][0] < end:
            if items[i][0] + items[i][1][0].place.nbytes > begin:
                yield items[i][1]
            i += 1

    def _cached(self, chunk: _Chunk) -> bool:
        """Read straight into the targets what is in memory already, when it all goes to host memory in order."""
        parts: list[base.Bytes] = []
        owners: list[Want] = []
        at = chunk.begin
        for wants in self._overlapping(chunk.file, chunk.begin, chunk.end):
            want = wants[0]
            begin = max(want.place.begin + want.start, chunk.begin)
            end = min(want.place.begin + want.stop, chunk.end)
            if len(wants) > 1 or want.flat is None or begin != at:
                return False
            offset = want.place.begin + want.start
            parts.append(want.flat[begin - offset : end - offset])
            owners.append(want)
            at = end
        if at != chunk.end:
            return False
        file = self._folder.open(chunk.file)
        got = file.read_cached(chunk.begin, parts[:1000])
        if got:
            for want in owners:
                want.touched = True
        if got != chunk.end - chunk.begin:
            return False
        if self._verify is not False:
            source, rest = iter(parts), np.empty(0, np.uint8)
            for low, high, expected in chunk.runs:
                state, left = xxhash.xxh3_128(), high - low
                while left:
                    if not rest.nbytes:
                        rest = next(source)
                    state.update(rest[:left].data)
                    left, rest = left - min(left, rest.nbytes), rest[left:]
                if expected and state.digest() != expected:
                    self._found(chunk.file, low, high)
        for want, part in zip(owners, parts, strict=True):
            want.count(part.nbytes)
        return True

    def _bounce(self, chunk: _Chunk, *, deliver: bool) -> None:
        """Read through a buffer; a run that is damaged goes no further."""
        file = self._folder.open(chunk.file)
        low = chunk.begin - chunk.begin % BLOCK
        length = -(-(chunk.end - low) // BLOCK) * BLOCK
        with buffers.POOL.lent() as buffer:
            out = buffer[:length]
            got = min(file.read_cached(low, [out]), chunk.end - low)
            if got < chunk.end - low:
                got -= got % BLOCK
                file.read(low + got, out[got:])
            for begin, end, expected in chunk.runs:
                data = out[begin - low : end - low]
                if expected and run_digest(data) != expected:
                    self._found(chunk.file, begin, end)
                elif deliver:
                    for wants in self._overlapping(chunk.file, begin, end):
                        place = wants[0].place
                        first, last = max(begin, place.begin), min(end, place.begin + place.nbytes)
                        for want in wants:
                            want.put(first - place.begin, data[first - begin : last - begin])

    def _found(self, file: str, begin: int, end: int) -> None:
        with self._lock:
            self.damage.append(self._folder.damage(file, begin, end))


def rank_values(folder: Folder, rank: int) -> tuple[dict[str, Any], dict[str, Place]]:
    """What a rank alone had: nodes by path, places of tensors by name; empty for a rank that saved nothing alone."""
    file = rank_file(rank)
    if file not in folder.checksums.files or file not in {f.name for f in folder.manifest.files}:
        return {}, {}
    places, text = folder.rank_places(file)
    try:
        nodes = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise LoadError(f"{folder.folder}/{file}: the values in the header are none: {error}") from error
    for node in nodes.values():
        tree.check(node, f"{folder.folder}/{file}")
    return nodes, places
