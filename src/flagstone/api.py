"""Save, load, open and verify: what ``import flagstone`` offers, put together from checkpoints and adapters."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import msgspec

from flagstone.adapters.collect import Collector
from flagstone.adapters.target import Targeter
from flagstone.checkpoint import lazy
from flagstone.checkpoint import load as loading
from flagstone.checkpoint import verify as verifying
from flagstone.checkpoint.lazy import Checkpoint, LazyTensor
from flagstone.checkpoint.load import LoadReport, Patterns, Rename
from flagstone.checkpoint.piece import Piece
from flagstone.checkpoint.reading import Folder
from flagstone.checkpoint.save import Assets, Progress, Save, SaveOptions, SaveReport
from flagstone.checkpoint.state import State
from flagstone.checkpoint.talk import in_words
from flagstone.checkpoint.values import Frame, NumpyFrame, Values
from flagstone.checkpoint.verify import VerifyReport
from flagstone.checkpoint.world import World
from flagstone.storage import resolve

Path = str | os.PathLike[str]
TIMEOUT = 600.0  # seconds


def save(
    state: Any,
    path: Path,
    *,
    overwrite: bool = False,
    assets: Assets = (),
    metadata: Any = None,
    group: Any = None,
    allow_pickle: bool = False,
    timeout: float = TIMEOUT,
    check_replicas: bool | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Save a state as a checkpoint folder that appears whole, or not at all. Every rank of the group calls it.

    Args:
        state: a dict of any nesting with tensors, DTensors, modules, optimizers, anything with ``state_dict`` and
            ``load_state_dict``, numpy arrays, ``per_rank`` values and plain Python values; or one of these.
        path: the folder; it must not be there, unless ``overwrite`` is set.
        overwrite: replace the checkpoint that is there, in one step. Other files in its folder are taken over.
        assets: files to put into the folder, such as ``config.json``; or names with paths or bytes.
        metadata: plain values to keep in the manifest.
        group: the process group whose ranks save together; the default one.
        allow_pickle: pickle what is nothing of the above. Loading it needs ``allow_pickle`` too.
        timeout: seconds that a rank waits for the others after it has done its own part.
        check_replicas: whether tensors that several ranks hold are compared before one of them is believed; by
            default those in host memory are.
        progress: called with bytes written so far by this rank, and bytes of the whole checkpoint.

    Raises:
        SaveError: nothing was published, on any rank; what was at ``path`` is as it was. The text is the same on all.
    """
    storage, folder = resolve(path)
    world, ranks = _world(group)
    collected: State | str
    try:
        if not timeout > 0:
            raise ValueError(f"a timeout of {timeout} seconds")
        metadata = msgspec.json.decode(msgspec.json.encode(metadata))
        collected = Collector(state, ranks, allow_pickle).collect()
    except Exception as error:  # the other ranks wait: they must hear of it
        collected = in_words(error)
    step = state.get("step") if isinstance(state, dict) else None
    options = SaveOptions(
        overwrite=overwrite,
        assets=assets,
        metadata=metadata,
        step=step if type(step) is int else None,
        timeout=timeout,
        check_replicas=check_replicas,
        progress=progress,
    )
    return Save(storage, folder, world, options).run(collected)


