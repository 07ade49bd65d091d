import pytest
import torch
from hypothesis import given

from hdtensor.errors import TopologyError
from hdtensor.placements import HDSpec
from hdtensor.redistribute import explain, resolve
from hdtensor.redistribute.topology import Topology
from tests.redistribute.strategies import any_pairs, layout_pairs, moved_pairs


TWO_NODES = Topology.of_nodes(2, 6)


def text_of(src, dst, shape, **sizes):
    return explain(HDSpec.from_text(src), HDSpec.from_text(dst), shape, **sizes)


def test_each_kind_of_step_has_its_line():
    assert text_of("S0[3:1] / 0,1:P 2:R", "P / 0,1:S1 2:R", (4, 4)) == (
        "S0[3:1] / 0,1:P 2:R (blocks 3, 1) -> P / 0,1:S1 2:R, shape (4, 4)\n"
        "1. bottom step in subgroup 0 along mesh axis 0, 0,1:P -> 0,1:S1\n"
        "     reduce-scatter sum of ranks 0,1: to 0 [0:3, 0:2]; to 1 [0:3, 2:4]\n"
        "2. local embed among 0, S0[3:1] / 0,1:S1 2:R -> P / 0,1:S1 2:R\n"
        "1 collective, 12 elements sent by all ranks together\n"
        "as float32: 48 bytes over any, in about 2.4 ns\n"
        "peak memory beside the old local tensors: 144 bytes, on ranks 0,1"
    )
    assert text_of("P(max) / 0,1:R 2:R", "R / 0,1:P 2:R", (2,)) == (
        "P(max) / 0,1:R 2:R -> R / 0,1:P 2:R, shape (2,)\n"
        "1. SplitAllReduce, top P(max) -> R\n"
        "     all-reduce max of ranks 0-2 (no term from 1): [0:2]\n"
        "2. local keep on ranks 0, 0 elsewhere in subgroup 0, 0,1:R -> 0,1:P\n"
        "1 collective, 8 elements sent by all ranks together\n"
        "as float32: 32 bytes over any, in about 1.2 ns\n"
        "peak memory beside the old local tensors: 16 bytes, on ranks 0,1"
    )
    assert text_of("R / 0:R 1:R", "S0 / 0:R 1:R", (2, 2)) == (
        "R / 0:R 1:R -> S0 / 0:R 1:R (blocks 1, 1), shape (2, 2)\n"
        "1. local cut, R / 0:R 1:R -> S0 / 0:R 1:R\n"
        "0 collectives, 0 elements sent by all ranks together\n"
        "peak memory beside the old local tensors: 8 bytes, on every rank"
    )


def test_messages_have_a_table():
    text = text_of("R / 0:R 2:R", "P / 2,3:S0 4:R", (4, 2), topology=TWO_NODES, dtype=torch.int64)
    assert text == (
        "R / 0:R 2:R -> P / 2,3:S0 4:R, shape (4, 2)\n"
        "1. BatchedSendRecv, R / 0:R 2:R -> P / 2,3:S0 4:R\n"
        "     2 -> 3: [2:4, 0:2], 32 bytes over nvlink\n"
        "     stays on 2: [0:2, 0:2], 32 bytes\n"
        "     filled with 0: rank 4\n"
        "1 message, 4 elements sent by all ranks together\n"
        "as int64: 32 bytes over nvlink, in about 0.08 ns\n"
        "peak memory beside the old local tensors: 64 bytes, on rank 4"
    )
    assert text_of("S0 / 0:R 1:R", "S0 / 0:R 2:R", (5,), topology=TWO_NODES) == (
        "S0 / 0:R 1:R (blocks 3, 2) -> S0 / 0:R 2:R (blocks 3, 2), shape (5,)\n"
        "1. SendRecv, S0 / 0:R 1:R -> S0 / 0:R 2:R\n"
        "     1 -> 2: [3:5], 8 bytes over ib\n"
        "     stays on 0: [0:3], 12 bytes\n"
        "1 message, 2 elements sent by all ranks together\n"
        "as float32: 8 bytes over ib, in about 0.16 ns\n"
        "peak memory beside the old local tensors: 12 bytes, on rank 0"
    )


