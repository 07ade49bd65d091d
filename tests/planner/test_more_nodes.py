"""Predictions for more nodes of the kinds that were measured: finite, and never slower by more than what is synchronized."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hdtensor.planner.decompose import find_shares, lane_times, place_lanes, sync_seconds
from hdtensor.planner.sailor_files import SailorFolder, training_system
from hdtensor.planner.simulate import step_seconds, strategy_memory
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


FOLDER = SailorFolder(Path(__file__).parents[2] / "benchmarks" / "data" / "sailor")
CONSTANTS = training_system({"RTX-2080": 3e9, "RTX-3090": 3e9, "Titan-RTX": 3e9})
NUM_STAGES, PER_NODE = 4, 8


def uniform(num_ranks, batch, num_layers):
    """Return lanes of four equal stages of one rank; the same stages of all lanes stand side by side."""
    num_lanes = num_ranks // NUM_STAGES
    return Strategy(
        tuple(
            LaneChoice(
                tuple(
                    StageChoice((stage * num_lanes + lane,), num_layers // NUM_STAGES, 1)
                    for stage in range(NUM_STAGES)
                ),
                batch // num_lanes,
                1,
            )
            for lane in range(num_lanes)
        )
    )


@pytest.mark.parametrize(
    "kinds", [("RTX-2080",), ("RTX-3090",), ("Titan-RTX",), ("RTX-2080", "RTX-3090"), ("RTX-3090", "Titan-RTX")], ids=str
)  # fmt: skip
def test_more_nodes_are_not_slower(kinds):
    shape, work = FOLDER.training("training_config_opt_350.json")
    costs = replace(FOLDER.costs("OPT-350", work), constants=CONSTANTS)
    before, memory_before = math.inf, math.inf
    for num_nodes in (16, 32, 64):
        cluster = FOLDER.cluster({kind: num_nodes // len(kinds) * PER_NODE for kind in kinds})
        strategy = uniform(cluster.num_ranks, work.batch, shape.num_layers)
        placed = place_lanes(strategy, cluster)
        seconds = step_seconds(strategy, cluster, costs, work)
        sync = sum(sync_seconds(find_shares(placed), placed, cluster, costs))
        memory = max(n.total for n in strategy_memory(strategy, cluster, costs, work).values())
        times = lane_times(strategy.lanes[0], placed[0], cluster, costs)
        passes = [sum(both) for both in zip(times.forward, times.backward, strict=True)]
        count = strategy.lanes[0].num_microbatches
        # By hand: the slowest stage works without a break at least, and each message stops it once at most.
        messages = sum((*times.send_forward, *times.send_backward))
        longest = sum(passes) + count * (max(passes) + 2 * messages) + sync + 2.0
        assert count * max(passes) <= seconds <= longest
        assert seconds <= before + sync
        assert 0 < memory <= memory_before * (1 + 1e-9)
        before, memory_before = seconds, memory
