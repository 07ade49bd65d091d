"""``find_whole_parts``: what it costs a plan that layers and micro-batches are whole, by the bound on its own lanes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdtensor.planner.lane_bounds import LaneLimits
from hdtensor.planner.lane_sets import LaneSets
from hdtensor.planner.space import Floats, Ints, Space
from hdtensor.planner.strategy import Strategy
from hdtensor.planner.tails import fastest_tails


#: Relative width at which bisections end.
_CLOSE = 1e-4


class WholeParts(NamedTuple):
    """What the lanes of a plan take at least, whatever the order of their stages, their layers and their shares of the batch.

    Attributes:
        seconds: With whole layers and whole micro-batches.
        layers: Seconds less if stages could have parts of layers.
        microbatches: Seconds less if lanes could do parts of micro-batches.
    """

    seconds: float
    layers: float
    microbatches: float


def find_whole_parts(space: Space, strategy: Strategy, high: float) -> WholeParts | None:
    """Return what whole layers and whole micro-batches cost the lanes of a strategy.

    The least time is found three times for lanes of just these kinds of stages; stages' own limits are left out, as they
    are only asked about whole micro-batches.

    Args:
        space: What the search knows.
        strategy: The plan.
        high: Its step.

    Returns:
        The parts; None if the plan has stages that the space does not have.
    """
    found = _sets_of(space, strategy)
    if found is None:
        return None
    counts, sizes = found
    whole, parts = LaneSets(space, counts), LaneSets(space, counts, whole_layers=False)
    least = _least_seconds(whole, sizes, high, is_whole=True)
    layers = _least_seconds(parts, sizes, least, is_whole=True)
    batches = _least_seconds(whole, sizes, least, is_whole=False)
    return WholeParts(least, least - layers, least - batches)


def _sets_of(space: Space, strategy: Strategy) -> tuple[Ints, Ints] | None:
    """Return how many stages of each kind the lanes have, and the numbers of their sizes of micro-batches."""
    numbers = {(kind.pool, kind.group.tp, kind.group.cp): k for k, kind in enumerate(space.kinds)}
    pools = {node: p for p, pool in enumerate(space.pools) for node in pool.nodes}
    counts = np.zeros((len(strategy.lanes), len(space.kinds)), dtype=np.int64)
    for p, lane in enumerate(strategy.lanes):
        for stage in lane.stages:
            pool = pools.get(space.cluster.node_of(stage.ranks[0]), -1)
            k = numbers.get((pool, stage.tp, stage.cp))
            if k is None:
                return None
            counts[p, k] += 1
    sizes = [space.prices.mbs.index(lane.mbs) for lane in strategy.lanes]
    return counts, np.array(sizes, dtype=np.int64)


def _least_seconds(sets: LaneSets, sizes: Ints, high: float, *, is_whole: bool) -> float:
    """Return the least time in which lanes, one of each set, may do the batch; no more than a time in which they do."""
    space, num = sets.space, len(sizes)
    tails = fastest_tails(space, num, num)
    rows = [np.flatnonzero(sizes == m) for m in range(len(space.prices.mbs))]
    limits = [
        (mine, size, LaneLimits(sets.subset(mine), tails, m, is_whole=is_whole))
        for m, (mine, size) in enumerate(zip(rows, space.prices.mbs, strict=True))
        if len(mine)
    ]

    def samples(seconds: float) -> Floats:
        found = np.zeros(num)
        for mine, size, limit in limits:
            found[mine] = np.minimum(limit.most(seconds) * size, space.workload.batch)
        return found

    low = high / 2
    while samples(low).sum() >= space.workload.batch:
        high, low = low, low / 2
    while high > low * (1 + _CLOSE):
        middle = (low + high) / 2
        if samples(middle).sum() >= space.workload.batch:
            high = middle
        else:
            low = middle
    return high
