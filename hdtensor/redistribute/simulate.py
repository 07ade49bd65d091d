"""Carry out a plan for all ranks in one process: what the executor is tested against.

Cell by cell and without regard to speed: a collective is a loop over its cells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from hdtensor.errors import RedistributeError
from hdtensor.placements import Box, cells
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Ranks,
    ReduceScatter,
)
from hdtensor.redistribute.steps import (
    BatchedSendReduce,
    Layout,
    LocalStep,
    PointToPoint,
    RedistributePlan,
    SendRecv,
    Step,
    find_cell,
)


def simulate(plan: RedistributePlan, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return every rank's local tensor after the plan.

    Args:
        plan: What ``resolve`` returned.
        shards: Rank -> its local tensor before, at least for the ranks of ``plan.src``. A rank of
            ``plan.dst`` alone may be left out.

    Returns:
        Rank -> its local tensor after; ``(0,)`` for a rank that no longer holds anything.

    Raises:
        RedistributeError: If a shard is missing or has not the shape that ``plan.src`` says.
    """
    before = Layout(plan.src, plan.shape, plan.src_top_sizes)
    for rank in plan.src.ranks:
        got = tuple(shards[rank].shape) if rank in shards else None
        if got != before.local_shape(rank):
            raise RedistributeError(
                f"rank {rank} needs a shard of shape {before.local_shape(rank)} under {plan.src}, "
                f"got {'none' if got is None else got}."
            )
    nothing = next(iter(shards.values())).new_empty(0)
    state = {
        rank: shards.get(rank, nothing) for rank in {*shards, *plan.src.ranks, *plan.dst.ranks}
    }
    for step in plan.steps:
        state = run_step(step, state)
    return state


def run_step(step: Step, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return every rank's local tensor after one step; ranks outside it keep theirs."""
    involved = {*step.src.spec.ranks, *step.dst.spec.ranks}
    out = {rank: shard for rank, shard in shards.items() if rank not in involved}
    if isinstance(step, PointToPoint):
        return out | run_messages(step, shards)
    for rank in involved:
        out[rank] = start_local(step, shards[rank], rank)
    for collective in step.collectives:
        run_collective(collective, step, shards, out)
    return out


def start_local(step: Step, shard: Tensor, rank: int) -> Tensor:
    """Return a rank's new local tensor with what it can fill in by itself."""
    fill = step.fill if isinstance(step, LocalStep) else None
    out = shard.new_full(step.dst.local_shape(rank), 0 if fill is None else fill)
    if isinstance(step, LocalStep) and step.keepers is not None and rank not in step.keepers:
        return out
    for old, _ in step.src.boxes(rank):
        for new, _ in step.dst.boxes(rank):
            common = old.intersect(new)
            if common is not None:
                read(out, step.dst, rank, common).copy_(read(shard, step.src, rank, common))
    return out


def run_messages(step: PointToPoint, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the new local tensors of a point-to-point step's ranks."""
    like = next(iter(shards.values()))
    fills = {} if isinstance(step, SendRecv) else dict(step.fills)
    out = {rank: like.new_empty(0) for rank in step.src.spec.ranks}
    for rank in step.dst.spec.ranks:
        out[rank] = like.new_full(step.dst.local_shape(rank), fills.get(rank, 0))
    if isinstance(step, BatchedSendReduce):
        terms_of: dict[tuple[int, Box], list[tuple[int, Tensor]]] = {}
        number = dict(step.terms)
        for box, src, dst in step.transfers:
            term = number[src], read(shards[src], step.src, src, box)
            terms_of.setdefault((dst, box), []).append(term)
        _reduce_into(out, step, terms_of)
        return out
    for box, src, dst in step.transfers:
        read(out[dst], step.dst, dst, box).copy_(read(shards[src], step.src, src, box))
    return out


def _reduce_into(
    out: Mapping[int, Tensor],
    step: BatchedSendReduce,
    terms_of: Mapping[tuple[int, Box], list[tuple[int, Tensor]]],
) -> None:
    """Reduce the terms that each rank got; terms may be cut into unlike cells."""
    for rank in step.dst.spec.ranks:
        mine = {box: terms for (dst, box), terms in terms_of.items() if dst == rank}
        for cell in cells(mine):
            terms = [
                (number, value[cell.slices_from(box.start)])
                for box, pairs in mine.items()
                if box.contains(cell)
                for number, value in pairs
            ]
            in_order = [value for _, value in sorted(terms, key=lambda term: term[0])]
            assert len(in_order) == step.num_terms, f"rank {rank} lacks terms of {cell}"
            read(out[rank], step.dst, rank, cell).copy_(combine(in_order, step.op))


def run_collective(
    collective: Collective, step: Step, shards: Mapping[int, Tensor], out: Mapping[int, Tensor]
) -> None:
    """Write what a collective delivers into the new local tensors."""

    def reduced(cell: Box, terms: Ranks, op: Partial) -> Tensor:
        return combine([read(shards[rank], step.src, rank, cell) for rank in terms], op)

    deliveries: list[tuple[Ranks, Box, Tensor]] = []
    match collective:
        case AllReduce(ranks=ranks, cells=cells, op=op, terms=terms):
            deliveries = [(ranks, cell, reduced(cell, terms, op)) for cell in cells]
        case ReduceScatter(ranks=ranks, op=op):
            deliveries = [
                ((receiver,), cell, reduced(cell, ranks, op))
                for receiver, cell in collective.receivers()
            ]
        case AllGather(ranks=ranks):
            deliveries = [
                (ranks, cell, read(shards[sender], step.src, sender, cell))
                for sender, cell in collective.senders()
            ]
        case AllToAll():
            deliveries = [
                ((receiver,), cell, read(shards[sender], step.src, sender, cell))
                for sender, receiver, cell in collective.messages()
            ]
        case _:
            assert_never(collective)
    for receivers, cell, value in deliveries:
        for rank in receivers:
            read(out[rank], step.dst, rank, cell).copy_(value)


def combine(terms: Sequence[Tensor], op: Partial) -> Tensor:
    """Return the reduction of the terms, in their own dtype."""
    norm = getattr(op, "norm_type", None)
    if norm is not None:
        return combine([term.pow(norm) for term in terms], Partial()).pow(1 / norm)
    if op.reduce_op == "avg":
        return combine(terms, Partial()) / len(terms)
    return functools.reduce(_BINARY[op.reduce_op], terms)


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def read(local: Tensor, layout: Layout, rank: int, cell: Box) -> Tensor:
    """Return a view of a cell in a rank's local tensor."""
    return local[find_cell(layout.boxes(rank), cell)]
