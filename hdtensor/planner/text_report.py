"""Plans and their steps as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hdtensor.placements.checks import ranks_text
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.copies import Lost
from hdtensor.planner.link_rates import links_text
from hdtensor.planner.strategy import Strategy
from hdtensor.planner.summary import LaneGroup, StageSummary, Summary, group_lanes, link_uses


#: What a lane's seconds go to -> words for it.
LANE_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "balanced": "balanced work",
        "imbalance": "imbalance",
        "start": "start",
        "fill": "fill and drain",
        "messages": "messages",
        "wait": "other lanes",
        "sync": "gradients",
        "optimizer": "optimizer",
    }
)

#: Rows of a table that are printed before the rest is counted.
_MOST_ROWS = 64
#: Ranks and nodes that alone have something, before the rest is counted.
_MOST_HOLDERS = 8


def seconds_text(seconds: float) -> str:
    """Return seconds in the unit that fits.

    >>> seconds_text(6.0512), seconds_text(0.0123), seconds_text(4.2e-5)
    ('6.051 s', '12.30 ms', '42.0 us')
    """
    if math.isinf(seconds):
        return "none yet"
    if seconds >= 1:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"


def bytes_text(num_bytes: float) -> str:
    """Return bytes in the decimal unit that fits.

    >>> bytes_text(81.2e9), bytes_text(-3.5e6)
    ('81.2 GB', '-3.5 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def cluster_text(cluster: Cluster) -> str:
    """Return a cluster as one line.

    >>> from hdtensor.planner.cluster_text import cluster_of_text
    >>> cluster_text(cluster_of_text("16x H800 + 4x H20"))
    '16x H800 (2 nodes) + 4x H20 (1 node)'
    """
    counts: dict[str, list[int]] = {}
    for node in cluster.nodes:
        entry = counts.setdefault(node.device.name, [0, 0])
        entry[0] += node.num_devices
        entry[1] += 1
    return " + ".join(
        f"{devices}x {name} ({nodes} node{'' if nodes == 1 else 's'})"
        for name, (devices, nodes) in counts.items()
    )


def strategy_text(strategy: Strategy) -> str:
    """Return a strategy in short, as ``2 lanes: 20+20+20 layers, tp 4`` for each kind of lane."""
    kinds: dict[str, int] = {}
    for lane in strategy.lanes:
        layers = "+".join(str(stage.num_layers) for stage in lane.stages)
        tps = ",".join(dict.fromkeys(str(stage.tp) for stage in lane.stages))
        text = f"{layers} layers, tp {tps}, {lane.num_microbatches} x {lane.mbs}"
        kinds[text] = kinds.get(text, 0) + 1
    return "; ".join(
        f"{count} lane{'' if count == 1 else 's'} of {text}"
        for text, count in list(kinds.items())[:4]
    ) + ("; ..." if len(kinds) > 4 else "")


def step_text(summary: Summary) -> str:
    """Return what a plan's step takes, its stages, its memory and its traffic, as tables."""
    planned, prediction = summary.planned, summary.prediction
    workload, model = planned.workload, planned.model
    lines = [
        f"{model.name} on {cluster_text(planned.cluster)}",
        f"batch {workload.batch} x {workload.context} tokens, {workload.precision}, {workload.optimizer}, "
        f"zero {workload.zero}, recompute {workload.recompute}, {workload.schedule}",
        f"links {links_text(planned.cluster)}",
        "",
        f"step           {seconds_text(prediction.seconds)} simulated, {summary.tokens_per_second:,.0f} tokens/s",
        *_bound_lines(summary.why),
        f"not computing  {summary.bubble:.1%} of the time of all ranks in use",
        f"bottleneck     {stage_text(summary.bottleneck)}: computes "
        f"{seconds_text(summary.bottleneck.busy)}",
    ]
    lines.append(f"critical path  {critical_text(summary)}")
    if summary.idle_ranks:
        plural = "" if len(summary.idle_ranks) == 1 else "s"
        lines.append(f"left idle      rank{plural} {ranks_text(summary.idle_ranks)}")
    lines += labelled("after a loss", copies_texts(summary))
    lines += ["", *table_lines(_stage_rows(summary))]
    lines += ["", *table_lines(_lane_rows(summary))]
    lines += ["", *table_lines(_memory_rows(summary))]
    lines += ["", *table_lines(_traffic_rows(summary))]
    lines += _why_lines(summary.why)
    lines += [
        f"warning: {stage_text(stage)} needs {bytes_text(stage.memory.total)} on each device, which has "
        f"{bytes_text(stage.capacity)}"
        for stage in summary.overfull
    ]
    return "\n".join(lines)


def stage_text(stage: StageSummary) -> str:
    """Return the name of a stage for people."""
    ranks = f"rank{'' if len(stage.ranks) == 1 else 's'} {ranks_text(stage.ranks)}"
    return f"lane {stage.lane} stage {stage.stage} ({stage.device}, {ranks})"


def critical_text(summary: Summary, most: int = 4) -> str:
    """Return what the critical path is made of, in a line.

    Args:
        summary: What a step is made of.
        most: Parts that are named.
    """
    parts = list(summary.critical.items())
    step = summary.prediction.seconds
    named = [f"{seconds / step:.0%} {what}" for what, seconds in parts[:most]]
    rest = sum(seconds for _, seconds in parts[most:])
    return ", ".join([*named, f"{rest / step:.0%} other"] if rest else named)


def labelled(label: str, texts: Sequence[str]) -> list[str]:
    """Return texts as lines, the first one behind a label."""
    return [f"{'' if n else label:15}{text}" for n, text in enumerate(texts)]


def copies_texts(summary: Summary) -> list[str]:
    """Return which losses of devices and nodes a plan survives, in one sentence or two."""
    copies, num_nodes = summary.copies, len(summary.planned.cluster.nodes)
    used = {rank for stage in summary.stages for rank in stage.ranks}
    if used <= set(copies.devices):
        return ["there is one copy: whichever device dies, a checkpoint is needed"]
    devices = _alone_texts("rank", copies.devices, copies.num_layers)
    nodes = _alone_texts("node", copies.nodes, copies.num_layers) if num_nodes > 1 else []
    what = "weights and optimizer states" if copies.has_states else "weights"
    kinds = [] if devices else ["any device"]
    kinds += ["any node"] if num_nodes > 1 and not nodes else []
    whole = [f"{what} have copies when {' or '.join(kinds)} dies"] if kinds else []
    if not kinds:
        whole = [f"{what} do not all have copies"]
    texts = ["; ".join([*whole, *devices, *nodes])]
    if not copies.has_states:
        texts.insert(
            0,
            "optimizer states have no copies (ZeRO 1 keeps each part on one device): whichever dies, a checkpoint is "
            "needed; zero 0 keeps copies",
        )
    return texts


def _alone_texts(what: str, holders: Mapping[int, Lost], num_layers: int) -> list[str]:
    """Return what some ranks or nodes alone have."""
    texts = [
        f"{what} {number}{'' if n else ' alone has'} {lost.words(num_layers)}"
        for n, (number, lost) in enumerate(list(holders.items())[:_MOST_HOLDERS])
    ]
    rest = len(holders) - len(texts)
    more = f"{rest} more {what}{'' if rest == 1 else 's'} alone have others (--json says all)"
    return [*texts, more] if rest else texts


def _bound_lines(why: Mapping[str, Any]) -> Iterator[str]:
    if "bound_seconds" in why:
        yield (
            f"lower bound    {seconds_text(why['bound_seconds'])}: no plan of this kind is faster; gap {why['gap']:.2%}"
        )
    if why.get("uniform_seconds") is not None:
        yield f"best uniform   {seconds_text(why['uniform_seconds'])}: {why.get('uniform', '')}".rstrip(
            ": "
        )


def _why_lines(why: Mapping[str, Any]) -> Iterator[str]:
    reasons = why.get("reasons", ())
    if reasons:
        yield from ("", "why")
        yield from (f"  {reason}" for reason in reasons)
    rejected = why.get("alternatives", ())
    if rejected:
        yield ""
        rows: list[tuple[str, ...]] = [("rejected", "why not", "plan")]
        rows += [(seconds_text(each["seconds"]), each["reason"], each["what"]) for each in rejected]
        yield from table_lines(rows)


def _stage_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]]
    rows = [("lane", "micro-batches", "stage", "ranks", "device", "tp", "layers", "forward", "backward",
             "busy", "waiting", "sync", "optimizer", "gather")]  # fmt: skip
    lanes = summary.planned.strategy.lanes
    for group in group_lanes(summary):
        lane = lanes[group.lanes[0]]
        for stage in group.stages:
            is_first = stage.stage == 0
            seconds = (
                stage.forward,
                stage.backward,
                stage.busy,
                stage.waiting,
                stage.sync,
                stage.optimizer,
                stage.gather,
            )
            rows.append(
                (
                    group.numbers if is_first else "",
                    f"{lane.num_microbatches} x {lane.mbs}" if is_first else "",
                    str(stage.stage),
                    group_ranks_text(summary, group, stage.stage),
                    stage.device,
                    str(stage.tp) if stage.cp == 1 else f"{stage.tp} cp {stage.cp}",
                    f"{stage.layers[0]}-{stage.layers[1]}",
                    *map(seconds_text, seconds),
                )
            )
    return rows


