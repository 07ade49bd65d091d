"""``explain``: a plan as text, step by step and cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

import torch
from torch.distributed.tensor import Partial

from hdtensor.placements import Box, HDSpec
from hdtensor.placements.checks import placement_text, ranks_text
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    ReduceScatter,
)
from hdtensor.redistribute.cost import PlanCost, cost
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import (
    BatchedSendRecv,
    BatchedSendReduce,
    BottomStep,
    LocalStep,
    PointToPoint,
    RedistributePlan,
    SendRecv,
    SplitAllGather,
    SplitAllReduce,
    SplitReduceScatter,
    Step,
    num_messages,
)
from hdtensor.redistribute.topology import UNIFORM, Topology


_MAX_CELLS = 4
_BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def explain(
    src: RedistributePlan | HDSpec | str,
    dst: HDSpec | str | None = None,
    shape: Sequence[int] | None = None,
    *,
    src_top_sizes: Sequence[int] | None = None,
    dst_top_sizes: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    topology: Topology = UNIFORM,
) -> str:
    """Return a plan as text: what moves between which ranks, cell by cell, and what it costs.

    >>> src = HDSpec.from_text("P / 0,1:S1 2:R")
    >>> print(explain(src, HDSpec.from_text("R / 0,1:S1 2:R"), (4, 4)))
    P / 0,1:S1 2:R -> R / 0,1:S1 2:R, shape (4, 4)
    1. SplitAllReduce, top P -> R
         all-reduce sum of ranks 0,2: [0:4, 0:2]
         all-reduce sum of ranks 1,2: [0:4, 2:4]
    2 collectives, 32 elements sent by all ranks together
    as float32: 128 bytes over any, in about 6.4 ns
    peak memory beside the old local tensors: 128 bytes, on rank 2

    Args:
        src: A plan, or the spec before.
        dst: The spec after, unless ``src`` is a plan.
        shape: The tensor's global shape, unless ``src`` is a plan.
        src_top_sizes: As for ``resolve``.
        dst_top_sizes: As for ``resolve``.
        dtype: Of the tensor, for bytes and seconds.
        topology: Links between the ranks, for seconds; also as for ``resolve``, unless ``src`` is a
            plan.

    Returns:
        Lines without a final newline. Cells of a bottom step count from the corner of its subgroup's
        block.

    Raises:
        SpecError: As ``resolve``.
        TopologyError: If the topology does not know a rank that sends or receives.
        TypeError: If there is neither a plan nor two specs and a shape.
    """
    if isinstance(src, RedistributePlan):
        plan = src
    elif dst is None or shape is None:
        raise TypeError("explain takes a plan, or the spec before, the spec after and a shape.")
    else:
        plan = resolve(
            src,
            dst,
            shape,
            src_top_sizes=src_top_sizes,
            dst_top_sizes=dst_top_sizes,
            topology=topology,
        )
    before, after = _spec(plan.src, plan.src_top_sizes), _spec(plan.dst, plan.dst_top_sizes)
    lines = [f"{before} -> {after}, shape {plan.shape}"]
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"{number}. {step_title(step)}")
        lines += [f"     {collective_text(collective)}" for collective in step.collectives]
        if isinstance(step, PointToPoint):
            lines += [f"     {line}" for line in _transfer_table(step, dtype.itemsize, topology)]
    if plan.steps:
        lines += _summary(plan, cost(plan, itemsize=dtype.itemsize, topology=topology), dtype)
    else:
        lines.append("nothing to do: every rank keeps its local tensor")
    return "\n".join(lines)


def _summary(plan: RedistributePlan, found: PlanCost, dtype: torch.dtype) -> Iterator[str]:
    collectives = sum(1 for _ in plan.collectives())
    messages = sum(num_messages(step) for step in plan.steps if isinstance(step, PointToPoint))
    counts = [_counted(collectives, "collective")] if collectives or not messages else []
    counts += [_counted(messages, "message")] if messages else []
    yield f"{', '.join(counts)}, {plan.num_moved} elements sent by all ranks together"
    sent = [
        f"{bytes_text(num)} over {name}"
        for name, num in zip(found.links, found.link_bytes, strict=True)
        if num
    ]
    if sent:
        name = str(dtype).removeprefix("torch.")
        yield f"as {name}: {', '.join(sent)}, in about {seconds_text(found.seconds)}"
    peak = found.peak_bytes
    at = tuple(rank for rank, num in found.extra_bytes.items() if num == peak)
    where = "every rank" if len(at) == len(found.extra_bytes) > 1 else ranks_text_of(at)
    yield f"peak memory beside the old local tensors: {bytes_text(peak)}, on {where}"


def _transfer_table(step: PointToPoint, itemsize: int, topology: Topology) -> Iterator[str]:
    """Yield who sends which cells to whom, then what stays, then what nobody sends."""
    terms = dict(step.terms) if isinstance(step, BatchedSendReduce) else {}
    for (src, dst), boxes in transfers_of(step).items():
        size = bytes_text(itemsize * sum(box.numel for box in boxes))
        term = f" (term {terms[src]})" if terms else ""
        if src == dst:
            yield f"stays on {src}{term}: {cells_text(boxes)}, {size}"
        else:
            link = topology.links[topology.link(src, dst)]
            yield f"{src} -> {dst}{term}: {cells_text(boxes)}, {size} over {link}"
    for ranks, value in fills_of(step):
        yield f"filled with {value:g}: {ranks_text_of(ranks)}"


def transfers_of(step: PointToPoint) -> dict[tuple[int, int], list[Box]]:
    """Return the cells that go from one rank to another, sorted; then those that stay on a rank."""
    pairs: dict[tuple[int, int], list[Box]] = {}
    for box, src, dst in step.transfers:
        if box.numel:
            pairs.setdefault((src, dst), []).append(box)
    order = sorted(pairs, key=lambda pair: (pair[0] == pair[1], pair))
    return {pair: pairs[pair] for pair in order}


def fills_of(step: PointToPoint) -> list[tuple[tuple[int, ...], float]]:
    """Return the ranks that hold a constant of a pending reduction, by constant."""
    by_value: dict[float, list[int]] = {}
    for rank, value in () if isinstance(step, SendRecv) else step.fills:
        by_value.setdefault(value, []).append(rank)
    return [(tuple(sorted(ranks)), value) for value, ranks in by_value.items()]


def _counted(num: int, word: str) -> str:
    return f"{num} {word}{'' if num == 1 else 's'}"


def ranks_text_of(ranks: tuple[int, ...]) -> str:
    """Return ``rank 2`` or ``ranks 0,1``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"


