"""``priced_bound``: the bound on clusters of so many devices that no lattice of them is gone through.

Whatever devices and lanes are worth, lanes do no more samples than all devices are worth, and what the lane that gains most gains
beyond that. The linear relaxation has the best of these prices. Sets of kinds count in it with a quick limit first; only those that
the prices choose get the dear limits of ``lane_classes``, until the batch does not come out, or has come out of dear limits alone.
docs/planner_bound.md has the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hdtensor.planner.lane_bounds import most_alone
from hdtensor.planner.lane_classes import SizedLanes, holds_layers
from hdtensor.planner.lane_sets import LaneSets
from hdtensor.planner.packing import relax
from hdtensor.planner.space import Floats, Ints, Space
from hdtensor.planner.tails import fastest_tails


#: Sets that get their dear limits at a time.
_AT_A_TIME = 500
#: Reward of each lane, in batches, for which as many are taken as there have to be.
_FOR_EACH_LANE = 16
#: Relative slack for sums in another order.
_ROUNDING = 1e-9
#: Times that are asked about in turn, until lanes do not do the batch: the best step divided by these.
_FACTORS = (1.12, 1.25, 1.4)
#: Likewise with many sets.
_FACTORS_MANY, _MANY_SETS = (1.2, 1.4), 50_000
#: Growth of the ranges of numbers of lanes, unless the bound shall be tight; and if it shall be.
_WIDE, _NARROW = 3.0, 1.2
#: Relative width at which a tight bound's bisection ends.
_CLOSE = 4e-3


class _Priced(NamedTuple):
    """What lanes do by some prices.

    Attributes:
        samples: At most.
        amounts: How much of each set the relaxation takes, of shape (sets,).
        worth: Of a device of each pool, in samples, of shape (pools,).
    """

    samples: float
    amounts: Floats
    worth: Floats


class PricedLanes:
    """Says how many samples lanes do at most in a time.

    Attributes:
        space: What the search knows.
        num_sets: Sets of kinds that lanes can be made of.
        most_lanes: Memory allows no more lanes.
    """

    def __init__(self, space: Space, *, whole_layers: bool = True) -> None:
        """Find all sets of kinds.

        Args:
            space: What the search knows.
            whole_layers: Whether stages have whole layers.
        """
        self.space, self._is_whole = space, whole_layers
        self._sets = LaneSets(space, whole_layers=False)
        self._columns = np.column_stack([self._sets.devices, np.ones(len(self._sets.counts))])
        self._columns = self._columns.astype(float)
        self.num_sets = len(self._sets.counts)
        self.most_lanes = self._most_lanes()
        self._known: tuple[float, Ints] | None = None

    def most_samples(self, seconds: float, least: int, most: int) -> float:
        """Return a number of samples that lanes do not do more of in a time.

        It is not the least such number, but below the batch if that one is.

        Args:
            seconds: The time.
            least: The smallest number of lanes.
            most: The largest one.
        """
        caps = self._quick_caps(seconds).copy()
        is_dear = caps == 0
        while True:
            found = self._price(caps, least, most)
            if found.samples < self.space.workload.batch * (1 - _ROUNDING):
                return found.samples
            if is_dear[found.amounts > 0].all():
                return found.samples
            gains = np.where(is_dear, -np.inf, caps - self._sets.devices @ found.worth)
            rows = np.argsort(-gains, kind="stable")[:_AT_A_TIME]
            rows = rows[np.isfinite(gains[rows])]
            caps[rows] = np.minimum(caps[rows], self._dear_caps(rows, seconds, least, most))
            is_dear[rows] = True

    def _price(self, caps: Ints, least: int, most: int) -> _Priced:
        """Return the samples that no lanes do more than, of which each does no more than its set's."""
        usable = caps > 0
        columns, values = self._columns[usable], caps[usable].astype(float)
        room = np.array([*self.space.devices, most], dtype=float)
        found = self._solve(caps, (values, columns, room), (least, most))
        if found.amounts.sum() < least:  # more lanes do less: the fewest do the most
            room[-1] = least
            values = values + _FOR_EACH_LANE * self.space.workload.batch
            other = self._solve(caps, (values, columns, room), (least, most))
            found = min(found, other, key=lambda each: each.samples)
        return found

    def _solve(
        self, caps: Ints, program: tuple[Floats, Floats, Floats], lanes: tuple[int, int]
    ) -> _Priced:
        amounts = np.zeros(len(caps))
        _, amounts[caps > 0], worth = relax(*program)
        worth = worth[:-1]
        # Prices need not be the best ones: what the best lane gains beyond them is granted to each.
        gain = float((caps - self._sets.devices @ worth).max())
        samples = float(np.array(self.space.devices) @ worth)
        return _Priced(samples + lanes[gain > 0] * gain, amounts, worth)

    def _quick_caps(self, seconds: float) -> Ints:
        """Return the most samples that a lane of each set does, by its slowest stage and memory, of shape (sets,)."""
        if self._known is None or self._known[0] != seconds:
            space, sets = self.space, self._sets
            caps = [
                np.minimum(most_alone(sets, seconds, m), space.workload.batch // size)
                * size * holds_layers(sets, m, self._sharers(self.most_lanes), 1)
                for m, size in enumerate(space.prices.mbs)
            ]  # fmt: skip
            self._known = seconds, np.max(caps, axis=0)
        return self._known[1]

    def _dear_caps(self, rows: Ints, seconds: float, least: int, most: int) -> Ints:
        """Return the most samples that a lane of some sets does, by all that is known of the number of lanes."""
        space = self.space
        sets = LaneSets(space, self._sets.counts[rows], whole_layers=self._is_whole)
        tails = fastest_tails(space, least, most)
        caps = []
        for m in range(len(space.prices.mbs)):
            all_rows = np.ones(len(rows), dtype=bool)
            lanes = SizedLanes(sets, tails, m, all_rows, seconds, self._sharers(most))
            lanes.limit(all_rows)
            caps.append(lanes.caps())
        found: Ints = np.max(caps, axis=0)
        return found

    def _most_lanes(self) -> int:
        """Return a number of lanes that memory allows no more of: the fewer there are, the more of the optimizer each holds."""
        space = self.space
        most = min(sum(space.devices), space.workload.batch, space.options.max_lanes or 1 << 30)
        while True:
            held = [
                holds_layers(self._sets, m, self._sharers(most), 1)
                for m in range(len(space.prices.mbs))
            ]
            caps = np.any(held, axis=0).astype(float)
            amounts = relax(caps, self._sets.devices.astype(float), np.array(space.devices, float))
            fewer = int(amounts[0] * (1 + _ROUNDING))
            if fewer >= most or not fewer:
                return most
            most = fewer

    def _sharers(self, most: int) -> int:
        return most if self.space.workload.zero else 1


def priced_bound(
    space: Space,
    low: float,
    high: float,
    *,
    whole_layers: bool = True,
    is_tight: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> float:
    """Return a lower bound on the step of every strategy.

    Args:
        space: What the search knows.
        low: A lower bound that is known.
        high: The step of some strategy.
        whole_layers: Whether stages have whole layers.
        is_tight: Whether to raise the bound for as long as lanes do not do the batch; takes seconds.
        should_stop: Is asked now and then; once it says yes, the bound so far is returned.
    """
    lanes = PricedLanes(space, whole_layers=whole_layers)
    factors = _FACTORS_MANY if lanes.num_sets > _MANY_SETS else _FACTORS
    ranges = _Ranges(lanes, _WIDE)
    for seconds in (high / factor for factor in factors):
        if seconds <= low or not ranges.may_end_in(seconds):
            low = max(low, seconds)
            break
    if not is_tight:
        return low
    ranges = _Ranges(lanes, _NARROW)
    while high > low * (1 + _CLOSE):
        middle = (low * high) ** 0.5
        may_end = ranges.may_end_in(middle, should_stop)
        if may_end is None:
            break
        low, high = (low, middle) if may_end else (middle, high)
    return low


class _Ranges:
    """Numbers of lanes, each range of them bounded by itself."""

    def __init__(self, lanes: PricedLanes, growth: float) -> None:
        """Cut all numbers of lanes into ranges.

        Args:
            lanes: Say how many samples they do.
            growth: How many times larger the next range's smallest number is.
        """
        self._lanes = lanes
        self._ranges = list(_ranges(lanes.space.options.min_lanes, lanes.most_lanes, growth))
        self._ended = dict.fromkeys(self._ranges, 0.0)  # no strategy with these lanes is faster

    def may_end_in(
        self, seconds: float, should_stop: Callable[[], bool] | None = None
    ) -> bool | None:
        """Return whether the bound leaves open that a strategy ends in a time, None if it was stopped before it knew."""
        enough = self._lanes.space.workload.batch * (1 - _ROUNDING)
        for each in self._ranges:
            if self._ended[each] >= seconds:
                continue
            if should_stop and should_stop():
                return None
            if self._lanes.most_samples(seconds, *each) >= enough:
                self._ranges.remove(each)
                self._ranges.insert(0, each)  # it is asked first about the next time
                return True
            self._ended[each] = seconds
        return False


def _ranges(least: int, most: int, growth: float) -> Iterator[tuple[int, int]]:
    """Yield the smallest and the largest number of lanes of each range.

    >>> list(_ranges(1, 20, 2))
    [(1, 1), (2, 3), (4, 7), (8, 15), (16, 20)]
    """
    while least <= most:
        after = max(least + 1, round(least * growth))
        yield least, min(after - 1, most)
        least = after
