"""Optimizer state belongs to names, never to positions; options come back; nothing is stepped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flagstone as fs


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = model(torch.rand(8, 4, generator=generator)).square().sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.001, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_resumed_run_equals_one_that_was_not_interrupted(kind: str, tmp_path: Path) -> None:
    """R039, R007: a new optimizer gets its state at load, for all of torch's."""
    model = _model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    _train(model, optimizer, seed=1)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    _train(model, optimizer, seed=2)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fresh = OPTIMIZERS[kind](other.parameters())
    fs.load(tmp_path / "a", into={"model": other, "optimizer": fresh})
    _train(other, fresh, seed=2)
    assert _equal(model, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    ],
    ids=["step", "multistep", "cosine", "one cycle", "lambda", "sequential", "plateau"],
)
def test_schedulers_go_on(make: Any, tmp_path: Path) -> None:
    def run(scheduler: Any, steps: int) -> None:
        for i in range(steps):
            scheduler.step(i) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else scheduler.step()

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    scheduler = make(optimizer)
    run(scheduler, 4)
    fs.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "a")
    other = torch.optim.SGD(model.parameters(), 0.1)
    other.step()
    again = make(other)
    fs.load(tmp_path / "a", into={"model": model, "optimizer": other, "scheduler": again})
    run(scheduler, 4)
    run(again, 4)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_every_group_comes_back_in_order_with_user_keys_and_empty_ones(tmp_path: Path) -> None:
    """R042."""

    def make(model: nn.Sequential, scale: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": 0.1 * scale, "betas": (0.8, 0.9), "mine": "a"},
                {"params": [], "lr": 0.2 * scale, "mine": "b"},
                {"params": model[1].parameters(), "lr": 0.3 * scale, "mine": {"x": [1, 2]}},
            ]
        )

    model = _model()
    optimizer = make(model, 1.0)
    model[2].requires_grad_(False)
    _train(model, optimizer)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other = make(model, 9.0)
    fs.load(tmp_path / "a", into={"model": model, "optimizer": other})
    strip = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups] == strip
    _train(model, other)


def test_state_follows_names_when_the_optimizer_has_another_order(tmp_path: Path) -> None:
    """R046: equal shapes on purpose."""
    model = _model()
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())), 0.1)
    _train(model, optimizer)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    other = torch.optim.AdamW([{"params": decay}, {"params": rest}], 0.1)
    fs.load(tmp_path / "a", into={"model": model, "optimizer": other})
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], other.state[parameter]["exp_avg"])


def test_two_optimizers_are_told_apart_by_name(tmp_path: Path) -> None:
    """R055."""
    model = _model()
    pair = {
        "dense": torch.optim.Adam(model[0].parameters(), 0.1),
        "expert": torch.optim.Adam(model[1].parameters(), 0.2),
    }
    _train(model, *pair.values())
    fs.save({"model": model, **pair}, tmp_path / "a")
    swapped = {
        "expert": torch.optim.Adam(model[1].parameters(), 0.2),
        "dense": torch.optim.Adam(model[0].parameters(), 0.1),
    }
    fs.load(tmp_path / "a", into={**swapped, "model": model})
    for key, optimizer in pair.items():
        for parameter in optimizer.param_groups[0]["params"]:
            assert torch.equal(optimizer.state[parameter]["exp_avg"], swapped[key].state[parameter]["exp_avg"])
    crossed = {"dense": swapped["expert"], "model": model}
    with pytest.raises(fs.LoadError, match=r"dense\.state\.1\.weight"):
        fs.load(tmp_path / "a", into=crossed)


def test_saving_does_not_depend_on_gradients_and_changes_nothing(tmp_path: Path) -> None:
    """R030."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def names(step: str) -> set[str]:
        before = copy.deepcopy(model.state_dict())
        report = fs.save({"model": model, "optimizer": optimizer}, tmp_path / step)
        assert report.notes == ([] if optimizer.state else ["optimizer has no state, or none yet"])
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        with fs.open(tmp_path / step) as checkpoint:
            return {n for n in checkpoint if n.startswith("optimizer.state.")}

    assert names("before any step") == set()
    model(torch.rand(2, 4)).sum().backward()
    assert names("after backward") == set()
    optimizer.step()
    kept = names("gradients kept")
    optimizer.zero_grad()
    assert names("gradients dropped") == kept
    assert len(kept) == 6 * 3


def test_a_parameter_without_gradient_has_no_state_and_that_is_no_error(tmp_path: Path) -> None:
    """R045."""

    def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = _model()
        model[2].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), 0.1)

    model, optimizer = build()
    _train(model, optimizer)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other, again = build()
    _train(other, again)  # has state of its own, which goes
    fs.load(tmp_path / "a", into={"model": other, "optimizer": again})
    for m, o in ((model, optimizer), (other, again)):
        m[2].requires_grad_(True)
        _train(m, o)
    assert _equal(model, other)


def test_a_new_parameter_is_missing_when_strict_and_fresh_when_not(tmp_path: Path) -> None:
    """R040."""
    model = _model()
    optimizer = torch.optim.AdamW(model[:2].parameters(), 0.1)
    _train(model, optimizer)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    more = torch.optim.AdamW(model.parameters(), 0.1)
    with pytest.raises(fs.LoadError, match=r"optimizer\.state\.2\.weight: missing") as caught:
        fs.load(tmp_path / "a", into={"model": model, "optimizer": more})
    assert str(tmp_path / "a") in str(caught.value)
    report = fs.load(tmp_path / "a", into={"model": model, "optimizer": more}, strict=False)
    assert report.missing == ["optimizer.state.2.weight", "optimizer.state.2.bias"]
    assert model[2].weight not in more.state
    assert torch.equal(more.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_unknown_and_absent_options_are_told_and_do_not_stop(tmp_path: Path) -> None:
    """R041."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    del optimizer.param_groups[0]["nesterov"]
    optimizer.param_groups[0]["from the future"] = 1
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    with (
        pytest.warns(fs.FlagstoneWarning, match="from the future"),
        pytest.warns(fs.FlagstoneWarning, match="nesterov"),
    ):
        report = fs.load(tmp_path / "a", into={"model": model, "optimizer": other})
    assert any("nesterov" in n for n in report.notes)
    assert any("from the future" in n for n in report.notes)
    assert other.param_groups[0]["nesterov"] is False
    assert other.param_groups[0]["lr"] == 0.1
    _train(model, other)


