"""Load: match what is wanted with what there is, tell all that does not fit at once, then read it into place."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from flagstone.checkpoint import tree
from flagstone.checkpoint.manifest import TensorRecord
from flagstone.checkpoint.piece import Piece
from flagstone.checkpoint.reading import Folder, Reader, Want
from flagstone.checkpoint.talk import Ruling, in_words, merged, settle
from flagstone.checkpoint.values import Frame, Values
from flagstone.checkpoint.world import World
from flagstone.errors import DamagedError, FlagstoneWarning, LoadError
from flagstone.layout import Box, Span

log = logging.getLogger("flagstone")

Patterns = str | Iterable[str] | None
Rename = Mapping[str, str] | Iterable[tuple[str, str]] | Callable[[str], str] | None


class Wanted(NamedTuple):
    """A tensor of the target: the whole tensor's dtype and shape, which part this rank has, and its memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Box | Span | None
    piece: Piece | None


@dataclass
class Target:
    """What is to be filled, as this rank has it.

    Attributes:
        wanted: tensors, by name.
        ties: names that are the same memory as another one's, and that one.
        values: paths of plain values, which ``finish`` sets.
        fresh: tensors in those values: new memory that is to be filled.
        strict: paths below which whatever the checkpoint has must be wanted.
        missing: what the target has and the checkpoint has not, found while collecting.
        problems: what else does not fit, in words.
        notes: what a person should know.
        finish: what is left to do when all bytes are in place.
    """

    wanted: dict[str, Wanted] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    fresh: list[Want] = field(default_factory=list)
    strict: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class LoadReport:
    """What a load did.

    Attributes:
        path: the checkpoint's folder.
        step: of the save, when it was given one.
        loaded: names of the tensors and values that were set.
        missing: names in the target that the checkpoint has not (with ``strict=False``).
        unexpected: names in the checkpoint, below what was asked for, that the target has not (with ``strict=False``).
        skipped: names in the checkpoint that were not asked for.
        cast: tensors whose element type was changed: from, to.
        notes: what a person should know, such as optimizer options that took their default.
        nbytes: bytes that this rank's tensors received.
        seconds: of the whole load.
    """

    path: str
    step: int | None = None
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0


class View:
    """A checkpoint under the names that the target uses: renamed, and without what was left out."""

    def __init__(
        self, folder: Folder, include: Patterns = None, exclude: Patterns = None, rename: Rename = None
    ) -> None:
        self.folder = folder
        self.renamed = _renamer(rename)
        self._keep = keeper(include, exclude)
        self.is_whole = include is None and not exclude
        self.leaves: dict[str, tuple[str, tree.Node]] = {}
        for saved, node in tree.leaves(folder.manifest.state):
            name = self.renamed(saved)
            if not self._keep(saved):
                continue
            if name in self.leaves:
                raise LoadError(f"rename gives {saved} and {self.leaves[name][0]} the same name {name}")
            self.leaves[name] = saved, node

    def keeps(self, name: str) -> bool:
        """Whether include and exclude let a name of the target through."""
        return self._keep(name)

    def record(self, name: str) -> TensorRecord | None:
        """The tensor under a name of the target; None when there is none."""
        saved = self.leaves.get(name)
        if saved is None or not isinstance(saved[1], dict) or saved[1].get("$") not in ("t", "a", "pickle"):
            return None
        manifest = self.folder.manifest
        return manifest.tensors.get(manifest.aliases.get(saved[0], saved[0]))

    def node(self, path: str) -> tuple[str, tree.Node] | None:
        """The value at a path of the target, a leaf or a container, and its name in the checkpoint."""
        if path in self.leaves:
            return self.leaves[path]
        found = tree.find(self.folder.manifest.state, path)
        return None if found is tree.UNKNOWN else (path, found)

    def below(self, path: str) -> Iterator[str]:
        """Names of leaves at or below a path."""
        return (n for n in self.leaves if not path or n == path or n.startswith(f"{path}."))


def read(folder: Folder, frame: Frame, view: View, *, verify: bool, allow_pickle: bool, progress: Any) -> Any:
    """The whole state as plain values and tensors of a framework; no ranks, no target."""
    node = folder.manifest.state if view.is_whole else _pruned(folder.manifest.state, "", view)
    values = Values(folder, frame, allow_pickle)
    made = values.make(node, "")
    _require(folder, values.wants)
    Reader(folder, values.wants, verify, progress).run()
    return made


