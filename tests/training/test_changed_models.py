"""Models that are changed after ``parallelize``: parametrizations, other dtypes, copies, averages, loaded weights."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import hdtensor
from hdtensor import PlanError
from tests.support.world import run_world
from tests.training.networks import (
    PLANS,
    WORLD_SIZE,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    both_backward,
    loss_of,
    pair,
)


STEPS = 4  # enough for modules to run as regions


class Doubled(nn.Module):
    """Twice what is stored: a parametrization with an inverse, which replaces the stored value."""

    def forward(self, stored):
        return stored * 2 + stored.sin()

    def right_inverse(self, value):
        return value / 2


def steps(net, reference, optimizers=None, first=0, **tolerance):
    ours, theirs = optimizers or [torch.optim.AdamW(n.parameters(), 0.05) for n in (net, reference)]
    for seed in range(first, first + STEPS):
        both_backward(net, reference, seed, rel=tolerance.get("rtol", 1e-11))
        assert_same_gradients(net, reference, **tolerance)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(net, reference, **tolerance)


def _doubled(net):
    parametrize.register_parametrization(net.up, "weight", Doubled(), unsafe=True)


PARAMETRIZED = {
    "own": _doubled,
    "weight_norm": lambda net: parametrizations.weight_norm(net.up),
    "weight_norm of rows": lambda net: parametrizations.weight_norm(net.head),
}


def _check_parametrized(rank, when):
    for change in PARAMETRIZED.values():
        if when == "before":
            steps(*pair(prepare=change))
            continue
        net, reference = pair()
        both_backward(net, reference)  # what runs as a whole was learnt without it
        net.zero_grad()
        reference.zero_grad()
        change(net)
        change(reference)
        steps(net, reference)


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrizations(when):
    run_world(_check_parametrized, WORLD_SIZE, when)


def _spectral(rank, name):
    net, _ = pair(name)
    torch.manual_seed(3)
    parametrizations.spectral_norm(net.down)
    losses = []
    for seed in range(2):
        loss = loss_of(net, hdtensor.distribute_batch(net, batch_of(seed)))
        loss.backward()
        assert all(p.grad is None or p.grad.spec is p.spec for p in net.parameters())
        losses.append(hdtensor.item(loss))
    largest = torch.linalg.matrix_norm(net.down.weight.detach().full_tensor(), 2).item()
    assert largest == pytest.approx(1, abs=0.02)
    return losses


def _check_spectral_before(rank):
    def normalize(net):
        parametrizations.spectral_norm(net.up)
        parametrizations.spectral_norm(net.down)

    for name in PLANS:
        net, reference = pair(name, prepare=normalize)
        for seed in range(3):
            both_backward(net, reference, seed)
            assert_same_gradients(net, reference)
        for module in (net, reference):
            module.eval()
        both_backward(net, reference, 7)
        assert_same_gradients(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_spectral_norm_before_parallelize():
    run_world(_check_spectral_before, WORLD_SIZE)


@pytest.mark.dist(WORLD_SIZE)
def test_spectral_norm_is_the_same_under_every_plan():
    found = [run_world(_spectral, WORLD_SIZE, name) for name in ("rank outside", "tp 3 beside 1")]
    for losses in (ranks for plan in found for ranks in plan):
        assert losses == pytest.approx(found[0][0], rel=1e-10)


def _check_dtype(rank):
    net, reference = pair()
    steps(net, reference)
    for module in (net, reference):
        module.to(torch.float32)
    steps(net, reference, first=10, rtol=1e-3, atol=1e-4)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    # What is swapped into a parameter by hand is watched too.
    net, reference = pair()
    both_backward(net, reference)
    for module in (net, reference):
        module.zero_grad()
        other = nn.Parameter(module.up.weight.detach() * 2)
        torch.utils.swap_tensors(module.up.weight, other)
    steps(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_other_dtypes_and_swapped_tensors():
    run_world(_check_dtype, WORLD_SIZE)


def _check_copy(rank):
    net, reference = pair()
    steps(net, reference)
    holder, other = nn.ModuleDict({"net": net}), copy.deepcopy(reference)
    twin = copy.deepcopy(holder)["net"]
    twin_of_twin = copy.deepcopy(twin)
    steps(net, reference, first=10)  # the original goes on
    steps(twin, other, first=20)  # the copy starts from where it was made
    assert all(p.grad is None for p in net.parameters())
    other = copy.deepcopy(pair()[1])
    other.load_state_dict({k: v.full_tensor() for k, v in twin_of_twin.state_dict().items()})
    with hdtensor.no_sync(twin_of_twin):  # each copy has its own
        both_backward(twin_of_twin, other)
        both_backward(net, reference)
    assert_same_gradients(net, reference)
    hdtensor.sync_gradients(twin_of_twin)
    assert_same_gradients(twin_of_twin, other)


@pytest.mark.dist(WORLD_SIZE)
def test_copies():
    run_world(_check_copy, WORLD_SIZE)


def _check_no_copy(rank):
    net, _ = pair()
    found = []

    def copy_inside(module, args):
        with pytest.raises(PlanError, match="running"):
            copy.deepcopy(net)
        found.append(True)

    handle = net.up.register_forward_pre_hook(copy_inside)
    batch = hdtensor.distribute_batch(net, batch_of(0))
    before = hdtensor.item(loss_of(net, batch))
    handle.remove()
    assert found
    assert hdtensor.item(loss_of(net, batch)) == before
    net.forward = lambda ids: ids
    with pytest.raises(PlanError, match="replaced"):
        copy.deepcopy(net)


@pytest.mark.dist(WORLD_SIZE)
def test_what_cannot_be_copied():
    run_world(_check_no_copy, WORLD_SIZE)


def _check_average(rank):
    net, reference = pair()
    average = [
        AveragedModel(n, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for n in (net, reference)
    ]
    plain_average = [AveragedModel(n) for n in (net, reference)]
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, reference)]
    schedulers = [SWALR(o, swa_lr=0.05, anneal_epochs=2) for o in optimizers]
    for round_ in range(2):
        steps(net, reference, optimizers, first=10 * round_)
        for averaged in (average, plain_average):
            for a, n in zip(averaged, (net, reference), strict=True):
                a.update_parameters(n)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_parameters(average[0].module, average[1].module)
    assert_same_parameters(plain_average[0].module, plain_average[1].module)
    both_backward(*average_modules(average))


def average_modules(averaged):
    return [a.module for a in averaged]


@pytest.mark.dist(WORLD_SIZE)
def test_averaged_models():
    run_world(_check_average, WORLD_SIZE)


def _check_state(rank):
    for assign in (False, True):
        net, reference = pair()
        optimizers = [torch.optim.AdamW(n.parameters(), 0.05) for n in (net, reference)]
        steps(net, reference, optimizers)
        file = io.BytesIO()
        torch.save([net.state_dict(), optimizers[0].state_dict()], file)
        file.seek(0)
        model_state, optimizer_state = torch.load(file, weights_only=True)
        again, _ = pair()
        both_backward(again, pair()[1])
        again.zero_grad()
        again.load_state_dict(model_state, assign=assign)
        optimizer = torch.optim.AdamW(again.parameters(), 0.3)
        optimizer.load_state_dict(optimizer_state)
        steps(again, reference, [optimizer, optimizers[1]], first=10)


@pytest.mark.dist(WORLD_SIZE)
def test_saved_and_loaded():
    run_world(_check_state, WORLD_SIZE)
