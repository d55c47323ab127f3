"""Boxes and spans, against numpy."""

from itertools import combinations, pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.layout import Box, Span, box_span, box_spans, intersect, span_boxes

fast = settings(deadline=None, max_examples=100)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))


@st.composite
def shaped_boxes(draw, count=1):
    shape = draw(shapes)
    return (shape, *(draw(boxes(shape)) for _ in range(count)))


@st.composite
def shaped_spans(draw):
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, Span(start, draw(st.integers(0, prod(shape) - start)))


def numbered(shape):
    return np.arange(prod(shape)).reshape(shape)


def elements(spans):
    return [i for s in spans for i in range(s.start, s.stop)]


@fast
@given(shaped_boxes())
def test_the_spans_of_a_box_are_its_elements_in_order(case):
    shape, box = case
    assert elements(box_spans(box, shape)) == numbered(shape)[box.slices].ravel().tolist()


@fast
@given(shaped_boxes())
def test_the_spans_of_a_box_are_as_long_as_can_be(case):
    shape, box = case
    spans = list(box_spans(box, shape))
    assert all(s.length > 0 for s in spans)
    assert all(a.stop < b.start for a, b in pairwise(spans))


@fast
@given(shaped_boxes())
def test_a_box_is_a_span_exactly_when_its_elements_are_consecutive(case):
    shape, box = case
    wanted = numbered(shape)[box.slices].ravel()
    consecutive = wanted.size > 0 and wanted[-1] - wanted[0] + 1 == wanted.size
    assert box_span(box, shape) == (Span(int(wanted[0]), wanted.size) if consecutive else None)


@fast
@given(shaped_spans())
def test_the_boxes_of_a_span_are_its_elements_in_order(case):
    shape, span = case
    array = numbered(shape)
    found = [i for box in span_boxes(span, shape) for i in array[box.slices].ravel().tolist()]
    assert found == list(range(span.start, span.stop))


@fast
@given(shaped_spans())
def test_a_span_is_few_boxes_none_of_them_empty_each_of_them_a_span(case):
    shape, span = case
    found = span_boxes(span, shape)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel and box_span(box, shape) is not None for box in found)


@pytest.mark.parametrize("shape", [(2, 3, 2), (1, 4), (3, 1, 2), (1, 1), (5,), ()])
def test_every_span_of_a_small_shape_is_covered_exactly(shape):
    array, n = numbered(shape), prod(shape)
    for start in range(n):
        for stop in range(start + 1, n + 1):
            found = [i for b in span_boxes(Span(start, stop - start), shape) for i in array[b.slices].ravel().tolist()]
            assert found == list(range(start, stop))


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 3, 2), (1, 3, 1), (2, 2, 1, 2)])
def test_every_box_of_a_small_shape_is_its_spans_exactly(shape):
    array = numbered(shape)
    for ends in product(*(combinations(range(n + 1), 2) for n in shape)):
        box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        spans = list(box_spans(box, shape))
        assert elements(spans) == array[box.slices].ravel().tolist()
        assert all(a.stop < b.start for a, b in pairwise(spans))
        assert box_span(box, shape) == (spans[0] if len(spans) == 1 else None)


def test_a_tensor_without_dimensions_is_one_element():
    assert Box.whole(()).numel == 1
    assert list(box_spans(Box((), ()), ())) == [Span(0, 1)]
    assert span_boxes(Span(0, 1), ()) == [Box((), ())]
    assert span_boxes(Span(0, 0), ()) == []


@pytest.mark.parametrize(("shape", "span"), [((2, 3), Span(4, 3)), ((), Span(1, 1)), ((0, 3), Span(0, 1))])
def test_a_span_outside_the_tensor_is_refused(shape, span):
    with pytest.raises(ValueError, match="not inside a tensor of shape"):
        span_boxes(span, shape)


@fast
@given(shaped_boxes(count=2))
def test_an_intersection_is_the_elements_that_both_have(case):
    shape, a, b = case
    masks = np.zeros((2, *shape), bool)
    masks[(0, *a.slices)] = masks[(1, *b.slices)] = True
    shared = intersect(a, b)
    assert shared == intersect(b, a)
    found = np.zeros(shape, bool)
    if shared is not None:
        assert shared.numel
        found[shared.slices] = True
    assert (found == (masks[0] & masks[1])).all()


@fast
@given(shaped_boxes(), st.data())
def test_a_box_in_the_coordinates_of_another_takes_the_same_elements_out_of_it(case, data):
    shape, outer = case
    local = data.draw(boxes(outer.sizes))
    inner = Box(tuple(a + b for a, b in zip(outer.offsets, local.offsets, strict=True)), local.sizes)
    assert inner.relative_to(outer) == local
    array = numbered(shape)
    assert (array[outer.slices][local.slices] == array[inner.slices]).all()


def test_a_box_and_a_span_refuse_what_cannot_be():
    for make in (lambda: Box((0,), (1, 1)), lambda: Box((-1,), (1,)), lambda: Box((0,), (-1,)), lambda: Span(-1, 1)):
        with pytest.raises(ValueError, match=r"a box|a span"):
            make()
    inner, outer = Box((0,), (2,)), Box((1,), (2,))
    with pytest.raises(ValueError, match="negative"):
        inner.relative_to(outer)
