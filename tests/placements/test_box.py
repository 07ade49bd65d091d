import pytest
import torch
from hypothesis import given, strategies as st

from hdtensor.placements import Box, cells


@st.composite
def boxes(draw, num_dims, size=6):
    spans = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for _ in range(num_dims)]
    return Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))


some_boxes = st.integers(0, 3).flatmap(lambda n: st.lists(boxes(n), min_size=1, max_size=5))
two_boxes = st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))


def mask(box, size=6):
    """Which elements of a cube the box covers."""
    covered = torch.zeros((size,) * len(box.start), dtype=torch.bool)
    covered[box.slices_from((0,) * len(box.start))] = True
    return covered


@given(two_boxes)
def test_intersection_holds_the_common_elements(pair):
    one, other = pair
    common = one.intersect(other)
    expected = mask(one) & mask(other)
    assert torch.equal(torch.zeros_like(expected) if common is None else mask(common), expected)
    assert (common is None) == (not expected.any())
    assert common == other.intersect(one)


@given(two_boxes)
def test_contains_means_that_nothing_is_outside(pair):
    one, other = pair
    assert one.contains(other) == (not (mask(other) & ~mask(one)).any())


@given(some_boxes)
def test_cells_tile_the_union_and_no_face_crosses_one(found):
    parts = cells(found)
    count = sum((mask(cell).int() for cell in parts), torch.zeros_like(mask(found[0]).int()))
    covered = torch.stack([mask(box) for box in found]).any(0)
    assert torch.equal(count, covered.int())
    assert parts == sorted(parts)
    for cell in parts:
        for box in found:
            assert box.contains(cell) or box.intersect(cell) is None


@given(some_boxes)
def test_cells_of_repeated_boxes_are_the_same(found):
    assert cells(found + found[::-1]) == cells(found)


def test_cells_of_a_diagonal_leave_the_rest_out():
    diagonal = [Box((i, i), (i + 1, i + 1)) for i in range(200)]
    assert cells(diagonal) == diagonal


@given(st.integers(0, 3).flatmap(boxes))
def test_shape_and_numel_are_those_of_the_slice(box):
    part = torch.empty((6,) * len(box.start))[box.slices_from((0,) * len(box.start))]
    assert box.shape == tuple(part.shape)
    assert box.numel == part.numel()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), torch.Size([2, 3])], ids=str)
def test_the_whole_box_has_the_shape(shape):
    whole = Box.whole(shape)
    assert whole.shape == tuple(shape)
    assert whole.start == (0,) * len(shape)
    assert whole.numel == torch.Size(shape).numel()


def test_slices_are_relative_to_an_origin():
    assert Box((4, 2), (6, 3)).slices_from((4, 1)) == (slice(0, 2), slice(1, 2))
