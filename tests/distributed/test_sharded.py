"""Several ranks: sharded in every way, saved by some number of ranks, loaded by another."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import flagstone as fs
from ranks import Ranks


def _whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape).to(dtype)


def _sharded(whole: torch.Tensor, mesh: Any, placements: Any, fill: bool = True) -> Any:
    """A DTensor made without communication, so that any element type goes."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = list(torch.chunk(local, mesh.size(dim), dim=placement.dim))
            at = mesh.get_local_rank(dim)
            empty = local.narrow(placement.dim, 0, 0)
            local = parts[at] if at < len(parts) else empty
        else:
            assert isinstance(placement, Replicate)
    local = local.clone() if fill else torch.zeros_like(local)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _layouts(world: int) -> dict[str, tuple[Any, Any]]:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    flat = init_device_mesh("cpu", (world,))
    found: dict[str, tuple[Any, Any]] = {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "last": (flat, [Shard(2)]),
        "replicas": (flat, [Replicate()]),
    }
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        found |= {
            "rows-twice": (square, [Shard(0), Shard(0)]),
            "rows-columns": (square, [Shard(0), Shard(1)]),
            "columns-rows": (square, [Shard(1), Shard(0)]),
            "hybrid": (square, [Replicate(), Shard(0)]),
            "hybrid-columns": (square, [Shard(1), Replicate()]),
        }
    return found


SHAPES = [(9, 5, 3), (1, 7, 2), (128, 64, 4), (3, 2, 700), (2, 0, 4), (65, 33, 17)]


def _save_layouts(rank: int, world: int, path: Path) -> None:
    state = {
        name: {str(i): _sharded(_whole(s, d), mesh, p) for i, (s, d) in enumerate(_cases())}
        for name, (mesh, p) in _layouts(world).items()
    }
    fs.save({**state, "plain": _whole((999,)), "step": 5}, path)


def _cases() -> list[tuple[tuple[int, ...], torch.dtype]]:
    dtypes = [torch.float32, torch.int16, torch.bfloat16, torch.complex128, torch.bool, torch.float8_e5m2]
    return list(zip(SHAPES, dtypes, strict=True))


def _load_layouts(rank: int, world: int, path: Path, names: list[str]) -> None:
    for name in names:
        for mesh, placements in _layouts(world).values():
            target = {str(i): _sharded(_whole(s, d), mesh, placements, False) for i, (s, d) in enumerate(_cases())}
            fs.load(path, into={name: target})
            for i, (shape, dtype) in enumerate(_cases()):
                expected = _sharded(_whole(shape, dtype), mesh, placements)
                got = target[str(i)].to_local().contiguous().view(torch.uint8)
                assert torch.equal(got, expected.to_local().contiguous().view(torch.uint8)), (name, placements, shape)


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_every_layout_loads_into_every_other_on_any_number_of_ranks(saved: int, ranks: Ranks, tmp_path: Path) -> None:
    """R057, R058, R061, R062: uneven, empty and one-rank shares among them."""
    path = tmp_path / "a"
    ranks.run(saved, _save_layouts, path)
    fs.verify(path)
    state = fs.load(path)
    names = [n for n in state if n not in ("plain", "step")]
    for name in names:
        plain = load_file(path / f"{name}.safetensors")
        for i, (shape, dtype) in enumerate(_cases()):
            whole = _whole(shape, dtype)
            assert torch.equal(state[name][str(i)].view(torch.uint8), whole.view(torch.uint8))
            if dtype != torch.complex128:
                assert torch.equal(plain[str(i)].view(torch.uint8), whole.view(torch.uint8))
    for world in (1, 2, 3, 4):
        ranks.run(world, _load_layouts, path, names if world == 4 else names[:4])


def test_files_are_the_same_whatever_the_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for world in (1, 2, 3, 4):
        ranks.run(world, _save_layouts, tmp_path / str(world))
        found.append(
            {
                n: (tmp_path / str(world) / f"{n}.safetensors").read_bytes()
                for n in ("rows", "columns", "last", "tensors")
            }
        )
    assert found[0] == found[1] == found[2] == found[3]


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 17)) for _ in range(2)))


