"""``explain``: a plan as text, step by step and cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from torch.distributed.tensor import Partial

from hdtensor.placements import Box, HDSpec
from hdtensor.placements.checks import placement_text, ranks_text
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    BatchedSendRecv,
    BatchedSendReduce,
    BottomStep,
    Collective,
    LocalStep,
    RedistributePlan,
    ReduceScatter,
    SendRecv,
    SplitAllGather,
    SplitAllReduce,
    SplitReduceScatter,
    Step,
)


_MAX_CELLS = 4


def explain(
    src: RedistributePlan | HDSpec | str,
    dst: HDSpec | str | None = None,
    shape: Sequence[int] | None = None,
    *,
    src_top_sizes: Sequence[int] | None = None,
    dst_top_sizes: Sequence[int] | None = None,
) -> str:
    """Return a plan as text: what moves between which ranks, cell by cell.

    >>> src = HDSpec.from_text("P / 0,1:S1 2:R")
    >>> print(explain(src, HDSpec.from_text("R / 0,1:S1 2:R"), (4, 4)))
    P / 0,1:S1 2:R -> R / 0,1:S1 2:R, shape (4, 4)
    1. SplitAllReduce, top P -> R
         all-reduce sum of ranks 0,2: [0:4, 0:2]
         all-reduce sum of ranks 1,2: [0:4, 2:4]
    2 collectives, 32 elements sent by all ranks together

    Args:
        src: A plan, or the spec before.
        dst: The spec after, unless ``src`` is a plan.
        shape: The tensor's global shape, unless ``src`` is a plan.
        src_top_sizes: As for ``resolve``.
        dst_top_sizes: As for ``resolve``.

    Returns:
        Lines without a final newline. Cells of a bottom step count from the corner of its subgroup's
        block.

    Raises:
        RedistributeError: As ``resolve``.
        SpecError: As ``resolve``.
        TypeError: If there is neither a plan nor two specs and a shape.
    """
    if isinstance(src, RedistributePlan):
        plan = src
    elif dst is None or shape is None:
        raise TypeError("explain takes a plan, or the spec before, the spec after and a shape.")
    else:
        plan = resolve(src, dst, shape, src_top_sizes=src_top_sizes, dst_top_sizes=dst_top_sizes)
    before, after = _spec(plan.src, plan.src_top_sizes), _spec(plan.dst, plan.dst_top_sizes)
    lines = [f"{before} -> {after}, shape {plan.shape}"]
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"{number}. {_title(step)}")
        lines += [f"     {_collective(collective)}" for collective in step.collectives]
    if plan.steps:
        num = sum(1 for _ in plan.collectives())
        plural = "" if num == 1 else "s"
        lines.append(
            f"{num} collective{plural}, {plan.num_moved} elements sent by all ranks together"
        )
    else:
        lines.append("nothing to do: every rank keeps its local tensor")
    return "\n".join(lines)


def _spec(spec: HDSpec, top_sizes: tuple[int, ...] | None) -> str:
    sizes = "" if top_sizes is None else f" (blocks {', '.join(map(str, top_sizes))})"
    return f"{spec}{sizes}"


def _title(step: Step) -> str:
    src, dst = step.src.spec, step.dst.spec
    match step:
        case LocalStep(index=None):
            return f"{_local(step)}, {src} -> {dst}"
        case LocalStep(index=index):
            groups = f"{src.subgroups[0].text()} -> {dst.subgroups[0].text()}"
            return f"{_local(step)} in subgroup {index}, {groups}"
        case BottomStep(index=index, axis=axis):
            groups = f"{src.subgroups[0].text()} -> {dst.subgroups[0].text()}"
            return f"bottom step in subgroup {index} along mesh axis {axis}, {groups}"
        case SplitAllReduce() | SplitReduceScatter() | SplitAllGather():
            tops = f"{placement_text(src.top)} -> {placement_text(dst.top)}"
            return f"{type(step).__name__}, top {tops}"
        case SendRecv() | BatchedSendRecv():
            return f"{type(step).__name__}, {src} -> {dst}"
        case BatchedSendReduce(op=op):
            return f"BatchedSendReduce {_op(op)}, {src} -> {dst}"
        case _:
            assert_never(step)


def _local(step: LocalStep) -> str:
    if step.keepers is not None:
        return f"local keep on ranks {ranks_text(step.keepers)}, {step.fill:g} elsewhere"
    return "local cut" if step.fill is None else f"local embed among {step.fill:g}"


def _collective(collective: Collective) -> str:
    ranks = f"of ranks {ranks_text(collective.ranks)}"
    match collective:
        case AllReduce(op=op, cells=cells):
            silent = [rank for rank in collective.ranks if rank not in collective.terms]
            note = f" (no term from {ranks_text(tuple(silent))})" if silent else ""
            return f"all-reduce {_op(op)} {ranks}{note}: {_cells(cells)}"
        case ReduceScatter(op=op, cells=parts):
            return f"reduce-scatter {_op(op)} {ranks}: {_parts(collective.ranks, parts, 'to')}"
        case AllGather(cells=parts):
            return f"all-gather {ranks}: {_parts(collective.ranks, parts, 'from')}"
        case AllToAll(cells=table):
            joined = [tuple(cell for part in row for cell in part) for row in table]
            return f"all-to-all {ranks}: {_parts(collective.ranks, joined, 'from')}"
        case _:
            assert_never(collective)


def _parts(ranks: Sequence[int], parts: Sequence[tuple[Box, ...]], word: str) -> str:
    return "; ".join(
        f"{word} {rank} {_cells(part)}" for rank, part in zip(ranks, parts, strict=True) if part
    )


def _cells(cells: Sequence[Box]) -> str:
    texts = [_cell(cell) for cell in cells[:_MAX_CELLS]]
    if len(cells) > _MAX_CELLS:
        texts.append(f"and {len(cells) - _MAX_CELLS} more")
    return " ".join(texts)


def _cell(cell: Box) -> str:
    """Return a cell as an index: ``[0:4, 2:4]``."""
    spans = [f"{a}:{b}" for a, b in zip(cell.start, cell.stop, strict=True)]
    return f"[{', '.join(spans)}]"


def _op(op: Partial) -> str:
    norm = getattr(op, "norm_type", None)
    return op.reduce_op if norm is None else f"{norm}-norm"
