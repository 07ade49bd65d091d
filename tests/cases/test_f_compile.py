"""Users' cases F: what compilers need of a wrapper tensor."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hdtensor import HDTensor, HDTensorError, as_rank, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
SPECS = [
    "S0[3:1] / 0,1:S1 2:R",
    "P / 0,1:S1 2:R",
    "R / 0-3(2x2):S0,S1",
    "S0[0:1] / 0:R 1:S0",
    "R / 3:R",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rank", range(4))
def test_case_42_one_named_inner_tensor(spec, rank):
    with as_rank(rank):
        x = distribute_tensor(torch.arange(24.0).reshape(4, 6), spec)
        for tensor in (x, x * 2, x.t(), x.sum()):
            assert is_traceable_wrapper_subclass(tensor)
            (name,), context = tensor.__tensor_flatten__()
            inner = getattr(tensor, name)
            assert type(inner) is torch.Tensor
            again = HDTensor.__tensor_unflatten__(
                {name: inner}, context, tensor.shape, tensor.stride()
            )
            assert repr(again) == repr(tensor)
            assert getattr(again, name) is inner
            # What stands beside the inner tensor is a constant of a graph: a value, equal and hashed as one.
            assert again.__tensor_flatten__()[1] == context
            assert hash(again.__tensor_flatten__()[1]) == hash(context)


def _check_nesting(rank):
    x = distribute_tensor(torch.ones(4, 6), SPECS[0])
    d = DTensor.from_local(
        torch.ones(2, 6), distribute_tensor(torch.ones(4), "R / 0-3:R").subgroups[0][0]
    )
    for wrapped in (x, d):
        for wrap in (
            lambda t: HDTensor.from_local(t, "R / 0-3:R"),
            lambda t: HDTensor.from_local(t, "R / 0-3:R", shape=t.shape),
            lambda t: HDTensor.from_local(t, "R / 0-3:R", shape=t.shape, check=False),
            lambda t: distribute_tensor(t, "R / 0-3:R"),
            lambda t: distribute_tensor(t, "R / 0-3:R", src_data_rank=None),
        ):
            with pytest.raises(HDTensorError):
                wrap(wrapped)
    with pytest.raises(HDTensorError):
        HDTensor.from_dtensor(x)
    assert type(x.to_local()) is torch.Tensor
    assert rank == 3 or type(x.to_dtensor().to_local()) is torch.Tensor


@pytest.mark.dist(WORLD_SIZE)
def test_case_43_wrappers_do_not_nest():
    run_world(_check_nesting, WORLD_SIZE)
