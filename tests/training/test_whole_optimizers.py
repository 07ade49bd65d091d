"""Optimizers that take norms and products of whole matrices, or read values, equal one device, by torch's own calls."""

import copy
import inspect

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
    plan_of,
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
    # New in torch 2.14.
    *[{"lr": 0.01, "max_iter": 4, "maximize": True}]
    * ("maximize" in inspect.signature(optim.LBFGS).parameters),
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
        for options in SEARCHES if plan == "rank outside" else SEARCHES[1:2]:
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


OPTIONS = {"lr": 0.1, "max_iter": 3, "line_search_fn": "strong_wolfe"}


def _lbfgs(net, state=None):
    optimizer = optim.LBFGS(net.parameters(), **OPTIONS)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


def _go_on(net, optimizer, steps=1):
    batch = batch_of(0)
    batch = hdtensor.distribute_batch(net, batch) if isinstance(next(net.parameters()), hdtensor.HDTensor) else batch  # fmt: skip
    for _ in range(steps):
        optimizer.step(_closure(net, optimizer, batch))


def _other_plan(net):
    """The same net under another plan."""
    again, _ = pair("tp 3 beside 1")
    state = hdtensor.full_state_dict(net.state_dict())
    with hdtensor.implicit_replication():
        again.load_state_dict(state)
    return again


def _check_lbfgs_state(rank, folder):
    """The history is torch's own: saved and loaded in memory and on disk, under this plan, another, or none."""
    net, reference = pair()
    ours, theirs = _lbfgs(net), _lbfgs(reference)
    _go_on(net, ours, 2)
    _go_on(reference, theirs, 2)
    whole = hdtensor.full_state_dict(ours.state_dict())
    torch.testing.assert_close(whole["state"][0], theirs.state_dict()["state"][0], rtol=1e-6, atol=1e-7)  # fmt: skip
    hdtensor.save_checkpoint(folder, net, ours, extra={"step": 2})
    _go_on(reference, theirs, 2)

    runs = []
    for state in (ours.state_dict(), whole, copy.deepcopy(ours.state_dict())):
        runs += [_other_plan(net)]
        runs[-1].optimizer = _lbfgs(runs[-1], state)
    runs += [pair("batch inside")[0], pair()[0]]
    for run in runs[3:]:
        run.optimizer = _lbfgs(run)
        assert hdtensor.load_checkpoint(folder, run, run.optimizer) == {"step": 2}
    for run in runs:
        _go_on(run, run.optimizer, 2)
        assert_same_parameters(run, reference, rtol=1e-6, atol=1e-7)

    other = torch.nn.Linear(3, 2)
    for p in (other.weight, other.bias):
        p.data = torch.ones_like(p)
    cut = [
        nn.Parameter(distribute_tensor(p.detach(), "R / 0,1:S0 2:R")) for p in other.parameters()
    ]
    optimizer = optim.LBFGS(cut)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": ours.state_dict()["state"]})
    with pytest.raises(DeductionError, match=r"the parameters have 8 elements.*state\.clear"):
        optimizer.step(lambda: sum(p.sum() for p in cut))


@pytest.mark.dist(WORLD_SIZE)
def test_lbfgs_state(tmp_path):
    run_world(_check_lbfgs_state, WORLD_SIZE, str(tmp_path))


def _check_lbfgs_switch(rank):
    net, reference = pair()
    ours, theirs = _lbfgs(net), _lbfgs(reference)
    for plan in ("tp 3 beside 1", "batch inside", "rank outside"):
        _go_on(net, ours)
        _go_on(reference, theirs)
        hdtensor.switch(net, plan_of(plan), ours)
    _go_on(net, ours)
    _go_on(reference, theirs)
    assert_same_parameters(net, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.dist(WORLD_SIZE)
def test_lbfgs_switches():
    run_world(_check_lbfgs_switch, WORLD_SIZE)


def _check_lbfgs_shapes(rank):
    """Cuts of every kind, scalars, complex and empty ones, one plain, gradients that are missing or of another cut."""
    shapes = [(4, 6)] * 8 + [(), (5,), (0, 3), (3, 2, 2)]
    specs = [*SPECS, "R / 3:R 1:R", "S0[3:1] / 0,1:S0 2:R", "R / 0:R", "R / 1,2:S2"]
    for complex_too, search in ((True, None), (False, "strong_wolfe")):
        dtypes = [torch.complex128 if complex_too and i in (1, 4) else torch.float64 for i in range(12)]  # fmt: skip
        start = [torch.randn(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        plain = [nn.Parameter(t.clone()) for t in [*start, torch.ones(3, 3, dtype=torch.float64)]]
        ours = [nn.Parameter(distribute_tensor(t, s)) for t, s in zip(start, specs, strict=True)]
        ours.append(nn.Parameter(torch.ones(3, 3, dtype=torch.float64)))
        for params in (plain, ours):
            optimizer = optim.LBFGS(params, lr=0.3, max_iter=5, line_search_fn=search)

            def closure(params=params, optimizer=optimizer):
                optimizer.zero_grad()
                total = 0.0
                for i, p in enumerate(params):
                    if i != 2:
                        value = (p - i).abs().square().sum() * (1 + i % 3)
                        total += hdtensor.full_tensor(value) if isinstance(value, hdtensor.HDTensor) else value  # fmt: skip
                total.backward()
                return total

            for _ in range(3):
                optimizer.step(closure)
        for p, q, spec in zip(plain, ours, [*specs, None], strict=True):
            whole = q.detach().full_tensor() if isinstance(q, hdtensor.HDTensor) else q.detach()
            torch.testing.assert_close(whole, p.detach(), rtol=1e-7, atol=1e-8, msg=lambda t, s=spec: f"{s} {t}")  # fmt: skip


@pytest.mark.dist(WORLD_SIZE)
def test_lbfgs_of_all_shapes():
    run_world(_check_lbfgs_shapes, WORLD_SIZE)


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
