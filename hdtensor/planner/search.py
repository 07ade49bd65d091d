"""``search``: the fastest strategy of a cluster, with a lower bound that says how much faster any other could be.

The first level, which devices form which lanes, is solved in the dual direction: for a time T, the samples that
each shape of a lane does within T are known at once for all shapes, and choosing lanes is a knapsack over pools of
like devices. The least T for which the batch is done is found by bisection, first with the relaxation, then with
whole lanes. The second level gives layers and micro-batches exactly. The best few strategies go to the
event simulator. Numbers of lanes matter only by what they share (ZeRO, gradients), so powers of two suffice.

Source: HSPMD, appendix A.1 (two levels, by solvers there).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hdtensor.errors import PlannerError
from hdtensor.planner.bounds import Bound, lower_bound, work_bound
from hdtensor.planner.columns import find_messages
from hdtensor.planner.exhaustive import search_all
from hdtensor.planner.lack_of_memory import too_large
from hdtensor.planner.levels import Level, deal, describe
from hdtensor.planner.place import LaneDraft, place
from hdtensor.planner.refine import refine_layers, refine_microbatches
from hdtensor.planner.score import Scored, Scorer
from hdtensor.planner.shapes import Shape, find_shapes
from hdtensor.planner.space import Space
from hdtensor.planner.strategy import Strategy
from hdtensor.planner.uniform import best_uniform
from hdtensor.planner.whole_parts import find_whole_parts


#: Strategies of equal lanes that are simulated, at each level.
_EQUAL = 6
#: Times, relative to the best, at which lanes are chosen: what is a little slower by estimate may be faster.
_NEAR = (1.0, 1.004, 1.012, 1.03)
#: Numbers of lanes so many doublings from the usual one are left out, once there is a strategy.
_FAR = 3.0
#: What is slower than the best by so much by estimate is not simulated, where devices are many.
_HOPELESS = 1.03
#: Likewise before lanes are refined.
_REFINED = 1.08
#: Few devices leave time for more of them.
_FEW_DEVICES = 16
_NEAR_FEW = (1.0, 1.01, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5)


class Progress(NamedTuple):
    """How far a search is.

    Attributes:
        done: Part of the work that is done.
        seconds: Of the best strategy's step; infinite before there is one.
        what: What was just done.
    """

    done: float
    seconds: float
    what: str


class Candidate(NamedTuple):
    """A strategy that was simulated.

    Attributes:
        seconds: Of its step.
        what: In words.
        strategy: With its ranks.
        lanes: Without them.
    """

    seconds: float
    what: str
    strategy: Strategy
    lanes: tuple[LaneDraft, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        space: What it worked on.
        strategy: The best one.
        seconds: Of its step, by the event simulator.
        bound: No strategy's step is shorter than ``bound.seconds``.
        uniform: The best uniform strategy, None if none fits.
        candidates: What was simulated, the best first.
        num_scored: How many strategies were simulated.
        is_complete: Whether the search came to its end.
        levels: The tables of lanes, which a re-plan uses again.
    """

    space: Space
    strategy: Strategy
    seconds: float
    bound: Bound
    uniform: Scored | None
    candidates: tuple[Candidate, ...]
    num_scored: int
    is_complete: bool
    levels: tuple[Level, ...]

    @property
    def gap(self) -> float:
        """(seconds - bound) / bound."""
        return self.seconds / self.bound.seconds - 1


