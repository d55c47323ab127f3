"""Save: agree on the state, place it, write it, and publish the folder when every byte of it is known to be there."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from flagstone.checkpoint import reading
from flagstone.checkpoint.manifest import (
    CHECKSUMS,
    FILE_NAME,
    MANIFEST,
    RUN,
    VERSION,
    Checksums,
    Extent,
    FileRecord,
    Manifest,
    TensorRecord,
    digest,
    tiling_fault,
)
from flagstone.checkpoint.piece import Piece
from flagstone.checkpoint.placement import FilePlan
from flagstone.checkpoint.state import Outline, State, unite
from flagstone.checkpoint.talk import Ruling, in_words, listed, merged, settle
from flagstone.checkpoint.world import SilentRank, World
from flagstone.checkpoint.writing import RankWriter, Writer
from flagstone.errors import LoadError, SaveError
from flagstone.layout import FileLayout, Sharding, index_of, lay_out, lay_out_file
from flagstone.storage import Staging, Storage

log = logging.getLogger("flagstone")

Assets = Iterable[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str] | bytes]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SaveOptions:
    """The arguments of ``flagstone.save`` that the writing of bytes does not depend on."""

    overwrite: bool = False
    assets: Assets = ()
    metadata: Any = None
    step: int | None = None
    timeout: float = 600.0
    check_replicas: bool | None = None
    progress: Progress | None = None


@dataclass
class SaveReport:
    """What a save did.

    Attributes:
        path: the checkpoint's folder.
        save_id: names this save among all.
        files: sizes of the files in bytes, by name.
        nbytes: bytes of all tensors.
        written: bytes that this rank wrote.
        notes: what a person should know, such as an optimizer without state.
        seconds: time of each stage on this rank: agree, write, sync, commit.
    """

    path: str
    save_id: str = ""
    files: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    written: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class _Hello(msgspec.Struct, omit_defaults=True):
    """What a rank says before a save."""

    error: str = ""
    digest: str = ""
    host: str = ""
    path: str = ""


class _Start(Ruling):
    """Begin the save ``token``; or first let the first rank of each of ``groups`` tell its outline."""

    token: str = ""
    groups: list[tuple[int, ...]] = []
    outline: Outline | None = None


class _Done(msgspec.Struct, omit_defaults=True):
    """What a rank says when it has written."""

    error: str = ""
    files: dict[str, list[Extent]] = {}
    sizes: dict[str, int] = {}  # of files that are this rank's alone
    replicas: dict[str, str] = {}


class _Commit(Ruling):
    """Publish; or first ``compare`` the replicas one by one."""

    compare: bool = False


class Save:
    """One save, seen from one rank. Whatever fails on one rank fails on all, with the same words."""

    def __init__(self, storage: Storage, folder: str, world: World, options: SaveOptions) -> None:
        self._storage, self._folder, self._world, self._options = storage, folder, world, options
        self._topic = world.topic("save")
        self._staging: Staging | None = None
        self._replaced: frozenset[str] = frozenset()
        self._replicas = _Replicas()
        self._published = False
        self._waited = 0.0  # seconds, of the timeout, for a rank that did not answer
        self._report = SaveReport(folder)

    def run(self, state: State | str) -> SaveReport:
        """Save a state, or take part in failing with what went wrong while it was collected."""
        try:
            with self._timed("agree"):
                outline = self._agree(state)
                specs, shardings = outline.shared(tuple(range(self._world.size)))
                layouts = lay_out(specs)
            assert isinstance(state, State)
            self._report.notes = state.notes
            self._report.nbytes = sum(s.nbytes for f in layouts for s in f.slots)
            done = self._write(state, layouts, shardings)
            with self._timed("commit"):
                self._commit(done, layouts, outline)
        finally:
            if self._staging is not None and not self._published:
                self._staging.discard() if self._world.is_coordinator else self._staging.release()
        self._report.files = self._storage.list(self._folder)
        for note in self._report.notes:
            log.warning("%s: %s", self._folder, note)
        log.info("saved %s: %d bytes in %s", self._folder, self._report.nbytes, self._report.seconds)
        return self._report

    def _settle(self, stage: str, word: Any, judge: Any, ruling: Any, speakers: Sequence[int] | None = None) -> Any:
        topic = f"{self._topic}/{stage}"
        seconds = self._options.timeout - self._waited
        verdict = settle(self._world, topic, word, judge, ruling, seconds, speakers)
        if verdict.error:
            self._world.reset_link()
            raise self._failure(verdict.error)
        return verdict

    def _failure(self, error: str) -> SaveError:
        return SaveError(f"{self._folder} was not saved: {error}")

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._report.seconds[stage] = time.perf_counter() - began

    # 1. Agree: all ranks have the same state, or learn the union of what they have; the folder is begun.

    def _agree(self, state: State | str) -> Outline:
        hello = _Hello(host=socket.gethostname(), path=self._folder)
        outline = Outline(None, [], [], {})
        if isinstance(state, str):
            hello.error = state
        else:
            outline = Outline.of(state)
            if self._world.size > 1:
                hello.digest = digest(msgspec.json.encode(outline))
        start = self._settle("hello", hello, lambda hellos: self._judge_hellos(hellos, outline), _Start)
        if start.groups:
            tellers = [group[0] for group in start.groups]
            start = self._settle("outline", outline, lambda t: self._judge_outlines(start.groups, t), _Start, tellers)
            outline = start.outline
        self._report.save_id = start.token
        return outline

    def _judge_hellos(self, hellos: list[_Hello], outline: Outline) -> _Start:
        self._world.forget()
        errors = {r: h.error for r, h in enumerate(hellos) if h.error}
        if errors:
            return _Start(error=merged(errors, self._world.size))
        paths = sorted({h.path for h in hellos if h.host == hellos[0].host})
        if len(paths) > 1:
            return _Start(error=f"the ranks want to save to different paths: {', '.join(paths)}")
        if not self._options.overwrite and self._storage.exists(self._folder):
            return _Start(error="something is there already; pass overwrite=True to replace a checkpoint")
        groups: dict[str, list[int]] = {}
        for rank, hello in enumerate(hellos):
            groups.setdefault(hello.digest, []).append(rank)
        if len(groups) > 1:
            return _Start(groups=[tuple(g) for g in groups.values()])
        return self._begin(outline)

    def _judge_outlines(self, groups: list[tuple[int, ...]], told: list[Outline]) -> _Start:
        outline = unite(dict(zip(groups, told, strict=True)))
        start = self._begin(outline)
        start.outline = outline
        return start

    def _begin(self, outline: Outline) -> _Start:
        """Clean up after the dead, begin the folder, take its space."""
        for name in self._storage.clean(self._folder):
            log.warning("removed what an interrupted save had left: %s", name)
        self._replaced = self._known_files()
        token = secrets.token_hex(16)
        self._staging = self._storage.stage(self._folder, token, replace=self._options.overwrite)
        for layout in lay_out(outline.shared(tuple(range(self._world.size)))[0]):
            self._staging.create(layout.file, layout.size)
        return _Start(token=token)

    def _known_files(self) -> frozenset[str]:
        """The files of the checkpoint that is to be replaced; anything else in its folder is the user's."""
        if not self._storage.exists(self._folder):
            return frozenset()
        there = self._storage.list(self._folder)
        if MANIFEST not in there:
            raise SaveError("the folder to be replaced holds no checkpoint; move it away first")
        try:
            files = [f.name for f in reading.read_manifest(self._storage, self._folder).files]
        except LoadError:  # damaged: what looks like ours is ours
            files = [f for f in there if f.endswith((".safetensors", ".safetensors.index.json"))]
        return frozenset([*files, MANIFEST, CHECKSUMS])

    # 2. Write: each rank its own bytes. A failure here is told at the end, so that exchanges with others go on.

    def _write(self, state: State, layouts: list[FileLayout], shardings: dict[str, Sharding]) -> _Done:
        writer = Writer(None, _counter(self._options.progress, sum(f.size for f in layouts)))
        try:
            with self._timed("write"):
                sizes: dict[str, int] = {}
                try:
                    if self._staging is None:
                        self._staging = self._join()
                    writer.staging = self._staging
                    sizes = self._submit_own(writer, state, layouts, shardings)
                except Exception as error:
                    writer.fail(error)
                plans = [FilePlan(i, f, shardings) for i, f in enumerate(layouts)]
                pieces = {name: e.piece for name, e in state.entries.items()}
                began = time.monotonic()
                try:
                    RankWriter(plans, pieces, self._world, writer, self._options.timeout / 2).run()
                except (SilentRank, OSError):
                    self._waited = min(time.monotonic() - began, self._options.timeout / 2)
                    raise
                writer.drain()
            with self._timed("sync"):
                writer.sync()
            done = _Done(files=writer.close(), sizes=sizes, replicas=self._replicas.combined())
            self._report.written = writer.written
            return done
        except Exception as error:
            return _Done(error=in_words(_first(writer, error)))
        except BaseException as interrupt:  # tell the others, then go
            done = _Done(error=in_words(_first(writer, interrupt)))
            with contextlib.suppress(SaveError):
                self._settle("done", done, lambda dones: _Commit(error=self._faults(dones)), _Commit)
            raise

    def _submit_own(
        self, writer: Writer, state: State, layouts: list[FileLayout], shardings: dict[str, Sharding]
    ) -> dict[str, int]:
        """Begin on what needs no other rank; the sizes of files that are this rank's alone."""
        if self._world.is_coordinator:
            for layout in layouts:
                _submit_header(writer, layout)
        sizes = self._write_rank_file(writer, state)
        self._submit_replicas(writer, state, shardings)
        return sizes

    def _join(self) -> Staging:
        try:
            return self._storage.join(self._folder, self._report.save_id)
        except FileNotFoundError as error:
            raise SaveError(
                f"{socket.gethostname()} does not see the folder that rank 0 has begun beside {self._folder}: "
                "the ranks do not share this file system; save to one that all of them mount"
            ) from error

    def _submit_replicas(self, writer: Writer, state: State, shardings: dict[str, Sharding]) -> None:
        check = self._options.check_replicas
        for name, entry in state.entries.items():
            if entry.piece is not None and check is not False and (entry.on_host or check):
                holders = shardings[name].holders(self._world.rank)
                if len(holders) > 1:
                    writer.submit(self._replicas.add, name, entry.piece, holders)

    def _write_rank_file(self, writer: Writer, state: State) -> dict[str, int]:
        """What this rank alone has goes into a file of its own."""
        if not state.rank_tree:
            return {}
        assert self._staging is not None
        metadata = {"flagstone": msgspec.json.encode(state.rank_tree).decode()}
        specs = [e.spec for e in state.rank_entries.values()]
        layout = lay_out_file(reading.rank_file(self._world.rank), specs, metadata)
        self._staging.create(layout.file, layout.size)
        _submit_header(writer, layout)
        shardings = {s.name: Sharding.replicated((0,)) for s in specs}
        pieces = {name: e.piece for name, e in state.rank_entries.items()}
        RankWriter([FilePlan(0, layout, shardings)], pieces, World(0, 1), writer, self._options.timeout).run()
        return {layout.file: layout.size}

    # 3. Commit: every byte was written once, then the manifest, then the name.

    def _commit(self, done: _Done, layouts: list[FileLayout], outline: Outline) -> None:
        verdict = self._settle("done", done, lambda dones: self._judge_dones(dones, layouts, outline), _Commit)
        if verdict.compare:
            self._settle("compare", self._replicas.by_name, _judge_replicas, _Commit)
        if self._world.is_coordinator:
            self._publish()
        else:
            self._await_publication()

    def _faults(self, dones: list[_Done]) -> str:
        errors = {r: d.error for r, d in enumerate(dones) if d.error}
        return merged(errors, self._world.size) if errors else ""

    def _judge_dones(self, dones: list[_Done], layouts: Sequence[FileLayout], outline: Outline) -> _Commit:
        error = self._faults(dones)
        if error:
            return _Commit(error=error)
        seen: dict[str, str] = {}
        for done in dones:
            for holders, combined in done.replicas.items():
                if seen.setdefault(holders, combined) != combined:
                    return _Commit(compare=True)
        extents: dict[str, list[Extent]] = {}
        sizes = {f.file: f.size for f in layouts}
        for done in dones:
            sizes |= done.sizes
            for file, found in done.files.items():
                extents.setdefault(file, []).extend(found)
        for file, size in sizes.items():
            extents[file] = sorted(extents.get(file, []), key=lambda e: e.begin)
            fault = tiling_fault(extents[file], size, RUN)
            if fault:
                return _Commit(error=f"{file}: not every byte was written once: {fault}")
        self._describe(layouts, sizes, extents, outline)
        return _Commit()

    def _describe(
        self,
        layouts: Sequence[FileLayout],
        sizes: Mapping[str, int],
        extents: dict[str, list[Extent]],
        outline: Outline,
    ) -> None:
        """Write what describes the data: index files, assets, checksums, and last the manifest."""
        groups: dict[str, list[FileLayout]] = {}
        for layout in layouts:
            groups.setdefault(layout.group, []).append(layout)
        indices = dict(index_of(group) for group in groups.values() if len(group) > 1)
        files = [FileRecord(file, size) for file, size in sizes.items()]
        for name, content in itertools.chain(indices.items(), self._assets({*sizes, *indices})):
            self._put(name, content)
            files.append(FileRecord(name, len(content), digest(content)))
        checksums = Checksums(RUN, extents).encode()
        self._put(CHECKSUMS, checksums)
        manifest = Manifest(
            flagstone=VERSION,
            save_id=self._report.save_id,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            tensors={
                s.name: TensorRecord(s.dtype, s.shape, i, s.key if s.key != s.name else "")
                for i, f in enumerate(layouts)
                for s in f.slots
            },
            files=files,
            state=outline.tree,
            checksums=digest(checksums),
            aliases=outline.aliases,
            step=self._options.step,
            metadata=self._options.metadata,
            ranks=self._world.size,
        )
        self._put(MANIFEST, manifest.encode())

    def _assets(self, taken: set[str]) -> Iterator[tuple[str, bytes]]:
        given = self._options.assets
        assets: dict[str, str | os.PathLike[str] | bytes]
        assets = dict(given) if isinstance(given, Mapping) else {os.path.basename(os.fspath(a)): a for a in given}
        for name, source in assets.items():
            if not FILE_NAME.fullmatch(name) or name in taken or name in (MANIFEST, CHECKSUMS):
                raise SaveError(f"an asset cannot have the name {name!r}: another file has it, or none may")
            if isinstance(source, bytes):
                yield name, source
            else:
                with open(source, "rb") as file:
                    yield name, file.read()

    def _put(self, name: str, content: bytes) -> None:
        assert self._staging is not None
        self._staging.create(name, len(content))
        with self._staging.open(name) as file:
            file.write(0, np.frombuffer(content, np.uint8))
            file.sync()

    def _publish(self) -> None:
        assert self._staging is not None
        error = ""
        try:
            self._staging.adopt(self._replaced)
            self._staging.publish()
            self._published = True
        except OSError as failure:
            error = in_words(failure)
        if self._world.size > 1:
            topic = f"{self._topic}/end"
            with contextlib.suppress(OSError):  # the store is gone: the others look for themselves
                self._world.decide(topic, msgspec.json.encode(Ruling(error=error)))
                self._world.settled(topic)
        if error:
            raise self._failure(error)

    def _await_publication(self) -> None:
        try:
            word = self._world.verdict(f"{self._topic}/end", self._options.timeout)
            error = msgspec.json.decode(word, type=Ruling).error
        except (SilentRank, OSError) as silent:
            # Rank 0 fell silent while it published. Whether it did is written on disk, and nowhere else.
            error = f"while it was published, {in_words(silent)}"
            with contextlib.suppress(OSError, LoadError):
                if reading.read_manifest(self._storage, self._folder).save_id == self._report.save_id:
                    error = ""
        if error:
            raise self._failure(error)
        self._published = True
        if self._staging is not None:
            self._staging.release()


