import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor._torch_compat import StridedShard
from hdtensor.errors import SpecError
from hdtensor.placements import (
    HDSpec,
    Subgroup,
    block_box,
    check_top_sizes,
    chunk_sizes,
    default_top_sizes,
    local_shape,
    owned_boxes,
    owners,
    ratio_sizes,
)
from hdtensor.placements.layout import contiguous_stride, normalize_dim, numel
from tests.placements.strategies import (
    chunks,
    cut_tensors,
    expected_local,
    expected_top_sizes,
    num_holders,
    numbered,
    specs_and_shapes,
)


def assembled(full, spec, shape, top_sizes, rank):
    """A rank's local tensor, filled piece by piece from its owned boxes."""
    local = torch.full(local_shape(spec, shape, top_sizes, rank), -1)
    for owned in owned_boxes(spec, shape, top_sizes, rank):
        local[owned.local_slices] = full[owned.box.slices_from((0,) * len(shape))]
    return local


@given(cut_tensors())
def test_every_rank_owns_what_plain_torch_cuts_for_it(cut):
    spec, shape, top_sizes = cut
    full = numbered(shape)
    for rank in spec.ranks:
        expected = expected_local(full, spec, rank, top_sizes)
        assert torch.equal(assembled(full, spec, shape, top_sizes, rank), expected)


@given(cut_tensors())
def test_boxes_tile_the_tensor_as_often_as_it_is_replicated(cut):
    spec, shape, top_sizes = cut
    count = torch.zeros(shape, dtype=torch.int64)
    for pieces in owners(spec, shape, top_sizes).values():
        for piece in pieces:
            assert piece.box.numel > 0
            count[piece.box.slices_from((0,) * len(shape))] += 1

    expected = torch.zeros(shape, dtype=torch.int64)
    for index, group in enumerate(spec.subgroups):
        block = block_box(spec, shape, index, top_sizes)
        expected[block.slices_from((0,) * len(shape))] += num_holders(group)
    assert torch.equal(count, expected)


@given(cut_tensors())
def test_blocks_follow_one_another_along_the_top_dim(cut):
    spec, shape, top_sizes = cut
    full = numbered(shape)
    blocks = [
        full[block_box(spec, shape, index, top_sizes).slices_from((0,) * len(shape))]
        for index in range(spec.num_subgroups)
    ]
    if isinstance(spec.top, Shard):
        assert torch.equal(torch.cat(blocks, spec.top.dim), full)
    else:
        assert all(torch.equal(block, full) for block in blocks)


@given(specs_and_shapes(), st.integers(0, 40))
def test_a_rank_outside_every_subgroup_owns_nothing(cut, rank):
    spec, shape = cut
    sizes = default_top_sizes(spec, shape)
    outside = rank + max(spec.ranks) + 1
    assert owned_boxes(spec, shape, sizes, outside) == ()
    assert local_shape(spec, shape, sizes, outside) == (0,)
    assert outside not in owners(spec, shape, sizes)


@given(specs_and_shapes())
def test_default_top_sizes_follow_the_documented_rule(cut):
    spec, shape = cut
    assert default_top_sizes(spec, shape) == expected_top_sizes(spec, shape)
    assert check_top_sizes(spec, shape, None) == expected_top_sizes(spec, shape)


@given(st.integers(0, 60), st.integers(1, 12))
def test_chunk_sizes_are_those_of_torch_chunk(length, num):
    assert list(chunk_sizes(length, num)) == [len(c) for c in chunks(torch.zeros(length), num, 0)]


@given(
    st.integers(0, 1 << 40), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=6).filter(any)
)
def test_ratio_sizes_add_up_and_stay_within_one_of_the_proportion(length, ratio):
    sizes = ratio_sizes(length, ratio)
    assert sum(sizes) == length
    for size, part in zip(sizes, ratio, strict=True):
        assert abs(size * sum(ratio) - length * part) < sum(ratio)
        assert size >= 0
        assert part or not size


@pytest.mark.parametrize(
    ("length", "ratio", "sizes"),
    [
        (8, (3, 1), (6, 2)),
        (16, (5, 3), (10, 6)),
        (7, (1, 1), (3, 4)),
        (10, (2, 3, 0, 5), (2, 3, 0, 5)),  # a subgroup without a part
        (1, (1, 1, 1), (0, 0, 1)),
        (0, (3, 1), (0, 0)),
        (64, (33, 31), (33, 31)),
    ],
)
def test_ratio_sizes(length, ratio, sizes):
    assert ratio_sizes(length, ratio) == sizes


@pytest.mark.parametrize(
    ("length", "num", "sizes"),
    [(50257, 4, (12565, 12565, 12565, 12562)), (5, 4, (2, 2, 1, 0)), (2, 4, (1, 1, 0, 0))],
)
def test_chunk_sizes(length, num, sizes):
    assert chunk_sizes(length, num) == sizes


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(14))
def test_strided_shards_are_those_of_torch(length, size, pieces):
    placement = StridedShard(0, split_factor=pieces)
    spec = HDSpec([Subgroup(range(size), placement)])
    expected, _ = placement._split_tensor(torch.arange(length), size, with_padding=False)
    for rank in range(size):
        got = assembled(torch.arange(length), spec, (length,), None, rank)
        assert torch.equal(got, expected[rank])


