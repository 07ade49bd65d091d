"""The schedule of a step as a Gantt chart: one row for each stage, drawn as SVG that stretches to any width."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from hdtensor.pipeline.schedule.timeline import Span
from hdtensor.placements.checks import ranks_text
from hdtensor.planner.page_style import PART_COLORS, stage_color
from hdtensor.planner.summary import LaneGroup, Summary, group_lanes
from hdtensor.planner.text_report import seconds_text


#: Lanes that are drawn; equal ones are drawn once.
_MOST_LANES = 12
#: Spans that each have their own element with a tooltip; more of them are drawn as one path for each colour.
_MOST_TITLES = 1500
_WIDTH = 2000.0
_HEIGHT = 20
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "gather": "gather of parameters",
    "sync": "gradient synchronization",
    "optimizer": "optimizer",
}


def timeline_html(summary: Summary) -> str:
    """Return the chart of a step."""
    groups = group_lanes(summary)
    total = summary.prediction.seconds
    spans = _spans_by_stage(summary, groups[:_MOST_LANES])
    has_titles = sum(map(len, spans.values())) <= _MOST_TITLES
    kinds = {span.kind for row in spans.values() for span in row}
    parts = ['<div class="legend">']
    parts += [
        f'<span><i style="background:{color}"></i>{_WORDS[kind]}</span>'
        for kind, color in PART_COLORS.items()
        if kind in kinds
    ]
    parts.append('<span><i style="background:var(--track)"></i>waiting</span></div>')
    for group in groups[:_MOST_LANES]:
        choice = summary.planned.strategy.lanes[group.lanes[0]]
        parts.append(
            f'<p class="lane-title"><b>{group.title}</b> <span class="faint">{choice.num_microbatches} micro-batches '
            f"of {choice.mbs}</span></p>"
        )
        for stage in group.stages:
            color = stage_color(stage.lane, stage.stage, len(group.stages))
            row = spans[stage.lane, stage.stage]
            drawing = _titled(row, total) if has_titles else _paths(row, total)
            parts.append(
                f'<div class="row"><div class="name"><i style="background:{color}"></i>stage {stage.stage}, '
                f'{escape(stage.device)} <span class="faint">{ranks_text(stage.ranks)}</span></div>'
                f'<svg class="time" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT}" height="{_HEIGHT}" '
                f'preserveAspectRatio="none" role="img" aria-label="stage {stage.stage}">{drawing}</svg></div>'
            )
    parts.append(
        f'<div class="row"><div></div><div class="axis">{"".join(_ticks(total))}</div></div>'
    )
    if len(groups) > _MOST_LANES:
        parts.append(
            f'<p class="small faint">{len(groups) - _MOST_LANES} more kinds of lanes are not drawn; the trace has '
            f"all.</p>"
        )
    return "".join(parts)


def _spans_by_stage(
    summary: Summary, groups: Sequence[LaneGroup]
) -> dict[tuple[int, int], list[Span]]:
    """Return the spans of each stage that is drawn, by its first rank."""
    place = {
        stage.ranks[0]: (stage.lane, stage.stage) for group in groups for stage in group.stages
    }
    found: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in summary.prediction.timeline.spans:
        if span.kind == "message":
            continue
        for rank in span.ranks:
            if rank in place:
                found[place[rank]].append(span)
    return found


def _titled(row: Sequence[Span], total: float) -> str:
    parts = []
    for span in row:
        number = "" if span.microbatch is None else f" of micro-batch {span.microbatch}"
        title = f"{_WORDS[span.kind]}{number}: {seconds_text(span.seconds)} from {seconds_text(span.start)}"
        parts.append(
            f'<path d="{_box(span, total)}" fill="{PART_COLORS[span.kind]}"{_shade(span)}>'
            f"<title>{escape(title)}</title></path>"
        )
    return "".join(parts)


def _paths(row: Sequence[Span], total: float) -> str:
    """Return one path for each colour and shade."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for span in row:
        found[PART_COLORS[span.kind], _shade(span)].append(_box(span, total))
    return "".join(
        f'<path d="{"".join(boxes)}" fill="{color}"{shade}/>'
        for (color, shade), boxes in found.items()
    )


def _shade(span: Span) -> str:
    """Return what tells a micro-batch from the next one."""
    return ' fill-opacity=".74"' if span.microbatch is not None and span.microbatch % 2 else ""


def _box(span: Span, total: float) -> str:
    scale = _WIDTH / total if total else 0.0
    start, width = span.start * scale, span.seconds * scale
    width = width - 1 if width > 6 else width
    return f"M{start:.1f} 0h{width:.1f}v{_HEIGHT}h-{width:.1f}z"


def _ticks(total: float) -> Iterator[str]:
    """Yield the labels of the time axis, at round numbers."""
    if not total:
        return
    step = 10 ** math.floor(math.log10(total))
    step = next((step * part for part in (0.1, 0.2, 0.25, 0.5) if total / (step * part) <= 6), step)
    number = 0
    while number * step <= total * 0.97:
        at = number * step
        text = "0" if not number else seconds_text(at).replace(".000", "").replace(".00 ", " ")
        yield f'<span style="left:{100 * at / total:.2f}%">{text}</span>'
        number += 1
