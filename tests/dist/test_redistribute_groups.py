"""Process groups, meshes and point-to-point messages on real gloo ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hdtensor._rank import as_rank
from hdtensor._torch_compat import group_timeout
from hdtensor.collectives import groups
from hdtensor.collectives.groups import ensure_groups, group_of, mesh_of, num_communicators
from hdtensor.collectives.p2p import exchange
from hdtensor.errors import DisagreementError, GroupError
from hdtensor.placements import HDSpec, Subgroup
from hdtensor.redistribute import resolve
from hdtensor.redistribute.execute import execute
from tests.support.world import run_world


WORLD_SIZE = 4


@contextlib.contextmanager
def no_groups():
    """Forget what earlier jobs of this process created."""
    before, groups._current = groups._current, None
    try:
        yield
    finally:
        groups._current = before


@no_groups()
def _check_creation(rank):
    before = num_communicators()
    ensure_groups([(0, 3), (1, 2), (0, 1, 2, 3)], [Subgroup((0, 2)), Subgroup((1,))])
    after = num_communicators()
    ensure_groups([(1, 2), (0, 3)])
    again = num_communicators()

    assert group_of(range(WORLD_SIZE)) is dist.group.WORLD
    mine = (0, 3) if rank in (0, 3) else (1, 2)
    assert dist.get_process_group_ranks(group_of(mine)) == list(mine)
    with pytest.raises(GroupError, match=rf"rank {rank} is not in the group of ranks"):
        group_of((1, 2) if rank in (0, 3) else (0, 3))
    with pytest.raises(GroupError, match=r"no process group for ranks \[0, 1, 2\].*ensure_groups"):
        group_of((0, 1, 2))
    return before, after, again


@pytest.mark.dist(WORLD_SIZE)
def test_groups_are_made_once_and_looked_up_afterwards():
    counts = run_world(_check_creation, WORLD_SIZE)

    before, after, again = counts[0]
    assert counts == [counts[0]] * WORLD_SIZE
    assert (before, after) == (0, 3)  # the world and the group of one rank are no communicators
    assert again == after


def _check_refusals(rank):
    with as_rank(2):
        with pytest.raises(GroupError, match=r"inside as_rank.*simulate"):
            ensure_groups([(1, 3)])
        with pytest.raises(GroupError, match=r"communicate over ranks \[0, 1\] inside as_rank"):
            group_of((0, 1))
    with pytest.raises(GroupError, match=r"ranks \[1, 9\] reach beyond the world.*0 to 3"):
        ensure_groups([(1, 9)])
    with pytest.raises(DisagreementError, match=rf"same process groups; rank {rank} misses 1"):
        ensure_groups([(0, 1, 2) if rank == 0 else (1, 2, 3)])
    dist.barrier()


@pytest.mark.dist(WORLD_SIZE)
def test_bad_requests_raise_on_every_rank():
    run_world(_check_refusals, WORLD_SIZE)


def test_groups_need_a_default_group():
    with pytest.raises(GroupError, match=r"torchrun.*init_process_group"):
        ensure_groups([(0, 1)])


def _check_meshes(rank):
    backwards = Subgroup((3, 1, 0), [Shard(0)])
    grid = Subgroup((0, 1, 2, 3), [Shard(0), Shard(1)], (2, 2))
    ensure_groups([], [backwards, grid])
    mesh, square = mesh_of(backwards), mesh_of(grid)

    assert mesh_of(backwards) is mesh
    assert mesh.mesh.tolist() == [3, 1, 0]
    assert tuple(square.get_coordinate()) == grid.coordinate(rank)
    if rank == 2:
        assert mesh.get_coordinate() is None
        return
    assert tuple(mesh.get_coordinate()) == backwards.coordinate(rank)
    # The group keeps the mesh's order, so that DTensor's own gather puts the shards where they belong.
    full = torch.arange(6.0)
    place = backwards.ranks.index(rank)
    tensor = DTensor.from_local(full[2 * place : 2 * place + 2], mesh, [Shard(0)])
    assert torch.equal(tensor.full_tensor(), full)


@pytest.mark.dist(WORLD_SIZE)
def test_meshes_keep_the_order_of_their_ranks():
    run_world(_check_meshes, WORLD_SIZE)


@no_groups()
def _check_missing_group(rank):
    spec = HDSpec.from_text("P / 0,1,3:R 2:R")
    plan = resolve(spec, HDSpec.from_text("R / 0,1,3:R 2:R"), (2,))
    assert plan.rank_sets() == [(0, 1, 2, 3)]
    with as_rank(3), pytest.raises(GroupError, match="inside as_rank"):
        execute(plan, torch.ones(2))
    apart = resolve(HDSpec.from_text("P / 0:R 3,1:S0"), HDSpec.from_text("R / 0:R 3,1:S0"), (2,))
    if rank in (0, 1, 3):
        local = torch.ones(2 if rank == 0 else 1)
        with pytest.raises(GroupError, match=r"no process group for ranks \[0, [13]\]"):
            execute(apart, local)


@pytest.mark.dist(WORLD_SIZE)
def test_a_plan_whose_groups_are_missing_raises_and_does_not_hang():
    run_world(_check_missing_group, WORLD_SIZE)


def _check_exchange(rank):
    right, left = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.int16):
        sent = torch.full((rank + 1, 2), rank).to(dtype)
        got, own = torch.zeros(left + 1, 2, dtype=dtype), torch.zeros_like(sent)
        exchange({right: sent, rank: sent}, {left: got, rank: own})
        assert torch.equal(got, torch.full((left + 1, 2), left).to(dtype))
        assert torch.equal(own, sent)
    # One to all, of a single buffer, with ranks that take no part.
    root = torch.arange(3.0)
    copy = torch.zeros(3)
    exchange({1: root, 2: root} if rank == 0 else {}, {0: copy} if rank in (1, 2) else {})
    assert torch.equal(copy, root if rank in (1, 2) else torch.zeros(3))


@pytest.mark.dist(WORLD_SIZE)
def test_exchange_delivers_one_buffer_to_each_peer():
    run_world(_check_exchange, WORLD_SIZE)


def _timeouts(rank):
    groups.ensure_groups([(0, 2)])
    if rank not in (0, 2):
        return None
    world = group_timeout(dist.group.WORLD, "cpu")
    return world, group_timeout(groups.group_of((0, 2)), "cpu")


@pytest.mark.dist(4)
def test_groups_wait_as_long_as_the_default_group():
    for rank in (0, 2):
        world, group = run_world(_timeouts, 4)[rank]
        assert group == world
