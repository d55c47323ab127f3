"""Initialisation on the meta device, state dicts, and checkpoints of sharded models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flagstone as fs
from sharded import (
    CONNECTED,
    TWO_WAYS,
    adamw,
    assert_same,
    connect,
    loss_of,
    net,
    shard,
    text,
    train,
    train_plain,
    whole,
)

# The meta device.


def reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def meta():
    with torch.device("meta"):
        return net()


def initialised(rank, world, how):
    connect(CONNECTED[how], rank)
    plain = net()
    torch.manual_seed(7)
    reset(plain)
    model = shard(meta())
    assert model.head.weight is model.embed.weight
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    reset(model)
    assert model.head.weight is model.embed.weight
    assert_same(model, plain)
    train_plain(plain, world, 2)
    train(model, rank, 2)
    assert_same(model, plain)


@pytest.mark.parametrize("how", TWO_WAYS)
@pytest.mark.parametrize("world", [1, 3])
def test_a_model_from_the_meta_device_has_the_same_first_values(ranks, world, how):
    """Bit for bit, under one seed, for any number of ranks."""
    ranks.run(world, initialised, how)


def forgotten(rank, world, how, path):
    connect(CONNECTED[how], rank)
    for empty in (False, True):
        model = shard(meta())
        if empty:
            model.to_empty(device="cpu")
        with pytest.raises(fs.FlagstoneError, match=r"^embed\.weight, norm\.weight, .* … came from the meta device"):
            loss_of(model, text(0, rank))
        reset(model.blocks)
        model.embed.reset_parameters()
        with pytest.raises(fs.FlagstoneError, match=r"^norm\.weight, norm\.bias came from the meta device"):
            loss_of(model, text(0, rank))
    plain = net()
    fs.save({"model": plain}, path)
    fs.load(path, into={"model": model})
    assert torch.equal(loss_of(model, text(0, rank)), loss_of(plain, text(0, rank)))
    other = shard(meta())
    other.load_state_dict(plain.state_dict())
    assert_same(other, plain)
    with torch.no_grad():
        other(text(0, rank))


@pytest.mark.parametrize("how", TWO_WAYS)
def test_parameters_without_values_are_named(ranks, how, tmp_path):
    """Until they are initialised, or loaded."""
    ranks.run(2, forgotten, how, tmp_path / "a")


# State dicts.


def unsharded(rank, world, how):
    connect(CONNECTED[how], rank)
    plain = net()
    model = shard(copy.deepcopy(plain))

    def check():
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert all(isinstance(value, fs.ShardedTensor) for value in state.values())
        assert_same(model, plain)

    check()
    loss = loss_of(model, text(0, rank))
    check()  # between forward and backward
    loss.backward()
    check()
    model.zero_grad()
    for unit in (model, model.blocks[0]):
        unit.unshard()
        assert torch.equal(unit.norm.weight, (plain if unit is model else plain.blocks[0]).norm.weight)
        check()
        assert not isinstance(unit.norm.weight, fs.ShardedTensor)
        with pytest.raises(fs.FlagstoneError, match="reshard it first"):
            model.load_state_dict(plain.state_dict())
        unit.reshard()
        assert isinstance(unit.norm.weight, fs.ShardedTensor)
        check()
    train_plain(plain, world, 2)
    train(model, rank, 2)
    check()


@pytest.mark.parametrize("how", TWO_WAYS)
def test_state_dicts_have_plain_names_and_sharded_values_whenever_they_are_taken(ranks, how):
    ranks.run(2, unsharded, how)


def loading(rank, world, how):
    """A plain state dict, whole and in part, right, and with a name or a shape that is wrong."""
    connect(CONNECTED[how], rank)
    torch.manual_seed(1)
    plain = net()
    reset(plain)
    model = shard(net())
    model(text(0, rank))
    state = plain.state_dict()
    assert str(model.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    assert_same(model, plain)
    part = {k: torch.full_like(v, 2.0) for k, v in state.items() if k.startswith("blocks.1")}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(part)
    result = model.load_state_dict({**part, "other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["other"]
    assert "embed.weight" in result.missing_keys
    plain.load_state_dict(part, strict=False)
    assert_same(model, plain)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.norm\.weight"):
        model.load_state_dict({"blocks.1.norm.weight": torch.ones(3)}, strict=False)
    theirs = shard(net())
    theirs.load_state_dict(model.state_dict())  # sharded values
    assert_same(theirs, plain)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_plain_state_dicts_are_loaded(ranks, how):
    ranks.run(2, loading, how)


# Checkpoints.


def saving(rank, world, how, path, sizes=None):
    """After three steps of as many micro-batches, whatever the number of ranks."""
    connect(CONNECTED[how], rank)
    model = shard(net())
    opt = adamw(model.parameters())
    for step in range(3):
        for micro in range(rank, 4, world):
            (loss_of(model, text(step, micro)) * 0).backward()
        for parameter in model.parameters():  # the same on any number of ranks
            parameter.grad = parameter.detach() * 0.5 + step
        opt.step()
        opt.zero_grad()
    fs.save({"model": model, "optimizer": opt, "step": 3}, path)


def resuming(rank, world, how, path):
    connect(CONNECTED[how], rank)
    model, plain = shard(net()), net()
    opt, plain_opt = adamw(model.parameters()), adamw(plain.parameters())
    for each, o in ((model, opt), (plain, plain_opt)):
        state = {"model": each, "optimizer": o, "step": 0}
        fs.load(path, into=state)
        assert state["step"] == 3
    assert_same(model, plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(whole(opt.state[p][key]), plain_opt.state[q][key])
            assert opt.state[p][key].any() if key == "step" else whole(opt.state[p][key]).any()
    expected = train_plain(plain, world, 2, lambda _: plain_opt)
    assert train(model, rank, 2, lambda _: opt) == [values[rank] for values in expected]
    assert_same(model, plain)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_checkpoint_is_the_same_files_for_any_number_of_ranks_and_goes_on_with_any_other(ranks, how, tmp_path):
    for world in (1, 2, 4):
        ranks.run(world, saving, how, tmp_path / str(world))
    names = sorted(p.name for p in (tmp_path / "1").iterdir() if p.suffix == ".safetensors")
    assert names
    for world in ("2", "4"):
        assert sorted(p.name for p in (tmp_path / world).iterdir() if p.suffix == ".safetensors") == names
        for name in names:
            assert (tmp_path / world / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
    for world in (1, 3):
        ranks.run(world, resuming, how, tmp_path / "2")


def saving_within(rank, world, how, path):
    """Between forward and backward, and while a unit is whole."""
    connect(CONNECTED[how], rank)
    plain = net()
    model = shard(copy.deepcopy(plain))
    loss = loss_of(model, text(0, rank))
    fs.save({"model": model}, path / "a")
    loss.backward()
    model.blocks[1].unshard()
    fs.save({"model": model}, path / "b")
    model.blocks[1].reshard()
    for name in "ab":
        state = fs.load(path / name)["model"]
        for key, value in plain.state_dict().items():
            assert torch.equal(state[key], value)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_save_may_come_between_forward_and_backward(ranks, how, tmp_path):
    ranks.run(2, saving_within, how, tmp_path)


def damaged_reading(rank, world, how, path):
    """A load that fails has changed nothing, and training goes on."""
    connect(CONNECTED[how], rank)
    plain = net()
    model = shard(copy.deepcopy(plain))
    with pytest.raises(fs.LoadError):
        fs.load(path, into={"model": model})
    assert_same(model, plain)
    train_plain(plain, world, 2)
    train(model, rank, 2)
    assert_same(model, plain)


@pytest.mark.parametrize("how", TWO_WAYS)
def test_a_load_that_fails_changes_nothing(ranks, how, tmp_path):
    fs.save({"model": nn.Linear(3, 3)}, tmp_path / "a")
    ranks.run(2, damaged_reading, how, tmp_path / "a")
