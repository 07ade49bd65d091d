"""Users' cases G: random numbers, pictures, and explicit redistribution."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor._utils import ExplicitRedistributionContext

from hdtensor import distribute_tensor
from hdtensor.debug import visualize
from tests.support.world import run_world


WORLD_SIZE = 4

#: HSize 1 to 3, other ranks, meshes and cuts, ranks outside.
PLANS = [
    "R / 0:R",
    "R / 0-3:S0",
    "R / 0-3(2x2):S1,S0",
    "R / 2,0:S1 1:S0",
    "S0[3:0:1] / 0,1:S1 2:R 3:R",
    "S1[1:2] / 1-3:S0 0:R",
    "R / 3:R 1:R 0,2:S0",
]

FILLS = {
    "normal_": lambda p: nn.init.normal_(p, 1.0, 2.0),
    "uniform_": lambda p: nn.init.uniform_(p, -1, 1),
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "bernoulli_": lambda p: p.bernoulli_(0.3),
    "exponential_": lambda p: p.exponential_(2.0),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "dropout": lambda p: F.dropout(torch.ones_like(p), 0.4),
    "in a row": lambda p: F.dropout(p.normal_(), 0.5) + torch.rand_like(p),
}


def _draws(rank, plan, name):
    x = distribute_tensor(torch.zeros(8, 6), plan, src_data_rank=None)
    with torch.no_grad():
        torch.manual_seed(11)
        first = FILLS[name](x).full_tensor()
        second = FILLS[name](x).full_tensor()
    return first.tolist(), second.tolist()


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("name", FILLS)
def test_case_45_values_do_not_depend_on_the_plan(name):
    found = [run_world(_draws, WORLD_SIZE, plan, name) for plan in PLANS]
    first, second = found[0][0]
    assert first != second
    # No two shards draw alike: nearly all of the continuous values are different numbers.
    values = torch.tensor(first).flatten()
    if name not in ("bernoulli_", "dropout", "in a row"):
        assert values.unique().numel() > 0.95 * values.numel()
    for ranks in found:
        assert all(draws == (first, second) for draws in ranks)


def _pictures(rank):
    pictures = []
    for spec, shape in [
        (PLANS[4], (8, 6)),
        (PLANS[2], (4, 4, 4)),
        ("R / 1:R", ()),
        (PLANS[1], (5,)),
        ("P / 0,1:S1 2:P", (2, 0, 3)),
    ]:
        x = distribute_tensor(torch.zeros(shape), spec, src_data_rank=None)
        pictures.append(visualize(x.spec, x.shape, x.top_sizes))
    return pictures


@pytest.mark.dist(WORLD_SIZE)
def test_case_46_any_rank_can_show_who_owns_what():
    ranks = run_world(_pictures, WORLD_SIZE)
    assert all(pictures == ranks[0] for pictures in ranks)
    for picture in ranks[0]:
        assert picture.isascii()
    assert all(str(r) in ranks[0][1] for r in range(4))  # a 3-D tensor has a table


def _check_explicit(rank):
    x = distribute_tensor(torch.randn(4, 6), "R / 0-3:S1")
    rows = distribute_tensor(torch.randn(4, 6), "R / 0-3:S0")
    ids = distribute_tensor(torch.zeros(4, dtype=torch.long), "R / 0-3:S0")
    implicit = {
        "add": lambda: x + rows,
        "softmax": lambda: x.softmax(-1),
        "norm": lambda: torch.linalg.vector_norm(x),
        "embedding": lambda: F.embedding(ids, rows),
        "view": lambda: x.view(3, 8),
        "foreach": lambda: torch._foreach_add([x], [rows]),
    }
    local = {"mul": lambda: x * 2, "sum": lambda: x.sum(), "t": lambda: x.t() @ x.t().t()}
    for call in (*implicit.values(), *local.values()):
        call()  # all work without the context
    with ExplicitRedistributionContext():
        for call in implicit.values():
            with pytest.raises(RuntimeError, match="implicit redistribution"):
                call()
        for name in ("mul", "sum"):
            local[name]()
        y = x + rows.redistribute(x.spec)  # what is asked for is no implicit conversion
        with ExplicitRedistributionContext(enable=False):
            implicit["add"]()
    assert y.spec is x.spec


@pytest.mark.dist(WORLD_SIZE)
def test_case_48_explicit_redistribution_is_honoured():
    run_world(_check_explicit, WORLD_SIZE)
