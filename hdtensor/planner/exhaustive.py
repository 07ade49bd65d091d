"""``search_all``: the best strategy of a small cluster, by all of them that could be faster than a known one.

A lane is faster than a time T up to some number of micro-batches, its cap. Sets of lanes whose caps make the batch are
gone through in depth; the lanes with the most samples for a device come first, so that what the devices left over could
add at most is known, and most sets are left out early. The event simulator judges the rest. A faster strategy lowers T, and
all begins again with smaller caps. Where that takes more than a few thousand simulations it ends without a proof.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from hdtensor.planner.columns import drain_part
from hdtensor.planner.decompose import PlacedStage, lane_times, place_lanes
from hdtensor.planner.lane_times import LaneTimes
from hdtensor.planner.memory import held_microbatches, rank_memory
from hdtensor.planner.place import LaneDraft
from hdtensor.planner.score import Scored, Scorer
from hdtensor.planner.simulate import end_of_passes, is_fast
from hdtensor.planner.space import Space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


#: Devices and lanes up to which a space is small.
_MOST_DEVICES = 8
_MOST_LANES = 20_000
#: What may be done: a set of lanes looked at is 1, a lane or a step simulated is more.
_EFFORT = 250_000
_LANE_EFFORT = 4
_STEP_EFFORT = 30
#: Events take longer than the exact end of a lane, and longer for each so many micro-batches.
_EVENTS = 12
_FEW = 32
#: A faster strategy begins all again only if it is so much faster.
_WORTHWHILE = 0.99
#: Relative difference that rounding makes.
_SAME = 1e-9


class Exhausted(NamedTuple):
    """What all strategies say.

    Attributes:
        faster: Strategies faster than the known one with their lanes, each faster than the one before.
        is_complete: Whether no strategy is faster than the last of them, or than the known one.
    """

    faster: tuple[tuple[Scored, tuple[LaneDraft, ...]], ...]
    is_complete: bool


class _PlacedLane(NamedTuple):
    """A lane on nodes.

    Attributes:
        draft: The lane, without micro-batches.
        nodes: Of each stage, among all nodes of all pools.
        taken: Devices of each node.
        cap: The most micro-batches with which it is fast enough.
    """

    draft: LaneDraft
    nodes: tuple[int, ...]
    taken: tuple[int, ...]
    cap: int = 0

    @property
    def samples(self) -> int:
        """What it does at most."""
        return self.cap * self.draft.mbs


class _SpentError(Exception):
    """The effort is spent."""


def search_all(
    space: Space,
    scorer: Scorer,
    seconds: float,
    should_stop: Callable[[], bool] | None = None,
) -> Exhausted:
    """Return the strategies of a small space that are faster than a known one, the best last.

    Args:
        space: What the search knows.
        scorer: What says how long a strategy takes.
        seconds: Of the known strategy's step; infinite if there is none.
        should_stop: Is asked now and then; once it says yes, what was found so far is returned.
    """
    if sum(space.devices) > _MOST_DEVICES:
        return Exhausted((), False)
    nodes = [(pool, ranks) for pool, own in enumerate(space.pools) for ranks in own.ranks]
    lanes = list(itertools.islice(_all_lanes(space, nodes), _MOST_LANES + 1))
    if len(lanes) > _MOST_LANES:
        return Exhausted((), False)
    run = _Run(space, scorer, seconds, [ranks for _, ranks in nodes], should_stop)
    try:
        while not run.has_none_faster(lanes):
            pass
    except _SpentError:
        return Exhausted(tuple(run.faster), False)
    return Exhausted(tuple(run.faster), True)


def _all_lanes(space: Space, nodes: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[_PlacedLane]:
    """Yield every lane on every choice of nodes, but for micro-batches."""
    longest = min(space.options.max_stages, space.num_layers)
    places = [
        (node, k)
        for node, (pool, ranks) in enumerate(nodes)
        for k, kind in enumerate(space.kinds)
        if kind.pool == pool and kind.size <= len(ranks)
    ]
    todo: list[tuple[tuple[int, int], ...]] = [()]
    while todo:
        stages = todo.pop()
        taken = [0] * len(nodes)
        for node, k in stages:
            taken[node] += space.kinds[k].size
        if any(count > len(ranks) for count, (_, ranks) in zip(taken, nodes, strict=True)):
            continue
        if stages:
            own_nodes, kinds = zip(*stages, strict=True)
            for layers in _splits(space.num_layers, len(stages)):
                for m, mbs in enumerate(space.prices.mbs):
                    if all(math.isfinite(space.prices.layer[k, m]) for k in kinds):
                        yield _PlacedLane(LaneDraft(kinds, layers, mbs), own_nodes, tuple(taken))
        if len(stages) < longest:
            todo.extend((*stages, place) for place in places)


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways of giving layers to stages, one or more to each."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


@dataclass
class _Run:
    """The effort spent and the best time so far."""

    space: Space
    scorer: Scorer
    seconds: float
    ranks: list[tuple[int, ...]]
    should_stop: Callable[[], bool] | None
    faster: list[tuple[Scored, tuple[LaneDraft, ...]]] = field(default_factory=list)
    left: int = _EFFORT

    def __post_init__(self) -> None:
        space, options = self.space, self.space.options
        self.most = min(sum(space.devices), space.workload.batch, options.max_lanes or 1 << 30)
        self.placed = lru_cache(maxsize=None)(self._placed)
        self.lane_seconds = lru_cache(maxsize=None)(self._lane_seconds)
        self.is_fast = is_fast(space.costs, space.workload)

    def has_none_faster(self, lanes: Sequence[_PlacedLane]) -> bool:
        """Go through the sets of lanes; return whether that came to its end, not to a much faster strategy."""
        start = self.seconds
        able = self._useful([lane._replace(cap=self._work_cap(lane)) for lane in lanes])
        able = self._useful([lane._replace(cap=self._cap(lane)) for lane in able])
        # With the greatest rates first, what later lanes can add is known from the next one.
        able.sort(key=lambda lane: -lane.samples / sum(lane.taken))
        free = tuple(len(ranks) for ranks in self.ranks)
        todo: list[tuple[tuple[_PlacedLane, ...], int, tuple[int, ...]]] = [((), 0, free)]
        while todo:
            chosen, first, free = todo.pop()
            if len(chosen) >= self.space.options.min_lanes:
                self._score_all(chosen)
                if self.seconds < start * _WORTHWHILE:
                    return False
            if len(chosen) < self.most:
                todo += list(self._longer(able, chosen, first, free))[::-1]
        return True

    def _useful(self, lanes: Sequence[_PlacedLane]) -> list[_PlacedLane]:
        """Return the lanes that may make the batch together with the greatest rate on all other devices."""
        rate = max((lane.samples / sum(lane.taken) for lane in lanes), default=0.0)
        batch, room = self.space.workload.batch, sum(self.space.devices)
        return [
            lane
            for lane in lanes
            if lane.cap and lane.samples + rate * (room - sum(lane.taken)) >= batch * (1 - _SAME)
        ]

    def _longer(
        self,
        able: Sequence[_PlacedLane],
        chosen: tuple[_PlacedLane, ...],
        first: int,
        free: tuple[int, ...],
    ) -> Iterator[tuple[tuple[_PlacedLane, ...], int, tuple[int, ...]]]:
        """Yield the sets with one lane more that may make the batch."""
        batch, room = self.space.workload.batch, sum(free)
        missing = batch - sum(lane.samples for lane in chosen)
        least = sum(lane.draft.mbs for lane in chosen)
        for index in range(first, len(able)):
            lane = able[index]
            self._spend(1)
            if room * lane.samples < missing * sum(lane.taken):
                return
            rest = tuple(have - take for have, take in zip(free, lane.taken, strict=True))
            if min(rest) >= 0 and least + lane.draft.mbs <= batch:
                yield (*chosen, lane), index, rest

    def _spend(self, effort: int) -> None:
        """Count effort.

        Raises:
            _SpentError: If there is none left, or somebody wants to stop.
        """
        before, self.left = self.left, self.left - effort
        asks = self.should_stop is not None and before // 10_000 != self.left // 10_000
        if self.left < 0 or (asks and self.should_stop and self.should_stop()):
            raise _SpentError

    def _score_all(self, chosen: tuple[_PlacedLane, ...]) -> None:
        """Simulate a set of lanes with all numbers of micro-batches that make the batch."""
        for counts in self._counts(chosen, self.space.workload.batch):
            lanes = [(lane, count) for lane, count in zip(chosen, counts, strict=True)]
            if any(self.lane_seconds(*each) >= self.seconds for each in lanes):
                continue
            events = _EVENTS * (1 + sum(counts) // _FEW)
            self._spend(_STEP_EFFORT * (1 if self.is_fast else events))
            scored = self.scorer.score(self._strategy(lanes))
            if scored is not None and scored.seconds < self.seconds * (1 - _SAME):
                self.seconds = scored.seconds
                drafts = [lane.draft._replace(num_microbatches=count) for lane, count in lanes]
                self.faster.append((scored, tuple(drafts)))

    def _counts(self, chosen: Sequence[_PlacedLane], batch: int) -> Iterator[tuple[int, ...]]:
        """Yield numbers of micro-batches within the lanes' caps that make a batch."""
        self._spend(1)
        if not chosen:
            if batch == 0:
                yield ()
            return
        lane, others = chosen[0], chosen[1:]
        most = sum(other.samples for other in others)
        least = sum(other.draft.mbs for other in others)
        size = lane.draft.mbs
        for count in range(
            max(1, -((most - batch) // size)), min(lane.cap, (batch - least) // size) + 1
        ):
            for rest in self._counts(others, batch - count * size):
                yield (count, *rest)

    def _strategy(self, lanes: Sequence[tuple[_PlacedLane, int]]) -> Strategy:
        """Return lanes with ranks; those of a node are alike, so the first free ones will do."""
        used = [0] * len(self.ranks)
        choices = []
        for lane, count in lanes:
            stages = []
            for node, k, layers in zip(
                lane.nodes, lane.draft.kinds, lane.draft.layers, strict=True
            ):
                kind = self.space.kinds[k]
                own = self.ranks[node][used[node] : used[node] + kind.size]
                used[node] += kind.size
                stages.append(StageChoice(own, layers, kind.group.tp, kind.group.cp))
            choices.append(LaneChoice(tuple(stages), count, lane.draft.mbs))
        return Strategy(tuple(choices))

    def _work_cap(self, lane: _PlacedLane) -> int:
        """Return how many micro-batches the slowest stage does in the time, 0 if one does not pass all stages."""
        prices, m = self.space.prices, self.space.prices.mbs.index(lane.draft.mbs)
        kinds = lane.draft.kinds
        works = [prices.layer[k, m] * n for k, n in zip(kinds, lane.draft.layers, strict=True)]
        works[0] += prices.first[kinds[0], m]
        works[-1] += prices.last[kinds[-1], m]
        most = self.space.workload.batch // lane.draft.mbs
        if sum(works) * drain_part(self.space.workload.schedule) > self.seconds:
            return 0
        return most if max(works) <= 0 else int(min(most, self.seconds / max(works)))

    def _cap(self, lane: _PlacedLane) -> int:
        """Return with how many micro-batches a lane ends early enough and fits; both get worse with more."""
        low, high = 0, lane.cap
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(lane, middle) and self.lane_seconds(lane, middle) < self.seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _placed(self, lane: _PlacedLane) -> tuple[tuple[PlacedStage, ...], LaneTimes]:
        self._spend(_LANE_EFFORT)
        strategy = self._strategy([(lane, 1)])
        (stages,) = place_lanes(strategy, self.space.cluster)
        times = lane_times(strategy.lanes[0], stages, self.space.cluster, self.space.costs)
        return stages, times

    def _fits(self, lane: _PlacedLane, count: int) -> bool:
        """Return whether memory holds a lane when as many lanes as can be share optimizer states."""
        stages, space = self.placed(lane)[0], self.space
        held = held_microbatches(space.workload.schedule, len(stages), count)
        sharers = self.most if space.workload.zero else 1
        need = rank_memory(stages, dict(enumerate(held)), lane.draft.mbs, space.costs, sharers)
        return all(
            need[stage.choice.ranks[0]].total <= stage.group.device.memory_bytes for stage in stages
        )

    def _lane_seconds(self, lane: _PlacedLane, count: int) -> float:
        """Return when a lane would end if all that lanes do together took no time."""
        self._spend(_LANE_EFFORT * (1 if self.is_fast else _EVENTS * (1 + count // _FEW)))
        space = self.space
        stages, times = self.placed(lane)
        traits = space.costs.runtime()
        ends = end_of_passes(times, count, space.workload.schedule, traits.is_blocking)
        updates = [space.costs.update(stage.group, stage.layers, self.most) for stage in stages]
        start = traits.start if len(stages) > 1 else 0.0
        return start + max(end + update for end, update in zip(ends, updates, strict=True))
