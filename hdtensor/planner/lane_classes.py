"""``LaneBound``: whether lanes, of which there are a number between two, may do the batch in a time.

What each set of kinds does at most is found in steps, each dearer than the one before, and after each the sets are left out that
cannot be part of lanes that do the batch, whatever the others do. If the batch may come out, the number of lanes is split, and then
strategies by TP, since what is bounded together is bounded by the best of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtensor.planner.lane_bounds import LaneLimits, most_alone
from hdtensor.planner.lane_sets import LaneSets
from hdtensor.planner.packing import pack, relax
from hdtensor.planner.space import Floats, Ints, Space
from hdtensor.planner.stage_limits import StageLimits
from hdtensor.planner.tails import Tails, fastest_tails


#: Numbers of lanes are bounded together, if there are many, from each of these up to the next; then one by one but for the last.
_LANE_STEPS = (1, 4, 9)
#: Micro-batches that stages' own limits take away at most; more costs more time than it is worth.
_MOST_FEWER = 8

#: For each size of micro-batches, which sets are looked at, of shape (sets,).
Rows = list[npt.NDArray[np.bool_]]


class _Open(NamedTuple):
    """A time in which strategies may end.

    Attributes:
        seconds: The time.
        sets: What their lanes can be made of.
        useful: Which of them are looked at, for each size of micro-batches.
    """

    seconds: float
    sets: LaneSets
    useful: Rows


class LaneBound:
    """What strategies with a number of lanes between two cannot beat."""

    def __init__(self, space: Space, least: int, most: int, degree: int | None = None) -> None:
        """Ask the cost model for what depends on the number of lanes.

        Args:
            space: What the search knows.
            least: The smallest number of lanes.
            most: The largest one.
            degree: The least of all lanes' greatest TP, the same for all strategies that are bounded; None for any.
        """
        self.space, self.least, self.most, self.degree = space, least, most, degree
        self._tails = fastest_tails(space, least, most, degree)
        self._open: _Open | None = None
        self._reach = [
            k for k, kind in enumerate(space.kinds) if degree is None or kind.group.tp >= degree
        ]

    def may_end_in(self, seconds: float, sets: LaneSets, useful: Rows) -> bool:
        """Return whether the bound leaves open that a strategy ends in a time.

        Args:
            seconds: The time.
            sets: What lanes can be made of.
            useful: Which of them may be part of lanes that do the batch in that time.
        """
        known = self._open
        if known and seconds <= known.seconds and len(known.sets.counts) < len(sets.counts):
            # What cannot be part of lanes that do the batch in a time cannot in a shorter one either.
            sets, useful = known.sets, known.useful
        caps = self._caps(seconds, sets, useful)
        best = np.max(caps, axis=0)
        some = best > 0
        if not some.any():
            return False  # not even parts of lanes do the batch
        fewer, near = sets.subset(some), [each[some] > 0 for each in caps]
        if not self._does_batch(best[some], fewer.devices):
            return False
        parts = self._parts
        for number, part in enumerate(parts):
            if part.may_end_in(seconds, fewer, near):
                parts.insert(0, parts.pop(number))  # it is asked first about the next time
                break
        else:
            if parts:
                return False
        self._open = _Open(seconds, fewer, near)
        return True

    @cached_property
    def _parts(self) -> list[LaneBound]:
        """Bounds that together say no less: of each number of lanes, or of each degree of TP."""
        if self._is_coarse:
            starts = [self.least, *(n for n in _LANE_STEPS if n > self.least)]
            ends = [*(n - 1 for n in starts[1:]), self.most]
            return [LaneBound(self.space, *each) for each in zip(starts, ends, strict=True)]
        if self.least < self.most and self.least < _LANE_STEPS[-1]:
            return [LaneBound(self.space, n, n) for n in range(self.least, self.most + 1)]
        if self.most == 1 or self.degree is not None:
            return []
        layer = self.space.prices.layer
        degrees = {
            kind.group.tp for k, kind in enumerate(self.space.kinds) if np.isfinite(layer[k]).any()
        }
        return [
            LaneBound(self.space, self.least, self.most, degree)
            for degree in sorted(degrees, reverse=True)
        ]

    def _caps(self, seconds: float, sets: LaneSets, useful: Rows) -> list[Ints]:
        """Return the most samples that a lane of each set does in a time, for each size of micro-batches.

        It is 0 for sets that cannot be part of lanes that do the batch.
        """
        usable = (sets.counts[:, self._reach] > 0).any(axis=1)
        sizes = [
            SizedLanes(sets, self._tails, m, rows & usable, seconds, self._sharers)
            for m, rows in enumerate(useful)
        ]
        caps = self._check(sets, sizes)
        if self._is_coarse:
            return caps  # what is dearer is for parts
        for size, each in zip(sizes, caps, strict=True):
            size.limit(each > 0)
        return self._check(sets, sizes)

    @property
    def _is_coarse(self) -> bool:
        return self.least < _LANE_STEPS[-1] <= self.most

    @property
    def _sharers(self) -> int:
        return self.most if self.space.workload.zero else 1

    def _check(self, sets: LaneSets, sizes: Sequence[SizedLanes]) -> list[Ints]:
        """Take micro-batches from sets whose stages do not hold all layers, while that changes anything; return what is left."""
        most = min(self.most, sum(self.space.devices))
        for _ in range(_MOST_FEWER):
            caps = [size.caps() for size in sizes]
            near = find_useful(sets, caps, most)
            left = [size.check(rows) for size, rows in zip(sizes, near, strict=True)]
            if not any(left):
                break
        caps = [size.caps() for size in sizes]
        near = find_useful(sets, caps, most)
        return [each * rows for each, rows in zip(caps, near, strict=True)]

    def _does_batch(self, caps: Ints, devices: Ints) -> bool:
        """Return whether lanes do the batch, by the most samples that each does and what it takes of each pool."""
        space, batch = self.space, self.space.workload.batch
        if self.most == 1:
            return bool(caps.max(initial=0) >= batch)
        points = math.prod(count + 1 for count in space.devices)
        chosen = pack(caps, devices, space.devices, self.most, points)
        return bool(caps[chosen].sum() >= batch)


class SizedLanes:
    """Lanes with one size of micro-batches: the most of these that each set does in a time, ever less."""

    def __init__(
        self,
        sets: LaneSets,
        tails: Tails,
        m: int,
        useful: npt.NDArray[np.bool_],
        seconds: float,
        sharers: int,
    ) -> None:
        """Take the sets whose memory holds all layers.

        Args:
            sets: What lanes can be made of.
            tails: What comes after the passes of a stage, at least.
            m: Number of the size of micro-batches.
            useful: Which sets are looked at.
            seconds: The time.
            sharers: Lanes that share optimizer state.
        """
        workload, self._mbs = sets.space.workload, sets.space.prices.mbs[m]
        schedule = workload.schedule.lower()
        rows = np.flatnonzero(useful)
        if len(rows):
            rows = rows[holds_layers(sets.subset(rows), m, sharers, 1)]
        self._rows = rows
        self._num, self._m, self._tails, self._seconds = len(sets.counts), m, tails, seconds
        self._sets = mine = sets.subset(self._rows)
        self._most = np.minimum(most_alone(mine, seconds, m), workload.batch // self._mbs)
        ahead = 1 if schedule == "gpipe" else sets.space.options.max_stages
        few = np.flatnonzero(~holds_layers(mine, m, sharers, ahead))
        self._most[few] = np.minimum(self._most[few], mine.stages[few] - 1)
        has_limits = schedule == "1f1b" and len(rows) > 0
        self._stages = StageLimits(mine, tails, m) if has_limits else None
        self._is_checked = np.zeros(len(self._rows), dtype=bool)

    def caps(self) -> Ints:
        """Return the most samples that a lane of each of all sets does, of shape (sets,)."""
        caps = np.zeros(self._num, dtype=np.int64)
        caps[self._rows] = self._most * self._mbs
        return caps

    def check(self, useful: npt.NDArray[np.bool_]) -> bool:
        """Take a micro-batch from sets whose stages do not hold all layers; return whether there were any.

        Args:
            useful: Which sets are looked at, of all.
        """
        rows = np.flatnonzero(useful[self._rows] & ~self._is_checked & (self._most > 0))
        if self._stages is None or not len(rows):
            return False
        holds = self._stages.may_hold(rows, self._most[rows], self._seconds)
        self._is_checked[rows] = holds
        self._most[rows[~holds]] -= 1
        return not holds.all()

    def limit(self, useful: npt.NDArray[np.bool_]) -> None:
        """Take micro-batches away that lanes do not do in time by their slowest and their first stage.

        Args:
            useful: Which sets are looked at, of all.
        """
        rows = np.flatnonzero(useful[self._rows])
        if not len(rows):
            return
        most = LaneLimits(self._sets.subset(rows), self._tails, self._m).most(self._seconds)
        self._is_checked[rows[most < self._most[rows]]] = False
        self._most[rows] = np.minimum(self._most[rows], most.astype(np.int64))


def find_useful(sets: LaneSets, caps: Sequence[Ints], most: int) -> Rows:
    """Return, for each size of micro-batches, whether a set can be part of lanes that do the batch.

    With devices worth w, the relaxed knapsack says how much all lanes do at most, and lanes with one of a set do at least
    ``w devices - samples`` fewer.

    Args:
        sets: What lanes can be made of.
        caps: The most samples that a lane of each set does, of shape (sets,), for each size of micro-batches.
        most: How many lanes may be taken.
    """
    space, batch = sets.space, sets.space.workload.batch
    value, worth = most_samples(space, np.max(caps, axis=0), sets.devices, most)
    paid = sets.devices @ worth
    return [(each > 0) & (paid - each <= value - batch + 1e-6) for each in caps]


def most_samples(space: Space, caps: Ints, devices: Ints, most: int) -> tuple[float, Floats]:
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


def holds_layers(sets: LaneSets, m: int, sharers: int, ahead: int) -> npt.NDArray[np.bool_]:
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
