"""A wrapper in the hands of its users: training, copies, files, nesting, ties, mistakes."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import flagstone as fs


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def wrapped(**kwargs):
    return fs.FlattenParamsWrapper(net(), **kwargs)


def data():
    return torch.arange(20.0).reshape(5, 4).sin()


def step(module, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.zero_grad()
    module(data()).square().sum().backward()
    optimizer.step()


def equal(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(a[key], b[key]) for key in a)


# What modules read


def test_weights_read_in_grad_mode_after_a_step_are_those_of_now():
    wrapper, plain = wrapped(), net()
    for _ in range(2):
        step(wrapper)
        step(plain)
        assert torch.equal(wrapper[0].weight, plain[0].weight)
        assert wrapper[0].weight.requires_grad
        assert not wrapper[0].weight.is_leaf
        with torch.no_grad():
            assert torch.equal(wrapper[2].bias, plain[2].bias)


@pytest.mark.parametrize("change", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.to("meta")])
@pytest.mark.parametrize("outer", [lambda w: w, lambda w: nn.Sequential(w)])
@pytest.mark.parametrize("swap", [False, True])
def test_weights_follow_a_conversion_at_once(change, outer, swap, monkeypatch):
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: swap)
    wrapper = wrapped()
    step(wrapper)
    change(outer(wrapper))
    weight = wrapper[0].weight
    assert (weight.dtype, weight.device) == (wrapper.flat_param.dtype, wrapper.flat_param.device)
    assert weight._base is wrapper.flat_param
    assert wrapper.flat_param.grad.dtype == weight.dtype
    assert type(wrapper.flat_param) is fs.FlatParameter
    assert wrapper.flat_param.metadata()[0] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def test_a_model_made_on_meta_gets_its_memory_and_its_values():
    with torch.device("meta"):
        wrapper = wrapped()
    wrapper.to_empty(device="cpu").load_state_dict(net().state_dict())
    equal(wrapper.state_dict(), net().state_dict())
    step(wrapper)


def test_data_that_was_swapped_is_what_is_read():
    wrapper = wrapped()
    wrapper(data())
    wrapper.flat_param.data = torch.arange(wrapper.flat_param.numel()).float()
    assert wrapper[0].weight[0].tolist() == [0, 1, 2, 3]
    assert wrapper(data()).shape == (5, 3)


def test_functional_call_uses_the_flat_parameter_that_it_is_given():
    wrapper, plain = wrapped().eval(), net().eval()
    other = {k: v * 2 for k, v in plain.named_parameters()}
    flat = torch.cat([v.flatten() for v in other.values()]).detach().requires_grad_()
    result = functional_call(wrapper, {"flat_param_0": flat}, (data(),))
    assert torch.equal(result, functional_call(plain, other, (data(),)))
    result.sum().backward()
    assert flat.grad.any()
    assert wrapper.flat_param.grad is None
    assert torch.equal(wrapper[0].weight, plain[0].weight)

    def loss(flat):
        return functional_call(wrapper, {"flat_param_0": flat}, (data(),)).sum()

    both = torch.stack([wrapper.flat_param.detach(), flat.detach()])
    assert torch.allclose(vmap(grad(loss))(both)[1], flat.grad)


def test_what_is_read_or_copied_inside_of_a_forward_is_as_outside():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapper = wrapper

        def forward(self):
            return self.wrapper[0].weight

    def look(*_):
        seen.append(wrapper[0].weight)
        seen.append(functional_call(Reads(), {"wrapper.flat_param_0": zeros}))
        seen.append(copy.deepcopy(wrapper)[0].weight)
        with torch.no_grad():
            wrapper.flat_param.add_(1)
        seen.append(wrapper[0].weight * 1)

    wrapper, seen = wrapped(), []
    zeros = torch.zeros_like(wrapper.flat_param, requires_grad=False)
    while zeros._version < wrapper.flat_param._version:
        zeros.zero_()
    before = wrapper[0].weight.detach().clone()
    wrapper[2].register_forward_pre_hook(look)
    wrapper(data())
    assert not seen[1].any()
    assert torch.equal(seen[2], before)
    assert torch.equal(seen[3], before + 1)


def test_a_flat_parameter_made_of_others_passes_their_gradients_on():
    wrapper = wrapped().eval()
    half = (wrapper.flat_param.detach() / 2).requires_grad_()
    functional_call(wrapper, {"flat_param_0": half * 2}, (data(),)).sum().backward()
    wrapper(data()).sum().backward()
    assert torch.allclose(half.grad, 2 * wrapper.flat_param.grad)


def test_a_compiled_wrapper_sees_what_changes():
    wrapper, plain = wrapped(), net()
    compiled = torch.compile(wrapper, backend="eager", fullgraph=True)
    step(compiled)
    step(plain)
    assert torch.equal(compiled(data()), plain(data()))


# Gradients


def test_only_the_flat_parameter_has_a_gradient_and_backward_splits_once():
    wrapper = wrapped()
    output = wrapper(data())
    names, todo = [], [output.grad_fn]
    while todo:
        node = todo.pop()
        names.append(node.name())
        todo += [n for n, _ in node.next_functions if n is not None and n not in todo]
    assert not [n for n in names if n.startswith(("SliceBackward", "NarrowBackward"))]
    assert any(n.startswith("SplitWithSizes") for n in names)
    output.sum().backward()
    assert [n for n, p in wrapper.named_parameters() if p.grad is not None] == ["flat_param_0"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_repeated_modules_have_the_gradients_of_the_plain_ones(reentrant):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = checkpoint(lambda x: self.b(self.a(x).relu()), x, use_reentrant=reentrant)
            return self.a(x) @ self.a.weight

    plain, wrapper = Repeated(), fs.FlattenParamsWrapper(Repeated())
    for module in (plain, wrapper):
        for _ in range(2):  # accumulated
            module(data().requires_grad_()).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert torch.allclose(wrapper.flat_param.grad, expected, rtol=1e-5)


def test_weights_that_a_forward_changes_in_place_are_used_changed():
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    torch.manual_seed(0)
    plain = Clamped(4, 2)
    wrapper = fs.FlattenParamsWrapper(copy.deepcopy(plain))
    for module in (plain, wrapper):
        step(module)
    equal(wrapper.state_dict(), plain.state_dict())


def test_forwards_in_several_threads_disturb_none():
    wrapper = wrapped().eval()
    expected = net().eval()(data())
    wrong = []

    def work():
        for i in range(30):
            with torch.set_grad_enabled(i % 2 == 0):
                if not torch.equal(wrapper(data()), expected):
                    wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_init_by_apply_and_zero_grad_and_freezing_reach_the_flat_parameter():
    wrapper = wrapped()
    wrapper.apply(lambda m: nn.init.constant_(m.weight, 3) if isinstance(m, nn.Linear) else None)
    wrapper[2].bias.data.fill_(4)
    assert wrapper.state_dict()["0.weight"].eq(3).all()
    assert wrapper.state_dict()["2.bias"].eq(4).all()
    wrapper(data()).sum().backward()
    wrapper.zero_grad()
    assert wrapper.flat_param.grad is None
    wrapper.requires_grad_(False)
    assert not wrapper(data()).requires_grad


# Kinds and ties


def test_types_and_frozen_parameters_come_into_flat_parameters_of_their_own():
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).double(), nn.Linear(4, 2))
    module.count = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    expected = copy.deepcopy(module).state_dict()
    wrapper = fs.FlattenParamsWrapper(module, flat_param_names=["a"])
    kinds = {name: (p.dtype, p.requires_grad, p.metadata()[0]) for name, p in wrapper.named_parameters()}
    assert kinds == {
        "flat_param_a": (torch.int64, False, ["count"]),
        "flat_param_a_1": (torch.float32, False, ["0.weight", "0.bias"]),
        "flat_param_a_2": (torch.float64, True, ["1.weight", "1.bias"]),
        "flat_param_a_3": (torch.float32, True, ["2.weight", "2.bias"]),
    }
    equal(wrapper.state_dict(), expected)
    wrapper.load_state_dict(wrapper.flat_state_dict())
    with pytest.raises(fs.FlagstoneError, match="not one flat parameter but 4"):
        _ = wrapper.flat_param


def test_frozen_weights_stay_bit_for_bit_and_the_others_learn():
    plain, module = net(), net()
    for m in (plain, module):
        m[0].requires_grad_(False)
    wrapper = fs.FlattenParamsWrapper(module)
    optimizers = [torch.optim.AdamW(m.parameters(), weight_decay=0.1, foreach=False) for m in (wrapper, plain)]
    for _ in range(3):
        step(wrapper, optimizers[0])
        step(plain, optimizers[1])
    equal(wrapper.state_dict(), plain.state_dict())
    assert len(optimizers[0].state) == 1


def tied():
    module = nn.ModuleDict({"enc": nn.Embedding(5, 3), "dec": nn.Linear(3, 5)})
    module["dec"].weight = module["enc"].weight
    return module


def test_a_tie_across_groups_belongs_to_the_first():
    module = tied()
    wrapper = fs.FlattenParamsWrapper(module, [module["enc"].parameters(), module["dec"].parameters()])
    assert [p.metadata()[0] for p in wrapper.flat_params] == [["enc.weight"], ["dec.bias"]]
    assert wrapper.flat_params[0].aliases == {"dec.weight": "enc.weight"}
    assert wrapper.num_params_managed == 2
    assert module["enc"].weight.data_ptr() == module["dec"].weight.data_ptr()
    assert list(wrapper.state_dict()) == ["enc.weight", "dec.weight", "dec.bias"]
    with wrapper.unflatten_params():
        assert module["enc"].weight is module["dec"].weight
    module["dec"](module["enc"](torch.tensor([1]))).sum().backward()
    assert wrapper.flat_params[0].grad.any()


def test_a_group_that_others_own_wholly_is_empty():
    module = tied()
    weight = module["enc"].weight
    wrapper = fs.FlattenParamsWrapper(module, [[weight], [weight]], flat_param_names=["a", "b"])
    assert wrapper.flat_param_names == ["flat_param_a"]
    for nothing in (nn.ReLU(), nn.BatchNorm1d(2, affine=False)):
        assert fs.FlattenParamsWrapper(nothing).flat_params == []
        fs.FlattenParamsWrapper(nothing).load_state_dict(nothing.state_dict())


def test_a_tie_with_another_wrapper_is_refused_by_both_names():
    module = tied()
    fs.FlattenParamsWrapper(module["enc"])
    with pytest.raises(fs.FlagstoneError, match="weight is shared with another wrapper, which has it as weight in"):
        fs.FlattenParamsWrapper(module["dec"])
    assert isinstance(module["dec"].weight, nn.Parameter)


def test_a_module_that_is_registered_twice_keeps_both_names():
    layer = nn.Linear(2, 2)
    plain = nn.ModuleDict({"a": layer, "b": layer})
    expected = copy.deepcopy(plain.state_dict())
    wrapper = fs.FlattenParamsWrapper(plain)
    assert wrapper.flat_param.aliases == {"b.weight": "a.weight", "b.bias": "a.bias"}
    equal(wrapper.state_dict(), expected)


# Strides


def test_channels_last_weights_stay_so_and_load_from_row_major_flat_data():
    def make(memory_format):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)).to(memory_format=memory_format)

    last, first = make(torch.channels_last), make(torch.contiguous_format)
    expected = copy.deepcopy(first.state_dict())
    last, first = fs.FlattenParamsWrapper(last), fs.FlattenParamsWrapper(first)
    for read in (last[0].weight, last.state_dict()["0.weight"], copy.deepcopy(last)[0].weight):
        assert read.is_contiguous(memory_format=torch.channels_last)
        assert not read.is_contiguous()
    equal(last.state_dict(), expected)
    assert not torch.equal(last.flat_param, first.flat_param)
    last.load_state_dict(first.flat_state_dict())
    equal(last.state_dict(), expected)
    last.load_state_dict(dict(first.flat_state_dict()))  # says nothing about itself
    equal(last.state_dict(), expected)
    first.load_state_dict(last.flat_state_dict())
    equal(first.state_dict(), expected)
    last.load_state_dict(last.flat_state_dict())
    equal(last.state_dict(), expected)


def test_flat_data_of_other_parameters_is_refused_by_names():
    a = fs.FlattenParamsWrapper(nn.ModuleDict({"a": nn.Linear(2, 2)}))
    b = fs.FlattenParamsWrapper(nn.ModuleDict({"b": nn.Linear(2, 2)}))
    before = b.flat_param.clone()
    with pytest.raises(RuntimeError, match=r"flat_param_0 was saved for .*'a.weight', 'a.bias'.* has .*'b.weight'"):
        b.load_state_dict(a.flat_state_dict())
    assert torch.equal(b.flat_param, before)


# State dicts


def test_state_dicts_share_the_memory_of_the_flat_parameter():
    wrapper = wrapped()
    wrapper.state_dict()["0.weight"].fill_(7)
    assert wrapper.flat_param[:24].eq(7).all()


def test_saving_between_forward_and_backward_disturbs_nothing():
    wrapper, plain = wrapped(), net()
    for module in (wrapper, plain):
        loss = module(data()).square().sum()
        module.state_dict()
        loss.backward()
    assert torch.equal(wrapper.flat_param.grad, torch.cat([p.grad.flatten() for p in plain.parameters()]))


@pytest.mark.parametrize("save", ["state_dict", "flat_state_dict"])
def test_a_saved_state_is_plain_data_and_loads(save):
    wrapper, file = wrapped(), io.BytesIO()
    step(wrapper)
    torch.save(getattr(wrapper, save)(), file)
    file.seek(0)
    other = wrapped()
    other.load_state_dict(torch.load(file, weights_only=True))
    equal(other.state_dict(), wrapper.state_dict())
    if save == "state_dict":
        net().load_state_dict(wrapper.state_dict())
        assert wrapper.state_dict()._metadata["1"] == net().state_dict()._metadata["1"]


def nested():
    module = net()
    module[0] = fs.FlattenParamsWrapper(module[0])
    return fs.FlattenParamsWrapper(module)


@pytest.mark.parametrize("source", [net, wrapped, nested])
def test_nested_wrappers_load_what_any_other_form_saved(source):
    saved, into = source(), nested()
    step(saved)
    into.load_state_dict(saved.state_dict())
    equal(into.state_dict(), saved.state_dict())
    assert [n for n, _ in into.named_parameters()] == ["flat_param_0", "_fpw_module.0.flat_param_0"]
    plain = net()
    plain.load_state_dict(into.state_dict())
    assert into.metadata(0)[0] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert into[0].metadata(0)[0] == ["weight", "bias"]


def test_nested_wrappers_load_their_flat_state_and_mixtures():
    saved = nested()
    step(saved)
    flat = saved.flat_state_dict()
    assert [k for k in flat if "flat" in k] == ["flat_param_0", "0.flat_param_0"]
    mixed = dict(flat)
    del mixed["0.flat_param_0"]
    mixed |= {k: v for k, v in saved.state_dict().items() if k.startswith("0.")}
    for state in (flat, mixed):
        into = nested()
        into.load_state_dict(state)
        equal(into.state_dict(), saved.state_dict())
    outer = nn.ModuleDict({"a": nested()})
    outer.load_state_dict({f"a.{k}": v for k, v in flat.items()})
    equal(outer["a"].state_dict(), saved.state_dict())


def test_a_wrapper_around_a_wrapper_is_like_one():
    inside = wrapped(param_list=None)
    twice = fs.FlattenParamsWrapper(inside)
    equal(twice.state_dict(), net().state_dict())
    twice.load_state_dict(net().state_dict())
    twice.load_state_dict(twice.flat_state_dict())
    assert twice.num_params_managed == 0


def test_what_an_inner_wrapper_leaves_the_outer_one_takes():
    module = net()
    module[0] = fs.FlattenParamsWrapper(module[0], [module[0].weight])
    wrapper = fs.FlattenParamsWrapper(module)
    assert wrapper.metadata(0)[0] == ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    equal(wrapper.state_dict(), net().state_dict())
    wrapper.load_state_dict(wrapper.flat_state_dict())
    step(wrapper)


class Own(nn.Module):
    """Parameters whose names look like those of flat ones."""

    def __init__(self, *names):
        super().__init__()
        for i, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(torch.full((2, 2), float(i))))


@pytest.mark.parametrize("names", [("flat_param_x", "w"), ("flat_param_0", "w"), ("flat_param_0",), ("flat_param",)])
def test_a_parameter_of_ones_own_may_be_called_flat_param(names):
    wrapper, other = fs.FlattenParamsWrapper(Own(*names)), fs.FlattenParamsWrapper(Own(*names))
    with torch.no_grad():
        wrapper.flat_param.add_(1)
    for state in (wrapper.state_dict(), wrapper.flat_state_dict()):
        other.flat_param.data.zero_()
        other.load_state_dict(state)
        equal(other.state_dict(), wrapper.state_dict())
    assert list(wrapper.state_dict()) == list(names)


def test_a_name_that_is_taken_by_what_stays_is_refused():
    module = Own("flat_param_0", "w")
    with pytest.raises(fs.FlagstoneError, match="cannot have the name flat_param_0 here"):
        fs.FlattenParamsWrapper(module, [module.w])
    assert isinstance(module.w, nn.Parameter)
    wrapper = fs.FlattenParamsWrapper(module, [module.w], ["mine"])
    wrapper.load_state_dict(wrapper.flat_state_dict())


def test_old_checkpoints_with_one_flat_param_load():
    wrapper, other = wrapped(), wrapped()
    step(wrapper)
    state = dict(wrapper.flat_state_dict())
    state["flat_param"] = state.pop("flat_param_0")
    other.load_state_dict(state)
    equal(other.state_dict(), wrapper.state_dict())
    assert "flat_param" in state
    outer = nn.ModuleDict({"a": wrapped()})
    outer.load_state_dict({f"a.{k}": v for k, v in state.items()})
    equal(outer["a"].state_dict(), wrapper.state_dict())


@pytest.mark.parametrize(
    "outer", [lambda w: w, lambda w: nn.ModuleDict({"a": w}), lambda w: fs.FlattenParamsWrapper(w)]
)
def test_messages_of_a_load_have_the_names_of_the_module(outer):
    wrapper = wrapped()
    module = outer(wrapper)
    state = module.state_dict()
    lead = "a." if isinstance(module, nn.ModuleDict) else ""
    state[f"{lead}0.weight"] = torch.zeros(3, 3)
    state[f"{lead}more"] = state.pop(f"{lead}2.bias")
    with pytest.raises(RuntimeError) as caught:
        module.load_state_dict(state)
    text = str(caught.value)
    assert "_fpw_module" not in text
    assert f'Missing key(s) in state_dict: "{lead}2.bias"' in text
    assert f'Unexpected key(s) in state_dict: "{lead}more"' in text
    assert f"size mismatch for {lead}0.weight" in text
    assert wrapper.is_flattened
    del state[f"{lead}0.weight"]
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert sorted(missing) == [f"{lead}0.weight", f"{lead}2.bias"]
    assert unexpected == [f"{lead}more"]


def test_a_flat_parameter_of_another_size_is_named():
    with pytest.raises(RuntimeError, match="size mismatch for flat_param_0"):
        wrapped().load_state_dict({**wrapped().flat_state_dict(), "flat_param_0": torch.zeros(3)})


@pytest.mark.parametrize("outer", [lambda w: w, lambda w: nn.ModuleDict({"a": w})])
def test_assignment_of_loaded_values_is_refused(outer):
    module = outer(wrapped())
    with pytest.raises(fs.FlagstoneError, match=r"assign=True.*to_empty"):
        module.load_state_dict(module.state_dict(), assign=True)


def test_a_load_that_breaks_off_leaves_a_wrapper_that_trains():
    class Breaking(nn.Linear):
        def _load_from_state_dict(self, *args):
            raise ZeroDivisionError

    for outer in (lambda w: w, lambda w: nn.ModuleDict({"a": w})):
        wrapper = fs.FlattenParamsWrapper(Breaking(4, 2))
        module = outer(wrapper)
        with pytest.raises(ZeroDivisionError):
            module.load_state_dict(module.state_dict())
        assert wrapper.is_flattened == (module is wrapper)  # by its own hand, or when next used
        wrapper(data()).sum().backward()
        assert wrapper.flat_param.grad.any()


def test_flagstone_checkpoints_hold_the_names_of_the_module(tmp_path):
    wrapper = wrapped()
    optimizer = torch.optim.AdamW(wrapper.parameters())
    step(wrapper, optimizer)
    fs.save({"model": wrapper, "optimizer": optimizer}, tmp_path / "step-1")
    plain, other = net(), wrapped()
    fs.load(tmp_path / "step-1", into={"model": plain})
    equal(plain.state_dict(), wrapper.state_dict())
    resumed = torch.optim.AdamW(other.parameters())
    fs.load(tmp_path / "step-1", into={"model": other, "optimizer": resumed})
    step(wrapper, optimizer)
    step(other, resumed)
    equal(other.state_dict(), wrapper.state_dict())


# Copies


@pytest.mark.parametrize(
    "make", [wrapped, nested, lambda: fs.FlattenParamsWrapper(tied()), lambda: nn.Sequential(wrapped())]
)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_module_works_and_is_apart(make, copied):
    module = make()
    twin = copied(module)
    equal(twin.state_dict(), module.state_dict())
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    equal(module.state_dict(), before)
    changed = [k for k, v in twin.state_dict().items() if not torch.equal(v, before[k])]
    assert set(changed) == {k for k in before if "running" not in k and "num_batches" not in k}


def test_an_average_by_deepcopy_trains_along():
    wrapper = wrapped()
    average = torch.optim.swa_utils.AveragedModel(wrapper)
    for _ in range(3):
        step(wrapper)
        average.update_parameters(wrapper)
    assert torch.equal(average.module[0].weight, next(average.module.flat_param.get_param_views()))
    assert not torch.equal(average.module.flat_param, wrapper.flat_param)
    assert average(data()).shape == (5, 3)


def test_an_lstm_copies_converts_and_trains():
    wrapper = fs.FlattenParamsWrapper(nn.LSTM(4, 3))
    wrapper(data())[0].sum().backward()
    twin = copy.deepcopy(wrapper)
    with torch.no_grad():
        twin.flat_param.zero_()
    assert not twin(data())[0].any()
    assert wrapper.double()(data().double())[0].dtype == torch.float64


# Own parameters for a while


def test_changes_inside_of_unflatten_params_are_kept_in_place_replaced_and_by_data():
    wrapper = wrapped()
    flat, twin = wrapper.flat_param, net()
    with torch.no_grad(), wrapper.unflatten_params():
        assert [n for n, _ in wrapper.named_parameters()] == [f"_fpw_module.{n}" for n, _ in twin.named_parameters()]
        wrapper[0].weight.fill_(1)
        wrapper[0].bias = nn.Parameter(torch.full((6,), 2.0))
        wrapper[2].weight.data = torch.full((3, 6), 3.0)
    assert wrapper.flat_param is flat
    assert [wrapper.state_dict()[k].unique().tolist() for k in ("0.weight", "0.bias", "2.weight")] == [[1], [2], [3]]
    assert torch.equal(wrapper[2].bias, twin[2].bias)


def test_what_cannot_be_kept_is_named_and_the_rest_is_kept():
    wrapper = fs.FlattenParamsWrapper(nn.ModuleDict({"a": nn.Linear(2, 2), "m": nn.Linear(1, 1), "t": tied()}))
    with pytest.raises(fs.FlagstoneError) as caught, wrapper.unflatten_params():  # noqa: PT012
        wrapper["a"].weight = nn.Parameter(torch.zeros(3, 3))
        del wrapper["a"].bias
        wrapper["t"]["enc"].weight = nn.Parameter(torch.ones(5, 3))
        wrapper["t"]["dec"].bias = nn.Parameter(torch.full((5,), 9.0))
        wrapper["m"].bias = nn.Parameter(torch.zeros(1, device="meta"))
    for part in (
        "a.weight has shape [3, 3], not [2, 2]",
        "a.bias was deleted",
        "m.bias is on meta, not on cpu",
        "t.enc.weight is no longer shared",
    ):
        assert part in str(caught.value)
    assert wrapper.is_flattened
    assert wrapper["t"]["dec"].bias.eq(9).all()
    assert wrapper["a"].weight.shape == (2, 2)


def test_an_exception_inside_is_passed_on_and_the_flat_parameter_is_back():
    wrapper = wrapped()
    flat = wrapper.flat_param
    with pytest.raises(ZeroDivisionError), wrapper.unflatten_params():  # noqa: PT012
        wrapper[0].weight = nn.Parameter(torch.zeros(1))
        raise ZeroDivisionError
    assert (wrapper.flat_param is flat, wrapper.is_flattened) == (True, True)
    step(wrapper)


def test_gradients_that_came_inside_are_added_to_those_of_the_flat_parameter():
    wrapper, plain = wrapped(), net()
    for module in (wrapper, plain):
        module(data()).sum().backward()
    with wrapper.unflatten_params():
        wrapper(data()).square().sum().backward()
    plain(data()).square().sum().backward()
    assert torch.allclose(wrapper.flat_param.grad, torch.cat([p.grad.flatten() for p in plain.parameters()]))


def test_other_flat_tensors_are_used_for_a_while():
    wrapper = wrapped().eval()
    before = wrapper.flat_param.detach().clone()
    average = torch.zeros_like(before)
    with wrapper.unflatten_params([average]):
        assert not wrapper(data()).any()
        wrapper(data()).sum().backward()
        assert wrapper[2].bias.grad.any()
        wrapper[2].bias = nn.Parameter(torch.ones(3))
        with wrapper.unflatten_params():
            assert not wrapper.is_flattened
        with pytest.raises(fs.FlagstoneError, match="not flat"), wrapper.unflatten_params([average]):
            pass
    assert torch.equal(wrapper.flat_param, before)
    assert average[-3:].eq(1).all()
    assert wrapper.flat_param.grad is None
    for wrong in ([], [torch.zeros(3)]):
        with pytest.raises(fs.FlagstoneError, match="flat tensors of shapes"), wrapper.unflatten_params(wrong):
            pass
    assert wrapper.is_flattened


def test_loading_and_saving_inside_use_the_names_of_the_module():
    wrapper, twin = wrapped(), net()
    step(twin)
    with wrapper.unflatten_params():
        wrapper.load_state_dict(twin.state_dict())
        assert not wrapper.is_flattened
        equal(wrapper.state_dict(), twin.state_dict())
        with pytest.raises(fs.FlagstoneError, match="not flat"):
            wrapper.flat_state_dict()
    equal(wrapper.state_dict(), twin.state_dict())


# Mistakes


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(6, 4))),
        lambda layer: setattr(layer, "weight", None),
        lambda layer: delattr(layer, "weight"),
        lambda layer: layer.register_parameter("weight", None),
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: functional_call(layer, {"weight": torch.zeros(6, 4)}, (data(),)),
    ],
)
def test_a_part_of_a_flat_parameter_is_not_replaced_unseen(change):
    wrapper = wrapped()
    with pytest.raises(fs.FlagstoneError, match=r"0.weight is a part of flat_param_0.*unflatten_params"):
        change(wrapper[0])
    equal(wrapper.state_dict(), net().state_dict())


def test_wrong_arguments_are_named_and_change_nothing():
    module = net()
    wrong = [
        (
            {"param_list": [[module[0].weight], [nn.Parameter(torch.zeros(7))]]},
            r"group 1 has a Parameter of shape \[7\]",
        ),
        ({"flat_param_names": ["a", "b"]}, "1 groups of parameters need as many names"),
        ({"param_list": [[module[0].weight], [module[0].bias]], "flat_param_names": ["a", "a"]}, "flat_param_a"),
        ({"flat_param_names": ["a.b"]}, "flat_param_a.b"),
    ]
    for arguments, message in wrong:
        with pytest.raises(fs.FlagstoneError, match=message):
            fs.FlattenParamsWrapper(module, **arguments)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert list(module.state_dict()) == list(net().state_dict())
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(fs.FlagstoneError, match=r"0\.weight is UninitializedParameter"):
        fs.FlattenParamsWrapper(lazy)
    inner = nested()
    with pytest.raises(fs.FlagstoneError, match=r"0\.flat_param_0 is flat already"):
        fs.FlattenParamsWrapper(inner.module, [inner[0].flat_param])


def test_an_attribute_before_init_is_missing_as_in_any_module():
    with pytest.raises(AttributeError, match="anything"):
        _ = fs.FlattenParamsWrapper.__new__(fs.FlattenParamsWrapper).anything


def test_views_of_a_wrong_number_of_tensors_are_refused():
    wrapper = wrapped()
    assert next(wrapper.get_param_views([torch.zeros_like(wrapper.flat_param)])).shape == (6, 4)
    assert torch.equal(next(wrapper.get_param_views([None])), wrapper[0].weight)
    with pytest.raises(fs.FlagstoneError, match="1 flat parameters need as many tensors, not 2"):
        wrapper.get_param_views([None, None])