def _fsdp(world: int, learning_rate: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model = _blocks()
    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), learning_rate)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """The same batch on every rank, so that the mean of gradients is that of one process."""
    for step in range(first, last):
        x = torch.rand(4, 17, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_fsdp(rank: int, world: int, load: Path | None, save: Path, first: int, last: int) -> None:
    model, optimizer = _fsdp(world)
    if load is not None:
        report = fs.load(load, into={"model": model, "optimizer": optimizer})
        assert len(report.loaded) >= 8 * 4
    _steps(model, optimizer, first, last)
    fs.save({"model": model, "optimizer": optimizer, "step": last}, save)


def test_training_goes_on_at_another_number_of_ranks_as_if_alone(ranks: Ranks, tmp_path: Path) -> None:
    """R060, R051: FSDP2 with AdamW, 2 ranks, 3, 1, 4, against one process."""
    model = _blocks()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    last: Path | None = None
    for at, world in enumerate((2, 3, 1, 4)):
        path = tmp_path / str(at)
        ranks.run(world, _train_fsdp, last, path, 2 * at, 2 * at + 2)
        _steps(model, optimizer, 2 * at, 2 * at + 2)
        state = fs.load(path)
        for name, parameter in model.named_parameters():
            assert torch.allclose(state["model"][name], parameter, atol=1e-6)
            moments = state["optimizer"]["state"][name]
            assert moments["step"] == 2 * at + 2
            assert torch.allclose(moments["exp_avg"], optimizer.state[parameter]["exp_avg"], atol=1e-6)
        plain = _blocks()
        plain.load_state_dict(load_file(path / "model.safetensors"))
        last = path


def _resume_exactly(rank: int, world: int, path: Path) -> None:
    model, optimizer = _fsdp(world)
    _steps(model, optimizer, 0, 3)
    fs.save({"model": model, "optimizer": optimizer}, path)
    _steps(model, optimizer, 3, 6)
    other, again = _fsdp(world, 0.5)
    fs.load(path, into={"model": other, "optimizer": again})
    _steps(other, again, 3, 6)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_resume_at_the_same_number_of_ranks_is_exact(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(world, _resume_exactly, tmp_path / "a")


def _mixed_precision(rank: int, world: int, path: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = _Mlp()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return model

    model, other = build(0), build(1)
    x = torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
    other(x)  # has compute copies of its own
    fs.save({"model": model}, path)
    fs.load(path, into={"model": other})
    assert torch.equal(model(x), other(x))


def test_right_after_a_load_forward_uses_what_was_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """R052: low-precision compute copies are not stale. R035: the float32 master is what is saved."""
    ranks.run(2, _mixed_precision, tmp_path / "a")
    assert fs.load(tmp_path / "a")["model"]["up.weight"].dtype == torch.float32


def _first_generation(rank: int, world: int, path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(_Mlp(), device_id=torch.device("cpu"))
    with pytest.raises(fs.SaveError, match="FSDP1"):
        fs.save({"model": model}, path)
    fs.save({"model": {"w": torch.ones(2)}}, path)
    with pytest.raises(fs.LoadError, match="FSDP1"):
        fs.load(path, into={"model": model})


def test_a_kind_of_sharding_that_is_not_supported_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """R033: exact, or a typed error; never a folder without data."""
    ranks.run(2, _first_generation, tmp_path / "a")


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 40)
        self.down = nn.Linear(40, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def _two_dimensions(rank: int, world: int, path: Path, whole: bool) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    model = _Mlp()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if whole:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    model(torch.rand(3, 16, generator=torch.Generator().manual_seed(0))).sum().backward()
    optimizer.step()
    fs.save({"model": model, "optimizer": optimizer}, path)
    state = load_file(path / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    moments = {n: optimizer.state[p]["exp_avg"].to_local().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().zero_()  # type: ignore[attr-defined]
    again = torch.optim.AdamW(model.parameters(), 0.5)
    fs.load(path, into={"model": model, "optimizer": again})
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), before[name])  # type: ignore[attr-defined]
        assert torch.equal(again.state[p]["exp_avg"].to_local(), moments[name])


@pytest.mark.parametrize("whole", [False, True], ids=["tensor parallel", "FSDP over tensor parallel"])
def test_tensor_parallel_files_are_whole(whole: bool, ranks: Ranks, tmp_path: Path) -> None:
    """The second has strided shards: cut by the inner mesh dimension first."""
    ranks.run(4, _two_dimensions, tmp_path / "a", whole)
    fs.verify(tmp_path / "a")


def _ddp(rank: int, world: int, path: Path) -> Any:
    torch.manual_seed(rank)  # DDP makes them equal
    model = nn.parallel.DistributedDataParallel(_Mlp())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(3, 16)).sum().backward()
    optimizer.step()
    report = fs.save({"model": model, "optimizer": optimizer}, path)
    state = fs.load(path)
    assert list(state["model"]) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    plain = _Mlp()
    fs.load(path, into={"model": plain})
    assert torch.equal(plain.up.weight, model.module.up.weight)
    return report.written


def test_ddp_divides_the_writing(ranks: Ranks, tmp_path: Path) -> None:
    written = ranks.run(2, _ddp, tmp_path / "a")
    total = sum(p.stat().st_size for p in (tmp_path / "a").glob("*.safetensors"))
    assert sum(written) == total
    assert min(written) > 0


def _stages(rank: int, world: int, path: Path) -> None:
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4), "shared": nn.Identity()})
    with torch.no_grad():
        model[f"stage{rank}"].weight.fill_(rank)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model[f"stage{rank}"](torch.rand(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 3, f"only{rank}": {"value": rank}}
    fs.save(state, path)
    other = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    again = torch.optim.AdamW(other.parameters(), 0.5)
    fs.load(path, into={"model": other, "optimizer": again}, strict=False)
    assert torch.equal(other[f"stage{rank}"].weight, model[f"stage{rank}"].weight)  # type: ignore[union-attr]
    assert again.param_groups[0]["lr"] == 0.1


def test_pipeline_stages_save_their_union(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, _stages, tmp_path / "a")
    state = fs.load(tmp_path / "a")
    assert sorted(k for k in state["model"] if "weight" in k) == [f"stage{r}.weight" for r in range(3)]
    assert len(state["optimizer"]["state"]) == 6
    assert len(state["optimizer"]["param_groups"][0]["params"]) == 6
    assert [state[f"only{r}"]["value"] for r in range(3)] == [0, 1, 2]
    assert state["step"] == 3


def _differ(rank: int, world: int, path: Path, kind: str) -> None:
    plain = torch.zeros(70_000)
    values: dict[str, Any] = {
        "values": {"w": plain, "a": {"seed": 1 if rank < 2 else rank}},
        "tensor": {"a": {"w": plain + (rank == 1)}, "same": torch.ones(3)},
        "shape": {"a": {"w": torch.zeros(3 + rank)}},
        "dtype": {"a": {"w": torch.zeros(3, dtype=torch.float64 if rank else torch.float32)}},
        "replicas": {},
    }
    state = values[kind]
    if kind == "replicas":
        from torch.distributed.tensor import Replicate, init_device_mesh

        mesh = init_device_mesh("cpu", (world,))
        state = {"a": {"w": _sharded(plain + (rank == 2), mesh, [Replicate()])}}
    fs.save(state, path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("values", r"a\.seed differs between rank 0, 1 and rank 2"),
        ("tensor", r"a\.w: rank 0, 2 differs from rank 1"),
        ("shape", r"a\.w is float32\[3\] on rank 0 and float32\[4\] on rank 1"),
        ("dtype", r"a\.w is float32\[3\] on rank 0 and float64\[3\] on rank 1, 2"),
        ("replicas", r"a\.w: rank 0, 1 differs from rank 2"),
    ],
)
def test_what_should_be_equal_and_is_not_is_named_on_every_rank(
    kind: str, words: str, ranks: Ranks, tmp_path: Path
) -> None:
    """R031."""
    errors = ranks.run(3, _differ, tmp_path / "a", kind, catch=True)
    assert {type(e) for e in errors} == {fs.SaveError}
    assert len({str(e) for e in errors}) == 1
    with pytest.raises(fs.SaveError, match=words):
        raise errors[0]
    assert list(tmp_path.iterdir()) == []


