"""Optimizers that take norms and products of whole matrices, or read values, equal one device, by torch's own calls."""

import pytest
import torch
from torch import nn, optim

import hdtensor
from hdtensor import DeductionError, distribute_tensor
from tests.support.world import run_world
from tests.training.networks import (
    PLANS,
    WORLD_SIZE,
    assert_same_parameters,
    batch_of,
    both_backward,
    loss_of,
    pair,
)


MATRICES = {
    optim.Adafactor: [
        {"lr": 0.1},
        {"lr": torch.tensor(0.1), "weight_decay": 0.1, "foreach": True},
        {"lr": 0.1, "maximize": True, "foreach": False, "d": 2.0},
    ],
    optim.Muon: [
        {"lr": 0.1},
        {"lr": 0.1, "nesterov": False, "weight_decay": 0.0},
        {"lr": torch.tensor(0.1), "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    ],
}
SEARCHES = [
    {"lr": 0.1, "max_iter": 4},
    {"lr": 0.5, "max_iter": 6, "line_search_fn": "strong_wolfe"},
    {"lr": 0.1, "max_iter": 5, "history_size": 2},
]


def _of(kind, net):
    return [p for p in net.parameters() if kind is optim.Adafactor or p.ndim == 2]


def _check_matrices(rank):
    for plan in PLANS:
        for kind, every in MATRICES.items():
            for options in every:
                net, reference = pair(plan)
                optimizers = [kind(_of(kind, n), **options) for n in (net, reference)]
                for seed in range(3):
                    both_backward(net, reference, seed, rel=1e-6)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                # Muon computes in bfloat16.
                far = {"rtol": 1e-2, "atol": 1e-2} if kind is optim.Muon else {}
                assert_same_parameters(net, reference, **far)


@pytest.mark.dist(WORLD_SIZE)
def test_adafactor_and_muon():
    run_world(_check_matrices, WORLD_SIZE)


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


def _check_specs(rank):
    """All sorts of cuts, more dims than two, parameters without a gradient, one plain; copies are alike to the bit."""
    for kind in MATRICES:
        shapes = [(4, 6)] * 8 + ([(3, 4, 6), (4, 6, 2), (8,)] if kind is optim.Adafactor else [])
        specs = [*SPECS, "S1[3:1] / 0,1:S2 2:R", "S0[3:1] / 0,1:S1 2:R", "S0[3:1] / 0,1:S0 2:R"]
        plain = [nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes]
        ours = [
            nn.Parameter(distribute_tensor(p.detach(), s))
            for p, s in zip(plain, specs, strict=False)
        ]
        first, second = (nn.Parameter(torch.ones(3, 3, dtype=torch.float64)) for _ in range(2))
        reference, optimizer = kind([*plain, first], lr=0.1), kind([*ours, second], lr=0.1)
        for step in range(3):
            for i, (p, q) in enumerate(zip(plain, ours, strict=True)):
                p.grad = None if i == step else torch.randn_like(p)
                q.grad = None if i == step else distribute_tensor(p.grad, specs[i])
            first.grad = second.grad = torch.ones_like(first)
            reference.step()
            optimizer.step()
        for p, q in zip([*plain, first], [*ours, second], strict=True):
            whole = q.detach().full_tensor() if isinstance(q, hdtensor.HDTensor) else q
            torch.testing.assert_close(whole, p, check_dtype=True, rtol=1e-9, atol=1e-9)


@pytest.mark.dist(WORLD_SIZE)
def test_cuts_of_every_kind():
    run_world(_check_specs, WORLD_SIZE)


def _check_refusals(rank):
    weight = distribute_tensor(torch.ones(4, 6), "S0[3:1] / 0,1:S1 2:R")
    p = nn.Parameter(weight)
    p.grad = weight.clone()
    with pytest.raises(ValueError, match="less than 100"):  # torch's own words, on every rank
        optim.Muon([p], ns_steps=100).step()
    empty = nn.Parameter(distribute_tensor(torch.ones(4, 0), "S0[3:1] / 0,1:R 2:R"))
    empty.grad = empty.detach().clone()
    with pytest.raises(ZeroDivisionError):
        optim.Adafactor([empty]).step()


@pytest.mark.dist(WORLD_SIZE)
def test_what_torch_refuses_all_ranks_refuse():
    run_world(_check_refusals, WORLD_SIZE)


def _closure(net, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    return closure


def _check_lbfgs(rank):
    batch = batch_of(0)
    for plan in PLANS:
        for options in SEARCHES:
            net, reference = pair(plan)
            ours, theirs = (optim.LBFGS(n.parameters(), **options) for n in (net, reference))
            cut = hdtensor.distribute_batch(net, batch)
            for _ in range(3):
                loss = ours.step(_closure(net, ours, cut))
                want = theirs.step(_closure(reference, theirs, batch))
                assert hdtensor.item(loss) == pytest.approx(want.item(), rel=1e-9)
            assert (
                ours.state_dict()["state"][0]["n_iter"]
                == theirs.state_dict()["state"][0]["n_iter"]
                > 2
            )
            assert_same_parameters(net, reference, rtol=1e-7, atol=1e-7)


@pytest.mark.dist(WORLD_SIZE)
def test_lbfgs():
    run_world(_check_lbfgs, WORLD_SIZE)


def _check_lbfgs_state(rank):
    """The history goes through a state dict, follows no other cut and is saved nowhere."""
    batch = batch_of(0)
    net, reference = pair()
    cut = hdtensor.distribute_batch(net, batch)
    for module, data in ((net, cut), (reference, batch)):
        optimizer = optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
        optimizer.step(_closure(module, optimizer, data))
        again = optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
        again.load_state_dict(optimizer.state_dict())
        again.step(_closure(module, again, data))
    assert_same_parameters(net, reference, rtol=1e-7, atol=1e-7)
    net, _ = pair()
    optimizer = optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    optimizer.load_state_dict(again.state_dict())
    with pytest.raises(DeductionError, match=r"state\.clear"):
        optimizer.step(_closure(net, optimizer, cut))


@pytest.mark.dist(WORLD_SIZE)
def test_lbfgs_state():
    run_world(_check_lbfgs_state, WORLD_SIZE)


def _check_lbfgs_not_finite(rank):
    """nan and infinity reach every rank, and no rank waits."""
    for bad in (float("nan"), float("inf")):
        results = []
        for spec in ("S0[3:1] / 0,1:S1 2:R", None):
            full = torch.ones(4, 6, dtype=torch.float64)
            p = nn.Parameter(full if spec is None else distribute_tensor(full, spec))
            optimizer = optim.LBFGS([p], max_iter=4, line_search_fn="strong_wolfe")
            broken = full.clone()
            broken[3, 5] = bad

            def closure(p=p, spec=spec, broken=broken, optimizer=optimizer):
                optimizer.zero_grad()
                factor = broken if spec is None else distribute_tensor(broken, spec)
                loss = (p * factor).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            results.append(p.detach() if spec is None else p.detach().full_tensor())
        torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.dist(WORLD_SIZE)
def test_lbfgs_of_values_that_are_not_finite():
    run_world(_check_lbfgs_not_finite, WORLD_SIZE)