def search(
    space: Space,
    *,
    report: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SearchResult:
    """Return the fastest strategy found.

    Args:
        space: What the search knows.
        report: Is told how far the search is.
        should_stop: Is asked now and then; once it says yes, the best strategy so far is returned.

    Raises:
        PlannerError: If no strategy fits in memory.
    """
    run = _Run(space, report, should_stop)
    run.search()
    return run.result()


class _Run:
    """One search: the best so far, and what it has seen."""

    def __init__(
        self,
        space: Space,
        report: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.space = space
        self.scorer = Scorer(space)
        self.uniform: Scored | None = None
        self.candidates: list[Candidate] = []
        self.levels: list[Level] = []
        self.is_complete = False
        self._messages = find_messages(space)
        self.is_best = False  # whether all strategies were gone through
        self._report, self._should_stop = report, should_stop

    @property
    def seconds(self) -> float:
        """Of the best strategy so far."""
        best = min((c.seconds for c in self.candidates), default=math.inf)
        return min(best, self.uniform.seconds if self.uniform else math.inf)

    def search(self) -> None:
        """Go through the levels, unless stopped."""
        self.uniform = best_uniform(self.space, self.scorer)
        shapes, _ = find_shapes(self.space)
        numbers = sorted(_level_numbers(self.space), key=self._likely)
        for index, num_lanes in enumerate(numbers):
            if not self._goes_on((index + 1) / (len(numbers) + 1), f"{num_lanes} lanes or more"):
                return
            if not (self.candidates and self._likely(num_lanes) > _FAR):
                self._level(shapes, num_lanes)
        self._exhaust()
        self.is_complete = True

    def _exhaust(self) -> None:
        """Go through all strategies of a small cluster that could be faster."""
        if self.space.options.equal_lanes:
            return
        found = search_all(self.space, self.scorer, self.seconds, self._should_stop)
        for scored, lanes in found.faster:
            what = describe(self.space, lanes)
            self.candidates.append(Candidate(scored.seconds, what, scored.strategy, lanes))
        self.is_best = found.is_complete

    def _likely(self, num_lanes: int) -> float:
        """Return how far a number of lanes is from the usual one, of about eight devices a lane."""
        return abs(math.log2(8 * num_lanes / sum(self.space.devices)))

    def _goes_on(self, done: float, what: str) -> bool:
        if self._report:
            self._report(Progress(done, self.seconds, what))
        found_some = bool(self.candidates) or self.uniform is not None
        return not (found_some and self._should_stop and self._should_stop())

    def _level(self, shapes: Sequence[Shape], num_lanes: int) -> None:
        level = Level(self.space, shapes, num_lanes, self._messages)
        if not len(level):
            return
        self.levels.append(level)
        if num_lanes == 1:
            for draft in level.single(_EQUAL):
                self._try(level, [draft])
            return
        room = np.array(self.space.devices)
        few = room.sum() <= _FEW_DEVICES
        work = work_bound(self.space)
        relaxed = level.relaxed_seconds(work, min(self.seconds, 64 * work), room)
        if relaxed >= self.seconds and not few:
            return  # not even parts of lanes are faster
        for lanes in level.equal(_EQUAL):
            self._try(level, lanes)
        if self.space.options.equal_lanes:
            return
        best = level.whole_seconds(relaxed, self.seconds, room)
        for factor in _NEAR_FEW if few else _NEAR:
            self._try_whole(level, best * factor, room)

    def _try_whole(self, level: Level, seconds: float, room: np.ndarray) -> None:
        lanes = level.whole(seconds, room)
        most = self.space.options.max_lanes
        if most is not None and len(lanes) > most:
            caps = level.caps(seconds)
            lanes = sorted(lanes, key=lambda lane: -caps[lane])[:most]
        dealt = deal(level, lanes, seconds) if lanes else None
        if dealt is not None:
            self._try(level, dealt)

    def _try(self, level: Level, lanes: Sequence[LaneDraft]) -> None:
        """Improve lanes, place them, and simulate the step."""
        few = sum(self.space.devices) <= _FEW_DEVICES
        if not few and max(map(level.clock.seconds, lanes)) > self.seconds * _REFINED:
            return
        refined = {lane: refine_layers(level.clock, lane) for lane in dict.fromkeys(lanes)}
        better = [refined[lane] for lane in lanes]
        better = refine_microbatches(level.clock, better)
        if not few and max(map(level.clock.seconds, better)) > self.seconds * _HOPELESS:
            return
        for drafts in (tuple(better), tuple(lanes)):
            placed = (place(self.space, drafts), place(self.space, drafts, "stage"))
            scored = [self.scorer.score(strategy) for strategy in placed if strategy]
            best = min((s for s in scored if s), key=lambda s: s.seconds, default=None)
            if best is not None:
                what = describe(self.space, drafts)
                self.candidates.append(Candidate(best.seconds, what, best.strategy, drafts))
                break

    def result(self) -> SearchResult:
        """Return what was found.

        Raises:
            PlannerError: If that is nothing.
        """
        found = best_of(
            self.space, self.candidates, self.uniform, Bound(0.0, 0.0), self.scorer.num_scored
        )
        if self.is_best:
            bound = Bound(found.seconds, min(work_bound(self.space), found.seconds))
        else:
            bound = lower_bound(self.space, found.seconds)
        parts = find_whole_parts(self.space, found.strategy, found.seconds)
        bound = bound._replace(parts=parts)
        return replace(found, bound=bound, is_complete=self.is_complete, levels=tuple(self.levels))


def best_of(
    space: Space,
    candidates: Sequence[Candidate],
    uniform: Scored | None,
    bound: Bound,
    num_scored: int,
) -> SearchResult:
    """Return the result of a search that saw some strategies.

    Args:
        space: What the search knows.
        candidates: What was simulated.
        uniform: The best uniform strategy, if one fits.
        bound: On the step.
        num_scored: How many strategies were simulated.

    Raises:
        PlannerError: If there is no strategy at all.
    """
    # Equal lanes may stand on other ranks: the fastest placement is the last one that the dictionary takes.
    slowest_first = sorted(candidates, key=lambda c: -c.seconds)
    ranked = sorted({c.what: c for c in slowest_first}.values(), key=lambda c: c.seconds)
    best = ranked[0] if ranked else None
    if uniform and (best is None or uniform.seconds < best.seconds):
        strategy, seconds = uniform.strategy, uniform.seconds
    elif best is not None:
        strategy, seconds = best.strategy, best.seconds
    else:
        raise PlannerError(too_large(space))
    return SearchResult(
        space=space,
        strategy=strategy,
        seconds=seconds,
        bound=bound,
        uniform=uniform,
        candidates=tuple(ranked),
        num_scored=num_scored,
        is_complete=True,
        levels=(),
    )


def _level_numbers(space: Space) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to the number of lanes that there may be."""
    most = min(sum(space.devices), space.workload.batch)
    if space.options.max_lanes is not None:
        most = min(most, space.options.max_lanes)
    number = 1
    while number <= most:
        if number >= space.options.min_lanes or 2 * number > space.options.min_lanes:
            yield max(number, space.options.min_lanes)
        number *= 2
