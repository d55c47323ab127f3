"""Memory above the state is bounded, whatever the size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, flagstone as fs
from pathlib import Path

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) >> 10

kind, path = sys.argv[1:]
fs.save({"m": {"w": torch.rand(10)}}, f"{path}-small")  # imports are no part of it
fs.load(f"{path}-small", into={"m": {"w": torch.rand(10)}})
if kind == "plain":
    tensor = torch.rand(100, 1 << 20)
elif kind == "strided":
    tensor = torch.rand(1 << 20, 100).t()
else:
    tensor = torch.rand(100, 1 << 20).to(torch.float64)
state = {"m": {"w": tensor}}
def peak(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before
saved = peak(lambda: fs.save(state, path))
if kind == "cast":
    state["m"]["w"] = tensor.float()
loaded = peak(lambda: fs.load(path, into=state, cast=kind == "cast"))
print(saved, loaded)
"""


@pytest.mark.parametrize("kind", ["plain", "strided", "cast"])
def test_save_and_load_take_less_than_96_mib(kind: str, tmp_path: Path) -> None:
    args = [sys.executable, "-c", SCRIPT, kind, str(tmp_path / "a")]
    saved, loaded = map(int, subprocess.run(args, capture_output=True, text=True, check=True).stdout.split())
    assert saved < 96
    assert loaded < 96
