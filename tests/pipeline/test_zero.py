"""Gradients summed over unlike lanes, and ZeRO-1: the same training as on one device, with optimizer state cut."""

import pytest
import torch

import hdtensor as hd
from hdtensor.pipeline.runtime import Runner
from tests.pipeline.training import batch, llama, plan
from tests.support.world import run_world


def _train(rank, name, zero, tied):
    reference = llama(tied)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    model = llama(tied)
    runner = Runner(model, plan(name, zero))
    optimizer = torch.optim.AdamW(runner.optimizer_parameters(), lr=1e-2, eps=1e-3)
    for step in range(2):
        loss, out = runner.step(batch(step)), reference(**batch(step)).loss
        out.backward()
        torch.testing.assert_close(loss, out.detach(), rtol=1e-5, atol=1e-6)
        for (key, p), q in zip(
            reference.named_parameters(), runner.optimizer_parameters(), strict=True
        ):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-6, msg=key)
        norm = hd.clip_grad_norm_(runner.optimizer_parameters(), 0.5)
        whole = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norm, whole, rtol=1e-5, atol=0)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        for (key, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p, rtol=1e-4, atol=1e-5, msg=key)
    held = sum(
        s.to_local().nbytes
        for state in optimizer.state.values()
        for s in state.values()
        if isinstance(s, hd.HDTensor)
    )
    due = sum(8 * p.numel() / len(p.spec.ranks) for p in model.parameters() if rank in p.spec.ranks)
    return held, due


@pytest.mark.paper("App. C")
@pytest.mark.parametrize(("zero", "tied"), [(0, True), (1, True), (1, False)])
@pytest.mark.dist(5)
def test_training_over_unlike_lanes_is_that_of_one_device(zero, tied):
    for held, due in run_world(_train, 5, "unlike", zero, tied):
        if zero:
            assert held <= due + 8 * 96 * 2  # a part or two of the largest
        else:
            assert held > 1.2 * due


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def _start(name, zero, optimizer="adamw", dtype=torch.float32, **options):
    model = llama(tied=True, dtype=dtype)
    # The first passes of regions may round in another way than later ones.
    runner = Runner(model, plan(name, zero), use_regions=False, **options)
    return model, runner, OPTIMIZERS[optimizer](runner.optimizer_parameters())


def _steps(runner, optimizer, steps):
    losses = []
    for step in steps:
        losses.append(runner.step(batch(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _whole(tensors):
    return [t.detach().full_tensor() for t in tensors]


def _resume(rank, folder, optimizer, dtype, others):
    model, runner, state = _start("unlike", 1, optimizer, dtype)
    _steps(runner, state, range(1))
    hd.save_checkpoint(folder, model, state)
    expected = _steps(runner, state, range(1, 3))
    after = _whole(runner.optimizer_parameters())
    for plan_name, zero in (("unlike", 1), *others):
        other, again, fresh = _start(plan_name, zero, optimizer, dtype)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        hd.load_checkpoint(folder, other, fresh)
        losses = _steps(again, fresh, range(1, 3))
        same = plan_name == "unlike" and zero == 1
        exact = {"rtol": 0.0, "atol": 0.0} if same else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(losses, expected, **exact)
        torch.testing.assert_close(_whole(again.optimizer_parameters()), after, **exact)


@pytest.mark.dist(5)
@pytest.mark.parametrize(
    ("optimizer", "dtype", "others"),
    [
        ("adamw", torch.float32, [("one lane", 1), ("unlike", 0)]),
        ("sgd", torch.float32, []),
        ("adamw", torch.bfloat16, []),
    ],
)
def test_masters_resume(tmp_path, optimizer, dtype, others):
    run_world(_resume, 5, str(tmp_path), optimizer, dtype, others)
