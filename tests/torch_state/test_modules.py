"""Modules keep their plain names, whatever wraps them, and are filled in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import flagstone as fs


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def _inner(wrap: Any) -> Any:
    def wrapped(module: nn.Module) -> nn.Module:
        module[2] = wrap(module[2])  # type: ignore[index,operator]
        return module

    return wrapped


WRAPS = {
    "plain": lambda m: m,
    "checkpointed": checkpoint_wrapper,
    "compiled": _compiled,
    "checkpointed(compiled)": lambda m: checkpoint_wrapper(_compiled(m)),
    "compiled(checkpointed)": lambda m: _compiled(checkpoint_wrapper(m)),
    "inner checkpointed": _inner(checkpoint_wrapper),
    "inner compiled": _inner(_compiled),
    "inner checkpointed(compiled)": _inner(lambda m: checkpoint_wrapper(_compiled(m))),
    "data parallel": nn.DataParallel,
}


@pytest.mark.parametrize("saved", list(WRAPS))
def test_names_are_the_plain_models_whatever_the_wrappers(saved: str, tmp_path: Path) -> None:
    """R043."""
    module = WRAPS[saved](_plain())
    fs.save({"model": module}, tmp_path / "a")
    state = fs.load(tmp_path / "a")["model"]
    assert list(state) == list(_plain().state_dict())
    for wrap in WRAPS.values():
        other = wrap(_plain())
        fs.load(tmp_path / "a", into={"model": other})
        for a, b in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_an_attribute_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    fs.save({"model": Holder()}, tmp_path / "a")
    assert list(fs.load(tmp_path / "a")["model"]) == ["module.weight", "module.bias"]


def test_a_module_alone_is_a_state(tmp_path: Path) -> None:
    model, other = _plain(), _plain()
    fs.save(model, tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").exists()
    fs.load(tmp_path / "a", into=other)
    assert torch.equal(model[0].weight, other[0].weight)  # type: ignore[index]


def test_buffers_come_along_and_non_persistent_ones_do_not(tmp_path: Path) -> None:
    model, other = _plain(), _plain()
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model(torch.rand(8, 4))
    fs.save({"model": model}, tmp_path / "a")
    assert "model.cache" not in fs.open(tmp_path / "a")
    fs.load(tmp_path / "a", into={"model": other})
    assert torch.equal(model[1].running_mean, other[1].running_mean)  # type: ignore[index]
    assert other[1].num_batches_tracked == 1  # type: ignore[index]


def test_extra_state_goes_through_the_module(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return {"scale": torch.tensor([1.5, 2.5]), "name": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    model, other = nn.Sequential(Extra(2, 2)), nn.Sequential(Extra(2, 2))
    model[0].extra = "x"  # type: ignore[assignment]
    fs.save({"model": model}, tmp_path / "a")
    fs.load(tmp_path / "a", into={"model": other})
    assert other[0].extra["name"] == "x"  # type: ignore[index]
    assert torch.equal(other[0].extra["scale"], torch.tensor([1.5, 2.5]))  # type: ignore[index]


def test_a_module_whose_state_dict_is_made_gets_it_back(tmp_path: Path) -> None:
    class Doubled(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "doubled"] = self.weight.detach() * 2

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            with torch.no_grad():
                self.weight.copy_(state_dict[prefix + "doubled"] / 2)

    model, other = Doubled(3, 3), Doubled(3, 3)
    fs.save({"model": model}, tmp_path / "a")
    fs.load(tmp_path / "a", into={"model": other})
    assert torch.equal(model.weight, other.weight)


def test_several_modules_have_files_of_their_own(tmp_path: Path) -> None:
    fs.save({"generator": nn.Linear(2, 2), "nets": {"critic": nn.Linear(3, 3)}}, tmp_path / "a")
    assert {"generator.safetensors", "nets.critic.safetensors"} <= {p.name for p in (tmp_path / "a").iterdir()}


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    """R035: what is saved has the type that it has in the model."""
    model = nn.Linear(64, 64).to(torch.bfloat16)
    report = fs.save({"model": model}, tmp_path / "a")
    assert report.nbytes == (64 * 64 + 64) * 2
    assert {t.dtype for t in fs.load(tmp_path / "a")["model"].values()} == {torch.bfloat16}


def test_loading_into_a_meta_module_says_what_to_do(tmp_path: Path) -> None:
    fs.save({"model": nn.Linear(2, 2)}, tmp_path / "a")
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(fs.LoadError, match=r"model\.weight.*meta device.*to_empty"):
        fs.load(tmp_path / "a", into={"model": model})


def test_loaded_tensors_live_on_when_the_folder_is_replaced_or_gone(tmp_path: Path) -> None:
    """R053: nothing is mapped."""
    path = tmp_path / "a"
    fs.save({"m": {"w": torch.arange(100_000)}}, path)
    state = fs.load(path)
    fs.save({"m": {"w": torch.zeros(100_000, dtype=torch.int64)}}, path, overwrite=True)
    assert torch.equal(state["m"]["w"], torch.arange(100_000))
    assert torch.equal(fs.load(path)["m"]["w"], torch.zeros(100_000, dtype=torch.int64))


def test_save_load_train_and_again_in_one_process(tmp_path: Path) -> None:
    """R044."""
    torch.manual_seed(0)
    model, optimizer = _trained(1)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "1")
    fs.load(tmp_path / "1", into={"model": model, "optimizer": optimizer})
    _step(model, optimizer, 1)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "2")
    torch.manual_seed(0)
    reference, other = _trained(2)
    fs.load(tmp_path / "2", into={"model": model, "optimizer": optimizer})
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], other.state[b]["exp_avg"])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(steps):
        _step(model, optimizer, seed)
    return model, optimizer
