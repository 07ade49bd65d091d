"""``Timeline``: who did what when, simulated or measured, and its picture as a trace for Perfetto."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from hdtensor.errors import ScheduleError
from hdtensor.placements.checks import ranks_text


#: What a span is: a part of a pass, a message, or work before and after the passes.
SpanKind: TypeAlias = Literal["F", "B", "I", "W", "message", "gather", "sync", "optimizer"]

_PASSES = ("F", "B", "I", "W")
#: Messages stand below the ranks of their lane.
_FIRST_CHANNEL = 1 << 24


class Span(NamedTuple):
    """One piece of work. A rank that measures writes the same as the simulator.

    Attributes:
        name: Such as "2F0", or "gradient sync".
        kind: What it is.
        lane: Number of the lane.
        ranks: The ranks that do it; of a message, sender and receiver.
        start: Seconds from the start of the step.
        seconds: How long it takes.
        stage: Number of the stage, if it is of one; of a message, the sender's.
        microbatch: Number of the micro-batch, if it is of one.
    """

    name: str
    kind: SpanKind
    lane: int
    ranks: tuple[int, ...]
    start: float
    seconds: float
    stage: int | None = None
    microbatch: int | None = None

    @property
    def end(self) -> float:
        """When it ends, seconds."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All spans of a step.

    Attributes:
        spans: In any order.
    """

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """When the last span ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lanes(self) -> tuple[int, ...]:
        """Numbers of the lanes."""
        return tuple(sorted({span.lane for span in self.spans}))

    def busy_seconds(self) -> dict[int, float]:
        """Return how long each rank computes forwards and backwards."""
        busy: defaultdict[int, float] = defaultdict(float)
        for span in self._passes():
            for rank in span.ranks:
                busy[rank] += span.seconds
        return dict(sorted(busy.items()))

    def bubble_share(self, lane: int | None = None) -> float:
        """Return the part of the ranks' time in which they compute nothing, while passes go on.

        The time of a lane is from its first forward to its last backward. For all lanes together it is that
        of the slowest one, so that waiting for another lane counts.

        Args:
            lane: Number of a lane; default all.
        """
        spans = [span for span in self._passes() if lane is None or span.lane == lane]
        if not spans:
            return 0.0
        length = max(span.end for span in spans) - min(span.start for span in spans)
        ranks = {rank for span in spans for rank in span.ranks}
        busy = sum(span.seconds * len(span.ranks) for span in spans)
        return 1 - busy / (length * len(ranks)) if length else 0.0

    def peak_activations(self) -> dict[tuple[int, int], int]:
        """Return, for each (lane, stage), the most micro-batches whose activations are held at once.

        They are held from the start of the forward to the end of the backward.
        """
        changes: defaultdict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        seen = set()
        for span in self._passes():
            assert span.stage is not None, span
            what = (span.lane, span.stage, span.kind, span.microbatch)
            if what in seen:  # each rank that measures writes its own
                continue
            seen.add(what)
            if span.kind == "F":
                changes[span.lane, span.stage].append((span.start, 1))
            elif span.kind in ("B", "W"):
                changes[span.lane, span.stage].append((span.end, -1))
        peaks = {}
        for where, steps in sorted(changes.items()):
            held = most = 0
            for _, change in sorted(steps):  # what ends goes before what starts
                held += change
                most = max(most, held)
            peaks[where] = most
        return peaks

    def trace(self) -> dict[str, Any]:
        """Return the spans as Chrome's trace events, which Perfetto and chrome://tracing show.

        A lane is a process, ranks and channels are its threads, times are microseconds.
        """
        return {"traceEvents": list(_events(self.spans)), "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a JSON file.

        Raises:
            OSError: If the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.trace()) + "\n", encoding="utf-8")

    @classmethod
    def from_trace(cls, trace: dict[str, Any]) -> Timeline:
        """Return the timeline of a trace that ``trace`` made, or of those of all ranks put together.

        Raises:
            ScheduleError: If it is none.
        """
        spans = []
        try:
            for event in trace["traceEvents"]:
                if event["ph"] != "X":
                    continue
                more = event["args"]
                spans.append(
                    Span(
                        name=event["name"],
                        kind=event["cat"],
                        lane=event["pid"],
                        ranks=tuple(more["ranks"]),
                        start=event["ts"] / 1e6,
                        seconds=event["dur"] / 1e6,
                        stage=more.get("stage"),
                        microbatch=more.get("microbatch"),
                    )
                )
        except (KeyError, TypeError, ValueError) as error:
            raise ScheduleError(
                f"the trace is none of a timeline: {type(error).__name__} {error}. Give one that "
                f"Timeline.save_trace wrote."
            ) from None
        return cls(spans=tuple(spans))

    def _passes(self) -> Iterator[Span]:
        return (span for span in self.spans if span.kind in _PASSES)


def _events(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[int, str], int] = {}
    num_channels = 0
    for span in spans:
        title = _thread(span)
        if (span.lane, title) not in threads:
            if all(lane != span.lane for lane, _ in threads):
                yield _name("process_name", span.lane, 0, f"lane {span.lane}")
            number = span.ranks[0]
            if span.kind == "message":
                number = _FIRST_CHANNEL + num_channels
                num_channels += 1
            threads[span.lane, title] = number
            yield _name("thread_name", span.lane, number, title)
        args: dict[str, Any] = {"ranks": list(span.ranks)}
        if span.stage is not None:
            args["stage"] = span.stage
        if span.microbatch is not None:
            args["microbatch"] = span.microbatch
        yield {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "ts": span.start * 1e6,
            "dur": span.seconds * 1e6,
            "pid": span.lane,
            "tid": threads[span.lane, title],
            "args": args,
        }


def _thread(span: Span) -> str:
    if span.kind == "message":
        return f"{span.ranks[0]} -> {span.ranks[-1]}"
    return f"rank{'' if len(span.ranks) == 1 else 's'} {ranks_text(span.ranks)}"


def _name(what: str, lane: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": lane, "tid": thread, "args": {"name": name}}
