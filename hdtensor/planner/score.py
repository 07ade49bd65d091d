"""``Scorer``: what a strategy's step takes, if it fits in memory; each strategy is simulated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hdtensor.planner.decompose import place_lanes
from hdtensor.planner.memory import held_microbatches, rank_memory
from hdtensor.planner.simulate import MAX_PASSES, num_passes, step_seconds
from hdtensor.planner.space import Space
from hdtensor.planner.strategy import Strategy


class Scored(NamedTuple):
    """A strategy and its step.

    Attributes:
        seconds: Of the step, by the event simulator.
        strategy: The strategy.
    """

    seconds: float
    strategy: Strategy


@dataclass(slots=True)
class Scorer:
    """Simulates strategies.

    Attributes:
        space: What the search knows.
        num_scored: How many strategies were simulated.
    """

    space: Space
    num_scored: int = 0
    _known: dict[Strategy, Scored | None] = field(default_factory=dict)

    def score(self, strategy: Strategy) -> Scored | None:
        """Return a strategy with its seconds, or None if memory, the numbers of lanes allowed or the simulator do not hold it."""
        if strategy not in self._known:
            self._known[strategy] = self._score(strategy)
        return self._known[strategy]

    def _score(self, strategy: Strategy) -> Scored | None:
        space = self.space
        if not self._fits(strategy):
            return None
        self.num_scored += 1
        seconds = step_seconds(strategy, space.cluster, space.costs, space.workload)
        return Scored(seconds, strategy)

    def _fits(self, strategy: Strategy) -> bool:
        space, num_lanes = self.space, len(strategy.lanes)
        if not space.options.min_lanes <= num_lanes <= (space.options.max_lanes or num_lanes):
            return False
        if num_passes(strategy) > MAX_PASSES:
            return False  # nobody could say what its step is made of
        sharers = num_lanes if space.workload.zero else 1
        for choice, stages in zip(
            strategy.lanes, place_lanes(strategy, space.cluster), strict=True
        ):
            held = held_microbatches(space.workload.schedule, len(stages), choice.num_microbatches)
            need = rank_memory(stages, dict(enumerate(held)), choice.mbs, space.costs, sharers)
            for stage in stages:
                if need[stage.choice.ranks[0]].total > stage.group.device.memory_bytes:
                    return False
        return True
