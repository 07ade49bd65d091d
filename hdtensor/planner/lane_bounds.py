"""``LaneLimits``: the most micro-batches that lanes of each set of kinds do in a time, whatever their order and layers.

The formulas are proven in docs/planner_bound.md. Each says that a lane's time is at least a sum of costs of its layers, so many
times its slowest stage's a, and a rest. For a given a the least sum is found by filling stages, the cheapest layers first. The
sum falls and is convex in a, so the most micro-batches come out at one of its corners.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdtensor.planner.lane_sets import NEVER, Entries, LaneSets, WholeLayers
from hdtensor.planner.space import Floats, Ints
from hdtensor.planner.tails import Tails


#: Relative slack for sums in another order.
_ROUNDING = 1e-9


def most_alone(sets: LaneSets, seconds: float, m: int) -> Ints:
    """Return the most micro-batches of one size in a time, if nothing came after the passes.

    Args:
        sets: What lanes can be made of.
        seconds: The time.
        m: Number of the size of micro-batches.
    """
    limit, seconds = sets.limit(m), seconds * (1 + _ROUNDING)
    found = seconds / limit.fit
    if sets.space.workload.schedule.lower() == "1f1b":
        many = ((seconds - 2 * limit.sums) / limit.slowest).max(axis=0) + sets.stages + 1
        few = _few(limit, np.full(len(found), seconds), sets.phi)
        few = np.minimum(few, sets.stages)
        found = np.minimum(found, np.where(many > sets.stages, many, few))
    return _whole(found)


def _few(limit: WholeLayers, seconds: Floats, phi: Floats) -> Floats:
    """Return the most micro-batches with T >= A + (M - 1) (1 - phi) a and T >= M a, for each set."""
    # As a chain: the first of both is T >= sums + (M - 1) a.
    sums = seconds - (seconds - limit.sums) / (1 - phi)
    none, one = np.zeros(len(phi)), np.ones(len(phi))
    chain = _chain(np.arange(len(phi)), (limit.slowest, sums), one, none, none)
    found: Floats = ((seconds - chain.sums) / chain.slowest).max(axis=0) + 1
    return found


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
        return found


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

    def __init__(self, sets: LaneSets, tails: Tails, m: int, *, is_whole: bool = True) -> None:
        """Find the corners.

        Args:
            sets: What lanes can be made of.
            tails: What comes after the passes of a stage, at least.
            m: Number of the size of micro-batches.
            is_whole: Whether lanes do whole micro-batches; else parts too.
        """
        self.sets, self._m, self._is_whole, space = sets, m, is_whole, sets.space
        self._tail = sets.least(tails.beside + tails.first + tails.per_layer)
        self._update = sets.least(tails.beside + tails.per_layer)
        self._schedule = space.workload.schedule.lower()
        self._chains: list[_Chain] = []
        if self._schedule != "1f1b":
            return
        known = np.isfinite(space.prices.layer[:, m])
        for k in np.flatnonzero(known):
            rows = np.flatnonzero((sets.counts[:, k] > 0) & (sets.limit(m).fit < NEVER))
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
        fit, stages = sets.limit(m).fit[rows], sets.stages[rows].astype(float)
        known = np.isfinite(prices.layer[:, m])
        layer, own = prices.layer[known, m], prices.layer[k, m]
        counts = sets.counts[rows].astype(float)
        counts[:, k] -= 1
        counts = np.column_stack([counts[:, known], np.ones(len(rows))])
        seconds, total = np.append(layer, own), float(sets.space.num_layers)
        last, tail = sets.least(prices.last[:, m])[rows], self._tail[rows]
        entries = Entries(counts, np.append(2 * layer, own + tails.per_layer[k]), seconds)
        rest = tails.beside[k] + tails.first[k] + prices.first[k, m]
        rest = rest + np.where(stages > 1, 2 * last, prices.last[k, m])
        corners = entries.corners(fit, total)
        self._chains.append(_chain(rows, corners, stages, rest, tail))

    def most(self, seconds: float) -> Floats:
        """Return the most micro-batches that lanes of each set do in a time, of shape (sets,)."""
        sets, limit = self.sets, self.sets.limit(self._m)
        seconds = seconds * (1 + _ROUNDING)
        if self._schedule not in ("1f1b", "gpipe"):  # the first stage need not be the last to end
            return self._rounded((seconds - self._update) / limit.fit)
        if self._schedule == "gpipe":
            return self._rounded(_few(limit, seconds - self._tail, sets.phi))
        many = np.zeros(len(sets.stages))
        for chain in self._chains:
            many[chain.rows] = np.maximum(many[chain.rows], self._rounded(chain.most(seconds)))
        rows = np.flatnonzero(many <= sets.stages)
        part, stages = limit.subset(rows), sets.stages[rows]
        few = _few(part, seconds - self._tail[rows], sets.phi[rows])
        # as many micro-batches as stages, with the slowest stage first
        end = part.sums + self._times[rows] * part.slowest + self._rest[rows]
        full = (many[rows] >= stages) | (end <= seconds).any(axis=0)
        many[rows] = np.minimum(few, np.where(full, stages, stages - 1))
        return self._rounded(many)

    def _rounded(self, counts: Floats) -> Floats:
        found: Floats = np.maximum(np.floor(counts + _ROUNDING) if self._is_whole else counts, 0)
        return found


def _whole(counts: Floats) -> Ints:
    found: Ints = np.maximum(np.floor(counts + _ROUNDING), 0).astype(np.int64)
    return found
