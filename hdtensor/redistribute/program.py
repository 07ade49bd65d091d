"""A plan as one rank sees it: which slices go into which flat buffer, and which come out of which.

Pure: the same code gives any rank's program, and none looks up a process group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from torch.distributed.tensor import Partial

from hdtensor.placements import Box
from hdtensor.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Layout,
    LocalStep,
    RedistributePlan,
    ReduceScatter,
    Step,
    find_cell,
)


Slices: TypeAlias = tuple[slice, ...]
#: Slices of a local tensor, joined flat in this order.
Pieces: TypeAlias = tuple[Slices, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's side of a collective.

    Attributes:
        collective: Whose side it is.
        sent: Per receiver, or once for all: the pieces of the old local tensor that are sent.
        received: Per sender, or once for all: the pieces of the new local tensor that arrive.
        num_sent: Elements of each entry of ``sent``.
        num_received: Elements of each entry of ``received``.
        num_total: Elements of all cells, the same for all ranks of the group.
        is_term: Whether what this rank sends counts in the reduction.
        is_whole: Whether it counts, and what is sent is the old local tensor as it is.
    """

    collective: Collective
    sent: tuple[Pieces, ...]
    received: tuple[Pieces, ...]
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    num_total: int
    is_term: bool
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step, compiled for one rank.

    Attributes:
        shape: Shape of the new local tensor.
        fill: Its value where nothing else is written; None if everything is.
        copies: (slices of the new, slices of the old local tensor).
        jobs: This rank's sides of the step's collectives.
        is_direct: Whether there is one job, and what arrives is the new local tensor as it is.
    """

    shape: tuple[int, ...]
    fill: float | None
    copies: tuple[tuple[Slices, Slices], ...]
    jobs: tuple[Job, ...]
    is_direct: bool


#: Which steps of several plans go together: (half tier passed, place among the steps in that tier).
Round: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One plan, compiled for one rank.

    Attributes:
        shape: Shape of the local tensor before.
        steps: The steps in which this rank takes part, each with its round.
        reductions: The pending reductions of the whole plan, also of ranks elsewhere.
        is_new: Whether the result must be a new tensor even without a step here.
    """

    shape: tuple[int, ...]
    steps: tuple[tuple[Round, RankStep], ...]
    reductions: tuple[Partial, ...]
    is_new: bool


@functools.lru_cache(maxsize=16384)
def compile_plan(plan: RedistributePlan, rank: int) -> Program:
    """Return what one rank does in a plan. Pure: it looks up no process group."""
    steps: list[tuple[Round, RankStep]] = []
    tier, place = 0, 0
    for step in plan.steps:
        if step.index is None:
            tier, place = tier + 1 + tier % 2, 0  # top tiers are odd, bottom tiers even
        elif tier % 2:
            tier, place = tier + 1, 0
        if rank in step.src.spec.ranks or rank in step.dst.spec.ranks:
            steps.append(((tier, place), compile_step(step, rank)))
            place += 1
    ops = [c.op for c in plan.collectives() if isinstance(c, AllReduce | ReduceScatter)]
    before = Layout(plan.src, plan.shape, plan.src_top_sizes)
    return Program(
        shape=before.local_shape(rank),
        steps=tuple(steps),
        reductions=tuple(dict.fromkeys(ops)),
        is_new=bool(plan.steps),
    )


def compile_step(step: Step, rank: int) -> RankStep:
    """Return what one rank does in one step."""
    shape = step.dst.local_shape(rank)
    jobs = tuple(_compile_job(c, step, rank) for c in step.collectives if rank in c.ranks)
    fill, keepers = (step.fill, step.keepers) if isinstance(step, LocalStep) else (None, None)
    copies: tuple[tuple[Slices, Slices], ...] = ()
    arriving = sum(sum(job.num_received) for job in jobs)
    if (keepers is None or rank in keepers) and arriving < math.prod(shape):
        copies = tuple(
            (find_cell((new,), common), find_cell((old,), common))
            for new in step.dst.boxes(rank)
            for old in step.src.boxes(rank)
            if (common := old.box.intersect(new.box)) is not None
        )
    arrived = [piece for job in jobs for part in job.received for piece in part]
    is_direct = len(jobs) == 1 and not copies and _is_whole(arrived, shape)
    return RankStep(shape=shape, fill=fill, copies=copies, jobs=jobs, is_direct=is_direct)


def _compile_job(collective: Collective, step: Step, rank: int) -> Job:
    me = collective.ranks.index(rank)
    sent: Sequence[Sequence[Box]]
    received: Sequence[Sequence[Box]]
    match collective:
        case AllReduce(cells=cells):
            sent, received = [cells], [cells]
        case AllGather(cells=parts):
            sent, received = [parts[me]], parts
        case ReduceScatter(cells=parts):
            sent, received = parts, [parts[me]]
        case AllToAll(cells=table):
            sent, received = table[me], [row[me] for row in table]
        case _:
            assert_never(collective)
    old, new = step.src.boxes(rank), step.dst.boxes(rank)
    is_term = not isinstance(collective, AllReduce) or rank in collective.terms
    sent_pieces = tuple(tuple(find_cell(old, cell) for cell in part) for part in sent)
    in_order = [piece for part in sent_pieces for piece in part]
    return Job(
        collective=collective,
        sent=sent_pieces,
        received=tuple(tuple(find_cell(new, cell) for cell in part) for part in received),
        num_sent=tuple(sum(cell.numel for cell in part) for part in sent),
        num_received=tuple(sum(cell.numel for cell in part) for part in received),
        num_total=collective.num_cells,
        is_term=is_term,
        is_whole=is_term and _is_whole(in_order, step.src.local_shape(rank)),
    )


def _is_whole(pieces: Sequence[Slices], shape: tuple[int, ...]) -> bool:
    """Return whether the pieces, joined flat, are a contiguous tensor of ``shape``."""
    if not shape:
        return True
    row = 0
    for first, *others in pieces:
        spans = zip(others, shape[1:], strict=True)
        if first.start != row or any((s.start, s.stop) != (0, n) for s, n in spans):
            return False
        row = first.stop
    return row == shape[0]