def test_terms_are_numbered_and_links_add_up():
    text = text_of("P / 0,1:S1 2:R", "R / 3:R", (512, 256), topology=TWO_NODES)
    assert text.splitlines()[1:] == [
        "1. BatchedSendReduce sum, P / 0,1:S1 2:R -> R / 3:R",
        "     0 -> 3 (term 0): [0:512, 0:128], 256 KiB over ib",
        "     1 -> 3 (term 0): [0:512, 128:256], 256 KiB over ib",
        "     2 -> 3 (term 1): [0:512, 0:256], 512 KiB over nvlink",
        "3 messages, 262144 elements sent by all ranks together",
        "as float32: 512 KiB over nvlink, 512 KiB over ib, in about 10.5 us",
        "peak memory beside the old local tensors: 1.5 MiB, on rank 3",
    ]


def test_collectives_and_messages_are_counted_together():
    text = text_of("P / 0,1:S1 2,3:S1", "P(max) / 2:R 4,5:S0", (4, 4))
    assert "2 collectives, 7 messages, 44 elements sent by all ranks together" in text


@given(layout_pairs() | any_pairs() | moved_pairs())
def test_any_plan_can_be_explained(pair):
    src, dst = pair
    plan = resolve(
        src.spec, dst.spec, src.shape, src_top_sizes=src.top_sizes, dst_top_sizes=dst.top_sizes
    )
    lines = explain(plan).splitlines()
    numbers = [line.partition(".")[0] for line in lines[1:] if line[0].isdigit() and "." in line]
    assert numbers == [str(i + 1) for i in range(len(plan.steps))]
    messages = {
        (i, t.src, t.dst)
        for i, step in enumerate(plan.steps)
        for t in getattr(step, "transfers", ())
        if t.box.numel and t.src != t.dst
    }
    assert sum(" -> " in line for line in lines if line.startswith("     ")) == len(messages)


def test_a_topology_chooses_senders_and_must_know_the_ranks():
    near = text_of("R / 0:R 2:R", "R / 3:R", (4,), topology=TWO_NODES)
    far = text_of("R / 0:R 2:R", "R / 3:R", (4,), topology=Topology.of_nodes(1, 4))
    assert "2 -> 3: [0:4], 16 bytes over nvlink" in near
    assert "0 -> 3: [0:4], 16 bytes over ib" in far
    with pytest.raises(TopologyError, match="ranks 0 to 5, not 6"):
        text_of("R / 0:R", "R / 6:R", (4,), topology=TWO_NODES)


def test_a_plan_without_steps_says_so():
    assert text_of("R / 0:R", "R / 0:R", ()).endswith("every rank keeps its local tensor")


def test_long_lists_of_cells_are_cut():
    text = text_of("R / 0-7:S0", "R / 0-7:S1", (8, 8))

    assert "from 7 [7:8, 0:1] [7:8, 1:2] [7:8, 2:3] [7:8, 3:4] and 4 more" in text


def test_exact_extents_are_shown_and_a_plan_is_taken():
    spec = HDSpec.from_text("S0 / 0:R 1:R")
    plan = resolve(spec, spec, (4,), dst_top_sizes=(4, 0))

    assert explain(plan) == explain(spec, spec, (4,), dst_top_sizes=(4, 0))
    assert "(blocks 2, 2) -> S0 / 0:R 1:R (blocks 4, 0)" in explain(plan)


def test_neither_a_plan_nor_two_specs_and_a_shape():
    with pytest.raises(TypeError, match="takes a plan, or the spec before"):
        explain(HDSpec.from_text("R / 0:R"))
