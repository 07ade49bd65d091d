"""DTensor's calls on a tensor of one subgroup: in and out, meshes, gradients, values."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import hdtensor
from hdtensor import HDTensor, SpecError
from tests.ops.test_as_dtensor import S0, S1, WORLD_SIZE, P, R, _mesh
from tests.support.world import run_world


def _check_border(rank):
    mesh, grid = _mesh(4), _mesh(2, 2)
    make = HDTensor.from_local
    local = torch.ones(3, 3)
    shapes = {(S0,): (12, 3), (Shard(-1),): (3, 12), (R,): (3, 3), (P,): (3, 3)}
    for placements, shape in shapes.items():
        for options in ({}, {"run_check": False}):
            assert make(local, mesh, placements, **options).shape == shape
    assert make(local, grid, [S0, S0]).shape == (12, 3)
    assert make(local_tensor=local, device_mesh=grid, placements=[S0, S1]).shape == (6, 6)
    uneven = torch.ones(2 if rank < 3 else 0, 2)
    assert make(uneven, mesh, [S0]).shape == (6, 2)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        strided = torch.empty([(2, 3, 4)[d] for d in order]).permute(
            [order.index(d) for d in range(3)]
        )
        strided.copy_(torch.arange(24.0).view(2, 3, 4) + 24 * rank)
        x = make(strided, mesh, [S1])
        whole = torch.cat([torch.arange(24.0).view(2, 3, 4) + 24 * r for r in range(4)], 1)
        assert (
            x.stride()
            == torch.empty([(2, 12, 4)[d] for d in order])
            .permute([order.index(d) for d in range(3)])
            .stride()
        )
        assert torch.equal((x.reshape(-1) * 2).full_tensor(), whole.reshape(-1) * 2)
    with pytest.raises(SpecError, match="pass both, of one dense tensor, or neither"):
        make(local, mesh, [S0], stride=(3, 1))
    with pytest.raises(TypeError, match="got both device_mesh and spec"):
        make(local, spec=mesh, device_mesh=mesh)


def _check_gradients(rank):
    mesh = _mesh(4)
    full = torch.arange(24.0).view(8, 3)
    weights = [full + r for r in range(4)]

    def leaf():
        return hdtensor.distribute_tensor(full.clone().requires_grad_(), mesh, [S0])

    # Every rank goes on to its own term of a sum.
    for whole in (
        lambda x: x.full_tensor(grad_placements=[P]),
        lambda x: x.redistribute(placements=[R], async_op=True).to_local(grad_placements=[P]),
    ):
        x = leaf()
        (whole(x) * weights[rank]).sum().backward()
        assert x.grad.placements == (S0,)
        torch.testing.assert_close(x.grad.full_tensor(), sum(weights))
    with pytest.raises(SpecError, match="gradient has the shape of its tensor"):
        leaf().to_local(grad_placements=[R])
    with pytest.raises(SpecError, match="gradient has the shape of its tensor"):
        leaf().full_tensor(grad_placements=[S0])
    two = leaf().redistribute("S0[3:1] / 0,1:S1 2:R")
    with pytest.raises(SpecError, match=r"go with one subgroup.*grad_top"):
        two.to_local(grad_placements=[R])
    # A rank outside takes part in what is collective, and has no term.
    pair = hdtensor.distribute_tensor(
        full.clone().requires_grad_(), DeviceMesh("cpu", [0, 2]), [S0]
    )
    (pair.full_tensor(grad_placements=[P]) * weights[rank]).sum().backward()
    torch.testing.assert_close(pair.grad.full_tensor(), weights[0] + weights[2])


def _check_mesh_blocks(rank):
    mesh, grid = _mesh(4), _mesh(2, 2)
    full = torch.arange(36.0).view(12, 3)
    x = hdtensor.distribute_tensor(full, mesh, [S0])
    assert hdtensor.distribute_tensor(x, mesh, [Shard(-2)]) is x
    with pytest.raises(SpecError, match=r"distributed already, not as .*S1"):
        hdtensor.distribute_tensor(x, mesh, [S1])
    with mesh:
        assert hdtensor.distribute_tensor(full, placements=[S0]).device_mesh is mesh
        with grid:
            assert hdtensor.distribute_tensor(full, placements=[S0, R]).to_local().shape == (6, 3)
            assert HDTensor.from_local(full, placements=[S0, S1]).shape == (24, 6)
        assert hdtensor.zeros(8, placements=[S0]).to_local().shape == (2,)
        two = hdtensor.distribute_tensor(full, "S0[3:1] / 0,1:S1 2:R")
        with pytest.raises(SpecError, match="a tensor of 2 subgroups has several"):
            two.redistribute(placements=[S0])
    with pytest.raises(SpecError, match="placements go with a DeviceMesh"):
        hdtensor.distribute_tensor(full, placements=[S0])


def _check_values(rank):
    x = hdtensor.distribute_tensor(torch.arange(8.0), _mesh(4), [S0])
    with hdtensor.debug.count_communication() as count:
        assert x.sum().item() == 28
    assert count.by_kind() == {"all_reduce": 1}
    assert bool((x >= 0).all())
    assert not (x > 3).all()
    torch.testing.assert_close(x, x.clone())
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(x, x + 1)


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize(
    "check", [_check_border, _check_gradients, _check_mesh_blocks, _check_values]
)
def test_calls(check):
    run_world(check, WORLD_SIZE)
