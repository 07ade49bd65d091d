"""What is written in place into an ``HDTensor`` is told to graphs of local tensors: an error as on one device, never wrong gradients."""

import pytest
import torch

from hdtensor import HDSpec, HDTensor, distribute_tensor, local_map
from tests.support.world import run_world


WORLD_SIZE = 4
MODIFIED = "has been modified( by an)? inplace"
SPEC = "S0[3:1] / 0,1:S0 2,3:S0"
X = torch.linspace(-1.0, 1.0, 48).reshape(8, 6)


def _leaf():
    return distribute_tensor(X.clone(), SPEC).requires_grad_()


def _result_of_a_local_function(write):
    y = local_map(torch.exp, 0)(_leaf())  # exp keeps its result for backward
    write(y)
    return y


def _argument_of_a_local_function(write):
    factor = distribute_tensor(X.clone(), SPEC)
    y = local_map(torch.mul, 0)(_leaf(), factor)
    write(factor)
    return y


def _from_local(write):
    local = _leaf().to_local().exp()
    y = HDTensor.from_local(local, SPEC, shape=X.shape)
    write(y)
    return y


def _to_local(write):
    factor = distribute_tensor(X.clone(), SPEC)
    local = _leaf().to_local() * factor.to_local()
    write(factor)
    return HDTensor.from_local(local, SPEC, shape=X.shape)


WRITES = {
    "record": lambda x: x.mul_(2.0),
    "view": lambda x: x[:, 1].mul_(2.0),
    "view of a view": lambda x: x[:, 1:3].unsqueeze(0).mul_(2.0),
    "special rule": torch.no_grad()(lambda x: x.normal_()),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "out": torch.no_grad()(lambda x: torch.add(X[:1, :1].sum(), x, out=x)),
    "local function": torch.no_grad()(lambda x: local_map(lambda t: t.add_(1), 0)(x)),
}


def _check_writes(rank):
    for graph in (_result_of_a_local_function, _argument_of_a_local_function, _from_local, _to_local):
        for name, write in WRITES.items():
            y = graph(write)
            with pytest.raises(RuntimeError, match=MODIFIED):
                y.sum().backward()
                pytest.fail(f"{name} behind {graph.__name__}")
        graph(lambda x: x + 1).sum().backward()  # without a write it works


@pytest.mark.dist(WORLD_SIZE)
def test_values_that_a_local_graph_needs():
    run_world(_check_writes, WORLD_SIZE)


def _check_a_local_function_that_writes(rank):
    x = distribute_tensor(X.clone(), "S0[3:1] / 0,1:S0 2:R")
    y = local_map(lambda t: t.add_(1), 0)(x)
    torch.testing.assert_close(x.full_tensor(), X + 1)
    torch.testing.assert_close(y.full_tensor(), X + 1)
    kept = _leaf().exp()
    with torch.no_grad():
        local_map(lambda t: t.mul_(2), 0)(kept)
    with pytest.raises(RuntimeError, match=MODIFIED):
        kept.sum().backward()
    with pytest.raises(RuntimeError, match="modified inplace"):
        local_map(lambda t: t.mul_(2), 0)(_leaf() * 1)


@pytest.mark.dist(WORLD_SIZE)
def test_a_local_function_that_writes_into_its_argument():
    run_world(_check_a_local_function_that_writes, WORLD_SIZE)


def _fill_pending(rank):
    local = torch.full((3,), float(rank + 1))
    x = HDTensor.from_local(local, "R / 0,1:P 2:R", shape=(3,))
    mask = torch.tensor([True, False, True])
    x.masked_fill_(distribute_tensor(mask, "R / 0,1:R 2:R", src_data_rank=None), 7.0)
    assert x.spec == HDSpec.from_text("R / 0,1:P 2:R")
    expected = torch.tensor([7.0, 3.0, 7.0])  # 1 + 2, and on rank 2 its own 3
    assert torch.equal(x.redistribute("R / 0,1:R 2:R").to_local(), expected)


@pytest.mark.dist(3)
def test_what_is_pending_inside_a_subgroup_can_be_filled():
    run_world(_fill_pending, 3)