def _own(rank: int, world: int, path: Path) -> None:
    rng = fs.rng_state()
    rng.value["torch"].fill_(rank)
    own = fs.per_rank({"cursor": rank * 10, "buffer": torch.full((rank + 1,), float(rank)), "keys": {rank: "x"}})
    fs.save({"w": torch.ones(5), "rng": rng, "deep": {"own": own}}, path)


def _take_own(rank: int, world: int, path: Path) -> tuple[Any, list[str]]:
    target = {"w": torch.zeros(5), "deep": {"own": fs.per_rank(None)}, "rng": fs.rng_state()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs.load(path, into=target)
    assert torch.equal(target["w"], torch.ones(5))
    return target["deep"]["own"].value, [str(w.message) for w in caught]


def test_values_of_ranks_are_kept_and_never_dropped_in_silence(ranks: Ranks, tmp_path: Path) -> None:
    """R059, R031."""
    path = tmp_path / "a"
    ranks.run(2, _own, path)
    fs.verify(path)
    for world in (1, 2, 3):
        results = ranks.run(world, _take_own, path)
        for rank, (value, messages) in enumerate(results):
            if rank < 2:
                assert value["cursor"] == rank * 10
                assert torch.equal(value["buffer"], torch.full((rank + 1,), float(rank)))
                assert value["keys"] == {rank: "x"}
            else:
                assert value is None
                assert any(f"deep.own: rank {rank} was not part of the save" in m for m in messages)
        if world == 1:
            assert any("deep.own: nobody here takes the values of rank 1 of the save" in m for m in results[0][1])
    both = fs.load(path)["deep"]["own"]
    assert [v["cursor"] for v in both] == [0, 10]


class _PerShard(torch.optim.Optimizer):
    """Keeps, for each parameter, something made from this rank's shard alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            local = p.to_local()
            self.state[p] = {"scale": local.abs().amax().reshape(1) if local.numel() else local.new_zeros(1), "n": 3}


def _per_shard(rank: int, world: int, path: Path, load: bool) -> None:
    model, _ = _fsdp(world)
    optimizer = _PerShard(model.parameters())
    optimizer.step()
    if not load:
        fs.save({"model": model, "optimizer": optimizer}, path)
        return
    other = _PerShard(model.parameters())
    fs.load(path, into={"model": model, "optimizer": other})
    for p in model.parameters():
        assert torch.equal(other.state[p]["scale"], optimizer.state[p]["scale"])
        assert other.state[p]["n"] == 3


def test_state_made_from_a_shard_comes_back_or_says_that_it_cannot_be_divided(ranks: Ranks, tmp_path: Path) -> None:
    """R034."""
    ranks.run(2, _per_shard, tmp_path / "a", False)
    ranks.run(2, _per_shard, tmp_path / "a", True)
    errors = ranks.run(3, _per_shard, tmp_path / "a", True, catch=True)
    assert all(isinstance(e, fs.LoadError) and "scale was made from the shards" in str(e) for e in errors)


def _only_group_members(rank: int, world: int, folder: Path) -> None:
    """R048: two halves of a job save to different folders at once, in groups of their own."""
    from torch.distributed.tensor import DeviceMesh, Shard

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    mesh = DeviceMesh.from_group(mine, "cpu")
    state = {"m": {"w": _sharded(_whole((9, 3)) + rank // 2, mesh, [Shard(1)])}, "own": fs.per_rank(rank)}
    path = folder / str(rank // 2)
    for i in range(2 + rank // 2):  # not as often in one as in the other
        fs.save(state, f"{path}-{i}", group=mine)
    target = {"m": {"w": _sharded(_whole((9, 3)), mesh, [Shard(1)], False)}, "own": fs.per_rank(None)}
    fs.load(f"{path}-1", into=target, group=mine)
    assert torch.equal(target["m"]["w"].to_local(), state["m"]["w"].to_local())
    assert target["own"].value == rank
    fs.save({"all": 1}, folder / "all")  # and then all together


def test_only_the_given_group_is_used(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, _only_group_members, tmp_path)
    assert torch.equal(fs.load(tmp_path / "1-2")["m"]["w"], _whole((9, 3)) + 1)
    assert fs.load(tmp_path / "all") == {"all": 1}


def _many(rank: int, world: int, folder: Path) -> None:
    import random
    import time

    random.seed(rank)
    for i in range(50):
        time.sleep(random.random() * 0.02)
        fs.save({"w": torch.full((100,), float(i)), "i": i}, folder / f"step-{i:03}")


def test_fifty_saves_with_ranks_that_come_late(ranks: Ranks, tmp_path: Path) -> None:
    """R036."""
    ranks.run(4, _many, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{i:03}" for i in range(50)]
    for i in range(50):
        assert fs.load(tmp_path / f"step-{i:03}")["i"] == i


def test_reading_needs_no_process_group(ranks: Ranks, tmp_path: Path) -> None:
    """R047, R054."""
    ranks.run(4, _save_layouts, tmp_path / "a")
    assert not dist.is_initialized()
    target = {"rows": {"0": torch.zeros(9, 5, 3)}}
    fs.load(tmp_path / "a", into=target, include="rows.0")
    assert torch.equal(target["rows"]["0"], _whole((9, 5, 3)))
    with fs.open(tmp_path / "a") as checkpoint:
        assert torch.equal(checkpoint["columns.0"][2:4], _whole((9, 5, 3))[2:4])
    assert not dist.is_initialized()
