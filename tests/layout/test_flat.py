"""Flat layouts: against slices of a numpy array."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.layout import BLOCK, DTYPES, FlatLayout, Place, Span, overlap

fast = settings(deadline=None, max_examples=100)

# most parameters are small, some are whole blocks of every type, some are none
shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from([(BLOCK,), (2, BLOCK), (512, 3), (1000, 7)]),
)
dtypes = st.sampled_from(["uint8", "bfloat16", "float32", "complex128"])


@st.composite
def layouts(draw):
    parameters = [(f"p{i}", shape) for i, shape in enumerate(draw(st.lists(shapes, max_size=8)))]
    return FlatLayout.of(draw(dtypes), parameters, blocks_first=draw(st.booleans()))


def filled(layout):
    """A flat buffer with a parameter's number in each of its elements; -1 where there is no parameter."""
    flat = np.full(layout.numel, -1)
    for number, place in enumerate(layout.places):
        flat[place.offset : place.offset + place.numel] = number
    return flat


@fast
@given(layouts())
def test_places_follow_each_other_without_gap_or_overlap(layout):
    flat = filled(layout)
    assert [int((flat == i).sum()) for i in range(len(layout.places))] == [prod(p.shape) for p in layout.places]
    assert (flat >= 0).all()
    assert (np.diff(flat) >= 0).all()
    assert layout.nbytes == layout.numel * DTYPES[layout.dtype].size


@fast
@given(dtypes, st.lists(shapes, max_size=8))
def test_whole_blocks_come_first_and_all_else_stays_in_order(dtype, given_shapes):
    parameters = [(f"p{i}", shape) for i, shape in enumerate(given_shapes)]
    assert [(p.name, p.shape) for p in FlatLayout.of(dtype, parameters, blocks_first=False).places] == parameters
    blocks = [p for p in parameters if prod(p[1]) * DTYPES[dtype].size % BLOCK == 0]
    others = [p for p in parameters if p not in blocks]
    assert [(p.name, p.shape) for p in FlatLayout.of(dtype, parameters).places] == blocks + others


@fast
@given(layouts(), st.integers(1, 9), st.booleans())
def test_shards_follow_each_other_without_gap_or_overlap(layout, world, whole):
    shards = layout.shards(world, whole=whole)
    flat = np.arange(layout.numel)
    parts = [flat[s.start : s.stop] for s in shards]
    assert len(parts) == world
    assert np.array_equal(np.concatenate(parts), flat)


@fast
@given(layouts(), st.integers(1, 9))
def test_shards_are_equal_and_cut_where_blocks_begin(layout, world):
    size = DTYPES[layout.dtype].size
    shards = layout.shards(world)
    inner = [s.stop for s in shards if s.stop < layout.numel]
    assert all(cut * size % BLOCK == 0 for cut in inner)
    lengths = [s.length for s in shards]
    assert lengths == sorted(lengths, reverse=True)
    assert len([n for n in lengths if 0 < n < lengths[0]]) <= 1  # equal, but for the last that has any
    assert lengths[0] * size < layout.nbytes / world + BLOCK


@fast
@given(layouts(), st.integers(1, 9))
def test_whole_shards_never_cut_a_parameter(layout, world):
    flat = filled(layout)
    for shard in layout.shards(world, whole=True):
        for cut in (shard.start, shard.stop):
            assert cut in (0, layout.numel) or flat[cut - 1] != flat[cut]


def test_whole_shards_are_as_even_as_can_be():
    layout = FlatLayout.of("float32", [(f"p{i}", (10,)) for i in range(8)])
    assert [s.length for s in layout.shards(4, whole=True)] == [20, 20, 20, 20]
    assert [s.length for s in layout.shards(3, whole=True)] == [30, 20, 30]


@fast
@given(layouts(), st.data())
def test_inside_is_what_a_slice_of_the_buffer_holds_of_each_parameter(layout, data):
    start = data.draw(st.integers(0, layout.numel))
    stop = data.draw(st.integers(start, layout.numel))
    flat, index = filled(layout), np.arange(layout.numel)
    for number, (place, span) in enumerate(layout.inside(Span(start, stop - start))):
        parameter = index[place.offset : place.offset + place.numel]
        held = index[start:stop][flat[start:stop] == number]
        assert np.array_equal(parameter[span.start : span.stop], held)


@fast
@given(*[st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda t: Span(*t))] * 2)
def test_overlap_counts_from_where_the_first_begins(place, span):
    elements = np.arange(40)
    both = np.intersect1d(elements[place.start : place.stop], elements[span.start : span.stop])
    found = overlap(place, span)
    assert found.stop <= place.length
    assert np.array_equal(elements[place.start : place.stop][found.start : found.stop], both)


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"\['a', 'a', 'b'\]"):
        FlatLayout.of("float32", [("a", (1,)), ("b", (1,)), ("a", (2,))])


def test_a_place_is_row_major_unless_it_says_otherwise():
    assert FlatLayout.of("float32", [("a", (2, 3))]).places == (Place("a", (2, 3), 0, 6, ()),)
