"""What ``parallelize`` and ``distribute_batch`` refuse, on every rank."""

import pytest
import torch
from torch import nn

import hdtensor as hd
from tests.models.hf import build, strategy
from tests.support.world import run_world


UNLIKE = strategy(([0, 1], 5), ([2], 3))


def _error(function):
    try:
        function()
    except hd.HDTensorError as error:
        return type(error).__name__, str(error)
    return None


def _unlike_plans(rank):
    plan = strategy(([0, 1], 5), ([2], 4 if rank == 1 else 3))
    return _error(lambda: hd.parallelize(build("llama"), plan))


def _unlike_weights(rank):
    return _error(lambda: hd.parallelize(build("llama", seed=rank == 2), UNLIKE))


def _unlike_batches(rank):
    model = hd.parallelize(build("llama"), UNLIKE)
    ids = torch.randint(0, 64, (8, 4), generator=torch.Generator().manual_seed(rank))
    return _error(lambda: hd.distribute_batch(model, {"input_ids": ids}))


def _unlike_batch_sizes(rank):
    model = hd.parallelize(build("llama"), UNLIKE)
    return _error(lambda: hd.distribute_batch(model, torch.zeros(8 - (rank == 3), 4)))


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("check", "text"),
    [
        (_unlike_plans, "other plans"),
        (_unlike_weights, "other weights"),
        (_unlike_batches, "the same whole batch"),
        (_unlike_batch_sizes, "the same whole batch"),
    ],
)
def test_ranks_that_differ_are_told_everywhere(check, text):
    for error in run_world(check, 4):
        assert error is not None
        assert error[0] == "DisagreementError"
        assert text in error[1]


def _beyond(rank):
    plan = strategy(([0, 1], 5), ([2, 7], 3))
    model = hd.parallelize(build("llama"), UNLIKE)
    return (
        _error(lambda: hd.parallelize(build("llama"), plan)),
        _error(lambda: hd.switch(model, plan)),
    )


@pytest.mark.dist(4)
def test_ranks_beyond_the_world_are_told_where_the_plan_names_them():
    for errors in run_world(_beyond, 4):
        for error in errors:
            assert error is not None
            assert error[0] == "PlanError"
            assert "pipelines[1].stages[0].ranks: rank 7 beyond the world" in error[1]


def _plain(rank, change):
    plan = {"pipelines": [{"stages": [{"ranks": [0], "layers": [0, 0]}]}]}
    model = nn.Sequential(nn.Linear(4, 4))
    return _error(lambda: change(model, hd.AnnotationPlan.from_dict(plan)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m, p: hd.parallelize(m, "plan.json"), "AnnotationPlan.load"),
        (lambda m, p: hd.parallelize(m, p, patterns=[("typo.*", "column")]), "names none"),
        (lambda m, p: hd.parallelize(hd.parallelize(m, p), p), "parallelized already"),
        (lambda m, p: hd.switch(hd.parallelize(m, p), "plan.json"), "AnnotationPlan.load"),
        (lambda m, p: hd.distribute_batch(m, torch.zeros(2, 4)), "was not parallelized"),
        (lambda m, p: hd.item(torch.ones(())), "expected an HDTensor"),
    ],
)
def test_mistakes_are_named(change, text):
    error = _plain(0, change)
    assert error is not None
    assert text in error[1]


def test_dtensors_names_are_here_too():
    names = "distribute_tensor distribute_module Shard Replicate Partial Placement ones empty full rand randn zeros"
    assert set(names.split()) <= set(hd.__all__)


def test_specs_may_be_given_as_text():
    text = "S0[3:1] / 0,1:S1 2:R"
    assert hd.explain(text, "R / 0,1:S1 2:R", (4, 4)).startswith(text)
    assert hd.debug.visualize(text, (4, 4)).startswith(text)
    assert "<svg" in hd.debug.svg(text, (4, 4))
