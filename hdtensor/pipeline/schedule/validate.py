"""``validate``: a schedule does all that a lane needs, in an order in which nobody waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

from hdtensor.errors import ScheduleError
from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.actions import LAST_KINDS, Action, Kind, Schedule
from hdtensor.pipeline.schedule.channels import Transport, find_deadlock
from hdtensor.pipeline.schedule.grid import Cell, draw_grid
from hdtensor.placements.checks import ranks_text


_PARTS = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_AROUND = 4
_MAX_REASONS = 8


def validate(schedule: Schedule, lane: Lane, transport: Transport | None = None) -> None:
    """Raise unless the lane can follow the schedule.

    ==============  ================================================================================
    checked         what must hold
    ==============  ================================================================================
    places          one row for each place of the lane, with actions of its own stages only
    completeness    each stage does each micro-batch's forward once, and its backward once: whole (B)
                    or in two parts (I, W)
    order           in a row, a micro-batch's F comes before its B or I, and I before W
    no deadlock     every place comes to its end on FIFO channels (``channels``)
    ==============  ================================================================================

    >>> lane = Lane.chain([(0,), (1,)])
    >>> validate(Schedule.parse("0F0,0B0\\n1B0,1F0"), lane)
    Traceback (most recent call last):
    hdtensor.errors.ScheduleError: custom: 1B0 stands before 1F0 in the row of rank 1; a backward needs its forward. Move it behind.
    step  rank 0  rank 1
       0   0F0    [1B0]  <-- here
       1   0B0     1F0

    Args:
        schedule: What to check.
        lane: Stages and edges.
        transport: How messages travel; default: separate channels for each direction and kind of traffic,
            sends that do not block, receives posted when they are needed.

    Raises:
        ScheduleError: The message says what is wrong and draws the grid of steps and places, with the wrong
            cells marked.
    """
    check = _Check(schedule, lane)
    check.places()
    for number in range(len(schedule.rows)):
        check.row(number)
    waiting = find_deadlock(schedule.rows, lane, transport or Transport())
    if waiting:
        reasons = "; ".join(
            f"{check.titles[place]} at {schedule.rows[place][step]} for {reason}"
            for place, step, reason in waiting[:_MAX_REASONS]
        )
        more = f"; and {len(waiting) - _MAX_REASONS} more" if len(waiting) > _MAX_REASONS else ""
        check.fail(
            f"{len(waiting)} of {len(schedule.rows)} places wait for ever: {reasons}{more}. Put actions that "
            f"others wait for earlier, or post receives ahead.",
            [(place, step) for place, step, _ in waiting],
        )


def place_titles(lane: Lane) -> list[str]:
    """Return a name for each place: its ranks."""
    return [
        f"rank{'' if len(place.ranks) == 1 else 's'} {ranks_text(place.ranks)}"
        for place in lane.places
    ]


class _Check:
    def __init__(self, schedule: Schedule, lane: Lane) -> None:
        self._schedule = schedule
        self._places = lane.places
        self.titles = place_titles(lane)

    def fail(self, fault: str, marked: Collection[Cell] = ()) -> NoReturn:
        """Raise with the grid, cut to what lies around the marked cells."""
        titles = self.titles
        if len(titles) != len(self._schedule.rows):
            titles = [f"row {number}" for number in range(len(self._schedule.rows))]
        around = _AROUND if self._schedule.num_actions > 64 else None
        grid = draw_grid(self._schedule.rows, titles, marked=marked, around=around)
        raise ScheduleError(f"{self._schedule.name}: {fault}\n{grid}")

    def places(self) -> None:
        rows, places = self._schedule.rows, self._places
        if len(rows) != len(places):
            wanted = ", ".join(
                f"{title}: stages {list(place.stages)}"
                for title, place in zip(self.titles, places, strict=True)
            )
            self.fail(
                f"it has {len(rows)} rows, but the lane has {len(places)} places ({wanted}). "
                f"Give a row for each."
            )

    def row(self, number: int) -> None:
        """Check one row: every action belongs there, is there once, in order, and none is missing."""
        row, title = self._schedule.rows[number], self.titles[number]
        stages = self._places[number].stages
        num = self._schedule.num_microbatches
        position: dict[Action, int] = {}
        for step, action in enumerate(row):
            if action.stage not in stages:
                text = (
                    f"{action} stands in the row of {title}, which has stages {list(stages)} only."
                )
                self.fail(text, [(number, step)])
            if not 0 <= action.microbatch < num:
                self.fail(
                    f"{action} is of a micro-batch that does not exist: there are {num}, from 0.",
                    [(number, step)],
                )
            if action in position:
                self.fail(
                    f"{action} stands twice in the row of {title}; keep one.",
                    [(number, position[action]), (number, step)],
                )
            position[action] = step
        for stage in stages:
            for microbatch in range(num):
                self._complete(number, stage, microbatch, position)

    def _complete(
        self, number: int, stage: int, microbatch: int, position: dict[Action, int]
    ) -> None:
        title = self.titles[number]
        has = {kind: position.get(Action(stage, kind, microbatch)) for kind in Kind}
        whole, parts = has[Kind.BACKWARD], [has[kind] for kind in _PARTS]
        if whole is not None and any(part is not None for part in parts):
            cells = [(number, step) for step in (whole, *parts) if step is not None]
            self.fail(
                f"{title} does the backward of micro-batch {microbatch} in stage {stage} whole and in parts; "
                f"keep B, or I and W.",
                cells,
            )
        needed = [Kind.FORWARD, *([Kind.BACKWARD] if whole is not None else _PARTS)]
        if whole is None and not any(part is not None for part in parts):
            needed = [Kind.FORWARD, Kind.BACKWARD]
        for kind in needed:
            if has[kind] is None:
                missing = Action(stage, kind, microbatch)
                end = len(self._schedule.rows[number])
                self.fail(f"{missing} is missing in the row of {title}; add it.", [(number, end)])
        for before, after in itertools.pairwise(needed):
            first, second = has[before], has[after]
            assert first is not None, before
            assert second is not None, after
            if first > second:
                early, late = Action(stage, after, microbatch), Action(stage, before, microbatch)
                why = "a backward needs its forward" if before is Kind.FORWARD else "W needs I"
                self.fail(
                    f"{early} stands before {late} in the row of {title}; {why}. Move it behind.",
                    [(number, second)],
                )


def peak_activations(rows: Iterable[Sequence[Action]]) -> dict[int, int]:
    """Return, for each stage, the most micro-batches whose activations it holds at once.

    They are held from the forward to the end of the backward, with B or W. For stages on several places it
    is the most of any.

    >>> peak_activations(Schedule.parse("0F0,0F1,0B0,0B1").rows)
    {0: 2}
    """
    peaks: dict[int, int] = {}
    for row in rows:
        held: dict[int, int] = {}
        for stage, kind, _ in row:
            if kind is Kind.FORWARD:
                held[stage] = held.get(stage, 0) + 1
                peaks[stage] = max(peaks.get(stage, 0), held[stage])
            elif kind in LAST_KINDS:
                held[stage] -= 1
    return dict(sorted(peaks.items()))
