"""Users' cases A: a tensor that should move to other ranks must move, or say that it does not."""

import itertools

import pytest
import torch

from hdtensor import distribute_tensor
from hdtensor.placements import local_shape
from tests.support.world import run_world


WORLD_SIZE = 4
X = torch.arange(32.0).reshape(8, 4)

#: Specs whose subgroups have other ranks than those of any other spec here.
ELSEWHERE = [
    "R / 0,1:S0",
    "R / 2,3:S0",
    "R / 0-3:S0",
    "S0 / 0:R 1:R",
    "S0[3:1] / 0,1:S1 3:R",
    "R / 1:R",
]


def _check_every_pair(rank):
    for src, dst in itertools.permutations(ELSEWHERE, 2):
        x = distribute_tensor(X, src)
        y = x.redistribute(dst)
        assert str(y.spec) == dst
        assert tuple(y.to_local().shape) == local_shape(y.spec, (8, 4), y.top_sizes, rank)
        assert torch.equal(y.full_tensor(), X)
        assert str(x.spec) == src
        assert torch.equal(x.full_tensor(), X)


@pytest.mark.dist(WORLD_SIZE)
def test_case_1_and_2_data_goes_to_whatever_ranks():
    run_world(_check_every_pair, WORLD_SIZE)


def _check_case_1(rank):
    y = distribute_tensor(X, "R / 0,1:S0").redistribute("R / 2,3:S0")
    sums = {0: 0.0, 1: 0.0, 2: 120.0, 3: 376.0}
    assert y.to_local().sum().item() == sums[rank]
    assert y.is_local == (rank in (2, 3))
    assert [list(group.ranks) for group in y.spec.subgroups] == [[2, 3]]


@pytest.mark.dist(WORLD_SIZE)
def test_case_1_as_reported():
    run_world(_check_case_1, WORLD_SIZE)


def _check_gradients(rank):
    for src, dst in itertools.permutations(ELSEWHERE, 2):
        leaf = distribute_tensor(X, src).requires_grad_()
        weights = distribute_tensor(X + 1, dst)
        (leaf.redistribute(dst) * weights).sum().backward()
        assert leaf.grad.spec == leaf.spec
        assert torch.equal(leaf.grad.full_tensor(), X + 1)


@pytest.mark.dist(WORLD_SIZE)
def test_gradients_come_back():
    run_world(_check_gradients, WORLD_SIZE)


def _check_trainer_to_generator(rank):
    full = torch.arange(48.0).reshape(12, 4)
    y = distribute_tensor(full, "R / 0-2:S0").redistribute("R / 3,4:S1")
    wanted = {3: full[:, :2], 4: full[:, 2:]}
    assert torch.equal(y.to_local(), wanted.get(rank, torch.empty(0)))


@pytest.mark.dist(5)
def test_case_7_three_trainers_to_two_generators():
    run_world(_check_trainer_to_generator, 5)
