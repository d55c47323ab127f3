"""All that does not fit is told at once, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flagstone as fs


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {
        "model": {
            "encoder.weight": torch.ones(4, 3),
            "encoder.bias": torch.ones(4),
            "head.weight": torch.ones(2, 4),
            "half": torch.ones(3, dtype=torch.float16),
        },
        "step": 7,
        "config": {"lr": 0.1, "layers": [1, 2]},
    }
    fs.save(state, tmp_path / "a", metadata={"note": "x"})
    return tmp_path / "a"


def _zeros(**shapes: Any) -> dict[str, torch.Tensor]:
    return {k.replace("_", "."): torch.zeros(v) for k, v in shapes.items()}


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_changed(saved: Path) -> None:
    target = {
        "model": {
            "encoder.weigth": torch.zeros(4, 3),
            "encoder.bias": torch.zeros(5),
            "head.weight": torch.zeros(2, 4),
            "half": torch.zeros(3),
        },
        "step": 0,
        "config": {"lr": torch.zeros(1)},
    }
    with pytest.raises(fs.LoadError) as caught:
        fs.load(saved, into=target)
    text = str(caught.value)
    for words in (
        "model.encoder.weigth: missing from the checkpoint; near: model.encoder.weight",
        "model.encoder.weight: in the checkpoint, but not in the target; near: model.encoder.weigth",
        "model.encoder.bias has shape [4] in the checkpoint, [5] in the target",
        "model.half is float16 in the checkpoint, float32 in the target; cast=True converts",
        "config.lr is a tensor in the target, but a plain value in the checkpoint",
        "config.layers.0: in the checkpoint, but not in the target",
        str(saved),
        "nothing was changed",
    ):
        assert words in text
    assert target["step"] == 0
    assert not bool(target["model"]["head.weight"].any())


def test_not_strict_loads_what_fits_and_reports_the_rest(saved: Path) -> None:
    target = {"model": _zeros(encoder_weight=(4, 3), extra=(2,)), "step": 0, "new": 5}
    report = fs.load(saved, into=target, strict=False)
    assert sorted(report.missing) == ["model.extra", "new"]
    assert report.unexpected == ["model.encoder.bias", "model.head.weight", "model.half"]
    assert report.skipped == ["config.lr", "config.layers.0", "config.layers.1"]
    assert report.loaded == ["model.encoder.weight", "step"]
    assert report.nbytes == 48
    assert bool(target["model"]["encoder.weight"].all())
    assert (target["step"], target["new"]) == (7, 5)


def test_top_level_keys_that_are_not_asked_for_are_skipped(saved: Path) -> None:
    target: dict[str, Any] = {"step": None}
    report = fs.load(saved, into=target)
    assert target == {"step": 7}
    assert "model.half" in report.skipped
    assert report.step == 7


def test_a_container_of_plain_values_is_replaced_as_a_whole(saved: Path) -> None:
    target: dict[str, Any] = {"config": None}
    fs.load(saved, into=target)
    assert target["config"] == {"lr": 0.1, "layers": [1, 2]}
    target = {"config": {"lr": 5, "layers": []}}
    fs.load(saved, into=target)
    assert target["config"] == {"lr": 0.1, "layers": [1, 2]}


def test_include_and_exclude(saved: Path) -> None:
    state = fs.load(saved, include=["model.encoder", "step"])
    assert list(state) == ["model", "step"]
    assert list(state["model"]) == ["encoder.weight", "encoder.bias"]
    state = fs.load(saved, exclude="*.bias")
    assert list(state["model"]) == ["encoder.weight", "head.weight", "half"]
    target = {"model": _zeros(encoder_weight=(4, 3), head_weight=(2, 4)), "step": 0}
    report = fs.load(saved, into=target, include="model.encoder.w*")
    assert report.loaded == ["model.encoder.weight"]
    assert not bool(target["model"]["head.weight"].any())
    assert target["step"] == 0


@pytest.mark.parametrize(
    "rename",
    [
        {"model.encoder": "model.body", "model.head": "model.top"},
        [(r"\.encoder\.", ".body."), (r"^model\.head", "model.top")],
        lambda name: name.replace("encoder", "body").replace("head", "top"),
    ],
    ids=["mapping", "patterns", "function"],
)
def test_rename(rename: Any, saved: Path) -> None:
    target = {"model": _zeros(body_weight=(4, 3), body_bias=(4,), top_weight=(2, 4), half=(3,))}
    fs.load(saved, into=target, rename=rename, cast=True)
    assert all(bool(t.all()) for t in target["model"].values())


def test_rename_follows_into_the_optimizer(tmp_path: Path) -> None:
    def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(3, 3)})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build("old")
    model["old"](torch.rand(2, 3)).sum().backward()  # type: ignore[operator, index]
    optimizer.step()
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other, again = build("new")
    fs.load(tmp_path / "a", into={"model": other, "optimizer": again}, rename={"model.old": "model.new"})
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], again.state[b]["exp_avg"])


def test_a_rename_that_makes_two_names_one_is_refused(saved: Path) -> None:
    with pytest.raises(fs.LoadError, match="the same name"):
        fs.load(saved, into={"model": {}}, rename=lambda name: "x")


def test_cast_converts_and_says_so(saved: Path) -> None:
    target = {"model": {"half": torch.zeros(3, dtype=torch.float64), "encoder.weight": np.zeros((4, 3), np.int8)}}
    report = fs.load(saved, into=target, include=["model.half", "model.encoder.weight"], cast=True)
    assert report.cast == {"model.half": ("float16", "float64"), "model.encoder.weight": ("float32", "int8")}
    assert bool(target["model"]["half"].all())
    assert target["model"]["encoder.weight"].all()


def test_a_cast_that_drops_an_imaginary_part_is_refused(tmp_path: Path) -> None:
    fs.save({"m": {"c": torch.ones(2, dtype=torch.complex64)}}, tmp_path / "a")
    target = torch.zeros(2)
    with pytest.raises(fs.LoadError, match="imaginary"):
        fs.load(tmp_path / "a", into={"m": {"c": target}}, cast=True)


def test_a_large_cast_goes_through_bounded_buffers(tmp_path: Path) -> None:
    tensor = torch.rand(3000, 2000)
    fs.save({"m": {"w": tensor}}, tmp_path / "a")
    target = torch.zeros(3000, 2000, dtype=torch.bfloat16)
    fs.load(tmp_path / "a", into={"m": {"w": target}}, cast=True)
    assert torch.equal(target, tensor.to(torch.bfloat16))


def test_overwriting_must_be_asked_for_and_replaces_whole(saved: Path) -> None:
    with pytest.raises(fs.SaveError, match="overwrite=True"):
        fs.save({"x": 1}, saved)
    assert fs.load(saved)["step"] == 7
    (saved / "notes.txt").write_text("mine")
    (saved / "plots").mkdir()
    (saved / "plots" / "a.png").write_text("mine too")
    fs.save({"x": 1}, saved, overwrite=True)
    assert fs.load(saved) == {"x": 1}
    assert (saved / "notes.txt").read_text() == "mine"
    assert (saved / "plots" / "a.png").read_text() == "mine too"
    assert not (saved / "model.safetensors").exists()


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(fs.SaveError):
            fs.save({"x": 1}, tmp_path / "a", overwrite=overwrite)
    assert (tmp_path / "a" / "thesis.txt").read_text() == "years"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_asset_does_not_replace_a_users_file(saved: Path) -> None:
    (saved / "config.json").write_text("mine")
    with pytest.raises(fs.SaveError, match=r"config\.json"):
        fs.save({"x": 1}, saved, overwrite=True, assets={"config.json": b"{}"})
    assert (saved / "config.json").read_text() == "mine"
    assert fs.load(saved)["step"] == 7


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "../x", "a/b", "", ".hidden"])
def test_assets_with_impossible_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(fs.SaveError, match="asset"):
        fs.save({"model": {"w": torch.ones(2)}}, tmp_path / "a", assets={name: b""})
    assert list(tmp_path.iterdir()) == []


def test_assets_metadata_and_step_are_kept(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    fs.save({"step": 12}, tmp_path / "a", assets=[tmp_path / "tokenizer.json"], metadata={"run": "b"})
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    with fs.open(tmp_path / "a") as checkpoint:
        assert (checkpoint.step, checkpoint.metadata) == (12, {"run": "b"})


def test_progress_is_told_for_save_load_and_verify(tmp_path: Path) -> None:
    state = {"m": {"w": torch.rand(5_000_000)}}
    calls: list[tuple[int, int]] = []
    fs.save(state, tmp_path / "a", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    for work in (
        lambda p: fs.load(tmp_path / "a", into=state, progress=p),
        lambda p: fs.load(tmp_path / "a", progress=p),
        lambda p: fs.verify(tmp_path / "a", progress=p),
    ):
        calls.clear()
        work(lambda done, total: calls.append((done, total)))
        assert calls[-1][0] == calls[-1][1] > 0
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_save_that_fails_removes_what_it_had_begun(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise RuntimeError("stop here")

    with pytest.raises(fs.SaveError, match="stop here"):
        fs.save({"m": {"w": torch.rand(100)}}, tmp_path / "a", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_many_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    from flagstone.layout import files

    monkeypatch.setattr(files, "FILE_BYTES", 100_000)
    monkeypatch.setattr(files.lay_out, "__defaults__", (100_000,))
    state = {f"layer.{i}.weight": torch.rand(100, 70) for i in range(10)}
    fs.save({"model": state}, tmp_path / "a")
    names = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert names == [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    import json

    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 10 * 28_000
    for key, tensor in state.items():
        assert torch.equal(load_file(tmp_path / "a" / index["weight_map"][key])[key], tensor)
    fs.verify(tmp_path / "a")
    assert torch.equal(fs.load(tmp_path / "a")["model"]["layer.7.weight"], state["layer.7.weight"])


def test_a_crash_between_the_two_renames_of_a_replacement_is_mended_by_the_next_save(tmp_path: Path) -> None:
    fs.save({"x": 1}, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / f".a.flagstone-{'0' * 32}.old")  # no exchange here, and killed in between
    fs.save({"x": 2}, tmp_path / "a", overwrite=True)
    assert fs.load(tmp_path / "a") == {"x": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_key_called_tensors_and_tensors_at_the_top_live_side_by_side(tmp_path: Path) -> None:
    fs.save({"tensors": {"a": torch.ones(2)}, "a": torch.zeros(3)}, tmp_path / "a")
    state = fs.load(tmp_path / "a")
    assert torch.equal(state["tensors"]["a"], torch.ones(2))
    assert torch.equal(state["a"], torch.zeros(3))


def test_keys_whose_names_differ_between_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.SaveError, match="frozenset"):
        fs.save({"d": {frozenset({"a", "b"}): torch.ones(2)}}, tmp_path / "a")


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_jobs_that_save_to_one_path_one_wins_whole(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if overwrite:
        fs.save({"who": "old"}, path)
    other_saved = False

    def meanwhile(done: int, total: int) -> None:
        nonlocal other_saved
        if not other_saved:
            other_saved = True
            fs.save({"m": {"w": torch.zeros(50_000)}, "who": "other"}, path, overwrite=overwrite)

    state = {"m": {"w": torch.ones(50_000)}, "who": "this"}
    with pytest.raises(fs.SaveError, match=r"appeared (there )?meanwhile"):
        fs.save(state, path, overwrite=overwrite, progress=meanwhile)
    assert fs.load(path)["who"] == "other"
    assert not bool(fs.load(path)["m"]["w"].any())
    fs.verify(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("excluded", ["m.a", "m.b"])
def test_of_two_names_of_one_tensor_either_may_be_left_out(excluded: str, tmp_path: Path) -> None:
    fs.save({"m": {"a": torch.ones(3), "b": torch.full((3,), 2.0)}}, tmp_path / "a")
    tied = torch.zeros(3)
    report = fs.load(tmp_path / "a", into={"m": {"a": tied, "b": tied}}, exclude=excluded)
    assert torch.equal(tied, torch.full((3,), 2.0 if excluded == "m.a" else 1.0))
    assert report.loaded == ["m.b" if excluded == "m.a" else "m.a"]


def test_a_tied_tensor_comes_from_whichever_name_the_checkpoint_has(tmp_path: Path) -> None:
    fs.save({"m": {"b": torch.ones(3)}}, tmp_path / "a")
    tied = torch.zeros(3)
    fs.load(tmp_path / "a", into={"m": {"a": tied, "b": tied}})
    assert torch.equal(tied, torch.ones(3))
    with pytest.raises(fs.LoadError, match=r"m\.x: missing"):
        fs.load(tmp_path / "a", into={"m": {"x": tied, "y": tied}})