@pytest.mark.parametrize(
    ("weights", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_state_keeps_its_own_element_type(weights: torch.dtype, moments: torch.dtype, tmp_path: Path) -> None:
    """R050."""
    model = _model().to(weights)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(parameter.shape).to(moments),
            "exp_avg_sq": torch.rand(parameter.shape).to(moments),
        }
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other = torch.optim.AdamW(model.parameters(), 0.1)
    fs.load(tmp_path / "a", into={"model": model, "optimizer": other})
    for parameter in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert other.state[parameter][key].dtype == moments
            assert torch.equal(other.state[parameter][key], optimizer.state[parameter][key])


class Odd(torch.optim.Optimizer):
    """State of every kind."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                n = p.numel()
                self.state[p] = {
                    "count": 3,
                    "nothing": None,
                    "kind": "blockwise",
                    "scalar": torch.tensor(2.5),
                    "other shape": torch.arange(n + 1.0),
                    "blocks": torch.arange(n, dtype=torch.int64).to(torch.uint8),
                    "nested": {"a": [1, (2, "x")], "t": torch.ones(3)},
                }


def test_state_that_is_not_elementwise_is_carried_as_it_is(tmp_path: Path) -> None:
    """R034."""
    model = _model()
    optimizer = Odd(model.parameters())
    optimizer.step()
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other = Odd(model.parameters())
    fs.load(tmp_path / "a", into={"model": model, "optimizer": other})
    for p in model.parameters():
        a, b = optimizer.state[p], other.state[p]
        assert list(a) == list(b)
        for key in ("count", "nothing", "kind"):
            assert a[key] == b[key]
            assert type(a[key]) is type(b[key])
        for key in ("scalar", "other shape", "blocks"):
            assert torch.equal(a[key], b[key])
            assert a[key].dtype == b[key].dtype
        assert b["nested"]["a"] == [1, (2, "x")]
        assert torch.equal(b["nested"]["t"], torch.ones(3))


def test_an_optimizer_without_its_module_is_refused(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(fs.SaveError, match="belongs to no module"):
        fs.save({"optimizer": optimizer}, tmp_path / "a")


def test_a_plain_state_dict_of_an_optimizer_goes_through(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    _train(model, optimizer)
    fs.save({"state": optimizer.state_dict()}, tmp_path / "a")
    other = torch.optim.AdamW(model.parameters(), 0.1)
    other.load_state_dict(fs.load(tmp_path / "a")["state"])
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[p]["exp_avg"])


def test_adapters_alone_resume_strictly(tmp_path: Path) -> None:
    """R056: what was saved under a filter is judged against the filter."""
    model = _model()
    model[0].requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, 0.1)
    _train(model, optimizer)
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    fs.save({"adapters": adapters, "state": optimizer.state_dict()}, tmp_path / "a")
    other = _model()
    fs.load(tmp_path / "a", into={"adapters": {n: p for n, p in other.named_parameters() if n in adapters}})
    assert torch.equal(other[2].weight, model[2].weight)
    with pytest.raises(fs.LoadError, match=r"adapters\.0\.weight: missing"):
        fs.load(tmp_path / "a", into={"adapters": dict(other.named_parameters())})


def test_the_whole_model_can_be_saved_and_adapters_loaded(tmp_path: Path) -> None:
    model, other = _model(), _model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    fs.save({"model": model}, tmp_path / "a")
    fs.load(tmp_path / "a", into={"model": other}, include="model.2")
    assert torch.equal(other[2].weight, model[2].weight)
    assert not torch.equal(other[0].weight, model[0].weight)


def test_excluded_state_stays_as_it_is_or_begins_anew(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    _train(model, optimizer)
    fs.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other = torch.optim.AdamW(model.parameters(), 0.1)
    report = fs.load(tmp_path / "a", into={"model": model, "optimizer": other}, exclude="*.exp_avg_sq")
    assert not any("exp_avg_sq" in name for name in report.loaded)
    for p in model.parameters():
        assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
        assert torch.count_nonzero(other.state[p]["exp_avg_sq"]) == 0
    _train(model, other)
    kept = {p: other.state[p]["exp_avg_sq"].clone() for p in model.parameters()}
    fs.load(tmp_path / "a", into={"model": model, "optimizer": other}, exclude="*.exp_avg_sq")
    assert all(torch.equal(other.state[p]["exp_avg_sq"], value) for p, value in kept.items())
