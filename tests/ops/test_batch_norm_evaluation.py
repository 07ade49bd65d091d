"""Batch norm in evaluation computes every element alone, so that any tier may cut the samples."""

import copy

import pytest
import torch
import torch.nn.functional as F

import hdtensor as hd
from tests.support.world import run_world


SHAPE = (6, 4, 5)
BY_SAMPLE = "S0[2:1] / 0,1:R 2:R"
LAYOUTS = [
    BY_SAMPLE,
    "S0[2:1] / 0,1:S1 2:R",
    "S0[2:1] / 0,1:S0 2:R",
    "S2[2:3] / 0,1:S0 2:R",
    "R / 0,1:S2 2:R",
]
WHOLE = "R / 0,1:R 2:R"


def _program(x, mean, variance, weight, bias):
    plain = F.batch_norm(x, mean, variance, eps=0.01)
    return (F.batch_norm(x, mean, variance, weight, bias) * plain).tanh()


def _arguments():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=draw, dtype=torch.float64)
    channels = [torch.rand(4, generator=draw, dtype=torch.float64) + 0.5 for _ in range(4)]
    return [x.requires_grad_(), *channels[:2], *(c.requires_grad_() for c in channels[2:])]


def _check(rank, layouts, compiles):
    whole = _arguments()
    expected = _program(*whole)
    expected.sum().backward()
    torch._dynamo.reset()
    run = torch.compile(_program, fullgraph=True, backend="aot_eager") if compiles else _program
    for layout in layouts:
        cut = [
            hd.distribute_tensor(a.detach(), WHOLE if i else layout).requires_grad_(a.requires_grad)
            for i, a in enumerate(whole)
        ]
        out = run(*cut)
        assert out.spec is cut[0].spec
        torch.testing.assert_close(out.detach().full_tensor(), expected.detach())
        out.sum().backward()
        for mine, one in zip(cut, whole, strict=True):
            assert (mine.grad is None) == (one.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), one.grad)


@pytest.mark.dist(4)
def test_every_cut_of_samples():
    run_world(_check, 4, LAYOUTS, False)


@pytest.mark.dist(4)
def test_compiled():
    run_world(_check, 4, LAYOUTS[1:3], True)


def _check_module(rank):
    reference = torch.nn.BatchNorm2d(4)
    x = torch.randn((6, 4, 3, 3), generator=torch.Generator().manual_seed(1))
    reference(x * 2 + 1)
    reference.eval()
    tested = copy.deepcopy(reference)
    with hd.implicit_replication(), torch.no_grad():
        cut = hd.distribute_tensor(x, BY_SAMPLE)
        torch.testing.assert_close(tested(cut).full_tensor(), reference(x))
        low = tested.bfloat16()(cut.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(tested.running_mean, reference.running_mean.bfloat16())


@pytest.mark.dist(4)
def test_plain_statistics_and_low_precision():
    run_world(_check_module, 4)
