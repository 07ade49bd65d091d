"""``lower_bound``: a time that no strategy's step beats, by the event simulator.

Take a lane of S stages with M micro-batches. For stage s let a_s be its forward and backward of a micro-batch, w_s = S-1-s
the stages behind it, D_s the sum of their a, and A the sum of all a. With 1F1B and M > S, these follow one another: the first
micro-batch down to s and through the stages behind, all that s does until its last forward, the last micro-batch through the
stages behind, and back up::

    T  >=  A + (M - 1 - w_s) a_s + D_s + tail

with tail the synchronization and optimizer of the first stage. Take the slowest stage: no other takes more than its a = max_s a_s,
so D_s >= A - (S - w_s) a, whatever its place, and::

    T  >=  2 A + (M - 1 - S) a + tail           if M > S
    T  >=  A + (M - 1) (1 - phi) a + tail       if M <= S, with phi the lesser share of forward and backward

Equal stages reach the first one, (M + S - 1) a. It does not depend on the order of stages, and of the split of layers only by a
and A, which whole layers limit. So the most that devices do in a time is a maximum over sets of kinds, not over lanes; a knapsack
joins sets. T is a bound if the batch does not come out. docs/planner.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtensor.planner.packing import pack
from hdtensor.planner.space import Floats, Ints, Space
from hdtensor.planner.tails import Tails, fastest_tails


#: Numbers of lanes are bounded together from each of these up to the next.
_LANE_STEPS = (1, 2, 3, 4, 6, 9)
#: Relative width at which the bisection ends.
_CLOSE = 4e-3
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


def lower_bound(space: Space, high: float | None = None) -> Bound:
    """Return a lower bound on the step of every strategy of a space.

    Args:
        space: What the search knows.
        high: The step of some strategy, above which the bound cannot be; default any.
    """
    work = work_bound(space)
    if (
        math.prod(count + 1 for count in space.devices) > _MOST_POINTS
        or count_sets(space) > _MOST_SETS
    ):
        return Bound(work, work)
    low, top = work, high or 64 * work
    sets = LaneSets(space)
    classes = [LaneBound(space, sets, least, most) for least, most in _lane_classes(space)]
    while top > low * (1 + _CLOSE):
        middle = (low * top) ** 0.5 if high is None else (low + 3 * top) / 4
        still = [each for each in classes if each.may_end_in(middle)]
        if still:  # what cannot end in this time cannot in a shorter one either
            classes, top = still, middle
        else:
            low = middle
    return Bound(low, work)


def _lane_classes(space: Space) -> Iterator[tuple[int, int]]:
    """Yield numbers of lanes that are bounded together, as (least, most)."""
    options = space.options
    most = min(sum(space.devices), space.workload.batch, options.max_lanes or space.workload.batch)
    steps = [step for step in _LANE_STEPS if step <= most]
    for least, after in zip(steps, [*steps[1:], most + 1], strict=True):
        if after > options.min_lanes:
            yield max(least, options.min_lanes), after - 1


class LaneSets:
    """All sets of kinds that a lane can be made of, whatever their order, and what limits them.

    Attributes:
        counts: How many stages of each kind, of shape (sets, kinds).
        devices: What each takes of each pool, of shape (sets, pools).
        stages: Numbers of stages, of shape (sets,).
    """

    def __init__(self, space: Space) -> None:
        """Enumerate them.

        Args:
            space: What the search knows.
        """
        kinds = [k for k in range(len(space.kinds)) if np.isfinite(space.prices.layer[k]).any()]
        pools = np.zeros((len(space.kinds), len(space.pools)), dtype=np.int64)
        for k, kind in enumerate(space.kinds):
            pools[k, kind.pool] = kind.size
        now = np.zeros((1, len(space.kinds)), dtype=np.int64)
        last = np.zeros(
            1, dtype=np.int64
        )  # kinds are added in their order, so that no set comes twice
        found = []
        for _ in range(min(space.options.max_stages, space.num_layers)):
            rows, added = np.nonzero(np.array(kinds)[None, :] >= last[:, None])
            last = np.array(kinds, dtype=np.int64)[added]
            now = now[rows]
            now[np.arange(len(now)), last] += 1
            fit = (now @ pools <= np.array(space.devices)).all(axis=1)
            now, last = now[fit], last[fit]
            found.append(now)
        self.space = space
        self.counts: Ints = np.concatenate(found)
        self.devices: Ints = self.counts @ pools
        self.stages: Ints = self.counts.sum(axis=1)
        self._limits = [_Limit(space, self, m) for m in range(len(space.prices.mbs))]
        self._phi = -self.least(-_lesser_shares(space))

    def least(self, values: Floats) -> Floats:
        """Return the least value over the kinds of each set."""
        found: Floats = np.where(self.counts > 0, values, np.inf).min(axis=1)
        return found

    def most(self, seconds: float, tails: Tails, m: int) -> Ints:
        """Return the most micro-batches of one size that lanes of each set do in a time.

        Args:
            seconds: The time.
            tails: What the first stage does after its passes, at least.
            m: Number of the size of micro-batches.
        """
        low = np.zeros(len(self.stages), dtype=np.int64)
        high = np.full(len(low), self.space.workload.batch // self.space.prices.mbs[m])
        limit = self._limits[m]
        high = np.minimum(high, (seconds / limit.fit * (1 + 1e-12)).astype(np.int64))
        while (low < high).any():
            middle = (low + high + 1) // 2
            able = self._may_do(seconds, middle.astype(float), limit, tails)
            low, high = np.where(able, middle, low), np.where(able, high, middle - 1)
        return low

    def _may_do(
        self, seconds: float, counts: Floats, limit: _Limit, tails: Tails
    ) -> npt.NDArray[np.bool_]:
        """Return whether some a = max_s a_s leaves each set time for some micro-batches."""
        schedule, stages = self.space.workload.schedule.lower(), self.stages
        more = np.maximum(counts - 1, 1e-9)
        if schedule not in ("1f1b", "gpipe"):  # the first stage need not be the last to end
            least = self.least(tails.beside + tails.per_layer)
            own: npt.NDArray[np.bool_] = counts * limit.fit <= (seconds - least) * (1 + 1e-9)
            return own
        high = seconds / np.maximum(counts, 1)  # the slowest stage's own work
        slack = (seconds - self._tail(high, limit, tails)) * (1 + 1e-9)
        high = np.minimum(high, slack / np.maximum(counts, 1))
        many = counts > stages
        wait = np.where(many, self._phi * (stages - 1), self._phi * more)
        if schedule == "gpipe":
            wait = np.zeros(len(more))
        # T >= A + (M - 1 - phi w) a, with all layers on the fastest stage
        high = np.minimum(high, (slack - limit.least_sum) / np.maximum(more - wait, 1e-9))
        times = np.where(many & (schedule == "1f1b"), 2.0, 1.0)
        each = np.where(many & (schedule == "1f1b"), more - stages, more - wait)
        able = times * limit.sums(high) + each * high <= slack
        for point, total in zip(limit.points.T, limit.point_sums.T, strict=True):
            able |= (point <= high) & (times * total + each * point <= slack)
        found: npt.NDArray[np.bool_] = able & (limit.fit <= high)
        return found

    def _tail(self, slowest: Floats, limit: _Limit, tails: Tails) -> Floats:
        """Return the least tail if no stage takes longer than a time: the first has the layers that others have no time for."""
        found = np.full(len(slowest), np.inf)
        for k in range(self.counts.shape[1]):
            others = slowest * (limit.speed - limit.speed_of[k])
            layers = np.maximum(self.space.num_layers - others, 1)
            tail = tails.beside[k] + tails.first[k] + tails.per_layer[k] * layers
            found = np.where(self.counts[:, k] > 0, np.minimum(found, tail), found)
        return found


class _Limit:
    """The least A for each a = max_s a_s of sets of kinds, all of shape (sets,) or (sets, points).

    Every stage has a layer. For a greatest a, A is least if the fastest stages do as much as they may. That is convex in a,
    with a corner where one more kind is needed. Below the time in which whole layers fit, nothing is possible.
    """

    def __init__(self, space: Space, sets: LaneSets, m: int) -> None:
        prices, self._total = space.prices, float(space.num_layers)
        seconds = prices.layer[:, m]
        order = np.argsort(seconds, kind="stable")
        order = order[np.isfinite(seconds[order])]
        self.speed_of = np.where(np.isfinite(seconds), 1 / seconds, 0.0)
        self.speed = sets.counts @ self.speed_of
        self._counts, self._seconds = sets.counts[:, order], seconds[order]
        self._beside = sets.least(prices.first[:, m]) + sets.least(prices.last[:, m])
        beside = (prices.first[order, m], prices.last[order, m])
        self.fit = _least_with_whole_layers(self._counts, self._seconds, beside, space.num_layers)
        self.least_sum = self.sums(np.full(len(self.fit), self._total * self._seconds.max()))
        # Each stage has a layer; the first kinds take all others in this time.
        speed = np.maximum(np.cumsum(self._counts / self._seconds, axis=1), 1e-30)
        others = self._total - self._counts.sum(axis=1, keepdims=True)
        others = others + np.cumsum(self._counts, axis=1)
        self.points = np.maximum(others / speed, self.fit[:, None])
        self.point_sums = np.stack([self.sums(point) for point in self.points.T], axis=1)

    def sums(self, slowest: Floats) -> Floats:
        """Return the least A for each greatest a; infinite if the layers do not fit."""
        left, sums = (
            self._total - self._counts.sum(axis=1),
            self._beside + self._counts @ self._seconds,
        )
        for k, each in enumerate(self._seconds):
            count = self._counts[:, k]
            done = np.minimum(left, count * np.maximum(slowest / each - 1, 0))
            sums, left = sums + done * each, left - done
        return np.where(left > 1e-6, np.inf, sums)


def _least_with_whole_layers(
    counts: Ints, seconds: Floats, beside: tuple[Floats, Floats], num_layers: int
) -> Floats:
    """Return the seconds of the slowest stage if whole layers are split as well as can be, for each set.

    Embedding and head stand where they cost the fewest layers, on one stage only if there is no other.

    Args:
        counts: How many stages of each kind, of shape (sets, kinds).
        seconds: Of a layer on each kind.
        beside: Seconds of embedding and head on each kind.
        num_layers: Decoder layers.
    """
    many = np.arange(num_layers + 1)[:, None] * seconds
    parts = [many, many + beside[0], many + beside[1], many + beside[0] + beside[1]]
    times = np.unique(np.concatenate(parts))
    times = times[times > 0]
    layers = np.floor(times[:, None] / seconds * (1 + 1e-12) + 1e-9)
    lost = []
    for part in (*beside, beside[0] + beside[1]):
        less = np.floor((times[:, None] - part) / seconds * (1 + 1e-12) + 1e-9)
        lost.append(np.where(less < 0, np.inf, layers - less))
    alone = counts.sum(axis=1) == 1
    used = counts > 0
    low, high = np.zeros(len(counts), dtype=np.int64), np.full(len(counts), len(times) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        fit = (layers[middle] * counts).sum(axis=1)
        first, last, both = (np.where(used, part[middle], np.inf).min(axis=1) for part in lost)
        enough = fit - np.where(alone, both, first + last) >= num_layers
        high, low = np.where(enough, middle, high), np.where(enough, low, middle + 1)
    return times[low]


def count_sets(space: Space) -> int:
    """Return at most how many sets of kinds there are."""
    return math.comb(len(space.kinds) + space.options.max_stages, space.options.max_stages)


class LaneBound:
    """What strategies with a number of lanes between two cannot beat."""

    def __init__(self, space: Space, sets: LaneSets, least: int, most: int) -> None:
        """Ask the cost model for what depends on the number of lanes.

        Args:
            space: What the search knows.
            sets: What lanes can be made of.
            least: The smallest number of lanes.
            most: The largest one.
        """
        self.space, self.sets, self.most = space, sets, most
        self._tails = fastest_tails(space, least)
        sharers = most if space.workload.zero else 1
        self._few = [_holds(space, sets, m, sharers, 1) for m in range(len(space.prices.mbs))]
        ahead = 1 if space.workload.schedule.lower() == "gpipe" else space.options.max_stages
        self._many = [_holds(space, sets, m, sharers, ahead) for m in range(len(space.prices.mbs))]

    def may_end_in(self, seconds: float) -> bool:
        """Return whether the bound leaves open that a strategy ends in a time."""
        batch, sizes = self.space.workload.batch, self.space.prices.mbs
        caps = np.zeros(len(self.sets.counts), dtype=np.int64)
        for m, size in enumerate(sizes):
            most = np.minimum(self.sets.most(seconds, self._tails, m), batch // size)
            most = np.where(self._many[m], most, np.minimum(most, self.sets.stages - 1))
            caps = np.maximum(caps, most * self._few[m] * size)
        if self.most == 1:
            return bool(caps.max(initial=0) >= batch)
        room = self.space.devices
        points = math.prod(count + 1 for count in room)
        chosen = pack(caps, self.sets.devices, room, self.most, points)
        return bool(caps[chosen].sum() >= batch)


def _holds(space: Space, sets: LaneSets, m: int, sharers: int, ahead: int) -> npt.NDArray[np.bool_]:
    """Return whether the memory of each set holds all layers.

    With as many micro-batches as stages, 1F1B has 1, 2, ... of them in flight, from the last stage to the first. Which kind
    stands where is a problem of assignment; every pair of prices, of kinds and of places, whose sums are no less than what a
    kind holds in a place, is a bound on it. The prices of places are taken from each kind in turn.

    Args:
        space: What the search knows.
        sets: What lanes can be made of.
        m: Number of the size of micro-batches.
        sharers: Lanes that share optimizer state.
        ahead: Most micro-batches in flight that are counted.
    """
    prices, held = space.prices, np.arange(1, space.options.max_stages + 1)
    nbytes = (prices.fixed + prices.shared / sharers)[:, :, m, None]
    nbytes = nbytes + prices.held[:, :, m, None] * np.minimum(held, ahead)
    with np.errstate(invalid="ignore"):
        fit = np.floor((prices.room - nbytes[0]) / nbytes[1] + 1e-9)
    layers = np.clip(np.nan_to_num(fit, nan=0.0), 0, space.num_layers)
    most = np.full(len(sets.counts), np.inf)
    for number in np.unique(sets.stages):
        mine = sets.stages == number
        now = layers[:, :number]
        for reference in now[:: 1 if ahead > 1 else len(now)]:
            places = reference - reference[0]
            kinds = (now - places).max(axis=1)
            most[mine] = np.minimum(most[mine], sets.counts[mine] @ kinds + places.sum())
    usable = (sets.counts[:, layers[:, 0] < 1] == 0).all(axis=1)
    found: npt.NDArray[np.bool_] = usable & (most >= space.num_layers)
    return found


def _lesser_shares(space: Space) -> Floats:
    """Return, for each kind, the greatest part that forwards, or backwards, have in a stage, whichever is less."""
    prices = space.prices
    known = np.isfinite(prices.layer)
    shares = []
    for first in (0, 1):
        for last in (0, 1):
            total = prices.layer + first * prices.first + last * prices.last
            forward = (
                prices.layer_forward + first * prices.first_forward + last * prices.last_forward
            )
            shares.append(np.where(known, forward / np.where(known, total, 1), 0.5))
    parts = np.stack(shares)
    found: Floats = np.minimum(parts.max(axis=(0, 2)), (1 - parts).max(axis=(0, 2)))
    return found
