"""Optimizers that users write, and all the ways to use one, take the steps of one device."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim
from torch.optim import swa_utils

import hdtensor
from hdtensor import HDSpec, HDTensor, distribute_tensor
from hdtensor.plan import ExpandedPlan
from tests.support.world import run_world
from tests.training import own_optimizers as own
from tests.training.networks import (
    WORLD_SIZE,
    assert_same_parameters,
    batch_of,
    both_backward,
    loss_of,
    pair,
)


KINDS = {
    "sgd": own.HandSGD,
    "lion": own.Lion,
    "sophia": own.Sophia,
    "lamb": own.Lamb,
    "shampoo": own.Shampoo,
    "adamw": lambda p: own.GroupAdamW(
        [{"params": q, "weight_decay": 0.1 * i, "lr": 0.01 * (i + 1)} for i, q in enumerate(p)]
    ),
    "lookahead": lambda p: own.Lookahead(optim.AdamW(p, lr=0.05)),
    "schedule-free": own.ScheduleFree,
    "centralized": lambda p: own.Centralized(p, lr=0.1, momentum=0.9),
    "normalized": own.Normalized,
    "thresholds": own.Thresholds,
}


def _check_kinds(rank, plan):
    for name, kind in KINDS.items():
        net, reference = pair(plan)
        optimizers = [kind(n.parameters()) for n in (net, reference)]
        for seed in range(3):
            both_backward(net, reference, seed, rel=1e-7)
            for optimizer in optimizers:
                # Identity matrices are plain.
                with hdtensor.implicit_replication() if name == "shampoo" else nullcontext():
                    optimizer.step()
                optimizer.zero_grad(set_to_none=seed != 1)
        assert_same_parameters(net, reference, rtol=1e-7, atol=1e-9)


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("plan", ["rank outside", "tp 3 beside 1"])
def test_own_optimizers(plan):
    run_world(_check_kinds, WORLD_SIZE, plan)


def _check_closures(rank):
    """SAM asks for the loss twice; torch's own pass on what a closure returns."""
    for kind in (own.Sam, lambda p: optim.SGD(p, lr=0.1), lambda p: optim.AdamW(p, foreach=True)):
        net, reference = pair()
        batch = batch_of(0)
        sides = [(net, hdtensor.distribute_batch(net, batch)), (reference, batch)]
        optimizers = [kind(n.parameters()) for n, _ in sides]
        for _ in range(2):
            losses = []
            for (n, data), optimizer in zip(sides, optimizers, strict=True):

                def closure(n=n, data=data, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = loss_of(n, data)
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure))
            assert hdtensor.item(losses[0]) == pytest.approx(losses[1].item(), rel=1e-9)
        assert_same_parameters(net, reference, rtol=1e-7, atol=1e-9)


@pytest.mark.dist(WORLD_SIZE)
def test_closures():
    run_world(_check_closures, WORLD_SIZE)


def _check_groups(rank):
    """Frozen parameters, groups that come later, gradients that are missing on some steps, options that change."""
    for kind in (optim.AdamW, optim.SGD, optim.Adafactor, own.Lamb):
        net, reference = pair()
        optimizers = []
        for n in (net, reference):
            n.embed.weight.requires_grad_(False)
            optimizers.append(kind([{"params": [n.up.weight], "lr": 0.02}, {"params": list(n.down.parameters())}], lr=0.05))  # fmt: skip
        for seed in range(5):
            both_backward(net, reference, seed, rel=1e-7)
            for n, optimizer in zip((net, reference), optimizers, strict=True):
                if seed == 1:
                    optimizer.add_param_group({"params": [*n.norm.parameters(), n.head.weight], "lr": 0.01})  # fmt: skip
                if seed == 2:
                    n.embed.weight.requires_grad_(True)
                    optimizer.add_param_group({"params": n.embed.weight})
                if seed == 3:
                    n.down.bias.grad = n.head.weight.grad = None
                    optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.step()
                optimizer.zero_grad(set_to_none=seed % 2 == 0)
                n.zero_grad(set_to_none=seed % 2 == 0)
        assert_same_parameters(net, reference, rtol=1e-7, atol=1e-9)


