"""Every byte that is not what was written is found, and named; an enemy's file is refused, and runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import flagstone as fs
from flagstone.checkpoint.manifest import digest

MARKER = "marker-of-an-enemy"


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 7))
    return {
        "model": model,
        "big": {"t": torch.rand(900_000), "u": torch.arange(11, dtype=torch.int16)},
        "own": fs.per_rank({"x": torch.rand(2000)}),
        "step": 3,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "whole"
    fs.save(_state(), path, assets={"config.json": b'{"a": 1}', "notes.txt": b"x" * 5000}, metadata={"who": "me"})
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def _flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def _target() -> dict[str, Any]:
    state = _state()
    for tensor in (*state["model"].parameters(), *state["big"].values()):
        tensor.detach().zero_()
    return state


def _untouched(state: dict[str, Any]) -> bool:
    return all(not bool(t.any()) for t in (*state["model"].parameters(), *state["big"].values()))


def test_every_flipped_bit_is_found_and_named(whole: Path, copy: Path) -> None:
    random.seed(1)
    for file in sorted(whole.iterdir()):
        size = file.stat().st_size
        for at in {0, 1, 7, size // 3, size // 2, size - 1, *(random.randrange(size) for _ in range(25))}:
            _flip(copy / file.name, at, random.randrange(8))
            with pytest.raises(fs.LoadError) as caught:
                fs.verify(copy)
            assert file.name in str(caught.value), (file.name, at)
            if file.suffix == ".safetensors" or file.name in ("config.json", "notes.txt"):
                assert isinstance(caught.value, fs.DamagedError)
                (damage, *_) = caught.value.damage
                assert damage.file == file.name
                assert damage.start <= at < damage.stop
            shutil.copy(file, copy / file.name)
    fs.verify(copy)


def test_the_tensor_of_a_damaged_range_is_named(copy: Path) -> None:
    with fs.open(copy) as checkpoint:
        place = checkpoint.place("big.t")
        other = checkpoint.place("model.1.bias")
    _flip(copy / place.file, place.begin + 2_000_000)
    _flip(copy / other.file, other.begin + 3)
    with pytest.raises(fs.DamagedError) as caught:
        fs.verify(copy)
    damage = {d.file: d for d in caught.value.damage}
    assert damage[place.file].tensors == ("big.t",)
    assert damage[place.file].stop - damage[place.file].start <= 1 << 20
    assert "model.1.bias" in damage[other.file].tensors


def test_load_finds_it_in_all_that_it_reads(whole: Path, copy: Path) -> None:
    random.seed(2)
    for name in ("model.safetensors", "big.safetensors", "manifest.json", "checksums.json"):
        size = (whole / name).stat().st_size
        for at in (3, 200, *(random.randrange(size) for _ in range(6))):
            if at >= size:
                continue
            _flip(copy / name, at)
            with pytest.raises(fs.LoadError):
                fs.load(copy)
            target = _target()
            with pytest.raises(fs.LoadError) as caught:
                fs.load(copy, into=target)
            if isinstance(caught.value, fs.DamagedError) and not caught.value.overwritten:
                assert _untouched(target)
            target = _target()
            with pytest.raises(fs.LoadError):
                fs.load(copy, into=target, verify="first")
            assert _untouched(target)
            shutil.copy(whole / name, copy / name)


def test_damage_met_on_the_way_says_what_was_overwritten(copy: Path) -> None:
    with fs.open(copy) as checkpoint:
        place = checkpoint.place("big.t")
    _flip(copy / place.file, place.begin + place.nbytes - 5)
    target = _target()
    with pytest.raises(fs.DamagedError, match=r"big\.t") as caught:
        fs.load(copy, into=target)
    changed = {n for n, t in target["big"].items() if bool(t.any())}
    assert {f"big.{n}" for n in changed} <= set(caught.value.overwritten)
    assert "overwritten" in str(caught.value) or "nothing of the target was changed" in str(caught.value)


def test_damage_that_is_not_read_does_not_matter(copy: Path) -> None:
    with fs.open(copy) as checkpoint:
        place = checkpoint.place("big.t")
    _flip(copy / place.file, place.begin + 5)
    assert fs.load(copy, include="model")["model"].keys()
    (copy / "big.safetensors").unlink()
    assert fs.load(copy, include="model")["model"].keys()
    with pytest.raises(fs.DamagedError, match=r"big\.safetensors.*missing"):
        fs.load(copy)


def test_a_damaged_slice_is_not_returned(copy: Path) -> None:
    with fs.open(copy) as checkpoint:
        place = checkpoint.place("big.t")
    _flip(copy / place.file, place.begin + 1_500_000)
    with fs.open(copy) as checkpoint:
        with pytest.raises(fs.DamagedError):
            checkpoint["big.t"][:]
        with pytest.raises(fs.DamagedError):
            checkpoint["big.t"][200_000:600_000]
    with fs.open(copy, verify=True) as checkpoint, pytest.raises(fs.DamagedError):
        checkpoint["big.t"][375_000:375_001]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "big.safetensors", "rank-00000.safetensors", "config.json", "checksums.json"]
)
@pytest.mark.parametrize("change", ["missing", "empty", "shorter", "longer"])
def test_files_of_another_size_are_told_before_anything_is_changed(name: str, change: str, copy: Path) -> None:
    """R038."""
    path = copy / name
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "shorter": data[:-1], "longer": data + b"\0"}[change])
    with pytest.raises(fs.LoadError, match=name):
        fs.verify(copy)
    if name in ("model.safetensors", "big.safetensors", "checksums.json"):
        target = _target()
        with pytest.raises(fs.LoadError, match=name):
            fs.load(copy, into=target)
        assert _untouched(target)


def test_swapped_files_are_found(tmp_path: Path) -> None:
    state = {"a": {"w": torch.rand(5000)}, "b": {"w": torch.rand(5000)}}
    fs.save(state, tmp_path / "c")
    a, b = tmp_path / "c" / "a.safetensors", tmp_path / "c" / "b.safetensors"
    a.rename(tmp_path / "x")
    b.rename(a)
    (tmp_path / "x").rename(b)
    with pytest.raises(fs.DamagedError, match=r"a\.safetensors.*b\.safetensors"):
        fs.verify(tmp_path / "c")
    target = {"a": {"w": torch.zeros(5000)}}
    with pytest.raises(fs.DamagedError, match=r"a\.safetensors"):
        fs.load(tmp_path / "c", into=target)
    assert not bool(target["a"]["w"].any())


def test_a_file_of_another_step_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        fs.save({"m": {"w": torch.full((5000,), float(step))}}, tmp_path / str(step))
    shutil.copy(tmp_path / "1" / "m.safetensors", tmp_path / "2" / "m.safetensors")
    with pytest.raises(fs.DamagedError, match=r"m\.w"):
        fs.load(tmp_path / "2")


def test_a_manifest_cut_anywhere_is_refused(copy: Path) -> None:
    data = (copy / "manifest.json").read_bytes()
    for length in range(0, len(data), 37):
        (copy / "manifest.json").write_bytes(data[:length])
        with pytest.raises(fs.LoadError):
            fs.load(copy)


# An enemy writes digests that fit.


def _forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["digest"]
    change(manifest)
    body = msgspec.json.encode(manifest)[:-1]
    (path / "manifest.json").write_bytes(body + b',"digest":"' + digest(body).encode() + b'"}\n')


def _forge_header(path: Path, file: str, header: bytes) -> None:
    """Another header in the place of one, under a checksum that fits."""
    data = (path / file).read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    assert len(header) == length
    (path / file).write_bytes(header + data[length:])
    import base64

    import xxhash

    sums = json.loads((path / "checksums.json").read_bytes())
    begin, end, _ = sums["files"][file][0]
    assert (begin, end) == (0, length)
    sums["files"][file][0][2] = base64.b64encode(xxhash.xxh3_128_digest(header)).decode()
    text = json.dumps(sums).encode()
    (path / "checksums.json").write_bytes(text)
    _forge(path, lambda m: m.update(checksums=digest(text)))


def _enemy_header(entries: dict[str, Any], length: int = 4096) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8)


BIG = {"dtype": "F32", "shape": [900000], "data_offsets": [22, 3600022]}
SMALL = {"dtype": "I16", "shape": [11], "data_offsets": [0, 22]}


@pytest.mark.parametrize(
    "header",
    [
        (1 << 63).to_bytes(8, "little") + b" " * 4088,
        (99_999_999).to_bytes(8, "little") + b" " * 4088,
        (0).to_bytes(8, "little") + b" " * 4088,
        _enemy_header({"t": {**BIG, "data_offsets": [22, 1 << 62]}, "u": SMALL}),
        _enemy_header({"t": {**BIG, "data_offsets": [3600022, 22]}, "u": SMALL}),
        _enemy_header({"t": {**BIG, "shape": [900001]}, "u": SMALL}),
        _enemy_header({"t": {**BIG, "shape": [-900000]}, "u": SMALL}),
        _enemy_header({"t": {**BIG, "shape": [1 << 40, 1 << 40]}, "u": SMALL}),
        _enemy_header({"t": BIG, "u": {**SMALL, "data_offsets": [0, 20]}}),
        _enemy_header({"t": BIG}),
        _enemy_header({"t": BIG, "u": SMALL, "v": SMALL}),
        _enemy_header({"t": {**BIG, "dtype": "F64"}, "u": SMALL}),
        _enemy_header(
            json.dumps({"t": BIG, "x": {**BIG, "shape": [1], "data_offsets": [22, 26]}, "u": SMALL})
            .replace('"x"', '"t"')
            .encode()
        ),
        _enemy_header(b'{"\xff\xfe": 1}'),
        _enemy_header(b"[" * 4000),
        _enemy_header(b'{"a":' * 800),
        _enemy_header(b"not json"),
    ],
    ids=[
        "length 2^63", "length 99 MB", "length 0", "offset beyond", "reversed", "shape larger", "negative",
        "huge shape", "hole", "absent", "one more", "other type", "twice", "not UTF-8", "deep", "deeper", "not JSON",
    ],
)  # fmt: skip
def test_headers_of_an_enemy_are_refused(header: bytes, copy: Path) -> None:
    """R105."""
    _forge_header(copy, "big.safetensors", header)
    target = _target()
    for attempt in (lambda: fs.load(copy), lambda: fs.load(copy, into=target), lambda: fs.verify(copy)):
        with pytest.raises(fs.LoadError):
            attempt()
    assert _untouched(target)
    with fs.open(copy) as checkpoint, pytest.raises(fs.LoadError):
        checkpoint["big.t"][0]


def _deep(manifest: dict[str, Any]) -> None:
    node: Any = 1
    for _ in range(300):
        node = [node]
    manifest["state"]["deep"] = node


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "file outside": lambda m: m["files"][0].update(name="../../../etc/passwd"),
    "absolute file": lambda m: m["files"][0].update(name="/etc/passwd"),
    "file in a folder": lambda m: m["files"][0].update(name="a/b"),
    "hidden file": lambda m: m["files"][0].update(name=".profile"),
    "file listed twice": lambda m: m["files"].append(m["files"][0]),
    "negative size": lambda m: m["files"][0].update(size=-1),
    "unknown type": lambda m: m["tensors"]["big.t"].__setitem__(0, "object"),
    "huge shape": lambda m: m["tensors"]["big.t"].__setitem__(1, [1 << 62, 1 << 62]),
    "negative shape": lambda m: m["tensors"]["big.t"].__setitem__(1, [-1]),
    "no such file": lambda m: m["tensors"]["big.t"].__setitem__(2, 99),
    "alias of nothing": lambda m: m.update(aliases={"x": "nothing"}),
    "tensor that is not there": lambda m: m["state"]["big"].update(z={"$": "t"}),
    "unknown kind": lambda m: m["state"].update(z={"$": "code", "v": "os.system"}),
    "bad dict": lambda m: m["state"].update(z={"$": "dict", "v": [[1]]}),
    "bad optimizer": lambda m: m["state"].update(z={"$": "optimizer", "state": [], "groups": {}}),
    "object scalar": lambda m: m["state"].update(z={"$": "np", "dtype": "O", "v": "AAAA"}),
    "bad bytes": lambda m: m["state"].update(z={"$": "bytes", "v": "***"}),
    "other version": lambda m: m.update(flagstone=2),
    "version of text": lambda m: m.update(flagstone="1"),
    "no tensors": lambda m: m.pop("tensors"),
    "pickle": lambda m: m["state"]["big"].update(u={"$": "pickle"}),
}


@pytest.mark.parametrize("forgery", list(FORGERIES))
def test_manifests_of_an_enemy_are_refused(forgery: str, copy: Path) -> None:
    """R102, R103."""
    _forge(copy, FORGERIES[forgery])
    with pytest.raises(fs.LoadError):
        fs.load(copy)


def test_a_deep_value_is_no_crash(copy: Path) -> None:
    _forge(copy, _deep)
    node = fs.load(copy)["deep"]
    for _ in range(300):
        (node,) = node
    assert node == 1


def test_a_link_out_of_the_folder_is_refused(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (copy / "big.safetensors").rename(secret)
    (copy / "big.safetensors").symlink_to(secret)
    with pytest.raises(fs.LoadError, match="link out of"):
        fs.load(copy)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (MARKER,)


@pytest.mark.parametrize("name", ["manifest.json", "checksums.json", "model.safetensors", "rank-00000.safetensors"])
def test_pickles_in_the_place_of_files_run_nothing(name: str, copy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """R102."""
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(_Evil())
    (copy / name).write_bytes(data.ljust((copy / name).stat().st_size, b"\0"))
    for attempt in (lambda: fs.load(copy), lambda: fs.verify(copy), lambda: fs.load(copy, into=_target())):
        try:
            attempt()
        except fs.LoadError:
            continue
        assert name == "rank-00000.safetensors"  # which `into` does not ask for
    assert not Path(MARKER).exists()


def test_a_pickle_of_an_enemy_is_not_opened_unasked(tmp_path: Path, monkeypatch: Any) -> None:
    """R103: the error names the flag."""
    monkeypatch.chdir(tmp_path)
    fs.save({"extra": _Evil(), "fine": 1}, "a", allow_pickle=True)
    for attempt in (
        lambda: fs.load("a"),
        lambda: fs.load("a", into={"extra": None}),
        lambda: fs.open("a")["extra"],
    ):
        with pytest.raises(fs.LoadError, match="allow_pickle=True"):
            attempt()
    assert not Path(MARKER).exists()
    target = {"fine": 0}
    fs.load("a", into=target)
    assert target == {"fine": 1}
    fs.load("a", allow_pickle=True)
    assert Path(MARKER).exists()


def test_our_own_files_need_no_unsafe_mode(tmp_path: Path) -> None:
    """R104: all that is saved by default is opened by default, generators among it."""
    import numpy as np

    state = fs.rng_state()
    expected = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    fs.save({"rng": state}, tmp_path / "a")
    target = {"rng": fs.rng_state()}
    fs.load(tmp_path / "a", into=target)
    fs.set_rng_state(target["rng"])
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == expected
    fs.set_rng_state(fs.load(tmp_path / "a")["rng"][0])
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == expected


@pytest.mark.parametrize("there", ["nothing", "empty", "file", "other files"])
def test_what_is_no_checkpoint_is_told(there: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if there == "file":
        path.write_text("hello")
    elif there != "nothing":
        path.mkdir()
        if there == "other files":
            (path / "a.txt").write_text("hello")
    with pytest.raises(fs.LoadError, match="no checkpoint at"):
        fs.load(path)
