"""What ranks really did when, in the form in which the simulator says what they will do."""

from __future__ import annotations

import time

import torch.distributed as dist

from hdtensor.collectives import groups
from hdtensor.pipeline.schedule.actions import Action
from hdtensor.pipeline.schedule.timeline import Span, SpanKind, Timeline


#: Seconds that this rank has waited for messages so far.
waited = [0.0]


class Recording:
    """The spans of this rank; ``timeline`` puts those of all ranks together."""

    def __init__(self, lane: int | None) -> None:
        """Begin; every rank of the world begins together, so that their clocks agree.

        Args:
            lane: Number of this rank's lane; None on a rank outside of all.
        """
        self._lane = lane
        self._spans: list[Span] = []
        dist.barrier(groups.lane_group())
        self._begin = time.perf_counter()

    def note(self, action: Action, start: float, end: float, waiting: float) -> None:
        """Note an action: its computing begins when what it waits for has come.

        Args:
            action: The action.
            start: When it began, by ``time.perf_counter``.
            end: When it ended.
            waiting: Seconds in which it waited for messages.
        """
        stage, kind, microbatch = action
        self._add(str(action), kind.value, start + waiting, end, stage, microbatch)

    def note_sync(self, start: float, end: float) -> None:
        """Note the end of a step, when gradients are summed over lanes."""
        self._add("gradient sync", "sync", start, end)

    def timeline(self) -> Timeline:
        """Return what all ranks did; every rank of the world calls it.

        Times are seconds from the beginning. Ranks that do the same together have a span each.
        """
        said: list[list[Span]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(said, self._spans, group=groups.lane_group())
        return Timeline(spans=tuple(Span(*span) for spans in said for span in spans))

    def _add(
        self,
        name: str,
        kind: SpanKind,
        start: float,
        end: float,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        assert self._lane is not None, "only ranks of lanes have something to note"
        ranks = (dist.get_rank(),)
        begin = start - self._begin
        self._spans.append(
            Span(name, kind, self._lane, ranks, begin, end - start, stage, microbatch)
        )
