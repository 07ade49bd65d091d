"""Users' cases A: a tensor that should move to other ranks must move, or say that it does not."""

import itertools

import pytest
import torch

from hdtensor import (
    RedistributeError,
    Topology,
    TopologyError,
    distribute_tensor,
    from_local,
    use_topology,
)
from hdtensor.debug import count_communication
from hdtensor.placements import local_shape
from hdtensor.redistribute import topology
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


def _check_lazy_and_meta(rank):
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    local = z.conj() if rank == 0 else torch.empty(0, dtype=z.dtype)
    assert torch.equal(from_local(local, "R / 0:R", shape=(4,)).full_tensor(), z.conj())
    x = distribute_tensor(torch.ones(8, 4, device="meta"), "S0[3:1] / 0,1:S1 2:R")
    for dst in ("R / 3:S0 1,2:S1", "S1 / 0:R 3:R", "R / 0,1:S1 2:R", "P / 0,1:P 2:R"):
        y = x.redistribute(dst)
        assert y.to_local().is_meta
        assert tuple(y.to_local().shape) == local_shape(y.spec, (8, 4), y.top_sizes, rank)
    assert x.full_tensor().is_meta


@pytest.mark.dist(WORLD_SIZE)
def test_lazy_conjugates_and_meta_tensors():
    run_world(_check_lazy_and_meta, WORLD_SIZE)


def _check_terms(rank):
    def gradient(spec):
        local = torch.tensor([1.0, 5.0, 2.0] if rank == 0 else [3.0, 1.0, 2.0], requires_grad=True)
        x = from_local(local, spec, shape=(3,))
        x.redistribute("R / 0:R 1:R" if " 1:" in spec else "R / 0,1:R").sum().backward()
        return local.grad

    assert torch.equal(gradient("P / 0:R 1:R"), torch.ones(3))
    assert torch.equal(gradient("P(avg) / 0:R 1:R"), torch.full((3,), 0.5))
    assert torch.equal(gradient("R / 0,1:P(avg)"), torch.full((3,), 0.5))
    for op in ("max", "min", "product"):
        with pytest.raises(RedistributeError, match="autograd through"):
            gradient(f"P({op}) / 0:R 1:R")


@pytest.mark.dist(2)
def test_gradients_of_terms():
    run_world(_check_terms, 2)


def _check_terms_of_integers(rank):
    x = distribute_tensor(torch.arange(4), "R / 0,1:S0")
    with pytest.raises(RedistributeError, match="has no exact result"):
        x.redistribute("P(avg) / 0:R 1:R")
    with pytest.raises(RedistributeError, match="has no exact result"):
        distribute_tensor(torch.arange(4), "R / 0,1:P(avg)", src_data_rank=None)
    assert torch.equal(x.redistribute("P / 0:R 1:R").full_tensor(), torch.arange(4))


@pytest.mark.dist(2)
def test_an_average_of_integers_is_refused_before_it_is_made():
    run_world(_check_terms_of_integers, 2)


def _check_topology(rank):
    """Rank 3 gets its copy from its neighbour, not from the first owner."""
    nodes = Topology.of_nodes(2, 4)
    topology._is_asked[0] = False  # as in a process that has redistributed nothing yet
    use_topology(nodes)
    try:
        x = distribute_tensor(torch.arange(35.0), "R / 0,2:R")
        with count_communication() as count:
            y = x.redistribute("R / 0,2,3:R")
        assert torch.equal(y.full_tensor(), torch.arange(35.0))
        assert [event.ranks for event in count.events] == ([(3,)] if rank == 2 else [])
        with pytest.raises(TopologyError, match="planned with another topology"):
            use_topology(Topology())
        with pytest.raises(TopologyError, match="must be a Topology"):
            use_topology("nodes")
    finally:
        topology._is_asked[0] = False
        use_topology(Topology())


@pytest.mark.dist(WORLD_SIZE)
def test_a_topology_in_use_chooses_the_senders():
    run_world(_check_topology, WORLD_SIZE)
