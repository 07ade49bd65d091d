import pytest

from hdtensor.placements import HDSpec
from hdtensor.redistribute import explain, resolve


def text_of(src, dst, shape, **sizes):
    return explain(HDSpec.from_text(src), HDSpec.from_text(dst), shape, **sizes)


def test_each_kind_of_step_has_its_line():
    assert text_of("S0[3:1] / 0,1:P 2:R", "P / 0,1:S1 2:R", (4, 4)) == (
        "S0[3:1] / 0,1:P 2:R (blocks 3, 1) -> P / 0,1:S1 2:R, shape (4, 4)\n"
        "1. bottom step in subgroup 0 along mesh axis 0, 0,1:P -> 0,1:S1\n"
        "     reduce-scatter sum of ranks 0,1: to 0 [0:3, 0:2]; to 1 [0:3, 2:4]\n"
        "2. local embed among 0, S0[3:1] / 0,1:S1 2:R -> P / 0,1:S1 2:R\n"
        "1 collective, 12 elements sent by all ranks together"
    )
    assert text_of("P(max) / 0,1:R 2:R", "R / 0,1:P 2:R", (2,)) == (
        "P(max) / 0,1:R 2:R -> R / 0,1:P 2:R, shape (2,)\n"
        "1. SplitAllReduce, top P(max) -> R\n"
        "     all-reduce max of ranks 0-2 (no term from 1): [0:2]\n"
        "2. local keep on ranks 0, 0 elsewhere in subgroup 0, 0,1:R -> 0,1:P\n"
        "1 collective, 8 elements sent by all ranks together"
    )
    assert text_of("S0 / 0:R 1:R", "S1 / 0:R 1:R", (2, 2)) == (
        "S0 / 0:R 1:R (blocks 1, 1) -> S1 / 0:R 1:R (blocks 1, 1), shape (2, 2)\n"
        "1. SplitAllGather, top S0 -> R\n"
        "     all-gather of ranks 0,1: from 0 [0:1, 0:2]; from 1 [1:2, 0:2]\n"
        "2. local cut, R / 0:R 1:R -> S1 / 0:R 1:R\n"
        "1 collective, 4 elements sent by all ranks together"
    )


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
