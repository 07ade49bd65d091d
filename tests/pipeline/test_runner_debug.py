"""Counts of a step's communication, and ranks that compare what they do in it."""

from collections import Counter

import pytest
import torch

from hdtensor import debug
from hdtensor.pipeline import Runner
from tests.pipeline import tiny, training
from tests.support.world import run_world


def _check_counts(rank):
    runner = Runner(tiny.llama(), tiny.unlike())
    runner.step(tiny.batch())
    with debug.count_communication() as count:
        runner.step(tiny.batch())
    found = Counter()
    for event in count.events:
        if event.kind == "send_recv" and event.num_bytes:
            found[event.why, event.ranks[0]] += event.num_bytes
    hidden = 3 * 2 * 6 * 16 * 4  # bytes: micro-batches, rows, tokens, features in fp32
    back = {("redistribute (backward)", peer): hidden for peer in (0, 1)}
    assert found == {0: {("redistribute", 2): hidden}, 1: {}, 2: back, 3: {}}[rank]


@pytest.mark.dist(4)
def test_a_steps_messages_are_counted_with_their_direction():
    run_world(_check_counts, 4)


def _check_agreement(rank, name, schedule):
    model, reference = training.llama(tied=True), training.llama(tied=True)
    with debug.check_agreement():
        runner = Runner(model, training.plan(name, zero=1), schedule=schedule)
        optimizer = torch.optim.AdamW(runner.optimizer_parameters())
        for step in range(2):
            loss = runner.step(training.batch(step))
            if step == 0:
                expected = reference(**training.batch(step)).loss
                torch.testing.assert_close(loss, expected.detach())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.dist(5)
@pytest.mark.parametrize(("name", "schedule"), [("unlike", "1f1b"), ("v", "zbv")])
def test_steps_run_while_ranks_compare_what_they_do(name, schedule):
    run_world(_check_agreement, 5, name, schedule)
