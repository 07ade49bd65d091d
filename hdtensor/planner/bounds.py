"""``lower_bound``: a time that no strategy's step beats, by the event simulator.

Take a lane of S stages with M micro-batches. For stage s let a_s be its forward and backward of a micro-batch, w_s = S-1-s
the stages behind it, D_s the sum of their a, and A the sum of all a. With 1F1B and M > S, these follow one another: the first
micro-batch down to s and through the stages behind, all that s does until its last forward, the last micro-batch through the
stages behind, and back up::

    T  >=  A + D_s + (M - 1 - w_s) a_s + tail

with tail the synchronization and optimizer of the first stage. With s the slowest stage and a its seconds, wherever it stands::

    T  >=  2 A + (M - 1 - S) a + (a - a_1) + tail of the first stage

It does not depend on the order of the stages between. So the most that devices do in a time is a maximum over sets of kinds, not
over lanes (``lane_bounds``); a knapsack joins sets. T is a bound if the batch does not come out. docs/planner.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtensor.planner.lane_bounds import LaneLimits, LaneSets
from hdtensor.planner.packing import pack, relax
from hdtensor.planner.space import Floats, Ints, Space
from hdtensor.planner.tails import fastest_tails


#: Numbers of lanes are bounded together from each of these up to the next.
_LANE_STEPS = (1, 4, 6, 9)
#: Relative width at which the bisection ends.
_CLOSE = 3e-3
#: Relative width of the first step down.
_FIRST_STEP = 0.015
#: With many sets no bound is sought that is nearer to the best step than this.
_MANY_SETS, _SOUGHT = 2_000, 1.03
#: Points of the lattice of devices, and sets of kinds, up to which lanes are bounded one by one.
_MOST_POINTS = 3_000
_MOST_SETS = 150_000


class Bound(NamedTuple):
    """A lower bound on the step.

    Attributes:
        seconds: No strategy of the space has a shorter step.
        work: All work spread over all devices, each at its best; no bubble, no whole layers or micro-batches.
    """

    seconds: float
    work: float


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


def lower_bound(space: Space, high: float | None = None, *, whole_layers: bool = True) -> Bound:
    """Return a lower bound on the step of every strategy of a space.

    Args:
        space: What the search knows.
        high: The step of some strategy, above which the bound cannot be; default any.
        whole_layers: Whether stages have whole layers. Without, what the bound loses is the part that whole layers cost.
    """
    work = work_bound(space)
    if (
        math.prod(count + 1 for count in space.devices) > _MOST_POINTS
        or count_sets(space) > _MOST_SETS
    ):
        return Bound(work, work)
    low, top = work, high or 64 * work
    sets = LaneSets(space, whole_layers=whole_layers)
    if len(sets.counts) > _MANY_SETS and high is not None:
        top = max(low, high / _SOUGHT)
    useful = _useful(sets, top)
    classes = [LaneBound(sets, useful, least, most) for least, most in _lane_classes(space)]
    if top != high and not any(each.may_end_in(top) for each in classes):
        return Bound(top, work)
    step = _FIRST_STEP
    while top > low * (1 + _CLOSE):
        # Most bounds are near the best step: steps down from there grow, until a bound is found.
        middle = max(top * (1 - step), (low * top) ** 0.5)
        still = [each for each in classes if each.may_end_in(middle)]
        if still:  # what cannot end in this time cannot in a shorter one either
            classes, top, step = still, middle, 2 * step
        else:
            low = middle
    return Bound(low, work)


def _useful(sets: LaneSets, seconds: float) -> list[npt.NDArray[np.bool_]]:
    """Return, for each size of micro-batches, whether a set can be part of lanes that do the batch in a time.

    With devices worth w, the relaxed knapsack says how much all lanes do at most, and lanes with one of a set do at least
    ``w devices - samples`` fewer.
    """
    space, batch = sets.space, sets.space.workload.batch
    caps = [
        np.minimum(sets.most_alone(seconds, m), batch // size) * size
        for m, size in enumerate(space.prices.mbs)
    ]
    value, worth = _most_samples(space, np.max(caps, axis=0), sets.devices, sum(space.devices))
    paid = sets.devices @ worth
    return [(each > 0) & (paid - each <= value - batch + 1e-6) for each in caps]


def _most_samples(space: Space, caps: Ints, devices: Ints, most: int) -> tuple[float, Floats]:
    """Return a number of samples that no lanes do more than, and what devices are worth in it.

    Whatever devices are worth, a lane does what its devices are worth and what it gains beyond that.

    Args:
        space: What the search knows.
        caps: Samples that lanes do at most, of shape (lanes,).
        devices: What they take of each pool, of shape (lanes, pools).
        most: How many lanes may be taken.
    """
    room = np.array(space.devices, dtype=float)
    _, _, worth = relax(caps.astype(float), devices.astype(float), room)
    gain = float((caps - devices @ worth).max(initial=0))
    return float(room @ worth) + most * gain, worth


def _lane_classes(space: Space) -> Iterator[tuple[int, int]]:
    """Yield numbers of lanes that are bounded together, as (least, most)."""
    options = space.options
    most = min(sum(space.devices), space.workload.batch, options.max_lanes or space.workload.batch)
    steps = [step for step in _LANE_STEPS if step <= most]
    for least, after in zip(steps, [*steps[1:], most + 1], strict=True):
        if after > options.min_lanes:
            yield max(least, options.min_lanes), after - 1


def count_sets(space: Space) -> int:
    """Return at most how many sets of kinds there are."""
    return math.comb(len(space.kinds) + space.options.max_stages, space.options.max_stages)


class LaneBound:
    """What strategies with a number of lanes between two cannot beat."""

    def __init__(
        self, sets: LaneSets, useful: Sequence[npt.NDArray[np.bool_]], least: int, most: int
    ) -> None:
        """Ask the cost model for what depends on the number of lanes.

        Args:
            sets: What lanes can be made of.
            useful: Which of them are looked at, for each size of micro-batches.
            least: The smallest number of lanes.
            most: The largest one.
        """
        self.sets, self.most = sets, most
        space = sets.space
        tails = fastest_tails(space, least)
        sharers = most if space.workload.zero else 1
        ahead = 1 if space.workload.schedule.lower() == "gpipe" else space.options.max_stages
        self._sizes = []
        for m, rows in enumerate(useful):
            able = np.flatnonzero(rows)[_holds(sets.subset(rows), m, sharers, 1)]
            mine = sets.subset(able)
            many = _holds(mine, m, sharers, ahead)
            self._sizes.append((able, LaneLimits(mine, tails, m), many))

    def caps(self, seconds: float) -> Ints:
        """Return the most samples that a lane of each set does in a time, of shape (sets,)."""
        space, caps = self.sets.space, np.zeros(len(self.sets.counts), dtype=np.int64)
        for size, (rows, limits, many) in zip(space.prices.mbs, self._sizes, strict=True):
            most = np.minimum(limits.most(seconds), space.workload.batch // size)
            most = np.where(many, most, np.minimum(most, self.sets.stages[rows] - 1))
            caps[rows] = np.maximum(caps[rows], most * size)
        return caps

    def may_end_in(self, seconds: float) -> bool:
        """Return whether the bound leaves open that a strategy ends in a time."""
        space, caps = self.sets.space, self.caps(seconds)
        batch, devices = space.workload.batch, self.sets.devices
        if self.most == 1:
            return bool(caps.max(initial=0) >= batch)
        most = min(self.most, sum(space.devices))
        if _most_samples(space, caps, devices, most)[0] < batch - 1e-6:
            return False  # not even parts of lanes do it
        points = math.prod(count + 1 for count in space.devices)
        chosen = pack(caps, devices, space.devices, self.most, points)
        return bool(caps[chosen].sum() >= batch)


def _holds(sets: LaneSets, m: int, sharers: int, ahead: int) -> npt.NDArray[np.bool_]:
    """Return whether the memory of each set holds all layers.

    With as many micro-batches as stages, 1F1B has 1, 2, ... of them in flight, from the last stage to the first. Which kind
    stands where is a problem of assignment; every pair of prices, of kinds and of places, whose sums are no less than what a
    kind holds in a place, is a bound on it. The prices of places are taken from each kind in turn.

    Args:
        sets: What lanes can be made of.
        m: Number of the size of micro-batches.
        sharers: Lanes that share optimizer state.
        ahead: Most micro-batches in flight that are counted.
    """
    space = sets.space
    prices, held = space.prices, np.arange(1, space.options.max_stages + 1)
    nbytes = (prices.fixed + prices.shared / sharers)[:, :, m, None]
    nbytes = nbytes + prices.held[:, :, m, None] * np.minimum(held, ahead)
    with np.errstate(invalid="ignore"):
        fit = np.floor((prices.room - nbytes[0]) / nbytes[1] + 1e-9)
    layers = np.clip(np.nan_to_num(fit, nan=0.0), 0, space.num_layers)
    most = np.full(len(sets.counts), np.inf)
    for number in np.unique(sets.stages):
        rows = np.flatnonzero(sets.stages == number)
        now = layers[:, :number]
        places = (now - now[:, :1])[:: 1 if ahead > 1 else len(now)]
        kinds = (now[None] - places[:, None]).max(axis=2)
        sums = sets.counts[rows].astype(float) @ kinds.T + places.sum(axis=1)
        most[rows] = sums.min(axis=1)
    usable = (sets.counts[:, layers[:, 0] < 1] == 0).all(axis=1)
    found: npt.NDArray[np.bool_] = usable & (most >= space.num_layers)
    return found
