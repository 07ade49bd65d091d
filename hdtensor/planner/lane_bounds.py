"""``LaneSets``: what lanes can be made of, and the most micro-batches that each does in a time, whatever its order and layers.

The formulas are proven in docs/planner.md. Each says that a lane's time is at least a sum of costs of its layers, so many
times its slowest stage's a, and a rest. For a given a the least sum is found by filling stages, the cheapest layers first. The
sum falls and is convex in a, so the most micro-batches come out at one of its corners.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtensor.planner.space import Floats, Ints, Space
from hdtensor.planner.tails import Tails


#: What an entry that no lane can have is set to; it keeps numbers finite.
_NEVER = 1e9
#: Relative slack for sums in another order.
_ROUNDING = 1e-9


class LaneSets:
    """Sets of kinds that a lane can be made of, whatever their order, and what limits them.

    Attributes:
        space: What the search knows.
        counts: How many stages of each kind, of shape (sets, kinds).
        devices: What each takes of each pool, of shape (sets, pools).
        stages: Numbers of stages, of shape (sets,).
        phi: The lesser of the parts that forwards and backwards have in a stage, at most; 0 for GPipe. Of shape (sets,).
    """

    def __init__(self, space: Space, *, whole_layers: bool = True) -> None:
        """Enumerate all of them.

        Args:
            space: What the search knows.
            whole_layers: Whether stages have whole layers; else one or more, and parts.
        """
        self.space = space
        self.counts, self.devices = _all_sets(space)
        self.stages: Ints = self.counts.sum(axis=1)
        self._used = np.ascontiguousarray(self.counts.T > 0)
        gpipe = space.workload.schedule.lower() == "gpipe"
        self.phi: Floats = -self.least(-_lesser_shares(space)) * (not gpipe)
        limits = [WholeLayers(self, m, whole_layers) for m in range(len(space.prices.mbs))]
        self.limits: tuple[WholeLayers, ...] = tuple(limits)

    def subset(self, rows: npt.NDArray[np.bool_] | Ints) -> LaneSets:
        """Return some of the sets.

        Args:
            rows: Whether a set is one of them, of shape (sets,); or their numbers.
        """
        other = object.__new__(LaneSets)
        other.space = self.space
        other.counts, other.devices = self.counts[rows], self.devices[rows]
        other._used = np.ascontiguousarray(self._used[:, rows])
        other.stages, other.phi = self.stages[rows], self.phi[rows]
        other.limits = tuple(limit.subset(rows) for limit in self.limits)
        return other

    def least(self, values: Floats) -> Floats:
        """Return the least value over the kinds of each set."""
        found: Floats = np.full(len(self.counts), np.inf)
        for k, value in enumerate(values):  # few kinds, many sets
            np.minimum(found, value, out=found, where=self._used[k])
        return found

    def most_alone(self, seconds: float, m: int) -> Ints:
        """Return the most micro-batches of one size in a time, if nothing came after the passes.

        Args:
            seconds: The time.
            m: Number of the size of micro-batches.
        """
        limit, seconds = self.limits[m], seconds * (1 + _ROUNDING)
        found = seconds / limit.fit
        if self.space.workload.schedule.lower() == "1f1b":
            many = ((seconds - 2 * limit.sums) / limit.slowest).max(axis=0) + self.stages + 1
            few = _few(limit, np.full(len(found), seconds), self.phi)
            few = np.minimum(few, self.stages)
            found = np.minimum(found, np.where(many > self.stages, many, few))
        return _whole(found)


def _few(limit: WholeLayers, seconds: Floats, phi: Floats) -> Floats:
    """Return the most micro-batches with T >= A + (M - 1) (1 - phi) a and T >= M a, for each set."""
    # As a chain: the first of both is T >= sums + (M - 1) a.
    sums = seconds - (seconds - limit.sums) / (1 - phi)
    none, one = np.zeros(len(phi)), np.ones(len(phi))
    chain = _chain(np.arange(len(phi)), (limit.slowest, sums), one, none, none)
    found: Floats = ((seconds - chain.sums) / chain.slowest).max(axis=0) + 1
    return found


def _all_sets(space: Space) -> tuple[Ints, Ints]:
    """Return all sets of kinds that there are devices for, and what they take."""
    kinds = [k for k in range(len(space.kinds)) if np.isfinite(space.prices.layer[k]).any()]
    pools = np.zeros((len(space.kinds), len(space.pools)), dtype=np.int64)
    for k, kind in enumerate(space.kinds):
        pools[k, kind.pool] = kind.size
    now = np.zeros((1, len(space.kinds)), dtype=np.int64)
    last = np.zeros(1, dtype=np.int64)  # kinds are added in their order, so that no set comes twice
    found = []
    for _ in range(min(space.options.max_stages, space.num_layers)):
        rows, added = np.nonzero(np.array(kinds)[None, :] >= last[:, None])
        last = np.array(kinds, dtype=np.int64)[added]
        now = now[rows]
        now[np.arange(len(now)), last] += 1
        fit = (now @ pools <= np.array(space.devices)).all(axis=1)
        now, last = now[fit], last[fit]
        found.append(now)
    counts = np.concatenate(found)
    return counts, counts @ pools


class WholeLayers:
    """What whole layers, and all stages together, ask of the slowest stage's a.

    Attributes:
        fit: The least a with which whole layers fit, of shape (sets,).
        slowest: Values of a at which the least A = sum_s a_s has corners, of shape (corners, sets).
        sums: The least A for them, likewise.
    """

    def __init__(self, sets: LaneSets, m: int, whole: bool) -> None:
        space, prices = sets.space, sets.space.prices
        seconds = prices.layer[:, m]
        known = np.isfinite(seconds)
        beside = (prices.first[:, m][known], prices.last[:, m][known])
        counts = sets.counts[:, known]
        if whole:
            fit = _least_with_whole_layers(counts, seconds[known], beside, space.num_layers)
        else:
            fit = space.num_layers / np.maximum(counts @ (1 / seconds[known]), 1e-30)
            fit = np.maximum(fit, (seconds[known] * (counts > 0)).max(axis=1, initial=0))
        self.fit: Floats = np.where((sets.counts[:, ~known] > 0).any(axis=1), _NEVER, fit)
        entries = _Entries(counts.astype(float), seconds[known], seconds[known])
        rest = sets.least(prices.first[:, m]) + sets.least(prices.last[:, m])
        self.slowest, sums = entries.corners(self.fit, float(space.num_layers))
        self.sums: Floats = sums + np.where(np.isfinite(rest), rest, 0.0)

    def subset(self, rows: npt.NDArray[np.bool_] | Ints) -> WholeLayers:
        """Return what is asked of some of the sets."""
        other = object.__new__(WholeLayers)
        other.fit, other.slowest = self.fit[rows], self.slowest[:, rows]
        other.sums = self.sums[:, rows]
        return other


class _Entries(NamedTuple):
    """Stages in groups of like ones.

    Attributes:
        counts: How many stages a group has, of shape (sets, groups).
        costs: Of a layer, of shape (groups,).
        seconds: Of a layer, likewise: a stage with n layers takes n times that, at most a.
    """

    counts: Floats
    costs: Floats
    seconds: Floats

    def corners(self, fit: Floats, num_layers: float) -> tuple[Floats, Floats]:
        """Return values of a, not falling, and the least costs of all layers for them, of shape (corners, sets).

        Each stage has a layer; the cheapest stages take all others, as far as a allows. At a corner some
        stages take all that they may, the others one layer. What is below ``fit`` is replaced by it.
        """
        order = np.argsort(self.costs, kind="stable")
        counts, costs, seconds = self.counts[:, order].T, self.costs[order], self.seconds[order]
        num, total = len(costs), counts.sum(axis=0)
        points = np.empty((num + 1, len(fit)))
        sums = np.empty_like(points)
        left, low = num_layers - total, costs @ counts
        speed, filled = np.zeros(len(fit)), np.zeros(len(fit))
        at_fit, others, behind = low.copy(), total, low
        for k, each in enumerate(seconds):
            count, cost = counts[k], costs[k]
            done = np.minimum(left, count * np.maximum(fit / each - 1, 0))
            at_fit, left = at_fit + done * cost, left - done
            others, behind = others - count, behind - count * cost
            speed, filled = speed + count / each, filled + count * (cost / each)
            point = (num_layers - others) / np.maximum(speed, 1e-30)
            usable = (point >= fit) & (speed > 0)
            points[num - k] = np.where(usable, point, fit)
            sums[num - k] = np.where(usable, filled * point + behind, np.nan)
        points[0], sums[0] = fit, at_fit
        return points, np.where(np.isnan(sums), at_fit, sums)


class _Chain(NamedTuple):
    """``T >= costs + (M - more) a + rest`` and ``T >= M a + tail``, for rows of sets.

    Attributes:
        rows: Numbers of the sets.
        slowest: Values of a, one of which allows the most, of shape (corners, rows).
        sums: Costs and rest there, likewise.
        more: Of shape (rows,).
    """

    rows: Ints
    slowest: Floats
    sums: Floats
    more: Floats

    def most(self, seconds: float) -> Floats:
        """Return the most micro-batches in a time, of shape (rows,)."""
        found: Floats = ((seconds - self.sums) / self.slowest).max(axis=0) + self.more
        return np.floor(found + _ROUNDING)


def _chain(
    rows: Ints, corners: tuple[Floats, Floats], more: Floats, rest: Floats, tail: Floats
) -> _Chain:
    """Return a chain whose corners are cut where M a + tail is what limits."""
    slowest, sums = corners
    sums = sums + rest
    spare = sums - more * slowest - tail  # falls with a; below 0 M a limits
    over = spare < 0
    corner, row = np.nonzero(over[1:] & ~over[:-1])
    part = spare[corner, row] / (spare[corner, row] - spare[corner + 1, row])
    cut = slowest[corner, row] * (1 - part) + slowest[corner + 1, row] * part
    slowest = np.where(over, slowest[0], slowest)
    sums = np.where(over, sums[0], sums)
    slowest[corner + 1, row] = cut
    sums[corner + 1, row] = more[row] * cut + tail[row]
    never = over[0]
    sums[:, never] = (more * slowest[0] + tail)[never]
    return _Chain(rows, slowest, sums, more)


class LaneLimits:
    """The most micro-batches of one size that lanes of each set do in a time, what comes after the passes counted."""

    def __init__(self, sets: LaneSets, tails: Tails, m: int) -> None:
        """Find the corners.

        Args:
            sets: What lanes can be made of.
            tails: What comes after the passes of a stage, at least.
            m: Number of the size of micro-batches.
        """
        self.sets, self._m, space = sets, m, sets.space
        self._tail = sets.least(tails.beside + tails.first + tails.per_layer)
        self._update = sets.least(tails.beside + tails.per_layer)
        self._schedule = space.workload.schedule.lower()
        self._chains: list[_Chain] = []
        if self._schedule != "1f1b":
            return
        known = np.isfinite(space.prices.layer[:, m])
        for k in np.flatnonzero(known):
            rows = np.flatnonzero((sets.counts[:, k] > 0) & (sets.limits[m].fit < _NEVER))
            if len(rows):
                self._add(rows, int(k), tails)
        # With as many micro-batches as stages, and the slowest stage first, its tail counts whole.
        share = tails.per_layer / np.where(known, space.prices.layer[:, m], 1.0)
        units = np.where(known, space.prices.first[:, m] + space.prices.last[:, m], 0.0)
        self._rest = sets.least(tails.beside - share * units)
        self._times = (sets.stages - 1) * (1 - sets.phi) + sets.least(share)

    def _add(self, rows: Ints, k: int, tails: Tails) -> None:
        """Add the chain whose first stage is of a kind: T >= 2 A - a_1 + (M - S) a + tail of the first stage."""
        sets, prices, m = self.sets, self.sets.space.prices, self._m
        fit, stages = sets.limits[m].fit[rows], sets.stages[rows].astype(float)
        known = np.isfinite(prices.layer[:, m])
        layer, own = prices.layer[known, m], prices.layer[k, m]
        counts = sets.counts[rows].astype(float)
        counts[:, k] -= 1
        counts = np.column_stack([counts[:, known], np.ones(len(rows))])
        seconds, total = np.append(layer, own), float(sets.space.num_layers)
        last, tail = sets.least(prices.last[:, m])[rows], self._tail[rows]
        entries = _Entries(counts, np.append(2 * layer, own + tails.per_layer[k]), seconds)
        rest = tails.beside[k] + tails.first[k] + prices.first[k, m]
        rest = rest + np.where(stages > 1, 2 * last, prices.last[k, m])
        corners = entries.corners(fit, total)
        self._chains.append(_chain(rows, corners, stages, rest, tail))

    def most(self, seconds: float) -> Ints:
        """Return the most micro-batches that lanes of each set do in a time, of shape (sets,)."""
        sets, limit = self.sets, self.sets.limits[self._m]
        seconds = seconds * (1 + _ROUNDING)
        if self._schedule not in ("1f1b", "gpipe"):  # the first stage need not be the last to end
            return _whole((seconds - self._update) / limit.fit)
        if self._schedule == "gpipe":
            return _whole(_few(limit, seconds - self._tail, sets.phi))
        many = np.zeros(len(sets.stages))
        for chain in self._chains:
            many[chain.rows] = np.maximum(many[chain.rows], chain.most(seconds))
        rows = np.flatnonzero(many <= sets.stages)
        part, stages = limit.subset(rows), sets.stages[rows]
        few = _few(part, seconds - self._tail[rows], sets.phi[rows])
        # as many micro-batches as stages, with the slowest stage first
        end = part.sums + self._times[rows] * part.slowest + self._rest[rows]
        full = (many[rows] >= stages) | (end <= seconds).any(axis=0)
        many[rows] = np.minimum(few, np.where(full, stages, stages - 1))
        return _whole(many)


def _whole(counts: Floats) -> Ints:
    found: Ints = np.maximum(np.floor(counts + _ROUNDING), 0).astype(np.int64)
    return found


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
    # Below the time of parts of layers nothing fits; whole layers lose less than one of each stage, and units some.
    speed = counts @ (1 / seconds)
    most_lost = 2 + np.ceil(max((part / seconds).max() for part in beside))
    low = np.searchsorted(times, num_layers / speed * (1 - 1e-9))
    most = (num_layers + counts.sum(axis=1) + 2 * most_lost) / speed
    high = np.minimum(np.searchsorted(times, most), len(times) - 1)
    low, columns = (
        np.minimum(low, high),
        [np.flatnonzero(counts[:, k]) for k in range(len(seconds))],
    )
    while (low < high).any():
        middle = (low + high) // 2
        fit = np.zeros(len(counts))
        first, last, both = (np.full(len(counts), np.inf) for _ in lost)
        for k, rows in enumerate(columns):
            at = middle[rows]
            fit[rows] += layers[at, k] * counts[rows, k]
            for least, part in zip((first, last, both), lost, strict=True):
                least[rows] = np.minimum(least[rows], part[at, k])
        enough = fit - np.where(alone, both, first + last) >= num_layers
        high, low = np.where(enough, middle, high), np.where(enough, low, middle + 1)
    found: Floats = times[low]
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
