"""Interleaved 1F1B and ZBV: schedules of places with several stages, found by planning ahead in time.

A planner lets time pass in units (a forward takes 1, a backward 2, each of its parts 1) and gives each free
place the first of its ready actions by a rule, within a limit of activations. So any number of micro-batches,
any number of stages for a place and any order of places works, V-shaped ones too, and what it finds never
waits for ever, since it has just been carried out.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from hdtensor.errors import ScheduleError
from hdtensor.pipeline.schedule.actions import LAST_KINDS, Action, Kind, Schedule
from hdtensor.pipeline.schedule.orders import Places


_UNITS = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
}

#: Sorts actions that are ready at once; the smallest goes first.
Rule: TypeAlias = Callable[[Action], tuple[int, ...]]


class PlaceRule(NamedTuple):
    """How one place chooses.

    Attributes:
        order: Sorts the ready actions.
        limit: Most micro-batches, counted in each stage, whose activations it holds.
    """

    order: Rule
    limit: int


def interleaved(places: Places, num_microbatches: int) -> Schedule:
    """Return interleaved 1F1B: several stages a place, so that a bubble is as short as a stage.

    Micro-batches come in groups of at least as many as there are places, and each group passes all stages of a
    place before the next one comes. With P places of v stages each, dealt in rounds, place p starts with
    (v - 1) G + 2 (P - 1 - p) forwards ahead, G being a group, and then takes turns (Megatron-LM, 2021).
    Stages in any other order are planned.

    >>> print(interleaved([(0, 2), (1, 3)], 2))
    # schedule: Interleaved1F1B
    # micro-batches: 2
    0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
    1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1

    Args:
        places: The stages of each place.
        num_microbatches: Micro-batches of a step, any number; 0 for none.
    """
    num_stages = _num_stages(places)
    if _are_dealt_in_rounds(places):
        rows = tuple(_taking_turns(places, num_microbatches))
    else:
        rules = _interleaved_rules(places, num_stages)
        rows, _ = _plan(places, num_microbatches, rules, is_split=False)
    return Schedule(name="Interleaved1F1B", num_microbatches=num_microbatches, rows=rows)


def _are_dealt_in_rounds(places: Places) -> bool:
    num = len(places)
    return all(
        sorted(own) == list(range(place, len(own) * num, num)) and len(own) == len(places[0])
        for place, own in enumerate(places)
    )


def _taking_turns(places: Places, num_microbatches: int) -> Iterator[tuple[Action, ...]]:
    """Yield the rows of interleaved 1F1B in closed form."""
    num_groups = max(1, num_microbatches // len(places)) if places else 1
    least, more = divmod(num_microbatches, num_groups)
    ends = list(itertools.accumulate(least + (g < more) for g in range(num_groups)))
    groups = [range(first, end) for first, end in itertools.pairwise([0, *ends])]
    for place, own in enumerate(places):
        stages = sorted(own)
        forward, backward = (
            [Action(s, kind, m) for group in groups for s in order for m in group]
            for kind, order in ((Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1]))
        )
        ahead = (len(stages) - 1) * len(groups[0]) + 2 * (len(places) - 1 - place)
        turns = itertools.zip_longest(forward[ahead:], backward)
        yield (*forward[:ahead], *(a for turn in turns for a in turn if a is not None))


def _interleaved_rules(places: Places, num_stages: int) -> list[PlaceRule]:
    num = len(places)

    def rule(place: int) -> PlaceRule:
        stages = sorted(places[place])

        def order(action: Action) -> tuple[int, ...]:
            stage, kind, microbatch = action
            group = microbatch // num
            if kind is Kind.FORWARD:
                return (1, group, stage, microbatch)
            return (0, group, num_stages - stage, microbatch)

        ahead = (len(stages) - 1) * num + 2 * (num - 1 - place)
        return PlaceRule(order, ahead + 1)

    return [rule(place) for place in range(num)]


def zero_bubble_v(places: Places, num_microbatches: int) -> Schedule:
    """Return ZBV: two stages a place in the order of a V, the backward in two parts.

    The last place turns round, so that the first one has the first stage and the last. Forwards go as far ahead
    as the activations of 1F1B allow, and weight gradients fill what is left. Of two rules, input gradients
    first or forwards first, the one that ends earlier is kept: with P places and m micro-batches usually
    after 6 m + P - 1 units, which is no bubble at all but that of the start.

    >>> print(zero_bubble_v([(0, 3), (1, 2)], 2))
    # schedule: ZBV
    # micro-batches: 2
    0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,0W0,3W1,0W1
    1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1

    Args:
        places: The stages of each place; more or fewer than two, and other orders, work too.
        num_microbatches: Micro-batches of a step, any number; 0 for none.
    """
    num_stages = _num_stages(places)

    def order(action: Action, is_forward_first: bool) -> tuple[int, ...]:
        stage, kind, microbatch = action
        if kind is Kind.BACKWARD_INPUT:
            return (1, microbatch, num_stages - stage)
        if kind is Kind.FORWARD:
            return (0 if is_forward_first else 2, -stage, microbatch)
        return (3, microbatch, num_stages - stage)

    found = []
    for is_first in (False, True):
        rule = PlaceRule(functools.partial(order, is_forward_first=is_first), num_stages)
        found.append(_plan(places, num_microbatches, [rule] * len(places), is_split=True))
    rows, _ = min(found, key=operator.itemgetter(1))
    return Schedule(name="ZBV", num_microbatches=num_microbatches, rows=rows)


def _num_stages(places: Places) -> int:
    stages = sorted(stage for own in places for stage in own)
    if stages != list(range(len(stages))):
        raise ScheduleError(
            f"the places must have stages 0 to {len(stages) - 1}, each once, got {[list(p) for p in places]}. "
            f"Where ranks share a stage but not another, write the schedule as a text."
        )
    return len(stages)


def _plan(
    places: Places, num_microbatches: int, rules: Sequence[PlaceRule], *, is_split: bool
) -> tuple[tuple[tuple[Action, ...], ...], int]:
    """Return the rows, and how many units they take."""
    planner = _Planner(places, num_microbatches, rules, is_split)
    return planner.run()


class _Planner:
    def __init__(
        self, places: Places, num_microbatches: int, rules: Sequence[PlaceRule], is_split: bool
    ) -> None:
        self._rules = rules
        self._num_stages = _num_stages(places)
        self._place_of = {stage: p for p, own in enumerate(places) for stage in own}
        self._gradient = Kind.BACKWARD_INPUT if is_split else Kind.BACKWARD
        self._ready: list[set[Action]] = [set() for _ in places]
        self._busy_until = [0] * len(places)
        self._held = [0] * len(places)
        self._slack = 0
        self._rows: list[list[Action]] = [[] for _ in places]
        #: time -> actions that end then
        self._ends: defaultdict[int, list[Action]] = defaultdict(list)
        if self._num_stages:
            first = self._place_of[0]
            self._ready[first] = {Action(0, Kind.FORWARD, m) for m in range(num_microbatches)}

    def run(self) -> tuple[tuple[tuple[Action, ...], ...], int]:
        """Let time pass until nothing is left; return the rows, and when the last one ends."""
        now = 0
        while any(self._ready) or self._ends:
            for action in self._ends.pop(now, ()):
                for follower in self._followers(action):
                    self._ready[self._place_of[follower.stage]].add(follower)
            self._start(now)
            if self._ends:
                now = min(self._ends)
            elif any(self._ready):
                self._slack += 1  # every place waits for another to hold less: let all hold more
        return tuple(map(tuple, self._rows)), max(self._busy_until, default=0)

    def _start(self, now: int) -> None:
        for place, ready in enumerate(self._ready):
            if self._busy_until[place] > now:
                continue
            allowed = [action for action in ready if self._is_allowed(place, action)]
            if allowed:
                action = min(allowed, key=self._rules[place].order)
                ready.remove(action)
                self._begin(place, action, now)

    def _is_allowed(self, place: int, action: Action) -> bool:
        is_full = self._held[place] >= self._rules[place].limit + self._slack
        return action.kind is not Kind.FORWARD or not is_full

    def _begin(self, place: int, action: Action, now: int) -> None:
        self._rows[place].append(action)
        self._busy_until[place] = now + _UNITS[action.kind]
        self._ends[self._busy_until[place]].append(action)
        self._held[place] += (action.kind is Kind.FORWARD) - (action.kind in LAST_KINDS)

    def _followers(self, action: Action) -> Iterator[Action]:
        """Yield what may begin once an action has ended."""
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            is_last = stage == self._num_stages - 1
            follower = Action(stage + 1, Kind.FORWARD, microbatch)
            yield Action(stage, self._gradient, microbatch) if is_last else follower
        elif kind is self._gradient:
            if stage:
                yield Action(stage - 1, self._gradient, microbatch)
            if kind is Kind.BACKWARD_INPUT:
                yield Action(stage, Kind.BACKWARD_WEIGHT, microbatch)
