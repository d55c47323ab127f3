"""``flagstone show`` and ``flagstone verify``: look at a checkpoint, and check it, without a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

app = typer.Typer(help="Training state on disk: look at it, check it.", no_args_is_help=True, add_completion=False)
_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def main() -> None:
    """Entry of the command. A user's mistake gives one line and a status, never a traceback."""
    from flagstone.errors import DamagedError, FlagstoneError

    try:
        app()
    except DamagedError as error:
        _fail(str(error), 1)
    except (FlagstoneError, OSError, ValueError) as error:
        _fail(str(error), 2)


@app.callback()
def _root() -> None:
    """Kept so that a single command still needs its name."""


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List what a checkpoint holds. Reads its manifest, not its tensors."""
    from flagstone.checkpoint import tree
    from flagstone.checkpoint.reading import read_manifest
    from flagstone.layout import DTYPES, Box
    from flagstone.storage import resolve

    storage, folder = resolve(path)
    manifest = read_manifest(storage, folder)
    sizes = {name: Box.whole(t.shape).numel * DTYPES[t.dtype].size for name, t in manifest.tensors.items()}
    total = sum(sizes.values())
    values = {
        name: node
        for name, node in tree.leaves(manifest.state)
        if name not in manifest.tensors and name not in manifest.aliases
    }
    if as_json:
        found = {
            "path": folder,
            "save_id": manifest.save_id,
            "created": manifest.created,
            "step": manifest.step,
            "ranks": manifest.ranks,
            "metadata": manifest.metadata,
            "nbytes": total,
            "tensors": [
                {
                    "name": name,
                    "dtype": t.dtype,
                    "shape": t.shape,
                    "nbytes": sizes[name],
                    "file": manifest.files[t.file].name,
                }
                for name, t in manifest.tensors.items()
            ],
            "aliases": manifest.aliases,
            "values": values,
            "files": [{"name": f.name, "size": f.size} for f in manifest.files],
        }
        print(json.dumps(found, indent=2))
        return
    step = "" if manifest.step is None else f"step {manifest.step}, "
    _out.print(f"[bold]{escape(folder)}[/]")
    _out.print(f"{step}saved {manifest.created} by {_count(manifest.ranks, 'rank')}, id {manifest.save_id}")
    _out.print(
        f"{_count(len(sizes), 'tensor')}, {_size(total)}; {len(manifest.aliases)} tied; "
        f"{_count(len(values), 'other value')}"
    )
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for column in ("tensor", "type", "shape", "size", "file"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=True)
    for name, t in manifest.tensors.items():
        shape = " x ".join(map(str, t.shape)) or "scalar"
        table.add_row(escape(name), t.dtype, shape, _size(sizes[name]), manifest.files[t.file].name)
    for alias, name in manifest.aliases.items():
        table.add_row(escape(alias), "", f"tied to {escape(name)}", "", "")
    _wide().print(table)
    if values:
        _out.print("\n[dim]value[/]")
    for name, node in values.items():
        _out.print(f"{escape(name)} = {escape(_brief(node))}")
    _out.print("\n[dim]file[/]")
    for file in manifest.files:
        _out.print(f"{escape(file.name)}  {_size(file.size)}")


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="A checkpoint's folder.")]) -> None:
    """Check every byte against its checksum. Status 1 and what is damaged, when it is not whole."""
    from flagstone.api import verify as check
    from flagstone.errors import DamagedError

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as progress:
        task = progress.add_task("verify", total=None)
        try:
            report = check(path, progress=lambda done, total: progress.update(task, completed=done, total=total))
        except DamagedError as error:
            progress.stop()
            for damage in error.damage:
                _err.print(f"[red]damaged[/] {escape(str(damage))}")
            _fail(f"{path} is damaged" if error.damage else str(error), 1)
    _out.print(
        f"{escape(str(path))} is whole: "
        f"{_count(report.tensors, 'tensor')}, {_count(report.files, 'file')}, {_size(report.nbytes)}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wide() -> Console:
    """Rows of a table are not broken when they go into a pipe."""
    return _out if _out.is_terminal else Console(highlight=False, width=10_000)


def _size(nbytes: float) -> str:
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def _brief(node: Any) -> str:
    if isinstance(node, dict) and node.get("$") == "ranks":
        return "one value for each rank"
    if isinstance(node, dict) and node.get("$") == "pickle":
        return "a pickle, opened only with allow_pickle=True"
    text = str(node["v"]) if isinstance(node, dict) and "v" in node else json.dumps(node)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(message: str, status: int) -> NoReturn:
    _err.print(f"[red]error[/] {escape(message)}")
    sys.exit(status)
