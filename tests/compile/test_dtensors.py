"""A subgroup's part of a program may be one of ``DTensor``s: they come and go inside of one graph."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

import hdtensor as hd
from tests.support.world import run_world


BATCH = "S0[2:1] / 0,1:S1 2:R"


def _program(x, w):
    block, scale = x.to_dtensor(Replicate()), w.to_dtensor(grad_top=Partial())
    out = (block * scale).sin().redistribute(placements=block.placements)
    y = hd.HDTensor.from_dtensor(out, x.spec, shape=x.shape, top_sizes=x.top_sizes)
    return (y * y).sum()


def _check(rank):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(_program, fullgraph=True, backend="aot_eager")
    whole = [torch.arange(float(n), dtype=torch.float64).div(n) for n in (24, 4)]
    whole = [whole[0].view(6, 4).requires_grad_(), whole[1].requires_grad_()]
    expected = (whole[0] * whole[1]).sin().pow(2).sum()
    expected.backward()
    for _ in range(2):
        cut = [
            hd.distribute_tensor(t.detach(), s).requires_grad_()
            for t, s in zip(whole, (BATCH, "R / 0,1:S0 2:R"), strict=True)
        ]
        loss = compiled(*cut)
        loss.backward()
        torch.testing.assert_close(loss.detach().full_tensor(), expected.detach())
        for mine, one in zip(cut, whole, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.dist(3)
def test_a_block_becomes_a_dtensor_and_comes_back():
    run_world(_check, 3)


def _with_a_rank_outside(rank):
    x = hd.distribute_tensor(torch.ones(6, 4), BATCH)

    def there(x):
        block = x.to_dtensor()
        return None if block is None else block.to_local() * 2

    def and_back(x):
        return hd.HDTensor.from_dtensor(x.to_dtensor(), x.spec, shape=x.shape, dtype=x.dtype)

    torch._dynamo.reset()
    local = torch.compile(there, fullgraph=True, backend="aot_eager")(x)
    assert (local is None) == (rank == 3)
    assert rank == 3 or local.sum() == 2 * x.to_local().numel()
    with pytest.raises(
        torch._dynamo.exc.TorchRuntimeError, match="some ranks of the world have no"
    ):
        torch.compile(and_back, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.dist(4)
def test_ranks_without_a_block_have_no_way_back():
    run_world(_with_a_rank_outside, 4)
