"""What every rank writes and reads: each element once, and nothing that is not its own."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

import hdtensor as hd
from hdtensor.checkpoint.pieces import MAX_PARTS, PART_BYTES, pieces
from tests.checkpoint.ranks import load, save, tensor_of
from tests.placements.strategies import cut_tensors, numbered
from tests.redistribute.strategies import layouts, rank_sets, shapes


@st.composite
def strided_tops(draw):
    shape = draw(shapes())
    layout = draw(layouts(shape, draw(rank_sets(8))).filter(lambda at: not at.spec.has_partial()))
    return layout.spec, shape, layout.top_sizes


cuts = cut_tensors(partial=False) | strided_tops()


def slices(item):
    return tuple(slice(o, o + s) for o, s in zip(item.offsets, item.sizes, strict=True))


@given(cuts)
def test_write_items_tile_the_tensor_once_and_carry_its_values(cut):
    spec, shape, top_sizes = cut
    full, times = numbered(shape), torch.zeros(shape)
    num_items = 0
    for rank in range(max(spec.ranks) + 2):
        tensor = tensor_of(full, spec, rank, top_sizes)
        with hd.as_rank(rank):
            items = tensor.__create_write_items__("name", tensor)
            assert rank in spec.ranks or not items, "a rank outside writes"
            for item in items:
                chunk = item.tensor_data.chunk
                times[slices(chunk)] += 1
                assert item.index.offset == chunk.offsets
                found = tensor.__get_tensor_shard__(item.index)
                assert torch.equal(found, full[slices(chunk)])
        num_items += len(items)
    assert torch.equal(times, torch.ones(shape))
    assert num_items > 0, "an empty tensor needs an entry too"


@given(cuts)
def test_chunk_lists_are_what_the_rank_holds(cut):
    spec, shape, top_sizes = cut
    full = numbered(shape)
    for rank in range(max(spec.ranks) + 2):
        tensor = tensor_of(full, spec, rank, top_sizes)
        chunks = tensor.__create_chunk_list__()
        assert sum(math.prod(c.sizes) for c in chunks) == tensor._local_tensor.numel()
        assert len({tuple(c.offsets) for c in chunks}) == len(chunks)
        for chunk in chunks:
            found = tensor.__get_tensor_shard__(MetadataIndex("name", chunk.offsets))
            assert torch.equal(found, full[slices(chunk)])
            found.fill_(-5)
        assert (tensor._local_tensor == -5).all(), "chunks are not the local tensor's memory"


@st.composite
def two_cuts(draw):
    shape = draw(shapes())
    both = [
        draw(layouts(shape, draw(rank_sets(6))).filter(lambda at: not at.spec.has_partial()))
        for _ in range(2)
    ]
    return shape, [(layout.spec, layout.top_sizes) for layout in both]


@settings(max_examples=30)
@given(cuts=two_cuts(), who=st.sampled_from(["hdtensor", "plain to", "to plain"]))
def test_what_one_layout_wrote_any_other_reads(tmp_path_factory, cuts, who):
    shape, (src, dst) = cuts
    folder = tmp_path_factory.mktemp("checkpoint")
    full, ranks = numbered(shape), range(6)
    plain = {"x": full.clone()}
    written = [{"x": tensor_of(full, src[0], rank, src[1])} for rank in ranks]
    save(folder, [plain] * 6 if who == "plain to" else written)
    if who == "to plain":
        states = [{"x": torch.full(shape, -1)} for _ in ranks]
        load(folder, states)
        assert all(torch.equal(state["x"], full) for state in states)
        return
    states = [{"x": tensor_of(full, dst[0], rank, dst[1], empty=True)} for rank in ranks]
    load(folder, states)
    for rank, state in enumerate(states):
        expected = tensor_of(full, dst[0], rank, dst[1])
        assert torch.equal(state["x"]._local_tensor, expected._local_tensor)


DTYPES = [
    torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def test_dtypes(tmp_path):
    full = {str(d): (torch.arange(24).reshape(6, 4) % 7).float().to(d) for d in DTYPES}
    spec, other = "S0[2:1] / 0,1:S1 2:R", "R / 3,0:S0 1:R"
    save(tmp_path, [{k: tensor_of(v, spec, r) for k, v in full.items()} for r in range(4)])
    states = [
        {k: tensor_of(torch.zeros_like(v), other, r) for k, v in full.items()} for r in range(4)
    ]
    load(tmp_path, states)
    for rank, state in enumerate(states):
        for name, tensor in state.items():
            expected = tensor_of(full[name], other, rank)._local_tensor
            assert torch.equal(tensor._local_tensor.view(torch.uint8), expected.view(torch.uint8))


def test_local_tensors_need_not_be_contiguous(tmp_path):
    full = torch.arange(24.0).reshape(6, 4)

    def cut(rank, values):
        tensor = tensor_of(full, "R / 0,1:S1 2:R", rank)
        local = (
            torch.empty(tensor._local_tensor.shape[::-1]).t().copy_(values(tensor._local_tensor))
        )
        tensor._local_tensor = local if rank < 3 else tensor._local_tensor
        return {"x": tensor}

    save(tmp_path, [cut(rank, lambda local: local) for rank in range(3)])
    states = [cut(rank, torch.zeros_like) for rank in range(3)]
    load(tmp_path, states)
    for rank, state in enumerate(states):
        assert not state["x"]._local_tensor.is_contiguous()
        expected = tensor_of(full, "R / 0,1:S1 2:R", rank)
        assert torch.equal(state["x"]._local_tensor, expected._local_tensor)


def written_bytes(spec, shapes, num_ranks, dtype=torch.float32):
    bytes_of = Counter()
    for rank in range(num_ranks):
        for number, shape in enumerate(shapes):
            tensor = tensor_of(torch.empty(shape, dtype=dtype), spec, rank)
            name = f"model.layers.{number}.weight"
            for item in tensor.__create_write_items__(name, tensor):
                bytes_of[rank] += math.prod(item.tensor_data.chunk.sizes) * dtype.itemsize
    return [bytes_of[rank] for rank in range(num_ranks)]


@pytest.mark.parametrize("spec", ["R / 0:R 1:R 2:R 3:R", "R / 0-3:R", "R / 0,1:S0 2,3:S0"])
def test_replicas_share_the_writing(spec):
    many = written_bytes(spec, [(16, 16)] * 200, 4)
    assert max(many) < 1.35 * sum(many) / 4, "small tensors by turns"
    large = written_bytes(spec, [(1024, 1024)] * 4, 4)
    assert max(large) == min(large) == (4 << 20), "large ones in parts"


def test_unlike_replicas_share_the_writing():
    """A subgroup of two halves beside a rank that holds all of it."""
    many = written_bytes("R / 0,1:S0 2:R", [(16, 16)] * 200, 3)
    assert sum(many) == 200 * 1024
    assert max(many) < 0.55 * sum(many), f"rank 2 could write up to all: {many}"


def test_parts_are_few_and_not_small():
    (whole,) = pieces(hd.HDSpec.from_text("R / 0-3:R"), (PART_BYTES // 4 - 1,), None, 4)
    assert whole.holders == (0, 1, 2, 3)
    spec = hd.HDSpec.from_text("R / 0-15:R")
    parts = pieces(spec, (16, PART_BYTES), None, 4)
    assert len(parts) == MAX_PARTS
    assert {len(part.holders) for part in parts} == {16}


def test_all_ranks_find_the_same_writer_whatever_the_hash_seed():
    spec = hd.HDSpec.from_text("R / 0:R 1:R 2:R 3:R")
    (piece,) = pieces(spec, (4,), None, 4)
    assert [piece.writer(name, 0) for name in ("a", "b", "w", "model.norm.weight")] == [3, 1, 2, 2]


def test_pending_reductions_are_refused_by_name():
    for rank in range(4):
        tensor = tensor_of(torch.ones(4, 4), "P / 0:R 2:R", rank)
        with pytest.raises(
            hd.CheckpointError, match=r"layers\.0\.grad, .*'P / 0:R 2:R'.*Redistribute"
        ):
            tensor.__create_write_items__("layers.0.grad", tensor)
        with pytest.raises(hd.CheckpointError, match="reduction pending"):
            tensor.__create_chunk_list__()


def test_a_box_that_is_not_held_is_an_error():
    tensor = tensor_of(torch.ones(4, 4), "R / 0,1:S0", 1)
    with pytest.raises(hd.CheckpointError, match=r"w: rank 1 holds no box .* starts at \(0, 0\)"):
        tensor.__get_tensor_shard__(MetadataIndex("w", (0, 0)))
