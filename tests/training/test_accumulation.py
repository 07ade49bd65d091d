"""Accumulation of gradients in rounds, deferred and not, while modules turn from op by op to regions."""

import pytest
import torch

import hdtensor
from tests.support.world import run_world
from tests.training.networks import (
    PLANS,
    WORLD_SIZE,
    assert_same_gradients,
    assert_same_parameters,
    both_backward,
    pair,
)


#: Backwards inside of no_sync, then outside; with none outside the gradients are asked for.
ROUNDS = [(2, 1), (1, 0), (3, 1), (0, 2), (1, 1), (2, 0), (1, 2)]


def _check_rounds(rank):
    for plan in PLANS:
        net, reference = pair(plan)
        optimizers = [torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, reference)]
        for num_inside, num_outside in ROUNDS:
            with hdtensor.no_sync(net):
                for seed in range(num_inside):
                    both_backward(net, reference, seed)
            for seed in range(num_outside):
                both_backward(net, reference, 5 + seed)
            if not num_outside:
                hdtensor.sync_gradients(net)
            # Before anything communicates: an error must be everywhere.
            assert all(p.grad.spec is p.spec for p in net.parameters())
            assert_same_gradients(net, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_rounds():
    run_world(_check_rounds, WORLD_SIZE)