def bytes_text(num_bytes: int) -> str:
    """Return a size to be read: exact below 10,000 bytes, else to four digits.

    >>> bytes_text(96), bytes_text(64 << 20), bytes_text(123456)
    ('96 bytes', '64 MiB', '120.6 KiB')
    """
    if num_bytes < 10_000:
        return _counted(num_bytes, "byte")
    power = 1
    while num_bytes >= 1000 * 1024**power and power < len(_BYTE_UNITS):
        power += 1
    return f"{num_bytes / 1024**power:.4g} {_BYTE_UNITS[power - 1]}"


def seconds_text(seconds: float) -> str:
    """Return a time to be read, to three digits.

    >>> seconds_text(0.0123), seconds_text(6.4e-9), seconds_text(75)
    ('12.3 ms', '6.4 ns', '75 s')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _spec(spec: HDSpec, top_sizes: tuple[int, ...] | None) -> str:
    sizes = "" if top_sizes is None else f" (blocks {', '.join(map(str, top_sizes))})"
    return f"{spec}{sizes}"


def step_title(step: Step) -> str:
    """Return what a step does, in one line."""
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


def collective_text(collective: Collective) -> str:
    """Return a collective in one line: kind, ranks and cells."""
    ranks = f"of ranks {ranks_text(collective.ranks)}"
    match collective:
        case AllReduce(op=op, cells=cells):
            silent = [rank for rank in collective.ranks if rank not in collective.terms]
            note = f" (no term from {ranks_text(tuple(silent))})" if silent else ""
            return f"all-reduce {_op(op)} {ranks}{note}: {cells_text(cells)}"
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
        f"{word} {rank} {cells_text(part)}" for rank, part in zip(ranks, parts, strict=True) if part
    )


def cells_text(cells: Sequence[Box]) -> str:
    """Return cells as indices, the first few."""
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