@pytest.mark.dist(WORLD_SIZE)
def test_groups():
    run_world(_check_groups, WORLD_SIZE)


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def _normed_plan():
    column, row, whole = map(
        HDSpec.from_text, ("R / 0,1:S0 2:R", "R / 0,1:S1 2:R", "R / 0,1:R 2:R")
    )
    names = {
        "first.weight": column,
        "first.bias": column,
        "norm.weight": column,
        "norm.bias": column,
    }
    batch = HDSpec.from_text("S0[5:3] / 0,1:R 2:R")
    names |= {"last.weight": row, "last.bias": whole}
    return ExpandedPlan(tensors=names, inputs=batch, labels=batch)


def _check_averages(rank):
    """EMA and SWA copies, ``foreach`` or a function of one's own, and statistics brought up to date."""
    functions = [
        {},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
        {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        {"avg_fn": lambda a, p, n: a + (p - a) / (n + 2), "use_buffers": True},
    ]
    data = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    for options in functions:
        torch.manual_seed(1)
        plain = _Normed().double()
        ours = hdtensor.parallelize(copy.deepcopy(plain), _normed_plan())
        averages = []
        for net in (plain, ours):
            batches = data if net is plain else [distribute_tensor(x, "S0[5:3] / 0,1:R 2:R") for x in data]  # fmt: skip
            average = swa_utils.AveragedModel(net, **options)
            optimizer = optim.SGD(net.parameters(), lr=0.1)
            for x in batches:
                loss = net(x).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(net)
            swa_utils.update_bn(batches, average)
            averages.append(average.state_dict())
        assert sorted(averages[0]) == sorted(averages[1])
        for name, value in hdtensor.full_state_dict(averages[1]).items():
            torch.testing.assert_close(value, averages[0][name], msg=lambda t, n=name: n + t)


@pytest.mark.dist(WORLD_SIZE)
def test_averages():
    run_world(_check_averages, WORLD_SIZE)


def _check_scaler(rank):
    """An infinity in one element of one subgroup: all ranks skip the step, and the scale falls alike."""
    full = torch.ones(8, 6)
    for where in (0, 7):  # the first subgroup's rows, the second's
        scales, values = [], []
        for spec in ("S0[3:1] / 0,1:S1 2:R", None):
            p = nn.Parameter(full.clone() if spec is None else distribute_tensor(full, spec))
            optimizer = optim.AdamW([p], lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
            for step in range(3):
                grad = full * 8
                if step == 1:
                    grad[where, 5] = float("inf")
                p.grad = grad if spec is None else distribute_tensor(grad, spec)
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
            values.append(p.detach() if spec is None else p.detach().full_tensor())
        assert scales[0] == scales[1]
        torch.testing.assert_close(*values)


@pytest.mark.dist(WORLD_SIZE)
def test_a_scaler_and_an_infinity_in_one_subgroup():
    run_world(_check_scaler, WORLD_SIZE)


#: Rprop's boolean index reads a scalar, and moves parts of what is empty.
REFUSED = {("scalar", optim.Rprop), ("empty", optim.Rprop)}


def _check_kinds_of_parameters(rank):
    """Complex, scalar and empty parameters; ``maximize``, ``capturable`` and ``fused`` are as in torch."""
    values = {
        "complex": (torch.randn(4, 6, dtype=torch.complex128), "S0[3:1] / 0,1:S1 2:R"),
        "scalar": (torch.randn((), dtype=torch.float64), "R / 0,1:R 2:R"),
        "one": (torch.randn(1, dtype=torch.float64), "R / 2:R"),
        "empty": (torch.randn(0, 3, dtype=torch.float64), "S0 / 0:R 1:R"),
    }
    kinds = [
        (optim.SGD, {"momentum": 0.9, "maximize": True}),
        (optim.SGD, {"momentum": 0.9, "foreach": True, "nesterov": True}),
        (optim.AdamW, {"maximize": True, "foreach": True}),
        (optim.AdamW, {"amsgrad": True, "foreach": False}),
        (optim.Adam, {"weight_decay": 0.1}),
        (optim.RMSprop, {"centered": True}),
        (optim.Adagrad, {"maximize": True}),
        (optim.Adadelta, {"foreach": True}),
        (optim.RAdam, {}),
        (optim.NAdam, {"foreach": True}),
        (optim.Rprop, {}),
        (optim.ASGD, {}),
        (optim.Adamax, {}),
    ]
    for kind, options in kinds:
        for name, (full, spec) in values.items():
            if (name, kind) in REFUSED:
                continue
            found = []
            for p in (nn.Parameter(full.clone()), nn.Parameter(distribute_tensor(full, spec))):
                optimizer = kind([p], lr=0.1, **options)
                for step in range(3):
                    p.grad = p.detach().sin() + step
                    optimizer.step()
                found.append(p.detach().full_tensor() if isinstance(p, HDTensor) else p.detach())
            torch.testing.assert_close(*found, msg=lambda t, k=(kind, options, name): f"{k} {t}")


@pytest.mark.dist(WORLD_SIZE)
def test_kinds_of_parameters():
    run_world(_check_kinds_of_parameters, WORLD_SIZE)


def _check_plain_states(rank):
    """A state of one device goes into cut parameters' optimizer at its next step, and whole ones go back."""
    for kind in (optim.AdamW, optim.SGD, optim.Adafactor, own.Lamb, own.HandSGD):
        options = {"lr": 0.05} if kind is not optim.SGD else {"lr": 0.05, "momentum": 0.9}
        net, reference = pair()
        ours, theirs = (kind(n.parameters(), **options) for n in (net, reference))
        before = reference
        for seed in range(2):
            loss_of(before, batch_of(seed)).backward()
            theirs.step()
            theirs.zero_grad()
        with hdtensor.implicit_replication():
            net.load_state_dict(reference.state_dict())
        ours.load_state_dict(pickle.loads(pickle.dumps(theirs.state_dict())))
        for seed in range(2, 4):
            both_backward(net, reference, seed, rel=1e-7)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(net, reference, rtol=1e-7, atol=1e-9)
        whole = hdtensor.full_state_dict(ours.state_dict())
        again = kind(reference.parameters(), **options)
        again.load_state_dict(copy.deepcopy(whole))  # torch shares the numbers of steps
        for optimizer in (ours, again):
            both_backward(net, reference, 9, rel=1e-7) if optimizer is ours else None
            optimizer.step()
        assert_same_parameters(net, reference, rtol=1e-7, atol=1e-9)


@pytest.mark.dist(WORLD_SIZE)
def test_states_of_one_device():
    run_world(_check_plain_states, WORLD_SIZE)


def _check_copies(rank):
    """Copies and pickles of an optimizer step as those of one device do."""
    for kind in (optim.AdamW, optim.Muon, optim.Adafactor, own.Centralized):
        found = []
        for cut in (True, False):
            full = torch.randn(
                4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
            )
            p = nn.Parameter(distribute_tensor(full, "R / 0,1:S1 2:R") if cut else full)
            optimizer = kind([p], lr=0.1)
            for change in (lambda o: o, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
                optimizer = change(optimizer)
                (q,) = optimizer.param_groups[0]["params"]
                q.grad = q.detach().sin()
                optimizer.step()
            found.append(q.detach().full_tensor() if cut else q.detach())
        far = {"rtol": 1e-2, "atol": 1e-2} if kind is optim.Muon else {}
        torch.testing.assert_close(*found, **far)


@pytest.mark.dist(WORLD_SIZE)
def test_copies_of_optimizers():
    run_world(_check_copies, WORLD_SIZE)


def _check_hooks(rank):
    """A step in a hook of each parameter: gradients come home after backward, so it says where to step instead."""
    net, _ = pair()
    optimizers = {p: optim.SGD([p], lr=0.1) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda q: optimizers[q].step())
    data = hdtensor.distribute_batch(net, batch_of(0))
    with pytest.raises(hdtensor.HDTensorError, match="redistribute"):
        loss_of(net, data).backward()


@pytest.mark.dist(WORLD_SIZE)
def test_a_step_inside_backward():
    run_world(_check_hooks, WORLD_SIZE)