class _Replicas:
    """Digests of what this rank holds along with others, under the digest of the ranks that share it and its name."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def add(self, name: str, piece: Piece, holders: tuple[int, ...]) -> None:
        state = xxhash.xxh3_128()
        flat = piece.flat()
        if flat is not None:
            state.update(flat.data)
        else:
            scratch = np.empty(min(RUN, piece.nbytes), np.uint8)
            for at in range(0, piece.nbytes, RUN):
                part = scratch[: min(RUN, piece.nbytes - at)]
                piece.read(at, part)
                state.update(part.data)
        self.by_name[f"{digest(np.array(holders, np.int64))} {name}"] = state.hexdigest()

    def combined(self) -> dict[str, str]:
        """One digest for each set of ranks that share something."""
        parts: dict[str, list[str]] = {}
        for name in sorted(self.by_name):
            parts.setdefault(name.split(" ", 1)[0], []).append(f"{name}={self.by_name[name]}")
        return {holders: digest("\n".join(lines).encode()) for holders, lines in parts.items()}


def _judge_replicas(told: list[dict[str, str]]) -> _Commit:
    """The error that names what is not equal."""
    faults = []
    for name in dict.fromkeys(name for digests in told for name in digests):
        values: dict[str, list[int]] = {}
        for rank, digests in enumerate(told):
            if name in digests:
                values.setdefault(digests[name], []).append(rank)
        if len(values) > 1:
            faults.append(
                f"{name.split(' ', 1)[1]}: " + " differs from ".join(f"rank {listed(r)}" for r in values.values())
            )
    more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
    return _Commit(
        error="tensors that should be replicas are not equal; declare what is meant to differ with per_rank():\n  "
        + "\n  ".join(faults[:20])
        + more
    )


def _first(writer: Writer, error: BaseException) -> BaseException:
    """End a writer; the failure that came first."""
    writer.fail(error)
    try:
        writer.close()
    except BaseException as first:
        return first
    return error


def _submit_header(writer: Writer, layout: FileLayout) -> None:
    data = np.frombuffer(layout.header, np.uint8)

    def fill(begin: int, end: int, out: Any) -> None:
        out[:] = data[begin:end]

    for low in range(0, data.nbytes, RUN):
        writer.submit(writer.chunk, layout.file, low, min(low + RUN, data.nbytes), fill)


def _counter(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    lock, done = threading.Lock(), 0

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    return count
