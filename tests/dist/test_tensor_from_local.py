"""``from_local`` and ``from_dtensor``: what shards add up to, on ranks inside and outside."""

import pytest
import torch
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hdtensor import HDTensor, SpecError, distribute_tensor
from tests.dist.test_tensor_distribute import any_layouts
from tests.redistribute.oracle import cut
from tests.redistribute.strategies import full_tensor, sample
from tests.support.world import run_world


WORLD_SIZE = 4
SPEC = "S0[3:1] / 0,1:S1 2:R"
X = torch.arange(24.0).reshape(4, 6)


def _check_round_trip(rank, layouts):
    for i, layout in enumerate(layouts):
        full = full_tensor(layout.shape)
        mine = cut(full, layout).get(rank, full.new_zeros(i % 3))
        options = ({"shape": layout.shape, "top_sizes": layout.top_sizes}, {"shape": layout.shape})[
            i % 2 and layout.top_sizes is None
        ]
        for check in (True, False):
            x = HDTensor.from_local(mine, layout.spec, **options, check=check)
            assert x.shape == full.shape
            assert x.top_sizes == layout.top_sizes
            assert x.dtype == full.dtype
            assert torch.equal(x.full_tensor(), full)


@pytest.mark.dist(WORLD_SIZE)
def test_shards_of_any_layout_make_the_tensor():
    run_world(_check_round_trip, WORLD_SIZE, sample(any_layouts(), 60))


#: (spec, shard shapes of the ranks, the whole shape and top extents, or None where they make no tensor)
SHARDS = [
    ("R / 0-3:S0", [(3, 2), (3, 2), (3, 2), (1, 2)], (10, 2), None),
    ("R / 0-3:S0", [(3, 2), (3, 2), (2, 2), (2, 2)], None, None),
    ("R / 0-3:S0", [(1, 2), (1, 2), (0, 2), (0, 2)], (2, 2), None),
    ("R / 0-3:S-1", [(2, 1), (2, 1), (2, 1), (2, 1)], (2, 4), None),
    ("R / 0-3(2x2):S0,S1", [(2, 2), (2, 1), (1, 2), (1, 1)], (3, 3), None),
    ("R / 0-3(2x2):S0,S0", [(2,), (1,), (1,), (1,)], (5,), None),
    ("R / 0-3(2x2):S0,S0", [(2,), (1,), (2,), (0,)], None, None),
    ("R / 0-3:R", [(2, 2), (2, 2), (2, 2), (2, 3)], None, None),
    (SPEC, [(3, 3), (3, 3), (1, 6), (7, 7)], (4, 6), (3, 1)),
    (SPEC, [(3, 3), (3, 3), (0, 6), (0,)], (3, 6), (3, 0)),
    (SPEC, [(3, 3), (3, 3), (1, 5), (0,)], None, None),
    ("S0 / 0:R 1:R 2:R 3:R", [(2, 1), (0, 1), (5, 1), (1, 1)], (8, 1), (2, 0, 5, 1)),
    ("P / 0,1:S1 2:R", [(3, 3), (3, 2), (3, 5), (0,)], (3, 5), None),
]


def _check_inference(rank):
    for spec, shapes, shape, sizes in SHARDS:
        mine = torch.ones(shapes[rank])
        if shape is None:
            with pytest.raises(SpecError, match=r"rank \d has .*expected"):
                HDTensor.from_local(mine, spec)
            continue
        x = HDTensor.from_local(mine, spec)
        assert (tuple(x.shape), x.top_sizes) == (shape, sizes), spec
        assert HDTensor.from_local(mine, spec, top_sizes=sizes).top_sizes == sizes


@pytest.mark.dist(WORLD_SIZE)
def test_the_global_shape_is_inferred_alike_or_refused_everywhere():
    run_world(_check_inference, WORLD_SIZE)


