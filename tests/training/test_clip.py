"""Clipping by the total norm of gradients of any subgroups equals one device, with one small collective."""

import math

import pytest
import torch
from torch import nn

import hdtensor
from hdtensor import DeductionError, DisagreementError, GroupError, SpecError, distribute_tensor
from hdtensor.debug import count_communication
from tests.support.world import run_world


WORLD_SIZE = 4
#: Stages on disjoint ranks, cuts at both tiers, copies at both tiers, meshes, blocks and shards without rows.
SPECS = [
    "S0[3:1] / 0,1:S1 2:R",
    "R / 0,1:S1 2:R",
    "R / 3:R",
    "R / 0-3(2x2):R,S0",
    "S1[1:2] / 0,1:S0 2:R",
    "S0 / 3:R 2:S1 0,1:S0",
    "R / 1,2:S0",
    "S0[0:1] / 0,1:S0 2:S1",
    "R / 0-3:S0",
    "R / 2,3:R 1:R",
]
#: Case 19: two meshes that overlap.
CASE_19 = ["R / 0,1:S0", "R / 0-3:S0"]
ORDERS = [2.0, 1, 3, 0.5, 0, -1, math.inf, -math.inf]


def normal(seed, shape=(5, 6), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def cut(full, spec):
    return distribute_tensor(full, spec, src_data_rank=None)


def models(dtype=torch.float64, specs=SPECS):
    """The same parameters with gradients: cut, and plain."""
    plain = [nn.Parameter(normal(i, dtype=dtype)) for i in range(len(specs) + 1)]
    ours = [nn.Parameter(cut(p.detach(), s)) for p, s in zip(plain, specs, strict=False)]
    ours.append(nn.Parameter(plain[-1].detach().clone()))
    for i, (p, q) in enumerate(zip(plain, ours, strict=True)):
        p.grad = normal(100 + i, dtype=dtype)
        q.grad = cut(p.grad, specs[i]) if i < len(specs) else p.grad.clone()
    return ours, plain


def whole(t):
    return hdtensor.full_tensor(t) if isinstance(t, hdtensor.HDTensor) else t


def assert_same_grads(ours, plain):
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


def wanted_norm(grads, order):
    """The definition: all elements as one vector."""
    return torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), order)


def _check_orders(rank):
    totals = []
    for order in ORDERS:
        for foreach in (None, False, True):
            ours, plain = models()
            want = wanted_norm([p.grad for p in plain], order)
            version = ours[0].grad._version
            total = hdtensor.clip_grad_norm_(ours, 0.75 * want.item(), order, foreach=foreach)
            assert type(total) is torch.Tensor
            torch.testing.assert_close(total, want)
            nn.utils.clip_grads_with_norm_(plain, 0.75 * want.item(), want)
            assert_same_grads(ours, plain)
            assert ours[0].grad._version > version
            totals.append(total.item())
    return totals


@pytest.mark.dist(WORLD_SIZE)
def test_every_order_equals_one_device():
    found = run_world(_check_orders, WORLD_SIZE)
    assert all(totals == found[0] for totals in found)


def _check_dtypes(rank):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        ours, plain = models(dtype)
        total = hdtensor.clip_grad_norm_(ours, 2.0)
        want = nn.utils.clip_grad_norm_(plain, 2.0)
        torch.testing.assert_close(total, want)
        assert_same_grads(ours, plain)
    # Unlike dtypes in one list.
    (ours, plain), (more, others) = models(torch.float32), models(torch.bfloat16)
    total = hdtensor.clip_grad_norm_(ours + more, 2.0)
    # torch rounds the norm of each bfloat16 tensor, so the definition is what to compare with.
    exact = wanted_norm([p.grad.double() for p in plain + others], 2.0).float()
    torch.testing.assert_close(total, exact)
    nn.utils.clip_grads_with_norm_(plain + others, 2.0, exact)
    assert_same_grads(ours + more, plain + others)


@pytest.mark.dist(WORLD_SIZE)
def test_dtypes():
    run_world(_check_dtypes, WORLD_SIZE)


def _check_case_19(rank):
    full = torch.arange(32.0).reshape(8, 4)
    ours = [nn.Parameter(cut(full, spec)) for spec in CASE_19]
    for p in ours:
        p.grad = cut(full, p.spec)
    assert hdtensor.get_total_norm([p.grad for p in ours]).item() == pytest.approx(144.33, abs=0.01)
    with count_communication() as counted:
        total = hdtensor.clip_grad_norm_(ours, 1.0)
    assert [(c.kind, c.num_bytes, c.why) for c in counted.events] == [
        ("all_reduce", 8, "clip_grad_norm_")
    ]
    assert total.item() == pytest.approx(math.sqrt(2 * 10416))
    for p in ours:
        torch.testing.assert_close(p.grad.full_tensor(), full / (total + 1e-6))


@pytest.mark.dist(WORLD_SIZE)
def test_case_19_two_meshes():
    run_world(_check_case_19, WORLD_SIZE)


