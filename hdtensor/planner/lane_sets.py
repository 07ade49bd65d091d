"""``LaneSets``: what lanes can be made of, whatever the order of stages, and what all layers ask of their stages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtensor.planner.space import Floats, Ints, Space


#: What an entry that no lane can have is set to; it keeps numbers finite.
NEVER = 1e9


class LaneSets:
    """Sets of kinds that a lane can be made of, whatever their order, and what limits them.

    Attributes:
        space: What the search knows.
        counts: How many stages of each kind, of shape (sets, kinds).
        devices: What each takes of each pool, of shape (sets, pools).
        stages: Numbers of stages, of shape (sets,).
        phi: The lesser of the parts that forwards and backwards have in a stage, at most; 0 for GPipe. Of shape (sets,).
        is_whole: Whether stages have whole layers.
        forwards: The least and the greatest part that forwards have in a stage, each of shape (kinds,).
    """

    def __init__(
        self, space: Space, counts: Ints | None = None, *, whole_layers: bool = True
    ) -> None:
        """Take some sets, or all.

        Args:
            space: What the search knows.
            counts: How many stages of each kind, of shape (sets, kinds); default all that there are devices for.
            whole_layers: Whether stages have whole layers; else one or more, and parts.
        """
        self.space, self.is_whole = space, whole_layers
        self.forwards = _forward_shares(space)
        self.counts = _all_sets(space) if counts is None else counts
        self.devices: Ints = self.counts @ _pool_sizes(space)
        self.stages: Ints = self.counts.sum(axis=1)
        self._used = np.ascontiguousarray(self.counts.T > 0)
        gpipe = space.workload.schedule.lower() == "gpipe"
        lesser = np.minimum(self.forwards[1], 1 - self.forwards[0])
        self.phi: Floats = -self.least(-lesser) * (not gpipe)
        self._limits: dict[int, WholeLayers] = {}
        self._among: tuple[LaneSets, npt.NDArray[np.bool_] | Ints] | None = None

    def subset(self, rows: npt.NDArray[np.bool_] | Ints) -> LaneSets:
        """Return some of the sets.

        Args:
            rows: Whether a set is one of them, of shape (sets,); or their numbers.
        """
        other = object.__new__(LaneSets)
        other.space, other.is_whole, other.forwards = self.space, self.is_whole, self.forwards
        other.counts, other.devices = self.counts[rows], self.devices[rows]
        other._used = np.ascontiguousarray(self._used[:, rows])
        other.stages, other.phi = self.stages[rows], self.phi[rows]
        other._limits, other._among = {}, (self, rows)
        return other

    def limit(self, m: int) -> WholeLayers:
        """Return what limits the sets with a size of micro-batches, by its number."""
        if m not in self._limits:
            if self._among is None:
                self._limits[m] = WholeLayers(self, m, self.is_whole)
            else:
                sets, rows = self._among
                self._limits[m] = sets.limit(m).subset(rows)
        return self._limits[m]

    def least(self, values: Floats) -> Floats:
        """Return the least value over the kinds of each set."""
        found: Floats = np.full(len(self.counts), np.inf)
        for k, value in enumerate(values):  # few kinds, many sets
            np.minimum(found, value, out=found, where=self._used[k])
        return found


def _pool_sizes(space: Space) -> Ints:
    """Return what each kind takes of each pool, of shape (kinds, pools)."""
    sizes = np.zeros((len(space.kinds), len(space.pools)), dtype=np.int64)
    for k, kind in enumerate(space.kinds):
        sizes[k, kind.pool] = kind.size
    return sizes


def _all_sets(space: Space) -> Ints:
    """Return all sets of kinds that there are devices for."""
    kinds = [k for k in range(len(space.kinds)) if np.isfinite(space.prices.layer[k]).any()]
    pools = _pool_sizes(space)
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
    return np.concatenate(found)


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
        self.fit: Floats = np.where((sets.counts[:, ~known] > 0).any(axis=1), NEVER, fit)
        entries = Entries(counts.astype(float), seconds[known], seconds[known])
        rest = sets.least(prices.first[:, m]) + sets.least(prices.last[:, m])
        self.slowest, sums = entries.corners(self.fit, float(space.num_layers))
        self.sums: Floats = sums + np.where(np.isfinite(rest), rest, 0.0)

    def subset(self, rows: npt.NDArray[np.bool_] | Ints) -> WholeLayers:
        """Return what is asked of some of the sets."""
        other = object.__new__(WholeLayers)
        other.fit, other.slowest = self.fit[rows], self.slowest[:, rows]
        other.sums = self.sums[:, rows]
        return other


class Entries(NamedTuple):
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


def _forward_shares(space: Space) -> tuple[Floats, Floats]:
    """Return, for each kind, the least and the greatest part that forwards have in a stage, whatever its layers."""
    prices = space.prices
    known = np.isfinite(prices.layer)
    layer, first, last = (
        np.where(known, part, 0.0) for part in (prices.layer, prices.first, prices.last)
    )
    forwards = (prices.layer_forward, prices.first_forward, prices.last_forward)
    layer_forward, first_forward, last_forward = (np.where(known, part, 0.0) for part in forwards)
    shares = []
    for has_first in (0, 1):
        for has_last in (0, 1):
            total = layer + has_first * first + has_last * last
            forward = layer_forward + has_first * first_forward + has_last * last_forward
            shares.append(np.where(known, forward / np.where(known, total, 1), 0.5))
    parts = np.stack(shares)
    return parts.min(axis=(0, 2)), parts.max(axis=(0, 2))