def fill(
    folder: Callable[[], Folder],
    collect: Callable[[Folder], tuple[View, Target]],
    world: World,
    *,
    path: str,
    strict: bool,
    cast: bool,
    verify: bool | str,
    timeout: float,
    progress: Callable[[int, int], None] | None,
) -> LoadReport:
    """Fill a target on all ranks of a world, or on none: nothing is changed before every rank knows that all fits.

    Damage that shows only while the bytes arrive is the exception; the error then says what was overwritten.
    """
    began = time.perf_counter()
    topic = world.topic("load")
    report = LoadReport(path)
    opened: Folder | None = None
    wants: list[Want] = []
    target, loaded = Target(), list[str]()
    failure: Exception | None = None
    try:
        try:
            opened = folder()
            report.step = opened.manifest.step
            view, target = collect(opened)
            wants, loaded = _match(opened, view, target, report, strict=strict, cast=cast)
            if verify == "first":
                damage = Reader(opened, wants, True).check()
                if damage:
                    shown = "; ".join(map(str, damage[:8]))
                    raise DamagedError(f"{path} is damaged: {shown}; nothing of the target was changed", tuple(damage))
        except Exception as error:  # whatever it is, the other ranks wait for a word
            failure = error
        _together(world, f"{topic}/plan", failure, timeout, path)
        assert opened is not None
        try:
            Reader(opened, wants, bool(verify) and verify != "first", progress).run()
            for step in target.finish:
                step()
        except Exception as error:
            failure = error
        touched = tuple(dict.fromkeys(w.place.name for w in wants if w.touched))
        _together(world, f"{topic}/done", failure, timeout, path, touched)
    finally:
        if opened is not None:
            opened.close()
    for note in target.notes:
        warnings.warn(f"{path}: {note}", FlagstoneWarning, stacklevel=3)
    report.loaded, report.notes = loaded, target.notes
    report.nbytes = sum(w.nbytes for w in wants)
    report.seconds = time.perf_counter() - began
    log.info("loaded %s: %d bytes in %.3f s", path, report.nbytes, report.seconds)
    return report


class _Word(msgspec.Struct, omit_defaults=True):
    error: str = ""
    damaged: bool = False


class _Ruling(Ruling):
    damaged: bool = False


def _together(
    world: World, topic: str, failure: Exception | None, timeout: float, path: str, touched: tuple[str, ...] = ()
) -> None:
    """Raise one error on all ranks when any has one; ``touched`` is what this rank has overwritten by then."""
    if world.size == 1:
        if failure is None:
            return
        if isinstance(failure, LoadError):
            raise failure
        raise LoadError(f"{path} was not loaded: {in_words(failure)}") from failure

    def judge(words: list[_Word]) -> _Ruling:
        world.forget()
        errors = {r: w.error for r, w in enumerate(words) if w.error}
        return _Ruling(merged(errors, world.size) if errors else "", any(w.damaged for w in words))

    word = _Word("" if failure is None else in_words(failure), isinstance(failure, DamagedError))
    ruling = settle(world, topic, word, judge, _Ruling, timeout)
    if ruling.error:
        if ruling.damaged:
            damage = failure.damage if isinstance(failure, DamagedError) else ()
            raise DamagedError(ruling.error, damage, touched) from failure
        raise LoadError(ruling.error) from failure


def _match(
    folder: Folder, view: View, target: Target, report: LoadReport, *, strict: bool, cast: bool
) -> tuple[list[Want], list[str]]:
    """What to read, once everything is known to fit. Raises LoadError with all that does not."""
    problems = list(target.problems)
    missing = list(target.missing)
    plan: list[tuple[Wanted, TensorRecord]] = []
    names: dict[str, list[str]] = {name: [name] for name in target.wanted}
    for name, first in target.ties.items():
        names[first].append(name)
    for first, wanted in target.wanted.items():
        kept = [n for n in names[first] if view.keeps(n)]
        if not kept:
            continue
        # One tensor of several names comes from whichever of them the checkpoint has.
        name = next((n for n in kept if view.record(n) is not None), kept[0])
        record = view.record(name)
        if record is None:
            there = view.leaves.get(name)
            if there is None:
                missing.append(name)
            else:
                problems.append(f"{name} is a tensor in the target, but a plain value in the checkpoint")
            continue
        if record.shape != wanted.shape:
            problems.append(
                f"{name} has shape {list(record.shape)} in the checkpoint, {list(wanted.shape)} in the target"
            )
        elif record.dtype != wanted.dtype and not cast:
            problems.append(
                f"{name} is {record.dtype} in the checkpoint, {wanted.dtype} in the target; cast=True converts"
            )
        else:
            plan.append((wanted._replace(name=name), record))
    problems += _untied(view, target)
    asked = {*target.wanted, *target.values, *target.ties}
    under = {n for path in target.strict for n in view.below(path)}
    others = [n for n in view.leaves if n not in asked and not _below_any(n, asked)]
    report.unexpected = [n for n in others if n in under and not _is_empty(view.leaves[n][1])]
    report.skipped = [n for n in others if n not in under]
    report.missing = missing
    if strict:
        problems += _listed("missing from the checkpoint", missing, list(view.leaves))
        problems += _listed("in the checkpoint, but not in the target", report.unexpected, list(asked))
    wants: list[Want] = []
    if not problems:
        for wanted, record in plan:
            if wanted.piece is None:
                continue
            piece = wanted.piece
            if record.dtype != wanted.dtype:
                report.cast[wanted.name] = record.dtype, wanted.dtype
                try:
                    piece = piece.cast_from(record.dtype)
                except LoadError as error:
                    problems.append(f"{wanted.name}: {error}")
                    continue
            wants.append(Want(folder.place(view.leaves[wanted.name][0]), piece, wanted.region))
        wants += target.fresh
        problems += map(str, folder.faults({w.place.file for w in wants}))
    if problems:
        shown = problems[:40]
        more = [f"and {len(problems) - 40} more"] if len(problems) > 40 else []
        raise LoadError(
            f"{folder.folder} does not fit the target; nothing was changed:\n  " + "\n  ".join([*shown, *more])
        )
    return wants, [*(w.name for w, _ in plan), *target.values]


