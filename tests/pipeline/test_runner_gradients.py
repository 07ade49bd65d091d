"""Accumulation over steps, low precision, loss scaling, the model's own loss: gradients of one device."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import hdtensor as hd
from hdtensor.errors import PlanError
from hdtensor.pipeline import Runner
from tests.pipeline import tiny
from tests.support.world import run_world


def _check_accumulation(rank):
    runner, reference = tiny.runner_and_reference(tiny.unlike())
    first, second, third = tiny.batch(seed=1), tiny.batch(5, 9, seed=2), tiny.batch(3, 4, seed=3)
    losses = [runner.step(first, sync=False)]
    assert all(p.grad is None for p in runner.model.parameters())
    with hd.no_sync(runner.model):
        losses.append(runner.step(second))
    losses.append(runner.step(third))
    for loss, one in zip(losses, (first, second, third), strict=True):
        torch.testing.assert_close(loss, tiny.one_device(tiny.llama(), one), rtol=1e-5, atol=1e-6)
    tiny.one_device(reference, first, second, third)
    tiny.assert_same_gradients(runner.model, reference)
    # What steps left in their stages may be forgotten, or be summed without a further step.
    runner.step(first, sync=False)
    runner.drop_gradients()
    runner.step(second, sync=False)
    runner.step(third, sync=False)
    runner.sync_gradients()
    tiny.one_device(reference, second, third)
    tiny.assert_same_gradients(runner.model, reference)
    # So do the syncs of several steps: gradients add up as after several backwards.
    runner.step(first)
    tiny.one_device(reference, first)
    tiny.assert_same_gradients(runner.model, reference)


@pytest.mark.dist(4)
def test_steps_without_sync_are_divided_by_all_that_counts():
    run_world(_check_accumulation, 4)


def _check_bfloat16(rank, schedule):
    whole = tiny.batch(32, 6)
    the_plan = tiny.plan(
        ([tiny.stage([0], 0, 1), tiny.stage([1], 2, 2)], 24, 1), ([tiny.stage([3], 0, 2)], 8, 1)
    )
    runner = Runner(tiny.llama().to(torch.bfloat16), the_plan, schedule=schedule)
    rounding = Runner(
        tiny.llama().to(torch.bfloat16), the_plan, schedule=schedule, gradient_dtype=None
    )
    reference = tiny.llama().to(torch.bfloat16)
    # One device, one sample at a time, adding in float32 what bfloat16 calls give.
    sums = [torch.zeros(p.shape) for p in reference.parameters()]
    for row in range(32):
        one = {name: t[row : row + 1] for name, t in whole.items()}
        reference.zero_grad()
        logits = reference(input_ids=one["input_ids"]).logits[:, :-1].flatten(0, 1).float()
        torch.nn.functional.cross_entropy(
            logits, one["labels"][:, 1:].flatten(), reduction="sum"
        ).backward()
        for total, p in zip(sums, reference.parameters(), strict=True):
            total += p.grad.float()
    count = int((whole["labels"][:, 1:] != -100).sum())
    for _ in range(3):  # op by op, checked, as regions
        runner.model.zero_grad()
        runner.step(whole)
    rounding.step(whole)
    errors = [0.0, 0.0]
    for total, *both in zip(
        sums, runner.model.parameters(), rounding.model.parameters(), strict=True
    ):
        for i, p in enumerate(both):
            assert p.grad.dtype == torch.bfloat16
            exact = total / count
            errors[i] = max(
                errors[i], ((hd.full_tensor(p.grad).float() - exact).norm() / exact.norm()).item()
            )
    assert errors[0] < 0.006  # a rounding of the sum, and the ranks' own order inside a stage
    assert errors[1] > 2 * errors[0]  # a rounding of every sum of two


@pytest.mark.dist(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_bfloat16_parameters_add_up_in_float32(schedule):
    run_world(_check_bfloat16, 4, schedule)


def _check_scaler(rank):
    whole, reference = tiny.batch(), tiny.llama()
    runner = Runner(tiny.llama(), tiny.pairs())
    optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scale = scaler.scale(torch.ones(())).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = runner.step(whole, loss_scale=scale)
        expected = tiny.one_device(reference, whole)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-3)
    scaler.unscale_(optimizer)
    tiny.assert_same_gradients(runner.model, reference, rtol=3e-2, atol=3e-3)
    before = [hd.full_tensor(p.detach()) for p in runner.model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    for p, old, q in zip(runner.model.parameters(), before, reference.parameters(), strict=True):
        torch.testing.assert_close(
            hd.full_tensor(p.detach()), old - 0.1 * q.grad, rtol=1e-2, atol=1e-3
        )
    # A scale that overflows: every rank skips the step and lowers the scale.
    optimizer.zero_grad()
    runner.step(whole, loss_scale=float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0


@pytest.mark.dist(4)
def test_autocast_and_loss_scaling():
    run_world(_check_scaler, 4)


def _check_own_loss(rank):
    whole, reference = tiny.batch(), tiny.llama()
    runner = Runner(tiny.llama(), tiny.unlike(), None)
    torch.testing.assert_close(
        runner.step(whole), tiny.one_device(reference, whole), rtol=1e-5, atol=1e-6
    )
    tiny.assert_same_gradients(runner.model, reference)
    with pytest.raises(PlanError, match="loss_fn=None takes the model's own loss"):
        Runner(torch.nn.Linear(2, 2), tiny.unlike(), None)


@pytest.mark.dist(4)
def test_a_model_s_own_loss_is_summed():
    run_world(_check_own_loss, 4)


def mixtral():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {"num_key_value_heads": 2, "vocab_size": tiny.VOCABULARY, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes))


def _check_experts(rank):
    whole, reference = tiny.batch(), mixtral()
    the_plan = tiny.plan(
        ([tiny.stage([0], 0, 0), tiny.stage([1], 1, 1)], 3, 1), ([tiny.stage([2], 0, 1)], 2, 2)
    )
    runner = Runner(mixtral(), the_plan)
    torch.testing.assert_close(
        runner.step(whole), tiny.one_device(reference, whole), rtol=1e-5, atol=1e-6
    )
    tiny.assert_same_gradients(runner.model, reference)
    with pytest.raises(PlanError, match="no sum over micro-batches"):
        runner.step({**whole, "output_router_logits": True})
    runner.model.config.output_router_logits = True
    with pytest.raises(PlanError, match="no sum over micro-batches"):
        runner.step(whole)


@pytest.mark.dist(4)
def test_experts_train_and_their_auxiliary_loss_is_refused():
    run_world(_check_experts, 4)
