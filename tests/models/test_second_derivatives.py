"""Penalties on gradients: modules stay op by op where backward itself is differentiated."""

import pytest
import torch

import hdtensor as hd
from tests.models.hf import compare_gradient, strategy
from tests.support.world import run_world


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = torch.nn.Linear(8, 12).double()
        self.down_proj = torch.nn.Linear(12, 8).double()

    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.up_proj(x)))


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x)


def _batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator, dtype=torch.double)


def _penalty(model, x):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean()


def _penalize(rank, model):
    plan = strategy(([0, 1], 3), ([2], 1))
    reference, tested = model(), hd.parallelize(model(), plan)
    for _ in range(4):
        expected = _penalty(reference, _batch())
        expected.backward()
        loss = _penalty(tested, hd.distribute_batch(tested, _batch()))
        loss.backward()
        assert hd.item(loss) == pytest.approx(expected.item(), rel=1e-12)
        for (name, p), q in zip(tested.named_parameters(), reference.parameters(), strict=True):
            compare_gradient(name, p, q)
        reference.zero_grad(), tested.zero_grad()


@pytest.mark.dist(4)
@pytest.mark.parametrize("model", [Mlp, Outer])
def test_penalties_on_gradients_equal_one_device(model):
    run_world(_penalize, 4, model)


def _begin_late(rank):
    model = hd.parallelize(Outer(), strategy(([2], 1)))
    for _ in range(4):
        x = hd.distribute_batch(model, _batch()).requires_grad_()
        model(x).square().sum().backward()
    try:
        _penalty(model, hd.distribute_batch(model, _batch()))
    except hd.DeductionError as error:
        return "use_regions=False" in str(error)
    return None


@pytest.mark.dist(4)
def test_a_module_that_runs_or_is_skipped_as_a_whole_refuses():
    assert run_world(_begin_late, 4) == [True] * 4
