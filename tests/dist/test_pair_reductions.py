"""All-reduces of two ranks that are cut into chunks: the same values as any other, terms kept or not."""

import pytest
import torch

from hdtensor.collectives import pairs
from hdtensor.collectives.groups import ensure_groups
from hdtensor.debug import count_communication
from hdtensor.redistribute import resolve, simulate
from hdtensor.redistribute.execute import execute, execute_many
from tests.redistribute.oracle import cut, layout_of
from tests.redistribute.strategies import full_tensor
from tests.support.world import run_world


SHAPE = (96, 200)
CASES = [
    ("P / 0,1:S0 2:R", "R / 0,1:S0 2:R"),  # contiguous halves
    ("P / 0,1:S1 2:R", "R / 0,1:S1 2:R"),  # strided ones on rank 2
    ("P(avg) / 0,1:S1x2 2:R", "R / 0,1:S1x2 2:R"),  # several boxes
    ("P(max) / 0,1:S1 2:R", "R / 0,1:S1 2:R"),
    ("P(product) / 0:R 1:R", "R / 0:R 1:R"),
    ("R / 1,2:P", "R / 1,2:R"),
    ("S0 / 0:R 1,2:P(min)", "S0 / 0:R 1,2:R"),
]


def _check(rank, dtype):
    before = pairs.CHUNK_BYTES, pairs.MIN_BYTES, pairs.MIN_BYTES_OF_MANY
    pairs.CHUNK_BYTES, pairs.MIN_BYTES, pairs.MIN_BYTES_OF_MANY = 3000, 4000, 4000
    try:
        for src, dst in CASES:
            if dtype.is_floating_point or "avg" not in src:
                _check_case(rank, src, dst, dtype)
    finally:
        pairs.CHUNK_BYTES, pairs.MIN_BYTES, pairs.MIN_BYTES_OF_MANY = before


def _check_case(rank, src, dst, dtype):
    plan = resolve(src, dst, SHAPE)
    ensure_groups(plan.rank_sets())
    shards = cut(full_tensor(SHAPE, dtype), layout_of(src, SHAPE))
    local = shards.get(rank, torch.empty(0, dtype=dtype)).contiguous()
    wanted = simulate(plan, shards).get(rank, local)
    copy = local.clone()

    kept = execute(plan, local)
    together = execute_many([plan, plan], [local, local.clone()])
    assert torch.equal(local, copy)
    (donated,) = execute_many([plan], [local], donate=True)
    strided = torch.stack([copy, copy], -1)[..., 0]
    (of_strided,) = execute_many([plan], [strided], donate=True)

    for got in (kept, *together, donated, of_strided):
        torch.testing.assert_close(got, wanted, msg=f"{src} on {rank}: {{}}".format)
    if rank in plan.src.ranks and plan.src.top != plan.dst.top:
        assert donated.data_ptr() == local.data_ptr()


@pytest.mark.dist(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
def test_values(dtype):
    run_world(_check, 3, dtype)


def _count(rank):
    plan = resolve("P / 0:R 1:R", "R / 0:R 1:R", SHAPE)
    ensure_groups(plan.rank_sets())
    local = torch.ones(SHAPE, dtype=torch.float64)
    assert local.nbytes > pairs.MIN_BYTES
    with count_communication() as count:
        execute_many([plan] * 5, [local] * 5)
    assert count.by_kind() == {"all_reduce": 1}


@pytest.mark.dist(2)
def test_tensors_of_medium_size_share_one_reduction():
    run_world(_count, 2)
