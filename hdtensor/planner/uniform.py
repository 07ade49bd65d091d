"""Uniform strategies: every device does the same, as frameworks without unlike lanes need it. What plans must beat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hdtensor.planner.score import Scored, Scorer
from hdtensor.planner.space import Space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


class UniformShape(NamedTuple):
    """A uniform strategy in numbers.

    Attributes:
        num_lanes: Degree of data parallelism.
        num_stages: Degree of pipeline parallelism.
        tp: Degree of tensor parallelism.
        cp: Degree of context parallelism.
        mbs: Samples of a micro-batch.
        lanes_apart: Whether ranks of a lane are neighbours; else ranks of a stage are (Megatron-LM's order).
    """

    num_lanes: int
    num_stages: int
    tp: int
    cp: int
    mbs: int
    lanes_apart: bool


def best_uniform(space: Space, scorer: Scorer) -> Scored | None:
    """Return the fastest uniform strategy that fits in memory, or None if none does.

    Tried are all degrees on all devices, on each pool alone, and on the nodes without a lost device. They are
    measured in the order of a lower bound, the work of the slowest stage, until that is above the best found.

    Args:
        space: What the search knows.
        scorer: What says how long a strategy takes.
    """
    found: list[tuple[float, int, Strategy]] = []
    for ranks in _rank_sets(space):
        for shape in _shapes(space, len(ranks)):
            strategy = _strategy(space, shape, ranks)
            if strategy is not None:
                found.append((_least_seconds(space, strategy), len(found), strategy))
    best: Scored | None = None
    for least, _, strategy in sorted(found, key=lambda item: item[:2]):
        if least >= (best.seconds if best else float("inf")):
            break
        scored = scorer.score(strategy)
        if scored is not None and (best is None or scored.seconds < best.seconds):
            best = scored
    return best


def _rank_sets(space: Space) -> list[tuple[int, ...]]:
    everything = sorted(r for pool in space.pools for node in pool.ranks for r in node)
    sets = {tuple(everything): None}
    for pool in space.pools:
        sets[tuple(sorted(r for node in pool.ranks for r in node))] = None
    widest = {len(node) for pool in space.pools for node in pool.ranks}
    for size in widest:
        whole = [
            r
            for pool in space.pools
            for node in pool.ranks
            if len(node) >= size
            for r in node[:size]
        ]
        sets[tuple(sorted(whole))] = None
    return list(sets)


def _shapes(space: Space, num_ranks: int) -> Iterator[UniformShape]:
    options, workload = space.options, space.workload
    for tp, cp in itertools.product(options.tp_degrees, options.cp_degrees):
        for num_stages in range(1, min(options.max_stages, space.num_layers) + 1):
            num_lanes, rest = divmod(num_ranks, tp * cp * num_stages)
            most = options.max_lanes or num_lanes
            if rest or not options.min_lanes <= num_lanes <= most:
                continue
            for mbs in space.prices.mbs:
                if num_lanes and workload.batch % (num_lanes * mbs) == 0:
                    for apart in (False, True):
                        yield UniformShape(num_lanes, num_stages, tp, cp, mbs, apart)


def _strategy(space: Space, shape: UniformShape, ranks: Sequence[int]) -> Strategy | None:
    """Return the strategy, or None if a stage would have unlike devices or leave its node."""
    size = shape.tp * shape.cp
    node_of = [space.cluster.node_of(rank) for rank in ranks]
    if any(node_of[i] != node_of[i + size - 1] for i in range(0, len(ranks), size)):
        return None
    each, more = divmod(space.num_layers, shape.num_stages)
    count = space.workload.batch // (shape.num_lanes * shape.mbs)
    lanes = []
    for lane in range(shape.num_lanes):
        stages = []
        for stage in range(shape.num_stages):
            if shape.lanes_apart:
                place = lane * shape.num_stages + stage
            else:
                place = stage * shape.num_lanes + lane
            mine = tuple(ranks[place * size : (place + 1) * size])
            stages.append(StageChoice(mine, each + (stage < more), shape.tp, shape.cp))
        lanes.append(LaneChoice(tuple(stages), count, shape.mbs))
    return Strategy(tuple(lanes))


def _least_seconds(space: Space, strategy: Strategy) -> float:
    """Return a time that the step is no shorter than: the first lane's, as ``bounds`` has it, or the work of a stage."""
    most, schedule = 0.0, space.workload.schedule.lower()
    kinds = {(kind.pool, kind.group.tp, kind.group.cp): k for k, kind in enumerate(space.kinds)}
    pools = {node: p for p, pool in enumerate(space.pools) for node in pool.nodes}
    for lane in strategy.lanes:
        m = space.prices.mbs.index(lane.mbs)
        total, slowest = 0.0, 0.0
        for number, stage in enumerate(lane.stages):
            k = kinds.get((pools[space.cluster.node_of(stage.ranks[0])], stage.tp, stage.cp))
            if k is None or not np.isfinite(space.prices.layer[k, m]):
                return float("inf")  # nobody knows what that takes
            work = space.prices.layer[k, m] * stage.num_layers
            work += space.prices.first[k, m] * (number == 0)
            work += space.prices.last[k, m] * (number == len(lane.stages) - 1)
            total, slowest = total + float(work), max(slowest, float(work))
        count, stages = lane.num_microbatches, len(lane.stages)
        most = max(most, slowest * count)
        if count > stages and schedule == "1f1b":
            most = max(most, 2 * total + (count - 1 - stages) * slowest)
    return most