def _check_wrong_shard(rank):
    with pytest.raises(SpecError, match="shape="):
        HDTensor.from_local(torch.ones(2), "R / 0-3:S0", check=False)
    wrong = torch.ones(5, 5) if rank == 1 else X[:3, :3] if rank == 0 else X[3:]
    if rank == 1:
        with pytest.raises(SpecError, match=r"must have shape \(3, 3\), got \(5, 5\)"):
            HDTensor.from_local(wrong, SPEC, shape=(4, 6), check=False)
    else:
        HDTensor.from_local(wrong, SPEC, shape=(4, 6), check=False)


@pytest.mark.dist(WORLD_SIZE)
def test_without_the_check_each_rank_looks_at_its_own_shard():
    run_world(_check_wrong_shard, WORLD_SIZE)


def _check_outside(rank):
    # The rank outside passes what it likes; dtype and requires_grad are the members'.
    local = torch.ones(3, 3, dtype=torch.bfloat16) if rank < 2 else torch.ones(1, 6)
    local = local.bfloat16().requires_grad_() if rank < 3 else torch.ones(2, 2, 2)
    x = HDTensor.from_local(local, SPEC)
    assert x.dtype == torch.bfloat16
    assert x.requires_grad
    (x * 3).sum().backward()
    if rank < 3:
        assert torch.equal(local.grad, torch.full_like(local, 3))
    else:
        assert local.grad is None


@pytest.mark.dist(WORLD_SIZE)
def test_ranks_outside_follow_the_members():
    run_world(_check_outside, WORLD_SIZE)


def _check_dtensor(rank):
    x = distribute_tensor(X, SPEC)
    block = x.to_dtensor()
    if rank == 3:
        assert block is None
    else:
        assert isinstance(block, DTensor)
        assert torch.equal(block.full_tensor(), X[:3] if rank < 2 else X[3:])
    for options in ({}, {"shape": (4, 6)}, {"shape": (4, 6), "top_sizes": (3, 1)}):
        again = HDTensor.from_dtensor(block, SPEC, **options)
        assert again.spec is x.spec
        assert torch.equal(again.full_tensor(), X)
    # One subgroup: the DTensor tells everything, also to ranks that have none.
    whole = distribute_tensor(X.bfloat16(), "R / 0-2:S1")
    again = HDTensor.from_dtensor(whole.to_dtensor())
    assert again.spec is whole.spec
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.full_tensor(), X.bfloat16())


@pytest.mark.dist(WORLD_SIZE)
def test_to_dtensor_and_back():
    run_world(_check_dtensor, WORLD_SIZE)


def _check_meshes(rank):
    # What a user's mesh made comes back on that mesh, so that DTensor takes it beside the user's own.
    full = X
    for mesh, placements in [
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), [Shard(0), Shard(1)]),
        (init_device_mesh("cpu", (4,)), [Shard(0)]),
    ]:
        d = dtensor.distribute_tensor(full, mesh, placements)
        h = HDTensor.from_dtensor(d)
        assert h.to_dtensor().device_mesh == mesh
        assert h.subgroups[0][0] == mesh
        assert torch.equal((h.to_dtensor() + d).full_tensor(), full * 2)
        assert torch.equal((h * 2).full_tensor(), full * 2)
        assert distribute_tensor(full, mesh, placements).to_dtensor().device_mesh == mesh


@pytest.mark.dist(WORLD_SIZE)
def test_a_users_mesh_comes_back():
    run_world(_check_meshes, WORLD_SIZE)


def _check_gradients_through_shards(rank):
    """Compute on shards, and bring the result to other ranks: those outside have a gradient, too."""

    def program(x):
        y = HDTensor.from_local(x.to_local() * 2, x.spec, shape=x.shape, check=False)
        return y.redistribute("R / 3:R 0:R").pow(2).sum()

    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        x = distribute_tensor(X, SPEC).detach().requires_grad_()
        run(x).backward()
        assert x.grad is not None, rank
        assert torch.equal(x.grad.full_tensor(), 8 * X)


@pytest.mark.dist(WORLD_SIZE)
def test_gradients_go_through_shards_on_every_rank():
    run_world(_check_gradients_through_shards, WORLD_SIZE)
