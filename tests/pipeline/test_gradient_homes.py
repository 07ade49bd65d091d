"""How gradients get to what the optimizer updates: buckets, late ones, masters of few bits, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

import hdtensor as hd
from hdtensor.errors import PlanError
from hdtensor.pipeline.runtime import Runner, gradients
from hdtensor.pipeline.runtime.homes import Home, buckets
from tests.pipeline.training import batch, gpt2, llama, plan
from tests.support.world import run_world


def _tied():
    return llama(tied=True)


BUILDS = {"tied": _tied, "llama": llama, "gpt2": gpt2}


def _home(ranks, num_bytes):
    parameter = SimpleNamespace(spec=SimpleNamespace(ranks=ranks))
    return Home(parameter, parameter, None, None, num_bytes)


def test_buckets_hold_gradients_of_the_same_ranks_last_ones_first():
    found = [
        _home(ranks, size)
        for ranks, size in [
            ((0, 2), 3),
            ((1, 2), 9),
            ((0, 2), 5),
            ((1, 2), 4),
            ((2, 1), 3),
            ((1, 2), 4),
        ]
    ]
    number = {id(home): i for i, home in enumerate(found)}
    numbers = [[number[id(home)] for home in bucket] for bucket in buckets(found, 8)]
    assert numbers == [[5, 4, 3], [1], [2, 0]]


def _compare(runner, reference, step):
    runner.step(batch(step))
    reference(**batch(step)).loss.backward()
    for (key, p), q in zip(
        reference.named_parameters(), runner.optimizer_parameters(), strict=True
    ):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-6, msg=key)
        p.grad = q.grad = None


def _in_small_buckets(rank, name, build, schedule):
    runner, reference = Runner(build(), plan(name, 1), schedule=schedule), build()
    gradients.BUCKET_BYTES = 20_000
    early = []
    if rank in {r for lane in runner.lanes for r in lane.ranks}:
        flush = runner._mine.gradients.flush

        def count_early():
            early.append(runner._mine.gradients._num_started)
            return flush()

        runner._mine.gradients.flush = count_early
    for step in range(2):
        _compare(runner, reference, step)
    return early


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("name", "build", "schedule"),
    [
        ("v", "tied", "ZBV"),
        ("interleaved", "llama", "Interleaved1F1B"),
        ("four", "gpt2", "GPipe"),
        ("one stage", "tied", "1F1B"),
    ],
)
def test_buckets_start_during_the_last_backward(name, build, schedule):
    for rank, early in enumerate(run_world(_in_small_buckets, 4, name, BUILDS[build], schedule)):
        # The second parts of ZBV's backwards come at its end.
        if schedule != "ZBV" and early:
            assert early[-1] >= 2, (rank, early)


def _late(rank, zero):
    runner, reference = Runner(_tied(), plan("unlike", zero)), _tied()
    _compare(runner, reference, 0)
    if rank in (1, 4):  # these take every gradient for its leaf's last
        runner._mine.gradients._is_done = lambda leaf: True
        runner._mine.gradients._parameters.shared = set()
    _compare(runner, reference, 1)


@pytest.mark.dist(5)
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_after_their_bucket_had_gone_count(zero):
    run_world(_late, 5, zero)


def _few_bits(rank):
    model = llama(dtype=torch.bfloat16)
    runner = Runner(model, plan("four", 1))
    masters = runner.optimizer_parameters()
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    reference = llama()
    whole = [p.detach().full_tensor().requires_grad_() for p in masters]
    expected = torch.optim.AdamW(whole, lr=1e-2)
    for step in range(2):
        runner.step(batch(step))
        assert {m.grad.dtype for m in masters} == {torch.float32}
        for w, m in zip(whole, masters, strict=True):
            w.grad = m.grad.full_tensor()
        if step == 0:
            reference(**batch(step)).loss.backward()
            for p, w in zip(reference.parameters(), whole, strict=True):
                assert torch.cosine_similarity(p.grad.view(-1), w.grad.view(-1), dim=0) > 0.99
        optimizer.step()
        expected.step()
        for p, m, w in zip(model.parameters(), masters, whole, strict=True):
            torch.testing.assert_close(m.detach().full_tensor(), w.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(p.full_tensor(), m.full_tensor().bfloat16())
        optimizer.zero_grad()
    with torch.no_grad():  # what is written to a parameter counts
        for p in model.parameters():
            p.fill_(0.5)
    runner.step(batch(0))
    for m in masters:
        assert bool((m.full_tensor() == 0.5).all())


@pytest.mark.dist(4)
def test_masters_of_parameters_with_few_bits():
    run_world(_few_bits, 4)


def _refused(rank):
    for zero in (2, 3):
        with pytest.raises(PlanError, match=f"ZeRO-{zero} is not executed.*Use zero 1 or 0"):
            Runner(llama(), plan("one stage", zero))
    model = llama()
    runner = Runner(model, plan("one stage", 1))
    with pytest.raises(PlanError, match=r"or zero 1\. Train it with"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(PlanError, match=r"rank 0 holds a part of .*not given"):
        runner.optimizer_parameters(free_bytes={1: 5})
    masters = runner.optimizer_parameters(free_bytes={0: 100, 1: 100, 2: 600})
    kept = sum(m.to_local().numel() for m in masters)
    with pytest.raises(PlanError, match="state was dealt already"):
        runner.optimizer_parameters(free_bytes={0: 1, 1: 1, 2: 1})
    with pytest.raises(PlanError, match=r"Build it from runner\.optimizer_parameters"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(PlanError, match="optimizers of zero 1 and of zero 0"):
        hd.switch(model, plan("one stage"))
    with pytest.raises(PlanError, match="the plan has zero 0"):
        Runner(llama(), plan("one stage")).optimizer_parameters(free_bytes={})
    return kept / sum(p.numel() for p in masters)


@pytest.mark.dist(3)
def test_what_is_refused_and_shares_of_free_memory():
    shares = run_world(_refused, 3)
    for share, due in zip(shares, (0.125, 0.125, 0.75), strict=True):
        assert abs(share - due) < 0.03