def group_ranks_text(summary: Summary, group: LaneGroup, stage: int, most: int = 40) -> str:
    """Return the ranks of a stage of all lanes of a group, in short.

    Args:
        summary: What the group is of.
        group: Lanes that do the same.
        stage: Number of the stage.
        most: Characters.
    """
    lanes = summary.planned.strategy.lanes
    ranks = [rank for lane in group.lanes for rank in lanes[lane].stages[stage].ranks]
    text = ranks_text(tuple(sorted(ranks)))
    return text if len(text) <= most else f"{text[: text.rindex(',', 0, most - 3)]},..."


def _lane_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]]
    rows = [("lane", "bottleneck", *LANE_WORDS.values())]
    for group in group_lanes(summary):
        lane = summary.lane_seconds[group.lanes[0]]
        seconds = (getattr(lane, name) for name in LANE_WORDS)
        rows.append((group.numbers, f"stage {lane.bottleneck}", *map(seconds_text, seconds)))
    return rows


def _memory_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]]
    rows = [("lane", "stage", "each rank needs", "parameters", "gradients", "optimizer", "activations",
             "in flight", "buffers", "of", "left")]  # fmt: skip
    for group in group_lanes(summary):
        for stage in group.stages:
            need = stage.memory
            parts = (need.total, need.parameters, need.gradients, need.optimizer, need.activations)
            rows.append(
                (
                    group.numbers if stage.stage == 0 else "",
                    str(stage.stage),
                    *map(bytes_text, parts),
                    str(stage.in_flight),
                    *map(bytes_text, (need.buffers, stage.capacity, stage.free)),
                )
            )
    return rows


def _traffic_rows(summary: Summary) -> list[tuple[str, ...]]:
    if not summary.traffic:
        return [("traffic of a step", "none")]
    rows: list[tuple[str, ...]] = [("traffic of a step", "nodes", "link", "bytes", "busiest link")]
    for kind, link, bandwidth, num_bytes, seconds in link_uses(summary):
        busy = seconds_text(seconds) if seconds else "in the passes"
        rows.append((kind, link, f"{bytes_text(bandwidth)}/s", bytes_text(num_bytes), busy))
    return rows


def table_lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the header."""
    shown = rows[: 1 + _MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    if len(rows) > len(shown):
        lines.append(f"... and {len(rows) - len(shown)} more; --json prints all")
    return lines
