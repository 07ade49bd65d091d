"""Plans as tables for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdtensor.placements.checks import ranks_text


if TYPE_CHECKING:
    from hdtensor.placements import HDSpec
    from hdtensor.plan.annotation import AnnotationPlan
    from hdtensor.plan.expanded import ExpandedPlan
    from hdtensor.plan.stages import Pipeline, Uniform
    from hdtensor.plan.strategy import StrategyPlan

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def strategy_table(plan: StrategyPlan, world_size: int | None) -> str:
    """Return one line per stage: share of the batch, micro-batches, ranks, tp, layers."""
    facts = [_count(len(plan.ranks), "rank")]
    if plan.num_layers is not None:
        pipelines = _count(len(plan.pipelines), "pipeline")
        facts = [pipelines, *facts, _count(plan.num_layers, "layer")]
    if plan.zero:
        facts.append(f"zero {plan.zero}")
    if plan.split == "sequence":
        facts.append("shares of every sequence")
    title = f"plan {plan.about.label!r}" if plan.about.label is not None else "plan"
    lines = [f"{title}: {', '.join(facts)}"]
    if plan.uniform is not None:
        lines.append(f"uniform: {_degrees(plan.uniform)}")
    else:
        lines += _columns(_stage_rows(plan.pipelines))
    return "\n".join(lines + _outside(plan, world_size))


def expanded_table(plan: ExpandedPlan, world_size: int | None) -> str:
    """Return the batch's spec, one line per kind of tensor and spec, then the points and notes."""
    lines = [
        f"expanded plan: {_count(len(plan.tensors), 'tensor')}, {_count(len(plan.ranks), 'rank')}, "
        f"{_count(plan.inputs.num_subgroups, 'pipeline')}, shares {':'.join(map(str, plan.shares))}"
    ]
    rows: dict[tuple[str, HDSpec], list[int]] = {}
    for name, spec in plan.tensors.items():
        index = _INDEX.search(name)
        key = (_INDEX.sub("*", name, count=1), spec)
        rows.setdefault(key, []).extend([int(index[0])] if index else [])
    table = [("tensor", "layers", "spec"), ("inputs", "-", str(plan.inputs))]
    table += [
        (name, ranks_text(tuple(layers)) or "-", str(spec)) for (name, spec), layers in rows.items()
    ]
    table.append(("labels", "-", str(plan.labels)))
    lines += _columns(table)
    lines += [
        f"stage point: {point.side} of {point.module} -> {point.spec}"
        for point in plan.points
        if point.kind == "stage"
    ]
    num_tp = sum(point.kind == "tp" for point in plan.points)
    if num_tp:
        lines.append(f"tp points: {num_tp}")
    sharing = plan.shared_sequences
    if sharing is not None:
        modules = _count(len(sharing.modules), "module")
        lines.append(f"shared sequences: {sharing.method}, {sharing.order}, in {modules}")
    if plan.replicated_kv:
        lines.append(f"k and v projections replicated in: {', '.join(plan.replicated_kv)}")
    if plan.unmatched:
        lines.append(f"replicated, since no pattern names them: {', '.join(plan.unmatched)}")
    return "\n".join(lines + _outside(plan, world_size))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _stage_rows(pipelines: Sequence[Pipeline]) -> list[tuple[str, ...]]:
    total = sum(pipeline.samples or 0 for pipeline in pipelines)
    with_cp = any(stage.cp > 1 or stage.ep > 1 for p in pipelines for stage in p.stages)
    with_device = any(stage.device is not None for p in pipelines for stage in p.stages)
    header = ["pipeline", "share", "micro-batches", "stage", "ranks", "tp"]
    header += ["cp", "ep"] * with_cp + ["layers"] + ["device"] * with_device
    rows = [tuple(header)]
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            row = [str(p), _share(pipeline, total), _micro_batches(pipeline)]
            row = (row if s == 0 else [""] * len(row)) + [str(s), ranks_text(stage.ranks)]
            row.append(str(stage.tp))
            row += [str(stage.cp), str(stage.ep)] * with_cp
            row.append(f"{stage.layers[0]}-{stage.layers[1]}")
            row += [stage.device or "-"] * with_device
            rows.append(tuple(row))
    return rows


def _share(pipeline: Pipeline, total: int) -> str:
    if pipeline.samples is None:
        return "equal"
    return f"{pipeline.samples} ({100 * pipeline.samples / total:.1f}%)"


def _micro_batches(pipeline: Pipeline) -> str:
    count, size = pipeline.microbatches, pipeline.mbs
    if count is None and size is None:
        return "-"
    return f"{'?' if count is None else count} x {'?' if size is None else size}"


def _degrees(uniform: Uniform) -> str:
    named = [(name, getattr(uniform, name)) for name in ("dp", "tp", "pp", "cp", "ep", "sp")]
    text = ", ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "one rank"
    return text if uniform.mbs is None else f"{text}, mbs {uniform.mbs}"


def _outside(plan: AnnotationPlan, world_size: int | None) -> list[str]:
    if world_size is None:
        return []
    ranks = plan.outside(world_size)
    return [f"outside, of {_count(world_size, 'rank')}: {ranks_text(ranks) or 'none'}"]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
