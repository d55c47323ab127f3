"""Parameters as views of a flat buffer, in one process, without an engine."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import flagstone as fs
from sharded import loss_of, net, text


def buffers(places, dtype=torch.float32):
    """Weights and gradients, full of what does not belong there."""
    return tuple(torch.full((fs.numel_of(places),), torch.nan, dtype=dtype) for _ in range(2))


def test_a_place_says_where_a_parameter_lives():
    model = net(blocks=1)
    places = fs.places_of(model)
    by_name = {p.fqn: p for p in places}
    assert list(by_name) == [name for name, _ in model.named_parameters()]
    narrow = by_name["blocks.0.narrow.weight"]
    assert narrow.module is model.blocks[0].narrow
    assert (narrow.shape, narrow.numel) == ((37, 112), 37 * 112)
    assert narrow.parameter is model.blocks[0].narrow.weight
    ends = [0, *(p.span.stop for p in places)]
    assert [p.offset for p in places] == ends[:-1], "one behind the other"
    assert [name for _, name in by_name["embed.weight"].owners] == ["weight", "weight"], (
        "the tied head is the same place"
    )


def test_a_filter_selects_parameters():
    model = net(blocks=2)
    places = fs.places_of(model, lambda name, parameter: name.startswith("blocks.1.") and parameter.dim() == 2)
    assert [p.fqn for p in places] == ["blocks.1.widen.weight", "blocks.1.narrow.weight"]


def test_training_on_views_equals_training():
    plain, model = net(), net()
    places = fs.places_of(model)
    weights, gradients = buffers(places)
    fs.copy_to(places, weights)
    loss_of(plain, text(0, 0)).backward()
    with fs.materialize(places, weights, gradients):
        assert fs.place_of(model.embed.weight) is places[0]
        assert model.head.weight is model.embed.weight
        assert fs.place_of(plain.embed.weight) is None
        loss_of(model, text(0, 0)).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert torch.equal(gradients, expected)
    assert model.embed.weight is places[0].parameter, "the module has its own parameters again"
    assert all(p.grad is None for p in model.parameters())


def test_the_first_gradient_is_copied_and_later_ones_are_added():
    plain, model = net(), net()
    places = fs.places_of(model)
    weights, gradients = buffers(places)
    fs.copy_to(places, weights)
    for step in range(3):
        loss_of(plain, text(step, 0)).backward()
    materialized = fs.materialize(places, weights, gradients)
    for step in range(3):
        loss_of(model, text(step, 0)).backward()
    fs.dematerialize(materialized)
    assert torch.equal(gradients, torch.cat([p.grad.flatten() for p in plain.parameters()]))


def test_what_gets_no_gradient_is_zero_and_never_what_was_there():
    model = net(blocks=2)
    places = fs.places_of(model)
    weights, gradients = buffers(places)
    fs.copy_to(places, weights)
    with fs.materialize(places, weights, gradients):
        model.blocks[0](torch.randn(2, 37)).square().sum().backward()
    for place in places:
        part = place.of(gradients)
        assert part.isfinite().all()
        assert bool(part.any()) == place.fqn.startswith("blocks.0."), place.fqn


def test_a_buffer_of_another_type_is_converted_to_and_from():
    model = net(blocks=1)
    places = fs.places_of(model)
    weights, _ = buffers(places, torch.bfloat16)
    _, gradients = buffers(places)
    fs.copy_to(places, weights)
    expected = copy.deepcopy(model).bfloat16()
    loss_of(expected, text(0, 0)).backward()
    with fs.materialize(places, weights, gradients):
        assert model.embed.weight.dtype == torch.bfloat16
        loss_of(model, text(0, 0)).backward()
    assert torch.equal(gradients, torch.cat([p.grad.flatten().float() for p in expected.parameters()]))


def test_frozen_parameters_are_views_without_a_gradient():
    model = net(blocks=1)
    model.blocks[0].requires_grad_(False)
    places = fs.places_of(model)
    weights, gradients = buffers(places)
    fs.copy_to(places, weights)
    with fs.materialize(places, weights, gradients):
        assert not model.blocks[0].widen.weight.requires_grad
        loss_of(model, text(0, 0)).backward()
    assert not any(p.of(gradients).any() for p in places if p.fqn.startswith("blocks."))


def test_weights_may_be_written_below_what_autograd_has_saved():
    model = nn.Linear(3, 3, bias=False)
    places = fs.places_of(model)
    weights, gradients = buffers(places)
    with fs.materialize(places, weights, gradients):
        weights.fill_(1.0)
        loss = model(torch.randn(2, 3, requires_grad=True)).sum()
        weights.fill_(2.0)  # as a buffer that is reused is; who does it gives the right bytes back in time
        weights.fill_(1.0)
        loss.backward()
    assert gradients.isfinite().all()


@pytest.mark.parametrize("shape", [(3,), (4, 4), (1, 16)])
def test_a_buffer_that_does_not_fit_is_refused(shape):
    places = fs.places_of(nn.Linear(3, 3))
    with pytest.raises(fs.FlagstoneError, match="weights has shape"):
        fs.materialize(places, torch.empty(shape))


def test_a_gradient_without_a_buffer_is_an_error():
    model = nn.Linear(3, 3)
    places = fs.places_of(model)
    with (
        fs.materialize(places, torch.ones(12)),
        pytest.raises(fs.FlagstoneError, match=r"(weight|bias) got a gradient"),
    ):
        model(torch.randn(2, 3)).sum().backward()


def test_an_exception_gives_the_parameters_back():
    model = nn.Linear(3, 3)
    own = model.weight
    places = fs.places_of(model)
    with pytest.raises(KeyError), fs.materialize(places, torch.ones(12)):
        raise KeyError
    assert model.weight is own


def test_nothing_keeps_the_buffers_alive():
    model = net(blocks=1)
    places = fs.places_of(model)
    weights, gradients = buffers(places)
    fs.copy_to(places, weights)
    seen = [weakref.ref(weights), weakref.ref(gradients)]
    gc.disable()
    try:
        with fs.materialize(places, weights, gradients) as materialized:
            loss_of(model, text(0, 0)).backward()
        del weights, gradients, materialized, model, places
        assert [s() for s in seen] == [None, None]
    finally:
        gc.enable()
