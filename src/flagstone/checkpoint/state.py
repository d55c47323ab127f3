"""What is to be saved, or to be filled, as this rank has it: a tree of values, and tensors as bytes under names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from flagstone.checkpoint import tree
from flagstone.checkpoint.piece import Piece
from flagstone.errors import SaveError
from flagstone.layout import Sharding, TensorSpec


class Entry(NamedTuple):
    """A tensor of the state.

    Attributes:
        spec: the whole tensor.
        sharding: None for a plain one: whole on every rank that has it.
        piece: this rank's part; None when it has none.
        on_host: whether the part is host memory, so that reading it twice is cheap.
    """

    spec: TensorSpec
    sharding: Sharding | None
    piece: Piece | None
    on_host: bool


@dataclass
class State:
    """A rank's state.

    Attributes:
        tree: all values, as ``flagstone.checkpoint.tree`` encodes them.
        entries: the tensors, by name.
        aliases: names of tensors that are the same memory as another one, and the name of that.
        rank_tree: what this rank alone has, by path.
        rank_entries: the tensors in it, by name.
        notes: what a person should know.
    """

    tree: Any = None
    entries: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    rank_tree: dict[str, Any] = field(default_factory=dict)
    rank_entries: dict[str, Entry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Outline(msgspec.Struct):
    """What the ranks must agree on: the state without its bytes."""

    tree: Any
    tensors: list[tuple[str, str, str, str, tuple[int, ...], int]]  # a TensorSpec and the number of its sharding, or -1
    shardings: list[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...]]]
    aliases: dict[str, str]

    @classmethod
    def of(cls, state: State) -> Outline:
        numbers: dict[Sharding, int] = {}
        tensors = []
        for spec, sharding, _, _ in state.entries.values():
            number = -1 if sharding is None else numbers.setdefault(sharding, len(numbers))
            tensors.append((*spec, number))
        return cls(state.tree, tensors, [(s.mesh, s.ranks, s.splits, s.cuts) for s in numbers], state.aliases)

    def shared(self, everyone: tuple[int, ...]) -> tuple[list[TensorSpec], dict[str, Sharding]]:
        """The tensors, and how each is divided; the plain ones are on all ranks."""
        made = [Sharding(*s) for s in self.shardings]
        plain = Sharding.replicated(everyone)
        specs = [TensorSpec(*t[:5]) for t in self.tensors]
        return specs, {t[0]: plain if t[5] < 0 else made[t[5]] for t in self.tensors}


def unite(outlines: Mapping[tuple[int, ...], Outline]) -> Outline:
    """The union of what groups of ranks have, as pipeline stages do.

    Args:
        outlines: the different outlines, each under the ranks that have it.

    Raises:
        SaveError: the same name means different things on different ranks; all of them are named.
    """
    faults: list[str] = []
    where: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, tuple[TensorSpec, Sharding | None]] = {}
    aliases: dict[str, str] = {}
    values: Any = None
    seen: tuple[int, ...] = ()
    for ranks, outline in outlines.items():
        made = [Sharding(*s) for s in outline.shardings]

        def conflict(path: str, ranks: tuple[int, ...] = ranks, seen: tuple[int, ...] = seen) -> None:
            faults.append(f"{path} differs between rank {_ranks(seen)} and rank {_ranks(ranks)}")

        values = outline.tree if not seen else tree.merge(values, outline.tree, "", conflict)
        seen += ranks
        for row in outline.tensors:
            spec, sharding = TensorSpec(*row[:5]), None if row[5] < 0 else made[row[5]]
            known = tensors.setdefault(spec.name, (spec, sharding))
            both = _joined(known[1], sharding)
            if known[0] != spec or both is _APART:
                faults.append(
                    f"{spec.name} is {_describe(*known)} on rank {_ranks(where[spec.name])} "
                    f"and {_describe(spec, sharding)} on rank {_ranks(ranks)}"
                )
            else:
                tensors[spec.name] = spec, both
            where[spec.name] = where.get(spec.name, ()) + ranks
        for alias, name in outline.aliases.items():
            if aliases.setdefault(alias, name) != name:
                faults.append(f"{alias} is tied to {aliases[alias]} on some ranks, to {name} on rank {_ranks(ranks)}")
    faults += [f"{alias} is tied on some ranks only" for alias in aliases if alias in tensors]
    if faults:
        raise SaveError(
            "the ranks do not have the same state; declare what is meant to differ with per_rank():\n  "
            + "\n  ".join(faults[:20])
            + (f"\n  and {len(faults) - 20} more" if len(faults) > 20 else "")
        )
    numbers: dict[Sharding, int] = {}
    rows = []
    for spec, sharding in tensors.values():
        owners = sharding or Sharding.replicated(tuple(sorted(where[spec.name])))
        rows.append((*spec, numbers.setdefault(owners, len(numbers))))
    return Outline(values, rows, [(s.mesh, s.ranks, s.splits, s.cuts) for s in numbers], aliases)


_APART: Any = object()


def _joined(a: Sharding | None, b: Sharding | None) -> Sharding | None:
    """The sharding of a tensor that several meshes hold alike, as the replicas of tensor parallelism under DDP do."""
    if a == b:
        return a
    if a is None or b is None:
        return _APART
    if a.ranks[-len(b.ranks) :] == b.ranks and len(a.ranks) > len(b.ranks):
        return a  # told by the other ranks of the same mesh
    copies = len(a.ranks) // len(b.ranks)
    splits = tuple((m + 1, d) for m, d in b.splits)
    alike = (
        a == b or (a.mesh == b.mesh and a.splits == b.splits) or (a.mesh == (copies, *b.mesh) and a.splits == splits)
    )
    if not alike or a.cuts != b.cuts or set(a.ranks) & set(b.ranks):
        return _APART
    return Sharding((copies + 1, *b.mesh), a.ranks + b.ranks, splits, b.cuts)


def _describe(spec: TensorSpec, sharding: Sharding | None) -> str:
    kind = "" if sharding is None else f", sharded {sharding.mesh} by {sharding.splits}"
    return f"{spec.dtype}{list(spec.shape)}{kind}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
