"""``lower_bound``: a time that no strategy's step beats, by the event simulator.

Take a lane of S stages with M micro-batches. For stage s let a_s be its forward and backward of a micro-batch, w_s = S-1-s
the stages behind it, D_s the sum of their a, and A the sum of all a. With 1F1B and M > S, these follow one another: the first
micro-batch down to s and through the stages behind, all that s does until its last forward, the last micro-batch through the
stages behind, and back up::

    T  >=  A + D_s + (M - 1 - w_s) a_s + tail

with tail the synchronization and optimizer of the first stage. With s the slowest stage and a its seconds, wherever it stands::

    T  >=  2 A + (M - 1 - S) a + (a - a_1) + tail of the first stage

It does not depend on the order of the stages between. So the most that devices do in a time is a maximum over sets of kinds, not
over lanes (``lane_bounds``); a knapsack joins sets. T is a bound if the batch does not come out. docs/planner_bound.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hdtensor.planner.lane_bounds import most_alone
from hdtensor.planner.lane_classes import LaneBound, Rows, find_useful
from hdtensor.planner.lane_sets import LaneSets
from hdtensor.planner.priced_bounds import priced_bound
from hdtensor.planner.space import Space
from hdtensor.planner.whole_parts import WholeParts


#: Relative width at which the bisection ends.
_CLOSE = 3e-3
#: Likewise with many sets.
_CLOSE_MANY = 0.01
#: Relative width of the first step down.
_FIRST_STEP = 0.015
#: With many sets no bound is sought that is nearer to the best step than this.
_MANY_SETS, _SOUGHT = 2_000, 1.019
#: Points of the lattice of devices, and sets of kinds, up to which lanes are bounded one by one.
_MOST_POINTS = 3_000
_MOST_SETS = 150_000


class Bound(NamedTuple):
    """A lower bound on the step.

    Attributes:
        seconds: No strategy of the space has a shorter step.
        work: All work spread over all devices, each at its best; no bubble, no whole layers or micro-batches.
        parts: What whole layers and whole micro-batches cost the lanes of the best plan known; None if nobody asked.
    """

    seconds: float
    work: float
    parts: WholeParts | None = None


def work_bound(space: Space) -> float:
    """Return the seconds of all work of a step, spread over all devices without any loss.

    Every device does layers at the best rate that any kind has; head and embedding count at their best rates too.

    Args:
        space: What the search knows.
    """
    prices = space.prices
    sizes = np.array([kind.size for kind in space.kinds])[:, None]
    rates = np.array(prices.mbs) / prices.layer / sizes
    total = 0.0
    for pool, count in enumerate(space.devices):
        mine = [rates[k].max() for k, kind in enumerate(space.kinds) if kind.pool == pool]
        total += count * max(mine, default=0.0)
    known = np.isfinite(prices.layer)
    beside = sum((part[known] / prices.layer[known]).min() for part in (prices.first, prices.last))
    return float(space.workload.batch * (space.num_layers + beside) / total)


def lower_bound(
    space: Space,
    high: float | None = None,
    *,
    whole_layers: bool = True,
    is_tight: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> Bound:
    """Return a lower bound on the step of every strategy of a space.

    Args:
        space: What the search knows.
        high: The step of some strategy, above which the bound cannot be; default any.
        whole_layers: Whether stages have whole layers. Without, what the bound loses is the part that whole layers cost.
        is_tight: Whether to take seconds, on large clusters minutes, for a bound as near to the best step as can be.
        should_stop: Is asked now and then; once it says yes, the best bound so far is returned.
    """
    work = work_bound(space)
    low, top = work, high or 64 * work
    if count_sets(space) > _MOST_SETS:
        return Bound(work, work)
    if math.prod(count + 1 for count in space.devices) > _MOST_POINTS:
        seconds = priced_bound(
            space, low, top, whole_layers=whole_layers, is_tight=is_tight, should_stop=should_stop
        )
        return Bound(seconds, work)
    sets = LaneSets(space, whole_layers=whole_layers)
    is_many = len(sets.counts) > _MANY_SETS and not is_tight
    if is_many and high is not None:
        top = max(low, high / _SOUGHT)
    useful = _useful(sets, top)
    most = min(sum(space.devices), space.workload.batch, space.options.max_lanes or 1 << 30)
    lanes = LaneBound(space, space.options.min_lanes, most)
    if top != high and not lanes.may_end_in(top, sets, useful):
        return Bound(top, work)
    step, close = _FIRST_STEP, _CLOSE_MANY if is_many else _CLOSE
    while top > low * (1 + close) and not (should_stop and should_stop()):
        # Most bounds are near the best step: steps down from there grow, until a bound is found.
        middle = max(top * (1 - step), (low * top) ** 0.5)
        if lanes.may_end_in(middle, sets, useful):
            top, step = middle, 2 * step
        else:
            low = middle
    return Bound(low, work)


def _useful(sets: LaneSets, seconds: float) -> Rows:
    """Return, for each size of micro-batches, whether a set can be part of lanes that do the batch in a time."""
    space, batch = sets.space, sets.space.workload.batch
    caps = [
        np.minimum(most_alone(sets, seconds, m), batch // size) * size
        for m, size in enumerate(space.prices.mbs)
    ]
    return find_useful(sets, caps, sum(space.devices))


def count_sets(space: Space) -> int:
    """Return at most how many sets of kinds there are."""
    return math.comb(len(space.kinds) + space.options.max_stages, space.options.max_stages)
