"""Collective functions called unlike on ranks: an error of ours on every rank, never a hang."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hdtensor import HDTensor, HDTensorError, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
SPEC = "S0[3:1] / 0,1:S1 2:R"
OTHER = "S0 / 0,1:S1 2:R"


def x(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def from_dtensor(rank, value, spec=SPEC, **options):
    block = distribute_tensor(x(4, 6), SPEC).to_dtensor()
    return HDTensor.from_dtensor(value(block), spec, **options)


#: Name -> (the call of a rank, what the message must say on some rank).
CALLS = {
    "shape": (lambda r: distribute_tensor(x(4, 6 + (r == 1)), SPEC), "unlike arguments"),
    "dtype": (
        lambda r: distribute_tensor(x(4, 6).to(torch.float64 if r else None), SPEC),
        "float64",
    ),
    "spec": (lambda r: distribute_tensor(x(4, 6), SPEC if r else OTHER), "unlike arguments"),
    "new groups": (
        lambda r: distribute_tensor(x(4, 6), f"R / {r % 2},3:S1 2:R"),
        "unlike arguments",
    ),
    "ratio and sizes": (
        lambda r: distribute_tensor(x(4, 6), OTHER, top_sizes=(4, 0) if r == 3 else (3, 1)),
        "unlike arguments",
    ),
    "requires_grad": (
        lambda r: distribute_tensor(x(4, 6).requires_grad_(r > 0), SPEC),
        "requires_grad",
    ),
    "source": (lambda r: distribute_tensor(x(4, 6), SPEC, src_data_rank=r), "src_data_rank=3"),
    "source beyond": (lambda r: distribute_tensor(x(4, 6), SPEC, src_data_rank=7), "no rank of"),
    "source type": (lambda r: distribute_tensor(x(4, 6), SPEC, src_data_rank="0"), "no rank of"),
    "ranks beyond": (lambda r: distribute_tensor(x(4), "S0 / 0,1:R 5:R"), "beyond the world"),
    "meta": (
        lambda r: distribute_tensor(x(4, 6).to("meta" if r == 1 else "cpu"), SPEC),
        "meta",
    ),
    "one fails: dim": (
        lambda r: distribute_tensor(x(4, 6), SPEC if r != 2 else "S5 / 0,1:R 2:R"),
        "S5",
    ),
    "one fails: text": (
        lambda r: distribute_tensor(x(4, 6), SPEC if r != 1 else "S0 / 0,,1:R"),
        "'0,,1:R'",
    ),
    "one fails: type": (lambda r: distribute_tensor(x(4, 6) if r else [1.0], SPEC), "got list"),
    "one fails: no leaf": (
        lambda r: distribute_tensor(x(4, 6) if r else x(4, 6).requires_grad_() * 2, SPEC),
        "leaf",
    ),
    "one fails: distributed twice": (
        lambda r: distribute_tensor(distribute_tensor(x(4, 6), SPEC), OTHER),
        "already",
    ),
    "other function": (
        lambda r: distribute_tensor(x(4, 6), SPEC) if r else HDTensor.from_local(x(4), "R / 0-3:R"),
        "calls from_local",
    ),
    "from_local spec": (
        lambda r: HDTensor.from_local(x(4), "R / 0-3:R" if r else "R / 0-3:S0"),
        "unlike specs",
    ),
    "from_local shape": (
        lambda r: HDTensor.from_local(x(4), "R / 0-3:R", shape=(4,) if r else (5,)),
        "shape=(5,)",
    ),
    "from_local dtype": (
        lambda r: HDTensor.from_local(x(4).to(torch.float64 if r else None), "R / 0-3:R"),
        "float64",
    ),
    "from_local grad": (
        lambda r: HDTensor.from_local(x(4).requires_grad_(r == 0), "R / 0-3:R"),
        "requires_grad",
    ),
    "from_local type": (
        lambda r: HDTensor.from_local(x(4) if r else None, "R / 0-3:R"),
        "NoneType",
    ),
    "from_local beyond": (lambda r: HDTensor.from_local(x(4), "R / 0,1:R 6:R"), "rank 6"),
    "from_local dims": (
        lambda r: HDTensor.from_local(x(*(2,) * (r + 1)), "R / 0-3:S0"),
        "unlike numbers",
    ),
    "from_local top dim": (lambda r: HDTensor.from_local(x(2), "S1 / 0,1:R 2:R"), "needs dim 1"),
    "from_local sizes": (
        lambda r: HDTensor.from_local(
            x(2, 4) if r < 2 else x(3, 4), "S0 / 0,1:R 2:R", top_sizes=(3, 2)
        ),
        "rank 0 has (2, 4), expected (3, 4)",
    ),
    "from_dtensor layout": (
        lambda r: from_dtensor(r, lambda d: d, OTHER.replace("S1", "S0")),
        "0,1:S0",
    ),
    "from_dtensor missing": (
        lambda r: from_dtensor(r, lambda d: None if r == 1 else d),
        "passes None",
    ),
    "from_dtensor type": (lambda r: from_dtensor(r, lambda d: d if r else x(3)), "got Tensor"),
    "from_dtensor two": (lambda r: from_dtensor(r, lambda d: d, None), "several layouts"),
    "from_dtensor nothing": (lambda r: HDTensor.from_dtensor(None), "nothing here tells"),
}


def _call_all(rank):
    outcomes = {}
    for name, (call, _) in CALLS.items():
        try:
            outcomes[name] = ("returned", repr(call(rank)))
        except HDTensorError as error:
            outcomes[name] = ("raised", str(error))
    return outcomes


@pytest.mark.dist(WORLD_SIZE)
def test_unlike_calls_raise_everywhere():
    ranks = run_world(_call_all, WORLD_SIZE)
    for name, (_, text) in CALLS.items():
        outcomes = [outcome[name] for outcome in ranks]
        assert {kind for kind, _ in outcomes} == {"raised"}, f"{name}: {outcomes}"
        assert any(text in message for _, message in outcomes), f"{name}: {outcomes}"


def _check_own_error(rank):
    # The rank that is wrong gets its own error, the others learn which rank it was.
    with pytest.raises(HDTensorError) as caught:
        distribute_tensor(x(4, 6), SPEC if rank != 2 else "S5 / 0,1:R 2:R")
    name = type(caught.value).__name__
    assert name == ("SpecError" if rank == 2 else "DisagreementError")
    assert rank == 2 or "rank 2 fails with SpecError" in str(caught.value)
    # All ranks are still in step.
    assert torch.equal(distribute_tensor(x(4, 6), SPEC).full_tensor(), x(4, 6))


@pytest.mark.dist(WORLD_SIZE)
def test_ranks_stay_in_step():
    run_world(_check_own_error, WORLD_SIZE)


def _check_plain_dtensor(rank):
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    with pytest.raises(HDTensorError, match="from_dtensor"):
        distribute_tensor(DTensor.from_local(x(2), mesh, [Replicate()]), SPEC)


@pytest.mark.dist(WORLD_SIZE)
def test_a_dtensor_is_not_cut_again():
    run_world(_check_plain_dtensor, WORLD_SIZE)