def test_a_strided_shard_before_a_shard_cuts_right_to_left():
    """FSDP over tensor parallel, as torch documents it: row pairs 0, 2, 1, 3."""
    spec = HDSpec([Subgroup(range(4), (StridedShard(0, split_factor=2), Shard(0)), (2, 2))])
    rows = [owned_boxes(spec, (8, 8), None, rank)[0].box.start[0] // 2 for rank in range(4)]
    assert rows == [0, 2, 1, 3]


def test_a_strided_rank_owns_several_boxes_in_the_order_of_its_local_tensor():
    spec = HDSpec([Subgroup((0, 1, 2, 3), StridedShard(0, split_factor=2))])
    owned = owned_boxes(spec, (9,), None, 0)
    assert [(o.box.start, o.box.stop, o.offset) for o in owned] == [
        ((0,), (2,), (0,)),
        ((5,), (6,), (2,)),
    ]


def test_each_rank_of_two_unlike_subgroups_owns_its_part():
    spec = HDSpec.from_text("S0[3:1] / 0,1:S1 2:R")
    boxes = {
        rank: [(o.box.start, o.box.stop) for o in pieces]
        for rank, pieces in owners(spec, (8, 4), (6, 2)).items()
    }
    assert boxes == {
        0: [((0, 0), (6, 2))],
        1: [((0, 2), (6, 4))],
        2: [((6, 0), (8, 4))],
    }


def test_a_scalar_is_one_box_of_one_element():
    spec = HDSpec.from_text("R / 0,1:R 2:P")
    for rank in range(3):
        ((box, offset),) = owned_boxes(spec, (), None, rank)
        assert (box.start, box.stop, offset, box.numel) == ((), (), (), 1)
        assert local_shape(spec, (), None, rank) == ()


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "message"),
    [
        (
            "S0 / 0:R 1:R",
            (4,),
            (1, 2),
            r"2 extents >= 0 that add up to 4 .* got \(1, 2\) \(sum 3\)",
        ),
        ("S0 / 0:R 1:R", (4,), (5, -1), r"got \(5, -1\)"),
        ("S0 / 0:R 1:R", (4,), (4,), r"must be 2 extents"),
        ("S0 / 0:R 1:R", (4,), (2.0, 2.0), "top_sizes must hold integers"),
        ("R / 0:R 1:R", (4,), (2, 2), "needs a top Shard"),
        ("S2 / 0:R 1:R", (4, 4), None, r"top Shard\(2\) .* needs dim 2, .* shape \(4, 4\)"),
        ("S0 / 0:R 1:R", (), None, "needs dim 0"),
    ],
)
def test_top_sizes_that_do_not_fit_are_refused(text, shape, sizes, message):
    with pytest.raises(SpecError, match=message):
        check_top_sizes(HDSpec.from_text(text), shape, sizes)


@pytest.mark.parametrize("text", ["R / 0,1:S2", "R / 0,1:S-3", "R / 0,1:S2x2"])
def test_a_bottom_dim_that_the_tensor_lacks_is_refused(text):
    spec = HDSpec.from_text(text)
    with pytest.raises(SpecError, match="the tensor has 2 dims"):
        owned_boxes(spec, (4, 4), None, 0)
    with pytest.raises(SpecError, match="the tensor has 2 dims"):
        local_shape(spec, (4, 4), None, 0)


def test_a_strided_top_shard_cuts_a_merged_dim_as_the_dim_was_cut():
    full, spec = numbered((2, 6)), HDSpec.from_text("S1[2:1] / 0,1:R 2:R")
    merged = HDSpec.from_text("S0x2[2:1] / 0,1:R 2:R")
    sizes = check_top_sizes(merged, (12,), None)
    assert sizes == (8, 4)
    for rank in spec.ranks:
        before = assembled(full, spec, (2, 6), (4, 2), rank)
        after = assembled(full.reshape(12), merged, (12,), sizes, rank)
        assert torch.equal(before.reshape(-1), after)
    with pytest.raises(SpecError, match="2 equal pieces"):
        check_top_sizes(merged, (13,), None)
    with pytest.raises(SpecError, match="multiples of the 2 pieces"):
        check_top_sizes(merged, (12,), (7, 5))


def test_a_top_shard_never_passes_for_a_replica():
    spec = HDSpec.from_text("S0 / 0:R 1:R")
    with pytest.raises(AssertionError, match="check_top_sizes"):
        block_box(spec, (4,), 0, None)


@pytest.mark.parametrize(
    ("placement", "num_dims", "dim"),
    [
        (Shard(1), 3, 1),
        (Shard(-1), 3, 2),
        (StridedShard(0, split_factor=2), 1, 0),
        (Replicate(), 0, None),
        (Partial(), 2, None),
    ],
    ids=str,
)
def test_normalize_dim(placement, num_dims, dim):
    assert normalize_dim(placement, num_dims) == dim


@given(st.lists(st.integers(0, 5), max_size=4))
def test_contiguous_stride_and_numel_are_those_of_torch(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()
    assert numel(shape) == torch.empty(shape).numel()
