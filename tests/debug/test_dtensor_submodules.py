"""A submodule that torch's own ``parallelize_module`` has cut, inside a model of ``HDTensor``s."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hdtensor
from hdtensor import HDTensor, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
STYLES = {"0": ColwiseParallel(), "2": RowwiseParallel()}
#: Batch 3 to 1 between a pair and a single rank; rank 3 is outside.
CUT = "S0[3:1] / 0,1:R 2:R"
ONE = "R / 0,1:R"
WHOLE = "R / 0,1:R 2:R"


def _mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5)).double()


def _reference():
    """One device: values, and the gradients of the input, of the weights and of what comes before."""
    mlp, first = _mlp(), torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True)
    x = X.clone().requires_grad_()
    out = mlp(x * first).sin()
    (out**2).sum().backward()
    return (
        out.detach(),
        x.grad,
        first.grad,
        {name: p.grad for name, p in mlp.named_parameters()},
    )


class _Submodule(nn.Module):
    """Hands the subgroup's block to a module of DTensors, and takes its result back."""

    def __init__(self, spec):
        super().__init__()
        index = hdtensor.HDSpec.from_text(spec).index_of(dist.get_rank())
        mesh = None
        if index is not None:
            mesh, _ = distribute_tensor_like(spec).subgroups[index]
        else:
            distribute_tensor_like(spec)
        self.inner = _mlp() if mesh is None else parallelize_module(_mlp(), mesh, STYLES)

    def forward(self, x):
        block = x.to_dtensor()
        out = None if block is None else self.inner(block)
        if out is not None and not isinstance(out, DTensor):
            # RowwiseParallel gives plain tensors, the same on every rank of the mesh.
            out = DTensor.from_local(out, block.device_mesh, block.placements, run_check=False)
        return HDTensor.from_dtensor(
            out, x.spec, shape=(x.shape[0], 5), dtype=x.dtype, top_sizes=x.top_sizes
        )


def _whole_gradient(leaf, dtype):
    """Every rank's part of a gradient, also of those without, as one plain tensor."""
    said = [None] * WORLD_SIZE
    mine = None if leaf.grad is None else (str(leaf.grad.spec), leaf.grad.top_sizes)
    dist.all_gather_object(said, mine)
    text, sizes = next(other for other in said if other is not None)
    local = torch.empty(0, dtype=dtype) if leaf.grad is None else leaf.grad.to_local()
    return HDTensor.from_local(local, text, shape=leaf.shape, top_sizes=sizes).full_tensor()


def distribute_tensor_like(spec):
    return distribute_tensor(X, spec, src_data_rank=None)


def _check_submodule(rank, spec):
    want, want_x, want_first, want_weights = _reference()
    module = _Submodule(spec)
    whole = WHOLE if spec == CUT else ONE
    x = distribute_tensor(X, spec).requires_grad_()
    first = distribute_tensor(torch.full((6,), 0.5, dtype=torch.float64), whole).requires_grad_()

    out = module(x * first).sin()
    (out**2).sum().backward()

    torch.testing.assert_close(out.detach().full_tensor(), want)
    # A rank outside has no DTensor, so no graph and no gradients; it passes an empty part.
    for leaf, expected in ((x, want_x), (first, want_first)):
        assert (leaf.grad is not None) == leaf.is_local
        torch.testing.assert_close(_whole_gradient(leaf, expected.dtype), expected)
    # Each subgroup has its own weights as DTensors; their gradients are terms where the batch is cut.
    for name, p in module.inner.named_parameters():
        grad = p.grad if isinstance(p, DTensor) and x.is_local else None
        placed = {"0.weight": "S0", "0.bias": "S0", "2.weight": "S1", "2.bias": "R"}[name]
        text = f"R / 0,1:{placed}" if spec == ONE else f"P / 0,1:{placed} 2:{placed}"
        total = HDTensor.from_dtensor(grad, text, shape=tuple(p.shape), dtype=torch.float64)
        torch.testing.assert_close(
            total.full_tensor(), want_weights[name], msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("spec", [ONE, CUT], ids=["one subgroup", "unlike subgroups"])
def test_a_submodule_of_dtensors_equals_one_device(spec):
    run_world(_check_submodule, WORLD_SIZE, spec)


def _check_functional(rank):
    """The weights are HDTensors, and lent to the submodule as DTensors: gradients come home by themselves."""
    want, _, _, want_weights = _reference()
    x = distribute_tensor(X * 0.5, CUT)
    plan = {"0.weight": "S0", "0.bias": "S0", "2.weight": "S1", "2.bias": "R"}
    mlp = _mlp()
    weights = {
        name: distribute_tensor(p.detach(), f"R / 0,1:{plan[name]} 2:{plan[name]}").requires_grad_()
        for name, p in mlp.named_parameters()
    }
    lent = {name: w.to_dtensor(grad_top=Partial()) for name, w in weights.items()}
    block = x.to_dtensor()
    out = None if block is None else torch.func.functional_call(mlp, lent, block)
    if out is not None:
        out = out.redistribute(placements=block.placements)
    y = HDTensor.from_dtensor(out, CUT, shape=(4, 5), dtype=x.dtype).sin()
    (y**2).sum().backward()

    torch.testing.assert_close(y.detach().full_tensor(), want)
    for name, weight in weights.items():
        assert (weight.grad is not None) == weight.is_local
        assert weight.grad is None or isinstance(weight.grad.spec.top, Partial)
        whole = _whole_gradient(weight, x.dtype)
        torch.testing.assert_close(whole, want_weights[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.dist(WORLD_SIZE)
def test_weights_lent_as_dtensors_get_their_gradients():
    run_world(_check_functional, WORLD_SIZE)


def _cut_again(rank):
    mesh = init_device_mesh("cpu", (2,))
    module = hdtensor.distribute_module(nn.Linear(4, 4), mesh)
    with pytest.raises(hdtensor.DeductionError, match="do not know how a tensor is cut"):
        parallelize_module(module, mesh, ColwiseParallel())
    with pytest.raises(hdtensor.DeductionError, match=r"allreduce_.*hdtensor\.item\(t\)"):
        dist.all_reduce(module.weight.detach())


@pytest.mark.dist(2)
def test_hdtensors_are_not_cut_by_torch_again():
    run_world(_cut_again, 2)
