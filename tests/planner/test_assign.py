"""The exact second level: against brute force and against HiGHS."""

from __future__ import annotations

import itertools
import random

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.assign import LaneLoad, StageLoad, assign_layers, assign_microbatches
from hdtensor.planner.certificates import certify_layers, certify_microbatches


def slowest(loads, counts):
    return max(load[1] + count * load[0] for load, count in zip(loads, counts, strict=True))


def random_stages(rng, num_stages):
    return [
        StageLoad(rng.choice([1.0, rng.uniform(0.2, 3)]), rng.uniform(0, 2), rng.randint(1, 9))
        for _ in range(num_stages)
    ]


def random_lanes(rng, num_lanes, sizes):
    return [
        LaneLoad(rng.uniform(0.2, 3), rng.uniform(0, 4), rng.choice(sizes))
        for _ in range(num_lanes)
    ]


def all_counts(lows, highs, weights, total):
    ranges = [range(low, high + 1) for low, high in zip(lows, highs, strict=True)]
    for counts in itertools.product(*ranges):
        if sum(c * w for c, w in zip(counts, weights, strict=True)) == total:
            yield counts


@pytest.mark.parametrize("seed", range(60))
def test_layers_are_split_as_brute_force_does(seed):
    rng = random.Random(seed)
    stages = random_stages(rng, rng.randint(1, 4))
    num_layers = rng.randint(len(stages), 16)
    room = [stage.max_layers for stage in stages]
    splits = list(all_counts([1] * len(stages), room, [1] * len(stages), num_layers))
    if not splits:
        with pytest.raises(PlannerError, match=r"^num_layers: "):
            assign_layers(stages, num_layers)
        return
    found = assign_layers(stages, num_layers)
    assert tuple(found) in splits
    best = min(slowest(stages, split) for split in splits)
    assert slowest(stages, found) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_microbatches_are_dealt_as_brute_force_does(seed):
    rng = random.Random(seed)
    lanes = random_lanes(rng, rng.randint(1, 3), rng.choice([[1], [2], [1, 2], [2, 4], [2, 3, 5]]))
    batch = rng.randint(1, 24)
    most = [batch // lane.mbs for lane in lanes]
    deals = list(all_counts([1] * len(lanes), most, [lane.mbs for lane in lanes], batch))
    if not deals:
        with pytest.raises(PlannerError, match=r"^batch: "):
            assign_microbatches(lanes, batch)
        return
    found = assign_microbatches(lanes, batch)
    assert tuple(found) in deals
    best = min(slowest(lanes, deal) for deal in deals)
    assert slowest(lanes, found) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_highs_agrees(seed):
    rng = random.Random(seed)
    stages = [stage._replace(max_layers=40) for stage in random_stages(rng, 6)]
    ours, theirs = assign_layers(stages, 60), certify_layers(stages, 60)
    assert sum(theirs) == 60
    assert slowest(stages, ours) == pytest.approx(slowest(stages, theirs), rel=1e-6)
    lanes = random_lanes(rng, 4, [1, 2, 4])
    lanes[0] = lanes[0]._replace(mbs=1)
    ours, theirs = assign_microbatches(lanes, 64), certify_microbatches(lanes, 64)
    assert sum(c * lane.mbs for c, lane in zip(theirs, lanes, strict=True)) == 64
    assert slowest(lanes, ours) == pytest.approx(slowest(lanes, theirs), rel=1e-6)


def test_highs_refuses_what_does_not_fit():
    with pytest.raises(PlannerError, match="HiGHS finds no way to place 9 layers"):
        certify_layers([StageLoad(1.0, 0.0, 4)] * 2, 9)
    with pytest.raises(PlannerError, match="7 samples in 2 lanes"):
        certify_microbatches([LaneLoad(1.0, 0.0, 2)] * 2, 7)