def load(
    path: Path,
    into: Any = None,
    *,
    strict: bool = True,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Rename = None,
    cast: bool = False,
    verify: bool | str = True,
    allow_pickle: bool = False,
    group: Any = None,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Any:
    """Load a checkpoint, into a state or as plain values.

    Args:
        path: the checkpoint's folder, saved by any number of ranks.
        into: the state to fill in place: what was given to ``save``, or any part of it, with the same keys. Then every
            rank of the group calls this, and each reads its own bytes. Without it, a dict of whole tensors and plain
            values is returned, and no process group is used.
        strict: whether it is an error when a name in ``into`` is missing from the checkpoint, or the checkpoint has
            others below what was asked for. Keys at the top that ``into`` lacks were not asked for.
        include: names, paths above names, or shell patterns of what is loaded; everything by default.
        exclude: the same for what is not.
        rename: what names of the checkpoint are in ``into``: a dict of names or paths, pairs of a regular expression
            and its replacement, or a function.
        cast: convert where the element type differs, which is an error otherwise.
        verify: check every byte on its way. ``"first"``: read and check all of it before anything is changed.
        allow_pickle: open what was saved with ``allow_pickle``. Only for checkpoints from people you trust.
        group: the process group whose ranks load together; the default one.
        timeout: seconds that a rank waits for the others after it has done its own part.
        progress: called with bytes read so far by this rank, and bytes that it will read.

    Returns:
        A ``LoadReport`` with ``into``; else the state.

    Raises:
        LoadError: all that does not fit, at once; nothing was changed.
        DamagedError: bytes that are not what was written; it says what had been overwritten when that was seen.
    """
    storage, folder = resolve(path)
    if verify not in (True, False, "first"):
        raise ValueError(f"verify is True, False or 'first', not {verify!r}")
    if into is None:
        if rename is not None:
            raise ValueError("rename is for loading into a state")
        opened = Folder(storage, folder)
        try:
            view = loading.View(opened, include, exclude)
            return loading.read(
                opened, _frame(), view, verify=bool(verify), allow_pickle=allow_pickle, progress=progress
            )
        finally:
            opened.close()
    world, ranks = _world(group)

    def collect(opened: Folder) -> tuple[loading.View, loading.Target]:
        view = loading.View(opened, include, exclude, rename)
        values = Values(opened, _frame(), allow_pickle)
        return view, Targeter(into, view, values, world.rank, world.size, ranks).collect()

    return loading.fill(
        lambda: Folder(storage, folder),
        collect,
        world,
        path=folder,
        strict=strict,
        cast=cast,
        verify=verify,
        timeout=timeout,
        progress=progress,
    )


def open(
    path: Path, *, framework: str | None = None, verify: bool | None = None, allow_pickle: bool = False
) -> Checkpoint:
    """Open a checkpoint as a mapping from dotted names to lazy tensors and plain values.

    Args:
        path: the checkpoint's folder.
        framework: ``"torch"`` or ``"numpy"``: what slices become; torch where it is installed.
        verify: whether slices are checked against their checksums. By default whole tensors are, and of a slice the
            runs of 1 MiB that lie within it, or all that it touches where that means to read at most a tenth and 64 KiB
            more. ``True`` reads as much as it takes to check everything.
        allow_pickle: as for ``load``.

    Raises:
        LoadError: there is no checkpoint.
        DamagedError: its manifest or its checksums are damaged.
    """
    storage, folder = resolve(path)
    return lazy.open_checkpoint(Folder(storage, folder), _frame(framework), verify=verify, allow_pickle=allow_pickle)


def verify(path: Path, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check every byte of a checkpoint against its checksum.

    Raises:
        DamagedError: naming file, byte range and tensor of all that is not what was written.
        LoadError: there is no checkpoint.
    """
    storage, folder = resolve(path)
    return verifying.verify(storage, folder, progress)


class _Installed:
    """torch tensors where torch is installed, else numpy arrays; torch is imported when the first one is made."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Piece]:
        return _frame("torch" if _has_torch() else "numpy").empty(dtype, shape)


def _frame(framework: str | None = None) -> Frame:
    if framework is None:
        return _Installed()
    if framework == "numpy":
        return NumpyFrame()
    if framework == "torch":
        from flagstone.adapters.pytorch import TorchFrame

        return TorchFrame()
    raise ValueError(f"framework is 'torch' or 'numpy', not {framework!r}")


def _has_torch() -> bool:
    try:
        return sys.modules.get("torch") is not None or find_spec("torch") is not None
    except ValueError:  # somebody has set sys.modules["torch"] to None, to keep it out
        return False


def _world(group: Any) -> tuple[World, dict[int, int]]:
    if sys.modules.get("torch") is None:
        return World(0, 1), {0: 0}
    from flagstone.adapters.distributed import world_of

    return world_of(group)


__all__ = ["Checkpoint", "LazyTensor", "LoadReport", "SaveReport", "VerifyReport", "load", "open", "save", "verify"]
