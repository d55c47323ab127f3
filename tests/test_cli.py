"""The command, as a process, on real folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flagstone as fs


def _run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flagstone", *map(str, args)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "step-00000007"
    model = torch.nn.Linear(30, 20)
    state = {"model": model, "tied": {"w": model.weight}, "step": 7, "name": "[run]", "rng": fs.rng_state()}
    fs.save(state, path, assets={"config.json": b"{}"})
    return path


def test_show_lists_tensors_values_and_files(saved: Path) -> None:
    result = _run("show", saved)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["model.weight", "float32", "20", "x", "30", "2.3", "KiB", "model.safetensors"] in rows
    assert ["tied.w", "tied", "to", "model.weight"] in rows
    assert ["name", "=", '"[run]"'] in rows
    assert ["config.json", "2", "B"] in rows
    assert "step 7" in result.stdout


def test_show_json_is_for_programs(saved: Path) -> None:
    found = json.loads(_run("show", saved, "--json").stdout)
    assert found["step"] == 7
    assert found["tensors"][0] == {
        "name": "model.weight",
        "dtype": "float32",
        "shape": [20, 30],
        "nbytes": 2400,
        "file": "model.safetensors",
    }
    assert found["aliases"] == {"tied.w": "model.weight"}
    assert found["values"]["name"] == "[run]"


def test_verify_says_whole_or_names_the_damage_and_exits_1(saved: Path, tmp_path: Path) -> None:
    result = _run("verify", saved)
    assert result.returncode == 0
    assert "is whole" in result.stdout
    import shutil

    copy = shutil.copytree(saved, tmp_path / "copy")
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[5000] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    result = _run("verify", copy)
    assert result.returncode == 1
    assert "model.safetensors: bytes 4,096 to 6,576 (tensor model.weight, model.bias)" in result.stderr
    (copy / "model.safetensors").unlink()
    result = _run("verify", copy)
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert "missing" in result.stderr


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_is_no_checkpoint_gives_one_line_and_status_2(command: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path(__file__)):
        result = _run(command, path)
        assert result.returncode == 2
        assert "no checkpoint at" in result.stderr
        assert "Traceback" not in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
