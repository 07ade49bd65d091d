"""Without process groups: one plain process, and any rank's view through ``as_rank``."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import hdtensor
from hdtensor import (
    DeductionError,
    GroupError,
    HDSpec,
    HDTensor,
    NonLocalError,
    SpecError,
    as_rank,
    current_rank,
    distribute_tensor,
)


SPEC = "S0[3:1] / 0,1:S1 2:R"
X = torch.arange(24.0).reshape(4, 6)
SHARDS = {0: X[:3, :3], 1: X[:3, 3:], 2: X[3:], 3: torch.empty(0)}


@pytest.mark.parametrize("rank", range(4))
def test_any_ranks_view(rank):
    with as_rank(rank):
        assert current_rank() == rank
        x = distribute_tensor(X, SPEC)
        assert x.is_local == (rank < 3)
        assert torch.equal(x.to_local(), SHARDS[rank])
        assert torch.equal((x * 2 + 1).relu().to_local(), SHARDS[rank] * 2 + 1)
        assert str((x.sum(0)).spec) == "P / 0,1:S0 2:R"
        assert torch.equal(
            HDTensor.from_local(SHARDS[rank], SPEC, shape=(4, 6)).to_local(), SHARDS[rank]
        )
        assert copy.deepcopy(x).spec is x.spec
    assert current_rank() == 0


@pytest.mark.parametrize("rank", range(4))
def test_gradients_in_a_view(rank):
    with as_rank(rank):
        w = nn.Parameter(distribute_tensor(torch.ones(6, 6), "R / 0,1:R 2:R"))
        y = distribute_tensor(X, "S0[3:1] / 0,1:R 2:R").requires_grad_()
        (y @ w).sum().backward()
        assert str(w.grad.spec) == "P / 0,1:R 2:R"
        rows = {0: X[:3], 1: X[:3], 2: X[3:]}.get(rank)
        if rows is not None:
            assert torch.equal(w.grad.to_local(), rows.sum(0)[:, None].expand(6, 6))


def test_what_would_communicate_raises():
    with as_rank(0):
        x = distribute_tensor(X, SPEC)
        for act in (
            x.full_tensor,
            lambda: hdtensor.item(x.sum()),
            lambda: x.redistribute("R / 0,1:S1 2:R"),
            lambda: x.softmax(-1),
            lambda: x.subgroups,
            x.to_dtensor,
        ):
            with pytest.raises(GroupError, match="as_rank"):
                act()
        with pytest.raises(SpecError, match="shape="):
            HDTensor.from_local(SHARDS[0], SPEC)
    with as_rank(3):
        x = distribute_tensor(torch.tensor(1.0), "R / 0,1:R 2:R")
        with pytest.raises(NonLocalError):
            x.item()
        assert x.to_dtensor() is None


def test_plain_python():
    x = distribute_tensor(X, "R / 0:S1").requires_grad_()
    assert x.is_local
    loss = (x @ distribute_tensor(torch.ones(6, 2), "R / 0:S0")).square().mean()
    loss.backward()
    plain = X.clone().requires_grad_()
    want = (plain @ torch.ones(6, 2)).square().mean()
    want.backward()
    assert hdtensor.item(loss) == want.item()
    assert torch.equal(x.grad.full_tensor(), plain.grad)
    assert torch.equal(HDTensor.from_local(X, "R / 0:S1").full_tensor(), X)
    with pytest.raises(GroupError, match="init_process_group"):
        _ = x.subgroups
    outside = distribute_tensor(X, "R / 1:R")
    assert not outside.is_local
    with pytest.raises(GroupError, match="holds no part"):
        outside.full_tensor()


def test_bad_specs():
    for spec, text in [
        ("S2 / 0:R 1:R", "dim 2"),
        ("R / 0,1:S5", "dim 5"),
        (None, "an HDSpec or its short text"),
        (7, "HDSpec or its short text"),
        ([((0, 1), [Shard(0), Shard(1)])], "one placement per mesh axis"),
        ([((0,), [Replicate()]), ((0,), [Replicate()])], "at most one"),
    ]:
        with pytest.raises(SpecError, match=text):
            distribute_tensor(X, spec)
    with pytest.raises(SpecError, match="add up to 4"):
        distribute_tensor(X, SPEC, top_sizes=(3, 3))
    with pytest.raises(SpecError, match="hdim"):
        distribute_tensor(X, SPEC, hdim=0)
    with pytest.raises(SpecError, match="placements go with"):
        distribute_tensor(X, SPEC, [Shard(0)])
    with pytest.raises(SpecError, match="leaf"):
        distribute_tensor(X.clone().requires_grad_() * 2, SPEC)
    x = distribute_tensor(X, SPEC)
    with pytest.raises(SpecError, match="dim 3"):
        x.redistribute("S3 / 0,1:R 2:R")
    with pytest.raises(SpecError, match="short text"):
        x.redistribute([Shard(0)])


def test_partial_terms_add_up_in_views():
    spec = HDSpec.from_meshes([((0, 1), [Partial()]), ((2,), [Replicate()])], hdim=-2)
    total = torch.zeros_like(X)
    for rank in range(3):
        with as_rank(rank):
            total += distribute_tensor(X, spec).to_local()
    assert torch.equal(total, X)


def test_operands_on_other_subgroups():
    a, b = distribute_tensor(X, "R / 0:R"), distribute_tensor(X, "R / 1:R")
    with pytest.raises(DeductionError, match=r"lives on \[0\].*on \[1\]"):
        a + b
