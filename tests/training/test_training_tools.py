"""PyTorch's training tools over mixed subgroups equal one device: precision, checkpoints, hooks, schedules, functions."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import hdtensor
from hdtensor import distribute_tensor
from tests.support.world import run_world
from tests.training.networks import (
    PLANS,
    WORLD_SIZE,
    Net,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    both_backward,
    both_losses,
    loss_of,
    pair,
    plan_of,
)


def _autocast_loss(net, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(batch["ids"])
        assert logits.dtype == torch.bfloat16
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def _check_autocast(rank):
    net, reference = pair(dtype=torch.float32)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, reference)]
    for seed in range(4):
        both_backward(net, reference, seed, _autocast_loss, rel=2e-3)
        assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
        assert_same_gradients(net, reference, rtol=2e-2, atol=5e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    both_backward(net, reference, 9, rel=2e-3)  # without it the same modules run in float32 again
    assert net(hdtensor.distribute_batch(net, batch_of(0))["ids"]).dtype == torch.float32


@pytest.mark.dist(WORLD_SIZE)
def test_autocast_with_master_weights():
    run_world(_check_autocast, WORLD_SIZE)


def _check_scaler(rank):
    net, reference = pair()
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.05) for n in (net, reference)]
    for seed in range(3):
        losses = both_losses(net, reference, seed)
        for loss, scaler in zip(losses, scalers, strict=True):
            scaler.scale(loss).backward()
        if seed == 1:  # one element on one rank: all ranks skip the step
            broken = torch.zeros_like(reference.up.weight)
            broken[0, 0] = float("inf")
            reference.up.weight.grad.add_(broken)
            spec = net.up.weight.spec
            net.up.weight.grad.add_(distribute_tensor(broken, spec, src_data_rank=None))
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
        hdtensor.clip_grad_norm_(net.parameters(), 0.5)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (256.0 if seed < 1 else 128.0)
        assert_same_parameters(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_grad_scaler():
    run_world(_check_scaler, WORLD_SIZE)


def _repeat(reentrant):
    return functools.partial(checkpoint, use_reentrant=reentrant)


def _check_checkpoint(rank):
    for reentrant in (False, True):
        net, reference = pair(repeat=_repeat(reentrant))
        for seed in range(4):
            both_backward(net, reference, seed)
            assert_same_gradients(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_checkpoints():
    run_world(_check_checkpoint, WORLD_SIZE)


def _dropped(rank, name):
    """Losses and gradient norms with dropout, without and with recomputation."""
    found = []
    for repeat in (None, _repeat(False), _repeat(True)):
        net, _ = pair(name, dropout=0.4, repeat=repeat)
        torch.manual_seed(5)
        for seed in range(2):
            loss = loss_of(net, hdtensor.distribute_batch(net, batch_of(seed)))
            loss.backward()
            norm = hdtensor.get_total_norm([p.grad for p in net.parameters()]).item()
            found.append([hdtensor.item(loss), norm])
    return found


@pytest.mark.dist(WORLD_SIZE)
def test_dropout_is_the_same_under_every_plan_and_when_recomputed():
    found = [run_world(_dropped, WORLD_SIZE, name) for name in PLANS]
    first = found[0][0]
    assert first[0] != first[1]
    for values in (ranks for plan in found for ranks in plan):
        for value, want in zip(values, first[:2] * 3, strict=True):
            assert value == pytest.approx(want, rel=1e-10)


def _initialized(rank, name):
    with torch.device("meta"):
        net = Net()
    torch.manual_seed(7)
    hdtensor.parallelize(net, plan_of(name, net))
    return [p.detach().full_tensor().tolist() for p in net.parameters()]


@pytest.mark.dist(WORLD_SIZE)
def test_meta_initialization_is_the_same_under_every_plan():
    found = [run_world(_initialized, WORLD_SIZE, name) for name in PLANS]
    assert all(values == found[0][0] for plan in found for values in plan)
    assert len({v for row in found[0][0][0] for v in row}) > 80  # no shard repeats another


def _check_hooks(rank):
    net, reference = pair()
    logs = ([], [])
    for module, log in zip((net, reference), logs, strict=True):
        for name, inner in list(module.named_modules())[1:]:
            inner.register_forward_pre_hook(lambda m, a, log=log, name=name: log.append(name))
            inner.register_forward_hook(lambda m, a, out: out * 1.5)
            if name != "embed":  # its inputs have no gradients, of which torch warns
                inner.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))
                inner.register_full_backward_hook(
                    lambda m, gi, go, log=log, name=name: log.append((name, tuple(go[0].shape)))
                )
        module.up.weight.register_hook(lambda grad: grad * 3)
        module.down.bias.register_post_accumulate_grad_hook(lambda p, log=log: log.append("down"))
    for seed in range(3):
        both_backward(net, reference, seed)
        assert_same_gradients(net, reference)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 30


@pytest.mark.dist(WORLD_SIZE)
def test_hooks():
    run_world(_check_hooks, WORLD_SIZE)


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [1]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def _check_schedules(rank):
    net, reference = pair()
    for make in SCHEDULES.values():
        optimizers = [torch.optim.SGD(n.parameters(), 0.05, momentum=0.9) for n in (net, reference)]
        schedules = [make(o) for o in optimizers]
        for seed in range(2):
            both_backward(net, reference, seed)
            metric = [1.0] if isinstance(schedules[0], lr_scheduler.ReduceLROnPlateau) else []
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step(*metric)
        assert_same_parameters(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_learning_rate_schedules():
    run_world(_check_schedules, WORLD_SIZE)


def _penalty(x, w):
    (grad,) = torch.autograd.grad((x @ w).tanh().square().sum(), x, create_graph=True)
    return grad.square().sum()


def _whole(t):
    return t.detach().full_tensor() if isinstance(t, hdtensor.HDTensor) else t.detach()


def _check_functions(rank):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    plain = (x, w[:6])
    specs = ("S0[3:1] / 0,1:R 2:R", "R / 0,1:S1 2:R")
    ours = tuple(distribute_tensor(t, s) for t, s in zip(plain, specs, strict=True))
    func = torch.func
    calls = {
        "grad": lambda x, w: func.grad(lambda x: (x @ w).tanh().square().sum())(x),
        "vjp": lambda x, w: func.vjp(lambda x: (x @ w).tanh(), x)[1](torch.ones_like(x))[0],
        "vmap": lambda x, w: func.vmap(lambda row: (row @ w).tanh())(x),
        "jvp": lambda x, w: func.jvp(lambda x: (x * x).tanh(), (x,), (torch.ones_like(x),))[1],
    }
    for name, call in calls.items():
        torch.testing.assert_close(
            _whole(call(*ours)), call(*plain), msg=lambda t, name=name: name + t
        )
    leaves = [tuple(t.detach().requires_grad_() for t in pair_) for pair_ in (ours, plain)]
    for pair_ in leaves:
        _penalty(*pair_).backward()
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(_whole(a.grad), b.grad)
    net, reference = pair()
    losses = []
    for module, batch in (
        (net, hdtensor.distribute_batch(net, batch_of(0))),
        (reference, batch_of(0)),
    ):
        doubled = {name: 2 * p for name, p in module.named_parameters()}
        logits = func.functional_call(module, doubled, (batch["ids"],))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        grads = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        assert all(p.grad is None for p in module.parameters())
        loss.backward()
        losses.append([_whole(g) for g in grads])
    assert_same_gradients(net, reference)
    for a, b in zip(*losses, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.dist(WORLD_SIZE)
def test_functional_transforms_and_double_backward():
    run_world(_check_functions, WORLD_SIZE)


def _check_inference(rank):
    """Operators that are made of others arrive whole in inference_mode."""
    net, reference = pair(dropout=0.5)
    for module in (net, reference):
        module.eval()
    batch = batch_of(0)
    cut = hdtensor.distribute_batch(net, batch)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            logits, want = net(cut["ids"]), reference(batch["ids"])
            torch.testing.assert_close(logits.full_tensor(), want)
            loss, plain = (
                F.cross_entropy(o.flatten(0, 1), b["labels"].flatten())
                for o, b in ((logits, cut), (want, batch))
            )
            assert hdtensor.item(loss) == pytest.approx(plain.item())
    q = torch.randn(4, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for spec in ("S0[3:1] / 0,1:S1 2:R", "R / 0,1:S1 2:R"):
        x = distribute_tensor(q, spec)
        with torch.inference_mode():
            for function in (
                lambda t: F.scaled_dot_product_attention(t, t, t, is_causal=True),
                lambda t: F.mse_loss(t, t * 2),
                lambda t: F.kl_div(t.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
                lambda t: F.cosine_similarity(t, t * 2, -1),
                lambda t: torch.where(t > 0, t, 0.0),
                lambda t: F.dropout(t, 0.5, training=False),
                lambda t: F.alpha_dropout(t, 0.5, training=False),
            ):
                torch.testing.assert_close(function(x).full_tensor(), function(q))
    drawn = []
    for mode in (torch.inference_mode, torch.no_grad):
        torch.manual_seed(3)
        with mode():
            drawn.append(F.dropout(x, 0.5).full_tensor())
    assert torch.equal(*drawn)


@pytest.mark.dist(WORLD_SIZE)
def test_inference_mode():
    run_world(_check_inference, WORLD_SIZE)


def _check_anomalies(rank):
    net, reference = pair()
    with torch.autograd.set_detect_anomaly(True):
        for seed in range(4):
            both_backward(net, reference, seed)
            assert_same_gradients(net, reference)
    x = distribute_tensor(torch.zeros(4, 6), "R / 0-3:S0").requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, with the forward's traceback
        with (
            torch.autograd.set_detect_anomaly(True),
            pytest.raises(RuntimeError, match="nan values"),
        ):
            (x.sqrt() * 0).sum().backward()


@pytest.mark.dist(WORLD_SIZE)
def test_detect_anomaly():
    run_world(_check_anomalies, WORLD_SIZE)


def _check_copy_with_gradients(rank):
    net, reference = pair()
    for seed in range(3):
        both_backward(net, reference, seed)
        twins = copy.deepcopy(net), copy.deepcopy(reference)
        both_backward(*twins, seed=9)
        assert_same_gradients(*twins)
        assert_same_gradients(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_a_copy_has_no_gradients():
    run_world(_check_copy_with_gradients, WORLD_SIZE)
