"""Steps of optimizers that would train without an error, but not the model, or on a part of the gradients."""

import pytest
import torch

import hdtensor
from hdtensor import HDSpec
from hdtensor.errors import HDTensorError
from hdtensor.plan import ExpandedPlan
from tests.models.hf import strategy
from tests.support.world import run_world
from tests.training.networks import (
    WORLD_SIZE,
    Net,
    assert_same_parameters,
    both_backward,
    pair,
)


def _said(call):
    try:
        call()
    except HDTensorError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _step_too_early(rank, num_steps):
    net, reference = pair()
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, reference)]
    for seed in range(num_steps):
        both_backward(net, reference, seed)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    with hdtensor.no_sync(net):
        both_backward(net, reference, 7)
    said = (
        _said(optimizers[0].step),
        _said(lambda: hdtensor.clip_grad_norm_(net.parameters(), 1.0)),
    )
    hdtensor.sync_gradients(net)
    for optimizer in optimizers:
        optimizer.step(), optimizer.zero_grad()
    assert_same_parameters(net, reference)
    with hdtensor.no_sync(net):
        both_backward(net, reference, 8)
    for optimizer in optimizers:
        optimizer.zero_grad()
    optimizers[0].step()  # nothing is there to step on
    return said


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("num_steps", [0, 4])
def test_a_step_on_gradients_that_are_not_summed_is_an_error_on_every_rank(num_steps):
    for step, clip in run_world(_step_too_early, WORLD_SIZE, num_steps):
        assert "DeductionError: AdamW.step" in step
        assert "the last backward was inside of no_sync" in step
        for said in (step, clip):
            assert "hdtensor.sync_gradients(model)" in said


def _step_on_one_subgroup(rank):
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Net().double())
    net, reference = nets
    whole = HDSpec.from_text("R / 0,1:R")
    tensors = {name: whole for name, _ in net.named_parameters()}
    hdtensor.parallelize(net, ExpandedPlan(tensors=tensors, inputs=whole, labels=whole))
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, reference)]
    for seed in range(4):
        with hdtensor.no_sync(net):
            both_backward(net, reference, seed)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    assert_same_parameters(net, reference)


@pytest.mark.dist(WORLD_SIZE)
def test_one_subgroup_has_nothing_to_sum():
    run_world(_step_on_one_subgroup, WORLD_SIZE)


def _make_early(rank):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    other = torch.nn.Linear(4, 4)
    early = torch.optim.SGD([*other.parameters(), *model[1].parameters()], lr=0.1)
    hdtensor.parallelize(model, strategy(([0, 1], 3), ([2], 1)))
    x = hdtensor.distribute_batch(model, torch.ones(8, 4))
    model(x).square().sum().backward()
    kept = [p.detach() for p in (*other.parameters(), *model.parameters())]
    locals_ = [p.to_local() if isinstance(p, hdtensor.HDTensor) else p for p in kept]
    before = [p.clone() for p in locals_]
    other(torch.ones(4)).sum().backward()
    said = _said(early.step)
    assert all(map(torch.equal, locals_, before))
    torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1).step()
    assert not torch.equal(other.weight, before[0])
    return said


@pytest.mark.dist(WORLD_SIZE)
def test_an_optimizer_of_replaced_parameters_is_an_error_on_every_rank():
    said = run_world(_make_early, WORLD_SIZE)
    assert len(set(said)) == 1
    assert "this SGD was made before parallelize, which replaced 2 of its parameters" in said[0]
    assert "'1.weight' the first" in said[0]
    assert "after hdtensor.parallelize(model, plan)" in said[0]


def _leave_behind(rank):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    hdtensor.parallelize(model, strategy(([0, 1], 3), ([2], 1)), src_data_rank=0)
    optimizers = [make(model.parameters()) for make in (torch.optim.AdamW, torch.optim.SGD)]

    def step(*chosen):
        x = hdtensor.distribute_batch(model, torch.ones(8, 4))
        model(x).square().sum().backward()
        for optimizer in chosen:
            optimizer.step()

    step(*optimizers)
    hdtensor.switch(model, strategy(([3], 1), ([1, 2], 1)), optimizers[1])
    said = _said(lambda: step(optimizers[0])), _said(lambda: step(optimizers[0]))
    step(optimizers[1])
    optimizers[0].state.clear()
    step(*optimizers)
    hdtensor.switch(model, strategy(([0], 1)), optimizers)
    step(*optimizers)
    return said


@pytest.mark.dist(WORLD_SIZE)
def test_a_state_that_a_switch_left_behind_is_an_error_on_every_rank():
    said = run_world(_leave_behind, WORLD_SIZE)
    assert len({text for texts in said for text in texts}) == 1
    assert "the states of this AdamW stayed behind when hdtensor.switch moved its" in said[0][0]
    assert "'exp_avg' is R / 0,1:R 2:R, its parameter R / 3:R 1,2:R" in said[0][0]
