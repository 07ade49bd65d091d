"""The first level by SCIP, against our own exact way: all sets of lanes, with the exact second level."""

from __future__ import annotations

import itertools
import random

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.assign import LaneLoad, StageLoad, assign_layers, assign_microbatches
from hdtensor.planner.certificates import LaneKind, certify_lanes


def lanes_time(lanes, kinds):
    return max(
        (lane.num_microbatches + len(lane.kinds) - 1)
        * max(n * kinds[k].seconds for k, n in zip(lane.kinds, lane.layers, strict=True))
        for lane in lanes
    )


def taken(shapes, kinds, num_pools):
    devices = [0] * num_pools
    for kind in itertools.chain.from_iterable(shapes):
        devices[kinds[kind].pool] += kinds[kind].size
    return devices


def least_step(kinds, devices, num_layers, batch, most):
    """All sets of lanes; each lane's layers and all micro-batches by the exact greedy ways."""
    shapes = [
        shape
        for length in range(1, min(most[1], num_layers) + 1)
        for shape in itertools.combinations_with_replacement(range(len(kinds)), length)
    ]
    best = float("inf")
    for count in range(1, min(most[0], batch) + 1):
        for chosen in itertools.combinations_with_replacement(shapes, count):
            used = taken(chosen, kinds, len(devices))
            if any(a > b for a, b in zip(used, devices, strict=True)):
                continue
            loads = []
            for shape in chosen:
                stages = [StageLoad(kinds[k].seconds, 0.0, num_layers) for k in shape]
                layers = assign_layers(stages, num_layers)
                slowest = max(s.per_layer * n for s, n in zip(stages, layers, strict=True))
                loads.append(LaneLoad(slowest, (len(shape) - 1) * slowest, 1))
            counts = assign_microbatches(loads, batch)
            times = [
                load.beside + n * load.per_microbatch for load, n in zip(loads, counts, strict=True)
            ]
            best = min(best, max(times))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_scip_agrees_with_all_sets_of_lanes(seed):
    rng = random.Random(seed)
    devices = [rng.randint(1, 2), rng.randint(1, 2)]
    kinds = []
    for pool, count in enumerate(devices):
        each = rng.uniform(0.5, 3)
        kinds += [
            LaneKind(each / size * (1 + rng.uniform(0, 0.2) * (size - 1)), pool, size)
            for size in (1, 2)
            if size <= count
        ]
    num_layers, batch, most = rng.randint(2, 5), rng.randint(2, 5), (2, 3)
    step, lanes = certify_lanes(kinds, devices, num_layers, batch, most)
    assert step == pytest.approx(least_step(kinds, devices, num_layers, batch, most), rel=1e-5)
    assert lanes_time(lanes, kinds) == pytest.approx(step, rel=1e-5)
    assert sum(lane.num_microbatches for lane in lanes) == batch
    assert all(sum(lane.layers) == num_layers for lane in lanes)
    used = taken([lane.kinds for lane in lanes], kinds, 2)
    assert all(a <= b for a, b in zip(used, devices, strict=True))


def test_scip_says_when_nothing_fits():
    with pytest.raises(PlannerError, match=r"^lanes: SCIP proves no optimum for 3 layers"):
        certify_lanes([LaneKind(1.0, 0, 2)], [1], 3, 2, (1, 1))
