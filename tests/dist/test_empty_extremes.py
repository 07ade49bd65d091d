"""Empty shards under pending extremes, and conversions inside one subgroup that a context forbids."""

import pytest
import torch
from torch.distributed.tensor import Partial

import hdtensor as hd
from hdtensor._torch_compat import ExplicitRedistributionContext
from tests.support.world import run_world


def _check_extremes(rank, op):
    a, b = torch.tensor([[3.0]]), torch.tensor([[-2.0]])
    x = hd.distribute_tensor(a, f"P({op}) / 2,0:R 1,3:S0")
    y = hd.distribute_tensor(b, "R / 2,0:S0 1,3:S0")
    result = torch.stack([y, x], 2).flip(-3).full_tensor()
    torch.testing.assert_close(result, torch.stack([b, a], 2).flip(-3))
    z = hd.distribute_tensor(torch.tensor([[1.0, -4.0]]), "S0 / 0,1:S0 2,3:S0")
    reduced = z.amax(0) if op == "max" else z.amin(0)
    assert isinstance(reduced.spec.top, Partial)
    torch.testing.assert_close(reduced.full_tensor(), torch.tensor([1.0, -4.0]))


@pytest.mark.dist(4)
@pytest.mark.parametrize("op", ["min", "max"])
def test_empty_shards_under_a_pending_extreme(op):
    run_world(_check_extremes, 4, op)


def _check_forbidden(rank):
    x = hd.distribute_tensor(torch.ones(4, 4), "R / 0,1:S0 2:R")
    assert x.softmax(0).spec == hd.HDSpec.from_text("R / 0,1:R 2:R")
    for _ in range(2):
        with (
            ExplicitRedistributionContext(strict=True),
            pytest.raises(RuntimeError, match=r"implicit redistribution inside \[0, 1\]"),
        ):
            x.softmax(0)


@pytest.mark.dist(4)
def test_a_forbidden_conversion_is_refused_on_every_rank():
    run_world(_check_forbidden, 4)
