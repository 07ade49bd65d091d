"""Plans and their steps as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hdtensor.placements.checks import ranks_text
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.summary import StageSummary, Summary


#: Rows of a table that are printed before the rest is counted.
_MOST_ROWS = 64


def seconds_text(seconds: float) -> str:
    """Return seconds in the unit that fits.

    >>> seconds_text(6.0512), seconds_text(0.0123), seconds_text(4.2e-5)
    ('6.051 s', '12.30 ms', '42.0 us')
    """
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


def step_text(summary: Summary) -> str:
    """Return what a plan's step takes, its stages, its memory and its traffic, as tables."""
    planned, prediction = summary.planned, summary.prediction
    workload, model = planned.workload, planned.model
    lines = [
        f"{model.name} on {cluster_text(planned.cluster)}",
        f"batch {workload.batch} x {workload.context} tokens, {workload.precision}, {workload.optimizer}, "
        f"zero {workload.zero}, recompute {workload.recompute}, {workload.schedule}",
        "",
        f"step           {seconds_text(prediction.seconds)} simulated, {summary.tokens_per_second:,.0f} tokens/s",
        *_bound_lines(summary.why),
        f"not computing  {summary.bubble:.1%} of the time of all ranks in use",
        f"bottleneck     {stage_text(summary.bottleneck)}: computes "
        f"{seconds_text(summary.bottleneck.busy)}",
    ]
    if summary.idle_ranks:
        lines.append(f"left idle      ranks {ranks_text(summary.idle_ranks)}")
    lines += ["", *_table(_stage_rows(summary))]
    lines += ["", *_table(_memory_rows(summary))]
    lines += ["", *_table(_traffic_rows(summary))]
    lines += _why_lines(summary.why)
    lines += [
        f"warning: {stage_text(stage)} needs {bytes_text(stage.memory.total)} on each device, which has "
        f"{bytes_text(stage.capacity)}"
        for stage in summary.overfull
    ]
    return "\n".join(lines)


def stage_text(stage: StageSummary) -> str:
    """Return the name of a stage for people."""
    return (
        f"lane {stage.lane} stage {stage.stage} ({stage.device}, ranks {ranks_text(stage.ranks)})"
    )


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
    for reason in why.get("reasons", ()):
        yield from ("", f"why: {reason}")
    rejected = why.get("alternatives", ())
    if rejected:
        yield ""
        rows: list[tuple[str, ...]] = [("rejected", "step", "why not")]
        rows += [(each["what"], seconds_text(each["seconds"]), each["reason"]) for each in rejected]
        yield from _table(rows)


def _stage_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]]
    rows = [("lane", "micro-batches", "stage", "ranks", "device", "tp", "layers", "forward", "backward",
             "busy", "waiting", "sync", "optimizer")]  # fmt: skip
    lanes = summary.planned.strategy.lanes
    for stage in summary.stages:
        lane = lanes[stage.lane]
        is_first = stage.stage == 0
        rows.append(
            (
                str(stage.lane) if is_first else "",
                f"{lane.num_microbatches} x {lane.mbs}" if is_first else "",
                str(stage.stage),
                ranks_text(stage.ranks),
                stage.device,
                str(stage.tp) if stage.cp == 1 else f"{stage.tp} cp {stage.cp}",
                f"{stage.layers[0]}-{stage.layers[1]}",
                seconds_text(stage.forward),
                seconds_text(stage.backward),
                seconds_text(stage.busy),
                seconds_text(stage.waiting),
                seconds_text(stage.sync),
                seconds_text(stage.optimizer),
            )
        )
    return rows


def _memory_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]]
    rows = [("lane", "stage", "each rank needs", "parameters", "gradients", "optimizer", "activations",
             "in flight", "buffers", "of", "left")]  # fmt: skip
    for stage in summary.stages:
        memory = stage.memory
        rows.append(
            (
                str(stage.lane) if stage.stage == 0 else "",
                str(stage.stage),
                bytes_text(memory.total),
                bytes_text(memory.parameters),
                bytes_text(memory.gradients),
                bytes_text(memory.optimizer),
                bytes_text(memory.activations),
                str(stage.in_flight),
                bytes_text(memory.buffers),
                bytes_text(stage.capacity),
                bytes_text(stage.free),
            )
        )
    return rows


def _traffic_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]]
    rows = [("traffic of a step", "between whom", "nodes", "link", "bytes", "busy")]
    for traffic in summary.traffic:
        busy = seconds_text(traffic.seconds) if traffic.seconds else "in the passes"
        rows.append(
            (
                traffic.kind,
                traffic.what,
                traffic.link,
                f"{bytes_text(traffic.bandwidth)}/s",
                bytes_text(traffic.num_bytes),
                busy,
            )
        )
    return rows if len(rows) > 1 else [("traffic of a step", "none")]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    shown = rows[: 1 + _MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    if len(rows) > len(shown):
        lines.append(f"... and {len(rows) - len(shown)} more; --json prints all")
    return lines