def _check_some_gradients(rank):
    ours, plain = models()
    for i in (0, 2, 5):
        ours[i].grad = plain[i].grad = None
    # A gradient below the limit stays as it is, also one tensor alone, also a generator.
    torch.testing.assert_close(
        hdtensor.clip_grad_norm_((p for p in ours), 1e9), nn.utils.clip_grad_norm_(plain, 1e9)
    )
    assert_same_grads(ours[3:5], plain[3:5])
    torch.testing.assert_close(
        hdtensor.clip_grad_norm_(ours[1], 0.1), nn.utils.clip_grad_norm_(plain[1], 0.1)
    )
    assert_same_grads(ours[1:2], plain[1:2])
    # Each rank may pass the parameters of its own stage only.
    own = [p for p in ours if not isinstance(p, hdtensor.HDTensor) or p.is_local]
    torch.testing.assert_close(
        hdtensor.clip_grad_norm_(own, 0.1), nn.utils.clip_grad_norm_(plain, 0.1)
    )
    assert_same_grads(ours[3:5], plain[3:5])
    for p in ours:
        p.grad = None
    assert hdtensor.clip_grad_norm_(ours, 1.0).item() == 0
    # Without HDTensors it is torch's, and nobody waits for anybody.
    if rank == 1:
        local = [nn.Parameter(normal(0))]
        local[0].grad = normal(1)
        want = wanted_norm([local[0].grad], 2)
        torch.testing.assert_close(hdtensor.get_total_norm([local[0].grad]), want)
        torch.testing.assert_close(hdtensor.clip_grad_norm_(local, 1.0), want)


@pytest.mark.dist(WORLD_SIZE)
def test_missing_gradients_and_other_lists():
    run_world(_check_some_gradients, WORLD_SIZE)


def _check_no_finite_norm(rank):
    for bad in (math.inf, math.nan):
        for order in (2.0, math.inf, -math.inf, 1.0):
            ours, plain = models()
            for p, q in zip(ours, plain, strict=True):
                broken = q.grad.clone()
                if q is plain[2]:
                    broken[0, 0] = bad  # a value that rank 3 alone holds
                q.grad = broken
                p.grad = cut(broken, p.spec) if isinstance(p, hdtensor.HDTensor) else broken.clone()
            want = wanted_norm([p.grad for p in plain], order)
            before = [whole(p.grad).clone() for p in ours]
            if not want.isfinite():
                with pytest.raises(RuntimeError, match="nothing is clipped"):
                    hdtensor.clip_grad_norm_(ours, 1.0, order, error_if_nonfinite=True)
            for p, old in zip(ours, before, strict=True):
                torch.testing.assert_close(whole(p.grad), old, equal_nan=True)
            total = hdtensor.clip_grad_norm_(ours, 1.0, order)
            torch.testing.assert_close(total, want, equal_nan=True)
            nn.utils.clip_grads_with_norm_(plain, 1.0, want)
            for p, q in zip(ours, plain, strict=True):
                torch.testing.assert_close(whole(p.grad), q.grad, equal_nan=True)


@pytest.mark.dist(WORLD_SIZE)
def test_norms_that_are_not_finite():
    run_world(_check_no_finite_norm, WORLD_SIZE)


def _check_errors(rank):
    p = nn.Parameter(cut(normal(0), "R / 0,1:S1 2:R"))
    for pending in ("P / 0,1:S1 2:R", "R / 0,1:P 2:R"):
        p.grad = cut(normal(1), pending)
        with pytest.raises(DeductionError, match="sync_gradients"):
            hdtensor.clip_grad_norm_([p], 1.0)
    p.grad = cut(normal(1), "R / 0,1:S1 2:R")
    # One rank alone is wrong: all hear of it, none waits.
    given = [p.grad, p.grad.to_dtensor()] if rank == 1 else [p.grad]
    with pytest.raises(SpecError if rank == 1 else DisagreementError):
        hdtensor.get_total_norm(given)
    with pytest.raises(GroupError, match="as_rank"), hdtensor.as_rank(2):
        hdtensor.clip_grad_norm_([p], 1.0)
    torch.testing.assert_close(p.grad.full_tensor(), normal(1))


@pytest.mark.dist(WORLD_SIZE)
def test_errors_reach_every_rank():
    run_world(_check_errors, WORLD_SIZE)


def _check_torch_clipping(rank):
    ours, plain = models()
    for foreach in (None, False):
        with pytest.raises(DeductionError, match=r"hdtensor\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(ours[:-1], 1.0, foreach=foreach)
        with pytest.raises(DeductionError, match=r"hdtensor\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(ours[1:3], 1.0, foreach=foreach)
    assert_same_grads(ours, plain)
    # With a norm of ours it scales any list.
    total = hdtensor.get_total_norm([p.grad for p in ours])
    nn.utils.clip_grads_with_norm_(ours, 1.0, total)
    nn.utils.clip_grad_norm_(plain, 1.0)
    assert_same_grads(ours, plain)
    hdtensor.clip_grads_with_norm_(ours, 0.5, total)
    nn.utils.clip_grads_with_norm_(plain, 0.5, total)
    assert_same_grads(ours, plain)


@pytest.mark.dist(WORLD_SIZE)
def test_torchs_own_clipping_names_ours():
    run_world(_check_torch_clipping, WORLD_SIZE)


def test_one_process():
    p = nn.Parameter(cut(normal(0), "R / 0:R"))
    p.grad = cut(normal(1), "R / 0:R")
    torch.testing.assert_close(hdtensor.clip_grad_norm_([p], 1.0), normal(1).norm())
    assert p.grad.full_tensor().norm().item() == pytest.approx(1.0, rel=1e-5)
