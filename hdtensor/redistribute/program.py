"""A plan as one rank sees it: which slices go into which flat buffer, and which come out of which.

Pure: the same code gives any rank's program, and none looks up a process group.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, assert_never

from torch.distributed.tensor import Partial

from hdtensor.placements import Box, OwnedBox
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
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
        tier: "top" where data goes between subgroups, "bottom" inside one.
    """

    collective: Collective
    sent: tuple[Pieces, ...]
    received: tuple[Pieces, ...]
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    num_total: int
    is_term: bool
    is_whole: bool
    tier: str


class Message(NamedTuple):
    """What one rank sends another in one step.

    Attributes:
        peer: The other rank.
        pieces: Pieces of the sender's old, or the receiver's new local tensor.
        num_elements: Elements of all pieces.
        term: Which term of a reduction it brings; 0 where nothing is reduced.
    """

    peer: int
    pieces: Pieces
    num_elements: int
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step, compiled for one rank.

    Attributes:
        shape: Shape of the new local tensor.
        fill: Its value where nothing else is written; None if everything is.
        copies: (slices of the new, slices of the old local tensor).
        jobs: This rank's sides of the step's collectives.
        is_direct: Whether there is one job, and what arrives is the new local tensor as it is.
        is_kept: Whether the new local tensor is the old one.
        is_in_place: Whether all that happens is that parts are reduced where they are.
        sent: Messages to other ranks.
        received: Messages from other ranks, by term.
        op: The reduction of the terms that arrive.
        own_term: Which term ``copies`` bring.
        num_terms: What an average divides by.
        tier: As ``Job.tier``.
    """

    shape: tuple[int, ...]
    fill: float | None
    copies: tuple[tuple[Slices, Slices], ...]
    jobs: tuple[Job, ...] = ()
    is_direct: bool = False
    is_kept: bool = False
    is_in_place: bool = False
    sent: tuple[Message, ...] = ()
    received: tuple[Message, ...] = ()
    op: Partial | None = None
    own_term: int = 0
    num_terms: int = 1
    tier: str = "top"


#: Which steps of several plans go together: (half tier passed, place among the steps in that tier).
Round: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One plan, compiled for one rank.

    Attributes:
        shape: Shape of the local tensor before.
        steps: The steps in which this rank takes part, each with its round.
        reductions: The pending reductions of the whole plan, also of ranks elsewhere.
        is_new: Whether the result must be a new tensor even if nothing changes here.
    """

    shape: tuple[int, ...]
    steps: tuple[tuple[Round, RankStep], ...]
    reductions: tuple[Partial, ...]
    is_new: bool

    @property
    def is_kept(self) -> bool:
        """Whether the local tensor after is the one before."""
        return all(step.is_kept for _, step in self.steps)


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
    before = Layout(plan.src, plan.shape, plan.src_top_sizes)
    return Program(
        shape=before.local_shape(rank),
        steps=tuple(steps),
        reductions=plan.reductions,
        is_new=bool(plan.steps),
    )


def partners(plan: RedistributePlan, rank: int) -> tuple[int, ...]:
    """Return whom a rank communicates with in a plan, itself included; nobody where it works alone.

    These are the ranks of its collectives, and all ranks of its steps of messages, also those it sends nothing to.
    """
    found: set[int] = set()
    for step in plan.steps:
        if isinstance(step, PointToPoint):
            groups = [(*step.src.spec.ranks, *step.dst.spec.ranks)]
        else:
            groups = [collective.ranks for collective in step.collectives]
        found.update(*(ranks for ranks in groups if rank in ranks))
    return tuple(sorted(found))


def compile_step(step: Step, rank: int) -> RankStep:
    """Return what one rank does in one step."""
    if isinstance(step, PointToPoint):
        return _compile_messages(step, rank)
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
    is_in_place = (
        fill is None
        and not copies
        and all(isinstance(job.collective, AllReduce) and job.sent == job.received for job in jobs)
    )
    return RankStep(
        shape=shape,
        fill=fill,
        copies=copies,
        jobs=jobs,
        is_direct=is_direct,
        is_in_place=is_in_place and shape == step.src.local_shape(rank),
        tier=_tier(step),
    )


def _compile_messages(step: PointToPoint, rank: int) -> RankStep:
    shape = step.dst.local_shape(rank)
    old, new = step.src.boxes(rank), step.dst.boxes(rank)
    copies: list[tuple[Slices, Slices]] = []
    sent: defaultdict[int, list[Box]] = defaultdict(list)
    received: defaultdict[int, list[Box]] = defaultdict(list)
    for box, src, dst in step.transfers:
        if src == dst == rank:
            copies.append((find_cell(new, box), find_cell(old, box)))
        elif src == rank:
            sent[dst].append(box)
        elif dst == rank:
            received[src].append(box)
    op: Partial | None = None
    term_of: dict[int, int] = {}
    num_terms = 1
    if isinstance(step, BatchedSendReduce):
        op, term_of, num_terms = step.op, dict(step.terms), step.num_terms
    fills = {} if isinstance(step, SendRecv) else dict(step.fills)
    arriving = [
        _message(peer, boxes, new, term_of.get(peer, 0)) for peer, boxes in received.items()
    ]
    is_kept = (
        not received
        and op is None
        and rank not in fills
        and old == new
        and shape == step.src.local_shape(rank)
        and all(a == b for a, b in copies)
    )
    return RankStep(
        shape=shape,
        fill=fills.get(rank),
        copies=tuple(copies),
        is_kept=is_kept,
        sent=tuple(
            _message(peer, boxes, old, term_of.get(rank, 0)) for peer, boxes in sent.items()
        ),
        received=tuple(sorted(arriving, key=lambda message: (message.term, message.peer))),
        op=op,
        own_term=term_of.get(rank, 0),
        num_terms=num_terms,
        tier=_tier(step),
    )


def _message(peer: int, boxes: Sequence[Box], owned: Sequence[OwnedBox], term: int) -> Message:
    pieces = tuple(find_cell(owned, box) for box in boxes)
    return Message(peer, pieces, sum(box.numel for box in boxes), term)


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
        tier=_tier(step),
    )


def _tier(step: Step) -> str:
    return "top" if step.index is None else "bottom"


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
