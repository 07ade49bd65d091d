"""A model under a runner goes to another plan: the next runner goes on as one device would."""

import pytest
import torch

import hdtensor as hd
from hdtensor.api.regions import Region
from hdtensor.errors import PlanError
from hdtensor.pipeline import Runner
from tests.pipeline.training import batch, llama, plan
from tests.support.world import run_world


def _train(runner, optimizer, reference, expected, steps):
    for step in steps:
        loss, out = runner.step(batch(step)), reference(**batch(step)).loss
        out.backward()
        torch.testing.assert_close(loss, out.detach(), rtol=1e-4, atol=1e-5)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    for (name, p), q in zip(
        reference.named_parameters(), runner.optimizer_parameters(), strict=True
    ):
        torch.testing.assert_close(q.detach().full_tensor(), p, rtol=1e-3, atol=1e-4, msg=name)


SCHEDULES = {"unlike": "1f1b", "v": "zbv", "interleaved": "interleaved1f1b", "one lane": "gpipe"}


def _check_switches(rank, zero, names):
    model, reference = llama(tied=True), llama(tied=True)
    runner = Runner(model, plan(names[0], zero), schedule=SCHEDULES[names[0]])
    optimizer = torch.optim.AdamW(runner.optimizer_parameters(), lr=1e-2, eps=1e-3)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    _train(runner, optimizer, reference, expected, range(2))
    for number, name in enumerate(names[1:], 1):
        hd.switch(model, plan(name, zero), optimizer)
        with pytest.raises(PlanError, match=r"switched to another plan .* Make a new one"):
            runner.step(batch())
        runner = Runner(
            model, plan(name, zero), schedule=SCHEDULES[name], activation_checkpointing=number == 1
        )
        _train(runner, optimizer, reference, expected, range(2 * number, 2 * number + 2))
    forwards = [m.forward for m in model.modules() if isinstance(m.forward, Region)]
    assert not any(isinstance(region.forward, Region) for region in forwards)
    held = sum(
        s.to_local().numel()
        for state in optimizer.state.values()
        for s in state.values()
        if isinstance(s, hd.HDTensor)
    )
    due = sum(2 * p.to_local().numel() for p in runner.optimizer_parameters())
    assert held == due
    with pytest.raises(PlanError, match=r"zero 0 and of zero 1|zero 1 and of zero 0"):
        hd.switch(model, plan(names[0], 1 - zero), optimizer)


@pytest.mark.dist(5)
@pytest.mark.parametrize(
    ("zero", "names"), [(0, ["unlike", "v"]), (1, ["unlike", "v", "one lane"])]
)
def test_a_switched_model_trains_on_as_one_device(zero, names):
    run_world(_check_switches, 5, zero, names)


def _check_other_plan(rank):
    model = llama()
    Runner(model, plan("unlike"))
    with pytest.raises(PlanError, match=r"parallelized by another plan.*hdtensor.switch"):
        Runner(model, plan("v"))
    Runner(model, plan("unlike"), num_microbatches=2).step(batch())


@pytest.mark.dist(5)
def test_a_runner_is_for_the_plan_that_its_model_has():
    run_world(_check_other_plan, 5)
