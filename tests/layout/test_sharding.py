"""Shardings: against torch.chunk, applied split by split."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.layout import FLAT, Box, Sharding, Span, box_span

fast = settings(deadline=None, max_examples=100)


@st.composite
def sharded(draw, dims=None):
    """A shape, and a sharding of it over a mesh of any ranks in any order."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    ranks = draw(st.permutations(range(prod(mesh) + 3)))[: prod(mesh)]
    chosen = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, len(mesh)))]
    splits = tuple((m, draw(st.sampled_from(dims or range(len(shape))))) for m in chosen)
    return shape, Sharding(mesh, tuple(ranks), splits)


def chunked(shape, sharding, coordinate):
    """What torch.chunk gives the rank at a coordinate of the mesh, as numbers of elements."""
    part = torch.arange(prod(shape)).reshape(shape)
    for mesh_dim, dim in sharding.splits:
        chunks = torch.chunk(part, sharding.mesh[mesh_dim], dim)
        i = coordinate[mesh_dim]
        part = chunks[i] if i < len(chunks) else part.narrow(dim, part.shape[dim], 0)
    return part


def coordinates(sharding):
    return zip(product(*map(range, sharding.mesh)), sharding.ranks, strict=True)


@fast
@given(sharded())
def test_every_rank_has_what_torch_chunk_gives_it(case):
    shape, sharding = case
    array = np.arange(prod(shape)).reshape(shape)
    for coordinate, rank in coordinates(sharding):
        wanted = chunked(shape, sharding, coordinate)
        box = sharding.box(shape, rank)
        assert box.sizes == tuple(wanted.shape)
        assert array[box.slices].tolist() == wanted.tolist()


@fast
@given(sharded())
def test_the_pieces_tile_the_tensor(case):
    shape, sharding = case
    count = np.zeros(shape, int)
    for box, holders in sharding.pieces(shape):
        assert box.numel > 0
        assert holders
        count[box.slices] += 1
    assert (count == 1).all()


@fast
@given(sharded())
def test_the_holders_of_a_piece_are_all_ranks_whose_box_it_is(case):
    shape, sharding = case
    boxes = {rank: sharding.box(shape, rank) for rank in sharding.ranks}
    for box, holders in sharding.pieces(shape):
        assert sorted(holders) == sorted(r for r, b in boxes.items() if b == box)
        for rank in holders:
            assert sharding.holders(rank) == holders


@fast
@given(sharded())
def test_ranks_hold_the_same_exactly_when_they_differ_in_dimensions_that_split_nothing_only(case):
    _, sharding = case
    split = [m for m, _ in sharding.splits]
    where = {rank: tuple(c[m] for m in split) for c, rank in coordinates(sharding)}
    for rank in sharding.ranks:
        assert set(sharding.holders(rank)) == {r for r in sharding.ranks if where[r] == where[rank]}


@fast
@given(sharded())
def test_a_rank_that_is_not_in_the_mesh_has_nothing(case):
    shape, sharding = case
    stranger = max(sharding.ranks) + 1
    assert sharding.box(shape, stranger) is None
    assert sharding.holders(stranger) == ()


@fast
@given(sharded())
def test_what_is_called_contiguous_has_pieces_that_are_spans(case):
    shape, sharding = case
    if sharding.is_contiguous(shape):
        assert all(box_span(box, shape) is not None for box, _ in sharding.pieces(shape))


@fast
@given(sharded(dims=[0]))
def test_rows_are_contiguous_over_any_number_of_mesh_dimensions(case):
    shape, sharding = case
    assert sharding.is_contiguous(shape)
    behind_ones = Sharding(sharding.mesh, sharding.ranks, tuple((m, d + 2) for m, d in sharding.splits))
    assert behind_ones.is_contiguous((1, 1, *shape))
    assert not sharding.splits or not behind_ones.is_contiguous((2, 1, *shape))


@fast
@given(sharded(dims=[0]))
def test_locate_finds_the_piece_of_every_element(case):
    shape, sharding = case
    pieces = [(box_span(box, shape), holders) for box, holders in sharding.pieces(shape)]
    for element in range(prod(shape)):
        span, holders = sharding.locate(shape, element)
        assert span.start <= element < span.stop
        assert (span, holders) in pieces


def test_locate_refuses_pieces_that_are_no_spans():
    with pytest.raises(ValueError, match="spans"):
        Sharding((2,), (0, 1), ((0, 1),)).locate((2, 4), 5)


def test_the_order_of_two_splits_of_one_dimension_says_who_is_outside():
    first, second = (Sharding((2, 2), (0, 1, 2, 3), s) for s in (((0, 0), (1, 0)), ((1, 0), (0, 0))))
    assert [first.box((8,), r) for r in range(4)] == [Box((i,), (2,)) for i in (0, 2, 4, 6)]
    assert [second.box((8,), r) for r in range(4)] == [Box((i,), (2,)) for i in (0, 4, 2, 6)]


def test_replicas_are_whole_on_every_rank():
    sharding = Sharding.replicated((3, 1))
    assert sharding.pieces((2, 2)) == [(Box.whole((2, 2)), (3, 1))]
    assert sharding.box((2, 2), 1) == Box.whole((2, 2))
    assert sharding.holders(3) == (3, 1)
    assert sharding.pieces(()) == [(Box((), ()), (3, 1))]


@pytest.mark.parametrize(
    ("mesh", "ranks", "splits"),
    [((2,), (0,), ()), ((2,), (0, 0), ()), ((2, 1), (0, 1), ((0, 0), (0, 1))), ((2,), (0, 1), ((1, 0),))],
)
def test_a_mesh_that_cannot_be_is_refused(mesh, ranks, splits):
    with pytest.raises(ValueError, match="mesh"):
        Sharding(mesh, ranks, splits)


@fast
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_a_flat_split_gives_each_rank_a_span_and_all_of_them_the_tensor(shape, replicas, parts, data):
    shape, numel = tuple(shape), prod(shape)
    inner = sorted(data.draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1)))
    cuts = (0, *inner, numel)
    sharding = Sharding((replicas, parts), tuple(range(replicas * parts)), ((1, FLAT),), cuts)
    assert sharding.is_flat
    assert sharding.is_contiguous(shape)
    for rank in range(replicas * parts):
        low, high = cuts[rank % parts], cuts[rank % parts + 1]
        assert sharding.region(shape, rank) == Span(low, high - low)
        assert sharding.span(shape, rank) == (Span(low, high - low) if low < high else None)
        assert sharding.holders(rank) == tuple(range(rank % parts, replicas * parts, parts))
    for element in range(numel):
        span, holders = sharding.locate(shape, element)
        assert span.start <= element < span.stop
        assert all(sharding.region(shape, rank) == span for rank in holders)
    assert sharding.region(shape, replicas * parts) is None


@pytest.mark.parametrize(
    ("splits", "cuts"), [(((0, FLAT),), (0, 3)), (((0, FLAT),), (0, 4, 3)), (((0, FLAT), (1, 0)), (0, 1, 2))]
)
def test_a_flat_split_that_makes_no_sense_is_refused(splits, cuts):
    with pytest.raises(ValueError, match="a flat split is alone"):
        Sharding((2, 1), (0, 1), splits, cuts)
