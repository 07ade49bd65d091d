"""``page_html``: a plan and its step as one self-contained web page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hdtensor.placements.checks import ranks_text
from hdtensor.planner.link_rates import links_text
from hdtensor.planner.page_style import LANE_COLORS, MEMORY_COLORS, STEP_COLORS, STYLE, stage_color
from hdtensor.planner.page_timeline import timeline_html
from hdtensor.planner.summary import LaneGroup, StageSummary, Summary, group_lanes, link_uses
from hdtensor.planner.text_report import (
    LANE_WORDS,
    bytes_text,
    cluster_text,
    copies_texts,
    critical_text,
    group_ranks_text,
    seconds_text,
    stage_text,
)


_MOST_ROWS = 200
#: From so many ranks on their numbers have four digits, which are written smaller.
_LONG_NUMBERS = 1000
_MEMORY_WORDS = {"optimizer": "optimizer state", "buffers": "buffers and runtime"}
_STEP_WORDS = {"busy": "computing", "sync": "gradients", "gather": "parameters"}


def save_page(path: str | os.PathLike[str], summary: Summary) -> None:
    """Write the page of a plan.

    Raises:
        OSError: If the file cannot be written.
    """
    Path(path).write_text(page_html(summary), encoding="utf-8")


def page_html(summary: Summary) -> str:
    """Return a page that needs nothing else: cluster, lanes, schedule, memory, traffic, and why.

    It has no scripts, so that it is as safe to open as a picture, and reads from phone to desk width.
    """
    planned = summary.planned
    title = f"{planned.model.name} on {cluster_text(planned.cluster)}"
    sections = [
        ("Cluster", "Each box is a device in the colour of its stage, numbered lane.stage; the line in it shows how full its memory is.",
         _cluster(summary)),
        ("Lanes", "Each lane is a pipeline with its own part of the batch.", _lanes(summary)),
        ("Schedule", "What each stage does when, by event simulation.", timeline_html(summary)),
        ("Where the step goes", "What the seconds of each lane, and of each of its stages, are spent on.", _step(summary)),
        ("Memory", "Bytes on each rank at its peak; a full bar is the whole device.", _memory(summary)),
        ("Links", "Bytes of a step, and how long the busiest link is in use.", _links(summary)),
        ("Why this plan", "", _why(summary)),
    ]  # fmt: skip
    body = "".join(
        f"<section><h2>{name}</h2>{_lead(lead)}{content}</section>"
        for name, lead, content in sections
    )
    workload = planned.workload
    about = (
        f"batch {workload.batch} x {workload.context} tokens, {workload.precision}, {workload.optimizer}, ZeRO "
        f"{workload.zero}, recompute {workload.recompute}, {workload.schedule}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="faint">{escape(about)}<br>links {escape(links_text(planned.cluster))}</p>'
        f'<div class="figures">{"".join(_figures(summary))}</div>{body}'
        "<footer>Predicted by hdtensor's event simulator. Times are of one step.</footer>"
        "</main></body></html>\n"
    )


def _lead(text: str) -> str:
    return f'<p class="small faint">{escape(text)}</p>' if text else ""


def _figures(summary: Summary) -> Iterator[str]:
    why = summary.why
    yield _figure(seconds_text(summary.prediction.seconds), "a step, simulated")
    if "bound_seconds" in why:
        bound = seconds_text(why["bound_seconds"])
        yield _figure(f"{why['gap']:.1%}", f"above the lower bound of {bound}")
    if why.get("uniform_seconds"):
        ratio = why["uniform_seconds"] / summary.prediction.seconds
        yield _figure(
            f"{ratio:.2f}x",
            f"as fast as the best uniform plan, {seconds_text(why['uniform_seconds'])}",
        )
    yield _figure(f"{summary.tokens_per_second:,.0f}", "tokens a second")
    yield _figure(f"{summary.bubble:.1%}", "of the ranks' time without computing")
    bottleneck = summary.bottleneck
    where = f"the bottleneck: lane {bottleneck.lane}, stage {bottleneck.stage}"
    yield _figure(bottleneck.device, where)


def _figure(number: str, words: str) -> str:
    return f'<div class="figure"><b>{escape(number)}</b><span>{escape(words)}</span></div>'


def _colors(summary: Summary) -> dict[tuple[int, int], str]:
    lanes = summary.planned.strategy.lanes
    return {
        (s.lane, s.stage): stage_color(s.lane, s.stage, len(lanes[s.lane].stages))
        for s in summary.stages
    }


def _cluster(summary: Summary) -> str:
    cluster, colors = summary.planned.cluster, _colors(summary)
    stage_of = {rank: stage for stage in summary.stages for rank in stage.ranks}
    kind = "ranks long" if cluster.num_ranks > _LONG_NUMBERS else "ranks"
    parts = ['<div class="nodes">']
    for number, node in enumerate(cluster.nodes):
        name = " ".join(filter(None, [f"node {number}", node.name, node.zone and f"@ {node.zone}"]))
        cells = "".join(
            _rank(rank, stage_of.get(rank), colors) for rank in cluster.ranks_of(number)
        )
        parts.append(
            f'<div class="node"><header><b>{escape(name)}</b><span class="faint">{node.num_devices}x '
            f'{escape(node.device.name)}</span></header><div class="{kind}">{cells}</div></div>'
        )
    return "".join([*parts, "</div>"])


def _rank(rank: int, stage: StageSummary | None, colors: Mapping[tuple[int, int], str]) -> str:
    if stage is None:
        return f'<div class="rank idle">{rank}<small>idle</small><span class="meter"></span></div>'
    full = stage.memory.total / stage.capacity
    title = (
        f"rank {rank}: lane {stage.lane} stage {stage.stage}, layers {stage.layers[0]}-{stage.layers[1]}, tp "
        f"{stage.tp}, {bytes_text(stage.memory.total)} of {bytes_text(stage.capacity)}"
    )
    return (
        f'<div class="rank" style="background:{colors[stage.lane, stage.stage]}" title="{escape(title)}">{rank}'
        f'<small>{stage.lane}.{stage.stage}</small><span class="meter{" over" if full > 1 else ""}">'
        f'<i style="width:{100 * min(full, 1):.1f}%"></i></span></div>'
    )


def _lanes(summary: Summary) -> str:
    colors = _colors(summary)
    parts = []
    for group in group_lanes(summary):
        choice = summary.planned.strategy.lanes[group.lanes[0]]
        boxes = "".join(
            f'<div class="box" style="background:{colors[s.lane, s.stage]}"><b>layers {s.layers[0]}-{s.layers[1]}</b>'
            f"<br>{escape(s.device)}, tp {s.tp}{f', cp {s.cp}' if s.cp > 1 else ''}<br>ranks "
            f"{group_ranks_text(summary, group, s.stage, 60)}</div>"
            for s in group.stages
        )
        parts.append(
            f'<div class="lane"><p><b>{group.title}</b> <span class="faint">{choice.num_microbatches} micro-batches of '
            f'{choice.mbs}</span></p><div class="flow">{boxes}</div></div>'
        )
    return "".join(parts)


def _step(summary: Summary) -> str:
    total = summary.prediction.seconds
    parts = [_legend(LANE_COLORS, LANE_WORDS)]
    for group in group_lanes(summary):
        lane = summary.lane_seconds[group.lanes[0]]
        values = {name: max(getattr(lane, name), 0.0) for name in LANE_COLORS}
        text = ", ".join(
            f"{LANE_WORDS[name]} {seconds_text(value)}"
            for name, value in values.items()
            if value > total / 1e4
        )
        parts.append(
            f'<div class="row"><div class="name"><b>{group.title}</b></div><div>{_bar(values, LANE_COLORS, total)}'
            f'<div class="value">{text}</div></div></div>'
        )
    parts.append(f'<p class="small faint">Critical path: {escape(critical_text(summary))}.</p>')
    parts.append(f'<p class="lane-title"><b>Each stage</b></p>{_legend(STEP_COLORS, _STEP_WORDS)}')
    for group in group_lanes(summary):
        for stage in group.stages:
            values = {name: getattr(stage, name) for name in STEP_COLORS}
            text = ", ".join(
                f"{_STEP_WORDS.get(name, name)} {seconds_text(value)}"
                for name, value in values.items()
                if value
            )
            parts.append(_row(summary, group, stage, _bar(values, STEP_COLORS, total), text))
    return "".join(parts)


def _memory(summary: Summary) -> str:
    parts = [_legend(MEMORY_COLORS, _MEMORY_WORDS)]
    for group in group_lanes(summary):
        for stage in group.stages:
            values = stage.memory._asdict()
            left = (
                f"{bytes_text(stage.free)} left"
                if stage.free >= 0
                else f'<b class="warn">{bytes_text(-stage.free)} too much</b>'
            )
            text = (
                f"{bytes_text(stage.memory.total)} of {bytes_text(stage.capacity)}, {left}; {stage.in_flight} "
                f"micro-batches in flight"
            )
            scale = max(stage.capacity, stage.memory.total)
            parts.append(_row(summary, group, stage, _bar(values, MEMORY_COLORS, scale), text))
    return "".join(parts)


def _row(summary: Summary, group: LaneGroup, stage: StageSummary, bar: str, text: str) -> str:
    color = stage_color(stage.lane, stage.stage, len(group.stages))
    lanes = group.title.removesuffix(" (alike)")
    return (
        f'<div class="row"><div class="name"><i style="background:{color}"></i>{lanes}, stage {stage.stage} '
        f'<span class="faint">{escape(stage.device)}, ranks {group_ranks_text(summary, group, stage.stage, 30)}</span></div>'
        f'<div>{bar}<div class="value">{text}</div></div></div>'
    )


def _bar(values: Mapping[str, float], colors: Mapping[str, str], total: float) -> str:
    parts = "".join(
        f'<i style="width:{100 * value / total:.2f}%;background:{colors[name]}"></i>'
        for name, value in values.items()
        if value > 0 and total
    )
    return f'<div class="bar">{parts}</div>'


def _legend(colors: Mapping[str, str], words: Mapping[str, str]) -> str:
    parts = "".join(
        f'<span><i style="background:{color}"></i>{words.get(name, name)}</span>'
        for name, color in colors.items()
    )
    return f'<div class="legend">{parts}</div>'


def _links(summary: Summary) -> str:
    if not summary.traffic:
        return "<p>Nothing is sent: one rank does everything.</p>"
    uses = link_uses(summary)
    most = max(use.num_bytes for use in uses)
    rows = []
    for kind, link, bandwidth, num_bytes, busy in uses:
        bar = _bar({"busy": num_bytes}, STEP_COLORS, most)
        words = f"{kind}, {'inside of nodes' if link == 'inside' else 'between nodes'}"
        text = f"{bytes_text(num_bytes)} over links of {bytes_text(bandwidth)}/s"
        if busy:
            share = busy / summary.prediction.seconds
            text += f", in use for {seconds_text(busy)} ({share:.1%} of the step)"
        rows.append(
            f'<div class="row"><div class="name">{words}</div><div>{bar}<div class="value">{text}</div></div></div>'
        )
    each = [
        (
            t.what,
            t.link,
            bytes_text(t.num_bytes),
            seconds_text(t.seconds) if t.seconds else "in the passes",
        )
        for t in summary.traffic
    ]
    table = _table(("between whom", "nodes", "bytes", "in use"), each[:_MOST_ROWS])
    more = len(each) - _MOST_ROWS
    rest = f'<p class="small faint">and {more} more</p>' if more > 0 else ""
    return f"{''.join(rows)}<details><summary>each of {len(each)}</summary>{table}{rest}</details>"


def _why(summary: Summary) -> str:
    why, bottleneck = summary.why, summary.bottleneck
    reasons = [
        f"{stage_text(bottleneck)} computes longest, {seconds_text(bottleneck.busy)} of the step's "
        f"{seconds_text(summary.prediction.seconds)}.",
        *why.get("reasons", ()),
    ]
    if summary.idle_ranks:
        reasons.append(f"Left idle: {ranks_text(summary.idle_ranks)}.")
    reasons += [f"After a loss {text}." for text in copies_texts(summary)]
    items = "".join(f"<li>{escape(str(reason))}</li>" for reason in reasons)
    items += "".join(
        f'<li class="warn">{escape(stage_text(stage))} needs {bytes_text(stage.memory.total)}, but its device has '
        f"{bytes_text(stage.capacity)}.</li>"
        for stage in summary.overfull
    )
    rejected: Sequence[Mapping[str, Any]] = why.get("alternatives", ())
    table = ""
    if rejected:
        rows = [
            (seconds_text(each["seconds"]), str(each["reason"]), str(each["what"]))
            for each in rejected
        ]
        table = f"<h2>Rejected</h2>{_table(('step', 'why not', 'plan'), rows)}"
    return f"<ul>{items}</ul>{table}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    """Return a cell; a short one, such as a number with its unit, stays on one line."""
    kind = ' class="short"' if len(text) <= 16 else ""
    return f"<td{kind}>{escape(text)}</td>"
