"""Autograd through every way in, out and across: gradients are those of one device."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hdtensor import HDTensor, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
WHOLE = "R / 0,1:R 2:R"
SPECS = [
    "S0[3:1] / 0,1:S1 2:R",
    "S0[0:1] / 0,1:S0 2:S1",
    "S1[1:2] / 0,1:S0 2:R",
    "S0 / 0,1:R 2:R",
    "R / 0,1:S1 2:R",
    "R / 0,1:P 2:S0",
    "P / 0,1:S1 2:R",
    "P / 0,1:P 2:P",
    WHOLE,
    "R / 2:S0 0,1:S0",
]
X = torch.arange(24, dtype=torch.float64).reshape(4, 6)
W = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reduced(spec):
    """The spec in which a gradient comes back: what was pending is replicated."""
    return spec.replace("P", "R")


def weighted_sum(y):
    """A scalar whose gradient is ``W``."""
    return (y.redistribute(WHOLE) * distribute_tensor(W, WHOLE, src_data_rank=None)).sum()


def shard(full, spec):
    return distribute_tensor(full, spec, src_data_rank=None).to_local()


def _check_redistribute(rank):
    for src, dst in itertools.product(SPECS, SPECS):
        x = distribute_tensor(X, src, src_data_rank=None).requires_grad_()
        y = x.redistribute(dst)
        assert str(y.spec) == dst
        assert torch.equal(y.detach().full_tensor(), X), f"{src} -> {dst}"
        weighted_sum(y).backward()
        assert str(x.grad.spec) == reduced(src), f"{src} -> {dst}"
        assert torch.equal(x.grad.full_tensor(), W), f"{src} -> {dst}"
        x.grad = None
        (y.redistribute(reduced(dst)) ** 2).sum().redistribute(WHOLE).backward()
        assert torch.equal(x.grad.full_tensor(), 2 * X), f"{src} -> {dst}"


@pytest.mark.dist(WORLD_SIZE)
def test_redistribute_between_all_pairs():
    run_world(_check_redistribute, WORLD_SIZE)


def _check_full_tensor(rank):
    for spec in SPECS:
        x = distribute_tensor(X, spec, src_data_rank=None).requires_grad_()
        full = x.full_tensor()
        assert type(full) is torch.Tensor
        (full * W).sum().backward()
        assert str(x.grad.spec) == reduced(spec)
        assert torch.equal(x.grad.full_tensor(), W), spec


@pytest.mark.dist(WORLD_SIZE)
def test_full_tensor_on_every_rank():
    run_world(_check_full_tensor, WORLD_SIZE)


def _check_local(rank):
    for spec in SPECS:
        local = shard(X, spec).requires_grad_()
        y = HDTensor.from_local(local, spec, shape=X.shape)
        weighted_sum(y).backward()
        if rank < 3:
            assert torch.equal(local.grad, shard(W, reduced(spec))), spec
        x = distribute_tensor(X, spec, src_data_rank=None).requires_grad_()
        out = x.to_local()
        (out * 2).sum().backward()
        assert str(x.grad.spec) == reduced(spec)
        assert torch.equal(x.grad.to_local(), torch.full_like(out, 2))


@pytest.mark.dist(WORLD_SIZE)
def test_from_local_and_to_local():
    run_world(_check_local, WORLD_SIZE)


def _check_dtensor(rank):
    for spec in SPECS:
        x = distribute_tensor(X, spec, src_data_rank=None).requires_grad_()
        block = x.to_dtensor()
        y = HDTensor.from_dtensor(None if block is None else block * 2, spec, shape=X.shape)
        assert y.requires_grad  # also on the rank outside, which goes on like the others
        (y.redistribute(WHOLE) ** 2).sum().backward()
        if rank < 3:
            assert str(x.grad.spec) == reduced(spec)
            assert torch.equal(x.grad.to_local(), shard(8 * X, reduced(spec))), spec


@pytest.mark.dist(WORLD_SIZE)
def test_through_dtensors():
    run_world(_check_dtensor, WORLD_SIZE)


def _check_hooks(rank):
    seen = []
    x = distribute_tensor(X, SPECS[0]).requires_grad_()
    y = x * 2
    y.retain_grad()
    y.register_hook(lambda grad: seen.append(type(grad)) or grad * 3)
    x.register_hook(lambda grad: seen.append("leaf"))
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    y.sum().backward()
    assert seen == [HDTensor, "leaf", (4, 6)]
    assert torch.equal(x.grad.full_tensor(), torch.full_like(X, 6))
    assert torch.equal(y.grad.full_tensor(), torch.full_like(X, 3))

    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second.full_tensor(), 6 * X)


@pytest.mark.dist(WORLD_SIZE)
def test_hooks_and_double_backward():
    run_world(_check_hooks, WORLD_SIZE)


def _check_accumulation(rank):
    for spec in SPECS:
        x = distribute_tensor(X, spec, src_data_rank=None).requires_grad_()
        for _ in range(3):
            # The two branches give gradients in unlike layouts, which add up all the same.
            weighted_sum(x).backward()
            weighted_sum(x.redistribute(reduced(spec)).t().contiguous().t()).backward()
        torch.testing.assert_close(x.grad.full_tensor(), 6 * W)
        x.grad = None
        assert x.grad is None


@pytest.mark.dist(WORLD_SIZE)
def test_gradients_accumulate():
    run_world(_check_accumulation, WORLD_SIZE)


def _forward(x):
    y = torch.nn.functional.dropout(x * 2, 0.5) * x
    return torch.nn.functional.dropout(y.sin(), 0.25)


def _check_checkpoint(rank):
    grads = []
    for spec in (SPECS[0], SPECS[4], WHOLE, "R / 0-3(2x2):S0,S1", "R / 3:R"):
        for use_reentrant in (None, False, True):
            x = distribute_tensor(X, spec).requires_grad_()
            torch.manual_seed(7)
            if use_reentrant is None:
                y = _forward(x)
            else:
                y = checkpoint(_forward, x, use_reentrant=use_reentrant)
            y.sum().backward()
            grads.append(x.grad.full_tensor())
    assert 0 < (grads[0] == 0).sum() < X.numel()
    # Recomputation draws again what forward drew, and every plan draws the same.
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.dist(WORLD_SIZE)
def test_checkpoint_recomputes_the_same_dropout():
    run_world(_check_checkpoint, WORLD_SIZE)


def _check_versions(rank):
    x = distribute_tensor(X, SPECS[0]).requires_grad_()
    y = x * 2
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.add_(1)


@pytest.mark.dist(WORLD_SIZE)
def test_autograd_sees_writes():
    run_world(_check_versions, WORLD_SIZE)
