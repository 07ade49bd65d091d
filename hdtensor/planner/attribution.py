"""What a step's seconds go to: the chain of work that sets its length, and the bubbles of each lane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from hdtensor.errors import PlannerError
from hdtensor.pipeline.schedule.timeline import Span, Timeline


_PASSES = ("F", "B", "I", "W")
_TOGETHER = ("sync", "gather")


class LaneSeconds(NamedTuple):
    """What the seconds of a step go to, as one lane spends them. They add up to the step.

    Attributes:
        lane: Number of the lane.
        bottleneck: The stage that computes longest.
        balanced: What every stage would compute if all computed equally long.
        imbalance: What the bottleneck computes beyond that.
        start: Before the passes.
        messages: How much earlier the passes would end if messages took no time.
        fill: What remains of the time until the last pass ends: the pipeline fills, drains and waits.
        wait: After the passes, until the other lanes come to the synchronization.
        sync: Synchronization of gradients after the passes, and the gathering of parameters (ZeRO).
        optimizer: The optimizer, as long as nothing else of the lane goes on.
    """

    lane: int
    bottleneck: int
    balanced: float
    imbalance: float
    start: float
    messages: float
    fill: float
    wait: float
    sync: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self[2:])

    @property
    def bubble(self) -> float:
        """The part of the passes' time in which the bottleneck does not compute."""
        idle = self.messages + self.fill
        return idle / (idle + self.balanced + self.imbalance)


def attribute(timeline: Timeline, without_messages: Timeline) -> tuple[LaneSeconds, ...]:
    """Return what the seconds of a step go to, for each lane.

    Args:
        timeline: The step.
        without_messages: The same step where messages take no time.

    Raises:
        PlannerError: If a lane has no passes.
    """
    step = timeline.seconds
    quiet = _by_lane(without_messages.spans)
    return tuple(
        _lane(lane, spans, step, _last(quiet[lane], _PASSES))
        for lane, spans in sorted(_by_lane(timeline.spans).items())
    )


def _lane(lane: int, spans: Sequence[Span], step: float, quiet_end: float) -> LaneSeconds:
    busy: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind in _PASSES and span.stage is not None:
            busy[span.stage] += span.seconds
    if not busy:
        raise PlannerError(f"lanes: lane {lane} has no passes to attribute seconds to.")
    end = _last(spans, _PASSES)
    start = min(span.start for span in spans if span.kind in _PASSES)
    bottleneck = max(busy, key=lambda stage: (busy[stage], -stage))
    balanced = sum(busy.values()) / len(busy)
    sync = _covered(spans, _TOGETHER, end, step)
    after = _covered(spans, (*_TOGETHER, "optimizer"), end, step)
    return LaneSeconds(
        lane=lane,
        bottleneck=bottleneck,
        balanced=balanced,
        imbalance=busy[bottleneck] - balanced,
        start=start,
        messages=end - quiet_end,
        fill=quiet_end - start - busy[bottleneck],
        wait=step - end - after,
        sync=sync,
        optimizer=after - sync,
    )


def _by_lane(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Return the spans of each lane; what several lanes do together is in each of them."""
    lane_of = {rank: s.lane for s in spans if s.kind in _PASSES for rank in s.ranks}
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in (*_PASSES, "message"):
            found[span.lane].append(span)
        else:
            for lane in {lane_of[rank] for rank in span.ranks if rank in lane_of}:
                found[lane].append(span)
    return dict(found)


def _last(spans: Iterable[Span], kinds: Sequence[str]) -> float:
    return max(span.end for span in spans if span.kind in kinds)


def _covered(spans: Iterable[Span], kinds: Sequence[str], since: float, until: float) -> float:
    """Return how long one or more spans of some kinds go on within an interval."""
    total, done = 0.0, since
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind in kinds:
            begin, end = max(span.start, done), min(span.end, until)
            if end > begin:
                total += end - begin
                done = end
    return total


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Return a chain of spans, from the start of a step to its end, in which each one starts as another ends.

    Whatever is not on it could take a little longer, and the step would not. Of several such chains it is one
    that waits for messages last.

    >>> from hdtensor.pipeline.lanes import Lane
    >>> from hdtensor.pipeline.schedule.actions import Schedule
    >>> from hdtensor.pipeline.schedule.simulate import Durations, LaneRun, simulate
    >>> schedule = Schedule.parse("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")
    >>> run = LaneRun(lane=Lane.chain([(0,), (1,)]), schedule=schedule, durations=Durations.unit(2))
    >>> [span.name for span in critical_path(simulate([run])) if span.kind != "message"]
    ['0F0', '1F0', '1B0', '1F1', '1B1', '0B1']
    """
    ends: defaultdict[float, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        ends[span.end].append(span)
    chain: list[Span] = []
    seen: set[Span] = set()
    found = sorted(timeline.spans, key=lambda each: each.end)[-1:]
    while found:
        after = found[0]
        chain.append(after)
        seen.add(after)
        before = [each for each in ends[after.start] if each not in seen and _feeds(each, after)]
        found = sorted(before, key=partial(_distance, after))[:1]
    return tuple(reversed(chain))


def _feeds(before: Span, after: Span) -> bool:
    """Return whether a span that ends as another starts may be what that one waits for."""
    return before.start <= after.start and not set(before.ranks).isdisjoint(after.ranks)


def _distance(after: Span, before: Span) -> tuple[bool, bool]:
    """Return what to prefer least: a message, then another micro-batch's message or pass beside a message."""
    is_message = before.kind == "message"
    has_message = is_message or after.kind == "message"
    return is_message, has_message and before.microbatch != after.microbatch
