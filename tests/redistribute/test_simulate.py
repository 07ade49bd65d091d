"""``simulate`` by itself: what it demands, and a few values that can be checked by eye."""

import pytest
import torch
from torch.distributed.tensor._ops._math_ops import _NormPartial

from hdtensor.errors import RedistributeError
from hdtensor.placements import HDSpec
from hdtensor.redistribute import resolve, simulate
from tests.redistribute.oracle import cut, layout_of, take, value
from tests.redistribute.strategies import full_tensor


def plan_of(src, dst, shape, **sizes):
    return resolve(HDSpec.from_text(src), HDSpec.from_text(dst), shape, **sizes)


def lists(shards):
    return {rank: shard.tolist() for rank, shard in sorted(shards.items())}


def test_top_partial_sums_one_holder_of_each_subgroup():
    plan = plan_of("P / 0,1:R 2:R", "R / 0,1:R 2:R", (2,))
    shards = {0: torch.tensor([1, 2]), 1: torch.tensor([1, 2]), 2: torch.tensor([10, 20])}

    assert lists(simulate(plan, shards)) == {r: [11, 22] for r in (0, 1, 2)}


def test_top_average_divides_by_the_number_of_subgroups():
    plan = plan_of("P(avg) / 0,1:R 2:R", "R / 0,1:R 2:R", (1,))
    shards = {0: torch.tensor([1.0]), 1: torch.tensor([1.0]), 2: torch.tensor([4.0])}

    assert lists(simulate(plan, shards)) == {r: [2.5] for r in (0, 1, 2)}


def test_the_bottom_reduces_before_the_top():
    plan = plan_of("P(max) / 0,1:P 2,3:P", "R / 0,1:R 2,3:R", ())
    shards = {r: torch.tensor(v) for r, v in enumerate([1, 4, 3, 3])}

    assert lists(simulate(plan, shards)) == dict.fromkeys(range(4), 6)  # max(1 + 4, 3 + 3)


def test_the_last_mesh_axis_reduces_first():
    plan = plan_of("R / 0-3(2x2):P(max),P", "R / 0-3(2x2):R,R", ())
    shards = {r: torch.tensor(v) for r, v in enumerate([1, 4, 3, 3])}

    assert lists(simulate(plan, shards)) == dict.fromkeys(range(4), 6)


@pytest.mark.parametrize(
    ("op", "kept", "others"),
    [("P", 7, 0), ("P(product)", 7, 1), ("P(max)", 7, 7), ("P(avg)", 7, 7)],
)
def test_replicate_to_partial_keeps_the_value_once_or_everywhere(op, kept, others):
    top = plan_of("R / 0,1:R 2:R", f"{op} / 0,1:R 2:R", ())
    bottom = plan_of("R / 0,1:R 2:R", f"R / 0,1:{op} 2:{op}", ())
    shards = {r: torch.tensor(7) for r in range(3)}

    assert lists(simulate(top, shards)) == {0: kept, 1: kept, 2: others}
    assert lists(simulate(bottom, shards)) == {0: kept, 1: others, 2: kept}


def test_a_top_shard_becomes_terms_of_a_sum_in_place():
    plan = plan_of("S0[3:1] / 0,1:R 2:R", "P / 0,1:R 2:R", (4,))
    shards = {0: torch.tensor([1, 2, 3]), 1: torch.tensor([1, 2, 3]), 2: torch.tensor([4])}

    assert lists(simulate(plan, shards)) == {0: [1, 2, 3, 0], 1: [1, 2, 3, 0], 2: [0, 0, 0, 4]}


def test_uneven_cuts_of_one_dim_by_two_axes():
    """(5, 3) cut twice along its rows on a 2x2 mesh, and back: rows 2, 1, 1, 1."""
    src, dst = layout_of("R / 0-3(2x2):S0,S0", (5, 3)), layout_of("R / 0-3(2x2):R,R", (5, 3))
    full = torch.arange(15).reshape(5, 3)
    shards = cut(full, src)

    got = simulate(resolve(src.spec, dst.spec, (5, 3)), shards)

    assert [len(shards[r]) for r in range(4)] == [2, 1, 1, 1]
    for rank in range(4):
        assert torch.equal(got[rank], full)


def test_a_rank_that_leaves_ends_with_nothing():
    plan = plan_of("R / 0,1:R", "R / 1:R", (3,))

    got = simulate(plan, {0: torch.ones(3), 1: torch.ones(3)})

    assert {rank: tuple(shard.shape) for rank, shard in got.items()} == {0: (0,), 1: (3,)}


def test_ranks_outside_keep_what_they_have():
    plan = plan_of("P / 0:R 1:R", "R / 0:R 1:R", (1,))
    bystander = torch.empty(0)

    got = simulate(plan, {0: torch.ones(1), 1: torch.ones(1), 5: bystander})

    assert got[5] is bystander


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ({0: torch.ones(2)}, r"rank 1 needs a shard of shape \(2,\) under S0 / 0:R 1:R, got none"),
        (
            {0: torch.ones(3), 1: torch.ones(1)},
            r"rank 0 needs a shard of shape \(2,\) .* got \(3,\)",
        ),
    ],
)
def test_wrong_shards_raise(shards, text):
    with pytest.raises(RedistributeError, match=text):
        simulate(plan_of("S0 / 0:R 1:R", "R / 0:R 1:R", (4,)), shards)


@pytest.mark.parametrize("p", [2, 3, -1])
def test_a_pending_norm_combines_as_a_norm(p):
    src = HDSpec.from_text("R / 0,1:R 2:R").replace(top=_NormPartial(p))
    dst = HDSpec.from_text("R / 0,1:R 2:R")
    shards = {0: torch.tensor(3.0), 1: torch.tensor(3.0), 2: torch.tensor(4.0)}

    got = simulate(resolve(src, dst, ()), shards)
    back = simulate(resolve(dst, src, ()), got)

    want = torch.tensor((3.0**p + 4.0**p) ** (1 / p))
    torch.testing.assert_close(got[2], want)
    torch.testing.assert_close((back[0] ** p + back[2] ** p) ** (1 / p), want)


@pytest.mark.parametrize("text", ["S0[3:1] / 0,1:S1 2:R", "P / 0-3(2x2):P(max),S0 4:P(avg)"])
def test_the_oracle_reads_back_what_it_cut(text):
    layout = layout_of(text, (7, 3))
    full = full_tensor((7, 3))

    assert torch.equal(value(layout, cut(full, layout)), full)
    assert take(full, layout_of("R / 0:S0", (7, 3)), 0) is not full
