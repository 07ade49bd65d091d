"""``execute`` on real gloo ranks: it equals ``simulate`` for random pairs, on every dtype."""

import functools

import pytest
import torch
import torch.distributed as dist

from hdtensor.collectives import p2p
from hdtensor.collectives.groups import ensure_groups
from hdtensor.redistribute import resolve, simulate
from hdtensor.redistribute.execute import execute, execute_many
from tests.redistribute.oracle import cut, layout_of
from tests.redistribute.strategies import any_pairs, full_tensor, layout_pairs, moved_pairs, sample
from tests.support.world import run_world


WORLD_SIZE = 4


def plan_of(src, dst):
    return resolve(
        src.spec, dst.spec, src.shape, src_top_sizes=src.top_sizes, dst_top_sizes=dst.top_sizes
    )


def scattered(local):
    """The same values with other strides."""
    return (
        local.new_zeros((*local.shape, 2)).index_fill(-1, torch.tensor([0]), 0)[..., 0].copy_(local)
    )


def _check_pairs(rank, pairs):
    plans = [plan_of(src, dst) for src, dst in pairs]
    ensure_groups([ranks for plan in plans for ranks in plan.rank_sets()])
    shards = [cut(full_tensor(src.shape), src) for src, _ in pairs]
    locals_ = [mine.get(rank, torch.empty(0, dtype=torch.float64)) for mine in shards]
    wanted = [
        simulate(plan, mine).get(rank, torch.empty(0, dtype=torch.float64))
        for plan, mine in zip(plans, shards, strict=True)
    ]
    copies = [local.clone() for local in locals_]

    one_by_one = [
        execute(plan, scattered(local)) for plan, local in zip(plans, locals_, strict=True)
    ]
    fused = execute_many(plans, locals_)
    in_small_buckets = execute_many(plans, locals_, bucket_bytes=64)

    for results in (one_by_one, fused, in_small_buckets):
        for plan, got, want in zip(plans, results, wanted, strict=True):
            case = f"{plan.src} -> {plan.dst}, {plan.shape}"
            torch.testing.assert_close(got, want, msg=functools.partial("{}: {}".format, case))
            assert got.is_contiguous() or not plan.steps
    for local, copy in zip(locals_, copies, strict=True):
        assert torch.equal(local, copy)


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("pairs", [layout_pairs, any_pairs, moved_pairs])
def test_execute_equals_simulate(pairs):
    run_world(_check_pairs, WORLD_SIZE, sample(pairs(num_ranks=WORLD_SIZE), 100))


NAMED_PAIRS = [
    # TP 4 next to TP 3, rank 7 outside
    ("P / 0-3:S1 4-6:S1", "R / 0-3:S1 4-6:S1", (5, 12)),
    ("P / 0-3:S1 4-6:S1", "S0[3:1] / 0-3:S1 4-6:S1", (5, 10)),
    ("S0[5:3] / 0-3:S1 4-6:S1", "R / 0-3:S1 4-6:S1", (8, 7)),
    ("S0[5:3] / 0-3:S1 4-6:S1", "S1[1:0] / 0-3:S0 4-6:R", (8, 7)),
    # a 2-D mesh next to a 1-D one and a single rank, a share of nothing
    ("P / 0-3(2x2):S0,S1 4,5:S1 6:R", "R / 0-3(2x2):S0,S1 4,5:S1 6:R", (6, 6)),
    ("S1[2:0:1] / 0-3(2x2):S0,S0 4,5:S0 6:R", "R / 0-3(2x2):R,R 4,5:S1 6:R", (7, 6)),
    ("P(avg) / 0-3(2x2):P,S1 4,5:P(max) 6:R", "S0 / 0-3(2x2):S1,S1 4,5:S0 6:R", (9, 5)),
    # fused weights: several boxes a rank
    ("P / 0-3(2x2):S0x2,S0 4,5:S0x3 6:R", "R / 0-3(2x2):S0x2,S0 4,5:S0x3 6:R", (12, 2)),
    # rows that no rank held before
    ("P / 0-3:S0 4-6:S0", "S0 / 0-3:S0 4-6:S0", (16, 3)),
    ("P / 0-3:P 4-6:S0", "P(max) / 6,4,5:S0 0-3:R", (11,)),
]


@pytest.mark.dist(8)
def test_execute_on_unlike_subgroups():
    pairs = [(layout_of(src, shape), layout_of(dst, shape)) for src, dst, shape in NAMED_PAIRS]
    run_world(_check_pairs, 8, pairs)


def _blocking(messages, group, tag):
    """``p2p.launch`` on a transport without tags that does one message after another."""
    for src, dst, buffer in messages:
        flat = buffer.view(-1).view(torch.uint8)
        if src == dist.get_rank():
            dist.send(flat, dst)
        else:
            dist.recv(flat, src)
    return []


def _check_blocking(rank, pairs):
    p2p.launch, launch = _blocking, p2p.launch
    try:
        _check_pairs(rank, pairs)
    finally:
        p2p.launch = launch


@pytest.mark.dist(WORLD_SIZE)
def test_messages_match_without_tags_one_after_another():
    run_world(_check_blocking, WORLD_SIZE, sample(any_pairs(num_ranks=WORLD_SIZE), 60))
