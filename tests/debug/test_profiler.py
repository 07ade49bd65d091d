"""Ranges with our names in torch's profiler."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hdtensor as hd
from hdtensor import distribute_tensor
from hdtensor.collectives import observe
from tests.models.hf import batch, build, strategy
from tests.support.world import run_world


WORLD_SIZE = 4
X = torch.arange(16.0).reshape(4, 4)


def _cut(spec):
    return distribute_tensor(X, spec, src_data_rank=None)


def _ranges(function):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    events = profiler.key_averages()
    return {e.key.removeprefix("hdtensor::"): e.count for e in events if "hdtensor::" in e.key}


def _check_verbs(rank):
    def moves():
        _cut("P / 0,1:S1 2:R").redistribute("R / 0,1:S1 2:R")
        _cut("S0 / 0:R 1:R").redistribute("S0 / 2:R 3:R")

    def converts():
        _cut("R / 0,1:S0") + _cut("R / 0,1:S1")

    for function in (moves, converts):
        function()  # makes groups
    hd.ops.dispatch.clear_caches()
    deduces = _ranges(lambda: torch.sinh(_cut("R / 0:R")))
    for function in (moves, converts):
        function()
    return [
        _ranges(moves),
        _ranges(converts),
        _ranges(lambda: hd.full_tensor(_cut("R / 0:R"))),
        _ranges(lambda: distribute_tensor(X, "R / 1:R")),
        _ranges(lambda: hd.switch_tensors({"x": _cut("R / 0:R")}, {"x": "R / 1:R"})),
        deduces,
    ]


@pytest.mark.dist(WORLD_SIZE)
def test_verbs_and_collectives_have_ranges():
    ranks = run_world(_check_verbs, WORLD_SIZE)

    # Columns 0,1 of the pair are summed with their halves of rank 2's block.
    assert [found[0] for found in ranks] == [
        {"redistribute": 2, "all_reduce": 1, "send_recv": 1},
        {"redistribute": 2, "all_reduce": 1, "send_recv": 1},
        {"redistribute": 2, "all_reduce": 2, "send_recv": 1},
        {"redistribute": 2, "send_recv": 1},
    ]
    assert [found[1] for found in ranks[:2]] == [{"implicit_redistribute": 1, "all_to_all": 1}] * 2
    for found in ranks:
        assert found[2].get("full_tensor") == 1
        assert found[3].get("distribute_tensor") == 1
        assert found[4].get("switch") == 1
        assert found[5] == {"deduce": 1}


def _check_gradients(rank):
    model = hd.parallelize(build("llama"), strategy(([0, 1], 5), ([2], 3)))
    data = hd.distribute_batch(model, batch(0))

    def step():
        model(**data).loss.backward()

    step()
    model.zero_grad()
    return _ranges(step)


@pytest.mark.dist(WORLD_SIZE)
def test_bringing_gradients_home_is_one_range():
    ranks = run_world(_check_gradients, WORLD_SIZE)

    assert [found.get("gradient_sync") for found in ranks] == [1, 1, 1, None]
    assert ranks[0]["all_reduce"] > 0


def test_without_a_profiler_there_is_no_range():
    assert observe.profiled("redistribute") is observe.profiled("switch")
    with profile(activities=[ProfilerActivity.CPU]):
        assert observe.profiled("redistribute") is not observe.profiled("switch")
