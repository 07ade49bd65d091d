"""``simulate``: when everything of a step happens, for lanes of unlike stages, schedules and micro-batches."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hdtensor.errors import ScheduleError
from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.actions import GRADIENT_KINDS, Action, Kind, Schedule
from hdtensor.pipeline.schedule.events import Task, run_tasks
from hdtensor.pipeline.schedule.messages import Flow, Message, Traffic
from hdtensor.pipeline.schedule.timeline import Span, SpanKind, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long the work of a lane takes.

    Attributes:
        forward: Seconds of each stage's forward, for a micro-batch of relative size 1.
        backward: Seconds of each stage's whole backward.
        backward_weight: Seconds of its part for the weights; the rest is the part for the input. Default
            half of it.
        sizes: Relative size of each micro-batch; all the rest scales with it. Default 1 each.
        message: (sender's stage, receiver's stage) -> seconds of a message of relative size 1, without
            latency; those of a pair that is not named take 0.
        latency: Seconds that every message takes beside.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_weight: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()
    message: Mapping[tuple[int, int], float] = field(default_factory=dict)
    latency: float = 0.0

    def __post_init__(self) -> None:
        weight = self.backward_weight or tuple(seconds / 2 for seconds in self.backward)
        object.__setattr__(self, "backward_weight", weight)
        if not len(self.forward) == len(self.backward) == len(weight):
            raise ScheduleError(
                f"durations must be of the same stages: forward has {len(self.forward)}, backward "
                f"{len(self.backward)}, backward_weight {len(weight)}."
            )
        numbers = (*self.forward, *self.backward, *weight, *self.sizes, *self.message.values())
        parts = (b - w for b, w in zip(self.backward, weight, strict=True))
        if any(not number >= 0 for number in (*numbers, *parts, self.latency)):
            raise ScheduleError(
                "durations must not be negative, nor backward_weight above backward."
            )

    @classmethod
    def unit(cls, num_stages: int) -> Durations:
        """Return the usual units: 1 for a forward, 2 for a backward (1 for each part), 0 for messages."""
        return cls(forward=(1.0,) * num_stages, backward=(2.0,) * num_stages)

    def compute_seconds(self, action: Action) -> float:
        """Return how long an action takes."""
        stage, kind, microbatch = action
        size = self.sizes[microbatch] if self.sizes else 1.0
        match kind:
            case Kind.FORWARD:
                return self.forward[stage] * size
            case Kind.BACKWARD:
                return self.backward[stage] * size
            case Kind.BACKWARD_INPUT:
                return (self.backward[stage] - self.backward_weight[stage]) * size
            case Kind.BACKWARD_WEIGHT:
                return self.backward_weight[stage] * size

    def message_seconds(self, message: Message) -> float:
        """Return how long a message takes."""
        size = self.sizes[message.microbatch] if self.sizes else 1.0
        return self.latency + self.message.get(message.edge, 0.0) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRun:
    """What one lane does in a step.

    Attributes:
        lane: Its stages.
        schedule: A schedule that ``validate`` accepts for the lane.
        durations: How long it takes.
        is_blocking: Whether sender and receiver do nothing else during a message, as where sends and receives
            stand in the stream of the passes.
    """

    lane: Lane
    schedule: Schedule
    durations: Durations
    is_blocking: bool = False

    def __post_init__(self) -> None:
        if len(self.durations.forward) != self.lane.num_stages:
            raise ScheduleError(
                f"the durations are of {len(self.durations.forward)} stages, but the lane {self.lane} has "
                f"{self.lane.num_stages}."
            )
        sizes, num = self.durations.sizes, self.schedule.num_microbatches
        if sizes and len(sizes) != num:
            raise ScheduleError(f"{len(sizes)} sizes are given for {num} micro-batches.")


class Event(NamedTuple):
    """Work before or after the passes that some ranks do together, across lanes too.

    Attributes:
        name: What the timeline calls it.
        kind: "gather" (ZeRO), "sync" (gradients) or "optimizer".
        seconds: How long it takes.
        ranks: The ranks that take part; it starts when all have come to it.
        when: "before" or "after" the passes; events of one rank keep their order.
    """

    name: str
    kind: Literal["gather", "sync", "optimizer"]
    seconds: float
    ranks: tuple[int, ...]
    when: Literal["before", "after"] = "after"


def simulate(runs: Sequence[LaneRun], events: Sequence[Event] = ()) -> Timeline:
    """Return when everything of a step happens.

    Each place does its row in order. An action starts when its messages have come; a message takes its
    channel for as long as it takes, while its sender goes on.

    >>> lane = Lane.chain([(0,), (1,)])
    >>> schedule = Schedule.parse("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")
    >>> timeline = simulate([LaneRun(lane=lane, schedule=schedule, durations=Durations.unit(2))])
    >>> timeline.seconds, round(timeline.bubble_share(), 3)
    (9.0, 0.333)

    Args:
        runs: The lanes; spans number them in this order.
        events: Gathers, synchronizations, optimizer steps, in program order.

    Raises:
        ScheduleError: If a schedule waits for ever, or an event names a rank of no lane.
    """
    with _no_garbage():
        build = _Builder(runs)
        for event in events:
            if event.when == "before":
                build.event(event)
        for index, run in enumerate(runs):
            build.passes(index, run)
        for event in events:
            if event.when == "after":
                build.event(event)
        return build.timeline()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep the garbage collector away: it would walk over tens of thousands of new tuples again and again.

    Nothing here makes circles. On 1,024 ranks this is two thirds of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Builder:
    """Turns lanes and events into tasks."""

    def __init__(self, runs: Sequence[LaneRun]) -> None:
        self._tasks: list[Task] = []
        self._spans: list[Span] = []
        self._orders: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        self._worker: dict[int, tuple[object, ...]] = {}  # rank -> (lane, place)
        self._ranks: dict[tuple[object, ...], tuple[int, ...]] = {}
        for index, run in enumerate(runs):
            for number, place in enumerate(run.lane.places):
                self._ranks[index, number] = place.ranks
                self._worker.update(dict.fromkeys(place.ranks, (index, number)))

    def event(self, event: Event) -> None:
        unknown = [rank for rank in event.ranks if rank not in self._worker]
        if unknown:
            raise ScheduleError(f"{event.name!r}: rank {unknown[0]} is in none of the lanes.")
        workers = sorted({self._worker[rank] for rank in event.ranks}, key=str)
        index = len(self._tasks)
        self._tasks.append(Task(event.seconds))
        lane = self._worker[event.ranks[0]][0] if event.ranks else 0
        assert isinstance(lane, int), lane
        self._spans.append(
            Span(event.name, event.kind, lane, tuple(event.ranks), 0.0, event.seconds)
        )
        for worker in workers:
            self._orders[worker].append(index)

    def passes(self, index: int, run: LaneRun) -> None:
        """Add the actions of a lane, and their messages in the order of sending."""
        traffic = Traffic(run.lane)
        made: dict[tuple[int, object, int], int] = {}  # (stage, what, micro-batch) -> task
        todo: list[tuple[int, int, Action]] = []
        sent: dict[Message, int] = {}
        for place, row in enumerate(run.schedule.rows):
            for action in row:
                key = (action.stage, action.kind, action.microbatch)
                if key not in made:
                    made[key] = self._compute(index, run, action, traffic)
                    if action.kind in GRADIENT_KINDS:
                        made[action.stage, "gradient", action.microbatch] = made[key]
                todo.append((made[key], place, action))
                for message in traffic.sent(place, action):
                    sent[message] = self._message(index, run, message, made[key])
        for task, place, action in todo:
            try:
                before = [sent[message] for message in traffic.received(place, action)]
                before += [made[key] for key in _own_needs(traffic, place, action)]
            except KeyError as error:
                raise ScheduleError(
                    f"{run.schedule.name}: {action} needs what no row has, {error}. Call validate, which draws it."
                ) from None
            if before:
                old = self._tasks[task]
                self._tasks[task] = Task(old.seconds, (*old.after, *before))
        self._order(index, run, todo, traffic, sent)

    def _order(
        self,
        index: int,
        run: LaneRun,
        todo: Sequence[tuple[int, int, Action]],
        traffic: Traffic,
        sent: Mapping[Message, int],
    ) -> None:
        """Put a lane's tasks in the orders in which places, and channels, do them."""
        if not run.is_blocking:
            for task, place, _ in todo:
                self._orders[index, place].append(task)
            for message, task in sent.items():
                self._orders[index, message.flow].append(task)
            return
        position = {
            (action.stage, action.kind is Kind.FORWARD, action.microbatch): number
            for number, (_, _, action) in enumerate(todo)
            if action.kind is not Kind.BACKWARD_WEIGHT
        }
        leaving: dict[int, list[Message]] = {}  # place -> what its last action sends
        for task, place, action in todo:
            order = self._orders[index, place]
            for message in _in_turn(
                leaving.get(place, ()), traffic.received(place, action), position
            ):
                order.append(sent[message])
            order.append(task)
            leaving[place] = list(traffic.sent(place, action))
        for place, messages in leaving.items():
            self._orders[index, place].extend(sent[message] for message in messages)

    def _compute(self, index: int, run: LaneRun, action: Action, traffic: Traffic) -> int:
        seconds = run.durations.compute_seconds(action)
        places = traffic.places_of[action.stage]
        ranks = tuple(rank for place in places for rank in self._ranks[index, place])
        kind: SpanKind = action.kind.value
        self._tasks.append(Task(seconds))
        self._spans.append(
            Span(str(action), kind, index, ranks, 0.0, seconds, action.stage, action.microbatch)
        )
        return len(self._tasks) - 1

    def _message(self, index: int, run: LaneRun, message: Message, producer: int) -> int:
        seconds = run.durations.message_seconds(message)
        flow: Flow = message.flow
        ends = tuple(self._ranks[index, place][0] for place in flow[:2])
        stage, to = message.edge
        letter = "F" if flow.is_forward else "B"
        name = f"{stage}->{to} {letter}{message.microbatch}"
        self._tasks.append(Task(seconds, (producer,)))
        self._spans.append(
            Span(name, "message", index, ends, 0.0, seconds, stage, message.microbatch)
        )
        return len(self._tasks) - 1

    def timeline(self) -> Timeline:
        starts = run_tasks(self._tasks, self._orders.values())
        timed = (
            span._replace(start=start) for span, start in zip(self._spans, starts, strict=True)
        )
        return Timeline(spans=tuple(timed))


def _in_turn(
    leaving: Sequence[Message],
    coming: Sequence[Message],
    position: Mapping[tuple[int, bool, int], int],
) -> list[Message]:
    """Return what a place sends and receives between two passes, in an order that both ends share.

    It sends first, but for a gradient that the place behind it makes before it takes what comes to it.
    """
    first = [
        gradient
        for gradient in coming
        if not gradient.flow.is_forward
        and any(
            gradient.flow[:2] == sent.flow[1::-1]
            and position[gradient.edge[0], False, gradient.microbatch]
            < position[sent.edge[1], True, sent.microbatch]
            for sent in leaving
            if sent.flow.is_forward
        )
    ]
    return [*first, *leaving, *(message for message in coming if message not in first)]


def _own_needs(traffic: Traffic, place: int, action: Action) -> Iterator[tuple[int, object, int]]:
    """Yield what an action needs of other stages of its own place."""
    for stage, kind, microbatch in traffic.needs(action):
        if place in traffic.places_of[stage]:
            yield stage, (kind if kind is Kind.FORWARD else "gradient"), microbatch
