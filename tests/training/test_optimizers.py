"""Unrolled steps are differentiable; an optimizer for sparse gradients refuses, as in torch."""

import pytest
import torch
from torch import nn, optim

from hdtensor import distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
DIFFERENTIABLE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


def normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator)


def _check_differentiable(rank):
    """The gradient of a loss after a step reaches the value before it."""
    for kind in DIFFERENTIABLE:
        found = []
        for spec in ("S0[3:1] / 0,1:S1 2:R", None):

            def cut(full, spec=spec):
                return full if spec is None else distribute_tensor(full, spec, src_data_rank=None)

            start = cut(normal(0)).requires_grad_()
            p = start.clone()
            p.retain_grad()
            optimizer = kind([p], lr=0.1, differentiable=True)
            p.grad = cut(normal(1))
            optimizer.step()
            (grad,) = torch.autograd.grad((p * cut(normal(9))).sum(), start)
            found.append([t if spec is None else t.full_tensor() for t in (p.detach(), grad)])
        for ours, want in zip(*found, strict=True):
            torch.testing.assert_close(ours, want, msg=lambda t, kind=kind: kind.__name__ + t)


@pytest.mark.dist(WORLD_SIZE)
def test_differentiable_steps():
    run_world(_check_differentiable, WORLD_SIZE)


def _check_refusals(rank):
    p = nn.Parameter(distribute_tensor(normal(0), "S0[3:1] / 0,1:S1 2:R", src_data_rank=None))
    p.grad = distribute_tensor(normal(1), p.spec, src_data_rank=None)
    with pytest.raises(RuntimeError, match="dense gradients"):
        optim.SparseAdam([p], lr=0.1).step()


@pytest.mark.dist(WORLD_SIZE)
def test_sparse_adam_refuses():
    run_world(_check_refusals, WORLD_SIZE)
