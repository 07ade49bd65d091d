"""Optimizers over parameters of unlike subgroups: the same steps as on one device, or an error everywhere."""

import itertools

import pytest
import torch
from torch import nn, optim

import hdtensor
from hdtensor import DeductionError, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
#: One list of parameters: other ranks, other numbers of subgroups, other meshes and cuts, a block without rows.
SPECS = [
    "S0[3:1] / 0,1:S1 2:R",
    "R / 0,1:S1 2:R",
    "R / 3:R",
    "R / 0-3(2x2):S0,S1",
    "S1[1:2] / 0,1:S0 2:R",
    "S0 / 3:R 2:S1 0,1:S0",
    "R / 1,2:S0",
    "S0[0:1] / 0,1:S0 2:S1",
]
MODES = {"default": {}, "single": {"foreach": False}, "foreach": {"foreach": True}}
FUSED = MODES | {"fused": {"fused": True}}
OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, FUSED),
    (optim.SGD, {"lr": 0.1}, FUSED),
    (optim.AdamW, {"lr": 0.1}, FUSED),
    (optim.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}, FUSED),
    (optim.AdamW, {"lr": torch.tensor(0.1)}, {"single": {"foreach": False}}),
    (optim.Adagrad, {"lr": 0.1}, FUSED),
    (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}, MODES),
    (optim.Adadelta, {"lr": 0.1}, MODES),
    (optim.NAdam, {"lr": 0.1}, MODES),
    (optim.RAdam, {"lr": 0.1}, MODES),
    (optim.Adamax, {"lr": 0.1}, MODES),
    (optim.Rprop, {"lr": 0.1}, MODES),
    (optim.ASGD, {"lr": 0.1, "weight_decay": 0.1}, MODES),
    (optim.NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "maximize": True}, MODES),
    (optim.RAdam, {"lr": torch.tensor(0.1, dtype=torch.float64)}, {"single": {"foreach": False}}),
    (optim.SGD, {"lr": torch.tensor(0.1, dtype=torch.float64), "dampening": 0.1, "momentum": 0.5}, FUSED),
]


def normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator)


def cut(full, spec):
    return distribute_tensor(full, spec, src_data_rank=None)


def _check_steps(rank):
    for kind, options, modes in OPTIMIZERS:
        for mode, switches in modes.items():
            plain = [nn.Parameter(normal(i)) for i in range(len(SPECS))]
            ours = [nn.Parameter(cut(p.detach(), s)) for p, s in zip(plain, SPECS, strict=True)]
            reference = kind(plain, **options, **MODES["single"])
            optimizer = kind(ours, **options, **switches)
            for step in range(3):
                for i, (p, q) in enumerate(zip(plain, ours, strict=True)):
                    p.grad = normal(100 * step + i)
                    q.grad = cut(p.grad, SPECS[i])
                reference.step()
                optimizer.step()
            for p, q, spec in zip(plain, ours, SPECS, strict=True):
                case = f"{kind.__name__} {options} {mode} {spec}".format
                assert str(q.spec) == spec
                torch.testing.assert_close(
                    q.detach().full_tensor(), p.detach(), msg=lambda text, case=case: case() + text
                )


@pytest.mark.dist(WORLD_SIZE)
def test_optimizers_take_the_steps_of_one_device():
    run_world(_check_steps, WORLD_SIZE)


def _check_pending_gradients(rank):
    for kind, mode in itertools.product((optim.SGD, optim.AdamW), FUSED.values()):
        # A sum over subgroups is never hidden in an optimizer ...
        p = nn.Parameter(cut(normal(0), "R / 0,1:S1 2:R"))
        p.grad = cut(normal(1), "P / 0,1:S1 2:R")
        with pytest.raises(DeductionError, match="redistribute"):
            kind([p], lr=0.1, weight_decay=0, **mode).step()
        torch.testing.assert_close(p.detach().full_tensor(), normal(0))
        # ... one inside a subgroup is an implicit conversion like any.
        p.grad = cut(normal(1), "R / 0,1:P 2:R")
        kind([p], lr=0.1, **mode).step()
        q = nn.Parameter(normal(0))
        q.grad = normal(1)
        kind([q], lr=0.1).step()
        torch.testing.assert_close(p.detach().full_tensor(), q.detach())


@pytest.mark.dist(WORLD_SIZE)
def test_pending_gradients():
    run_world(_check_pending_gradients, WORLD_SIZE)


def _check_zero_grad(rank):
    ours = [nn.Parameter(cut(normal(0), spec)) for spec in SPECS]
    optimizer = optim.SGD(ours, lr=0.1)
    for p, spec in zip(ours, SPECS, strict=True):
        p.grad = cut(normal(1), spec)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.full_tensor().any() for p in ours)
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours)


@pytest.mark.dist(WORLD_SIZE)
def test_zero_grad():
    run_world(_check_zero_grad, WORLD_SIZE)


def _check_clipping(rank):
    ours = [nn.Parameter(cut(normal(i), s)) for i, s in enumerate(SPECS)]
    plain = [nn.Parameter(normal(i)) for i in range(len(SPECS))]
    for i, (p, q) in enumerate(zip(ours, plain, strict=True)):
        q.grad = normal(10 + i)
        p.grad = cut(q.grad, SPECS[i])
    # By hand, over any subgroups: each square sum is read on every rank.
    total = sum(hdtensor.item(p.grad.square().sum()) for p in ours) ** 0.5
    want = nn.utils.clip_grad_norm_(plain, 1.0)
    assert total == pytest.approx(want.item())
    torch._foreach_mul_([p.grad for p in ours], 1.0 / (total + 1e-6))
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    nn.utils.clip_grad_value_(ours, 0.01)
    nn.utils.clip_grad_value_(plain, 0.01)
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.dist(WORLD_SIZE)
def test_clipping_by_hand():
    run_world(_check_clipping, WORLD_SIZE)


def _check_torch_clipping(rank):
    specs = ["R / 0,1:S1 2:R", "R / 0,1:S0 2:R", "R / 0,1:R 2:S0"]
    for foreach in (None, True, False):
        ours = [nn.Parameter(cut(normal(i), s)) for i, s in enumerate(specs)]
        plain = [nn.Parameter(normal(i)) for i in range(len(specs))]
        for i, (p, q) in enumerate(zip(ours, plain, strict=True)):
            q.grad = normal(10 + i)
            p.grad = cut(q.grad, specs[i])
        total = nn.utils.clip_grad_norm_(ours, 1.0, foreach=foreach)
        want = nn.utils.clip_grad_norm_(plain, 1.0)
        assert hdtensor.item(total) == pytest.approx(want.item())
        for p, q in zip(ours, plain, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.dist(WORLD_SIZE)
def test_clip_grad_norm_on_one_list_of_subgroups():
    run_world(_check_torch_clipping, WORLD_SIZE)