def _untied(view: View, target: Target) -> list[str]:
    """Names that are one tensor here, and two in the checkpoint: the target cannot hold both."""
    aliases = view.folder.manifest.aliases
    found = []
    for name, first in target.ties.items():
        a, b = view.leaves.get(name), view.leaves.get(first)
        if a and b and view.record(name) and aliases.get(a[0], a[0]) != aliases.get(b[0], b[0]):
            found.append(
                f"{name} and {first} are one tensor in the target, but two in the checkpoint; exclude one of them"
            )
    return found


def _is_empty(node: tree.Node) -> bool:
    return node in ({}, [])


def _below_any(name: str, paths: set[str]) -> bool:
    at = name.rfind(".")
    while at > 0:
        if name[:at] in paths:
            return True
        at = name.rfind(".", 0, at)
    return False


def _listed(what: str, names: Sequence[str], others: Sequence[str]) -> list[str]:
    """One line a name, with the nearest other names."""
    lines = []
    for name in names[:20]:
        near = difflib.get_close_matches(name, others, 2, 0.7) if len(others) <= 20_000 else []
        lines.append(f"{name}: {what}" + (f"; near: {', '.join(near)}" if near else ""))
    if len(names) > 20:
        lines.append(f"and {len(names) - 20} more {what}")
    return lines


def _require(folder: Folder, wants: Sequence[Want]) -> None:
    damage = folder.faults({w.place.file for w in wants})
    if damage:
        raise DamagedError(f"{folder.folder} is damaged: " + "; ".join(map(str, damage)), tuple(damage))


def keeper(include: Patterns, exclude: Patterns) -> Callable[[str], bool]:
    """Whether a name passes: shell patterns, a name, or a path above it."""
    inside, outside = _patterns(include), _patterns(exclude)
    return lambda name: (inside is None or bool(inside.match(name))) and not (outside and outside.match(name))


def _patterns(patterns: Patterns) -> re.Pattern[str] | None:
    if patterns is None:
        return None
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed:
        return None
    return re.compile("|".join(rf"(?:{fnmatch.translate(p)[:-2]}(?:\.|\Z))" for p in listed), re.DOTALL)


def _renamer(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    if isinstance(rename, Mapping):
        table = dict(rename)

        def by_table(name: str) -> str:
            at = len(name)
            while at > 0:  # the longest name or path above it
                if name[:at] in table:
                    return table[name[:at]] + name[at:]
                at = name.rfind(".", 0, at)
            return name

        return by_table
    rules = [(re.compile(p), r) for p, r in rename]

    def by_rules(name: str) -> str:
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        return name

    return by_rules


def _pruned(node: tree.Node, path: str, view: View) -> tree.Node:
    """A tree without the leaves that are left out: keys of dictionaries go, items of sequences become None."""
    if isinstance(node, list):
        return [
            _pruned(v, tree.join(path, i), view) if _any(v, tree.join(path, i), view) else None
            for i, v in enumerate(node)
        ]
    if not isinstance(node, dict):
        return node
    kind = node.get("$")
    if kind is None:
        return {k: _pruned(v, tree.join(path, k), view) for k, v in node.items() if _any(v, tree.join(path, k), view)}
    if kind == "optimizer":
        return {**node, "state": _pruned(node["state"], tree.join(path, "state"), view)}
    if kind in ("dict", "odict", "counter"):
        below = zip(node["v"], tree.children(node, path), strict=True)
        return {"$": kind, "v": [[k, _pruned(v, name, view)] for (k, v), (name, _) in below if _any(v, name, view)]}
    if kind == "tuple":
        return {"$": kind, "v": _pruned(node["v"], path, view)}
    return node


def _any(node: tree.Node, path: str, view: View) -> bool:
    return any(view.keeps(name) for name, _ in tree.leaves(node, path))
