"""How much memory ``execute`` takes on a rank beside its old local tensor: its buffers, counted ahead.

It follows ``execute``, ``messages``, ``collectives.split`` and ``collectives.pack`` allocation by
allocation. Of a step are alive at once:

==============  ==========================================================================
what            bytes
==============  ==========================================================================
old local       unless it is the caller's
new local       unless it is the collective's result, or the old one
collective      what is packed, unless it is the whole local tensor; the result, unless packed
                terms are reduced where they are; what uneven parts are reduced in
pairs           of an all-reduce of two ranks: buffers of the chunks that are not contiguous
messages        one buffer of all that is sent and one of all that is received, without the
                messages that are one contiguous piece
==============  ==========================================================================

Local tensors are taken to be contiguous, and reductions to be native ones of the backend. What a
backend takes by itself, or lets go of late, is not counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, assert_never

from torch.distributed.tensor import Partial

from hdtensor.placements import Box
from hdtensor.placements.box import cut_box
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Ranks,
    ReduceScatter,
)
from hdtensor.redistribute.program import Job, Message, RankStep, Slices, compile_plan
from hdtensor.redistribute.steps import (
    RedistributePlan,
)


# Messages start at multiples of this in the buffer they share, as in ``collectives.pack``.
_ALIGNMENT = 16
# When two ranks reduce chunk by chunk, as in ``collectives.pairs``.
_PAIR_BYTES, _CHUNK_BYTES, _DEPTH = 1 << 16, 4 << 20, 8
# Strided pieces up to here are packed by way of a copy, as in ``triton_kernels.pack_boxes.foreach``.
_SMALL_BYTES = 1 << 14


def extra_bytes(plan: RedistributePlan, rank: int, itemsize: int) -> int:
    """Return the most bytes that a rank holds at once beside its old local tensor.

    Args:
        plan: What ``resolve`` returned.
        rank: The rank.
        itemsize: Bytes per element.
    """
    program = compile_plan(plan, rank)
    shape, old_bytes, peak = program.shape, 0, 0
    for _, step in program.steps:
        peak = max(peak, old_bytes + _step_bytes(step, shape, itemsize))
        if not step.is_kept:
            shape, old_bytes = step.shape, math.prod(step.shape) * itemsize
    if program.is_new and program.is_kept:
        return math.prod(shape) * itemsize
    return peak


class _Buffers(NamedTuple):
    """What one collective takes.

    Attributes:
        while_starting: Until it has started, what it keeps included.
        until_done: Until its result is written.
        while_ending: Beside the others, when it ends.
    """

    while_starting: int
    until_done: int
    while_ending: int


def _step_bytes(step: RankStep, shape: tuple[int, ...], itemsize: int) -> int:
    held = peak = 0
    paired = [job for job in step.jobs if _is_in_pair(job, itemsize)]
    jobs = [job for job in step.jobs if not _is_in_pair(job, itemsize)]
    buffers = [_collective_buffers(together, shape, itemsize) for together in _buckets(jobs)]
    for start, kept, _ in buffers:
        peak = max(peak, held + kept, held + start)
        held += kept
    if paired or not (step.is_direct or step.is_kept):
        held += math.prod(step.shape) * itemsize
    held += sum(_pair_bytes(job, shape, step.shape, itemsize) for job in paired)
    arriving = [m for m in step.received if m.term or not _is_alone(m, step.shape)]
    for messages, of, is_sent in (
        (arriving, step.shape, False),
        ([m for m in step.sent if not _is_alone(m, shape)], shape, True),
    ):
        whole, gaps = _joint(messages, itemsize)
        small = _small_bytes(messages, of, itemsize) if is_sent else 0
        peak = max(peak, held + whole + gaps + small)
        held += whole
    return max(peak, held, *(held + end for _, _, end in buffers))


def _buckets(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs that share a buffer: those of one group of ranks, as a step has one kind."""
    found: defaultdict[Ranks, list[Job]] = defaultdict(list)
    for job in jobs:
        found[job.collective.ranks].append(job)
    return [found[ranks] for ranks in sorted(found)]


def _collective_buffers(jobs: Sequence[Job], shape: tuple[int, ...], itemsize: int) -> _Buffers:
    copied, packed = (num * itemsize for num in _num_packed(jobs, shape, itemsize))
    sent = [itemsize * sum(nums) for nums in zip(*(job.num_sent for job in jobs), strict=True)]
    arriving = [itemsize * sum(nums) for nums in zip(*(j.num_received for j in jobs), strict=True)]
    collective = jobs[0].collective
    world, result = len(collective.ranks), sum(arriving)
    match collective:
        case AllReduce(op=op):
            if _num_powers(op):
                return _Buffers(max(copied, result) + packed, result, result)
            return _Buffers(copied + packed, packed or result, 0)
        case ReduceScatter(op=op):
            powers = _num_powers(op) * sum(sent)
            held = powers + packed + world * result
            return _Buffers(copied + packed + powers, held, min(world, 3) * result)
        case AllGather() | AllToAll():
            return _Buffers(copied + packed, packed + result, 0)
        case _:
            assert_never(collective)


def _is_in_pair(job: Job, itemsize: int) -> bool:
    collective = job.collective
    if not isinstance(collective, AllReduce) or _num_powers(collective.op):
        return False
    return len(collective.ranks) == 2 and job.num_total * itemsize >= _PAIR_BYTES


def _pair_bytes(job: Job, old: tuple[int, ...], new: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of the buffers for chunks that are not contiguous."""
    total = 0
    for pieces, shape in ((job.sent[0], old), (job.received[0], new)):
        places = [0] * _DEPTH
        number = 0
        for piece in pieces:
            box = Box.whole([part.stop - part.start for part in piece])
            for chunk in cut_box(box, _CHUNK_BYTES // itemsize):
                slices = chunk.slices_from(tuple(-part.start for part in piece))
                if _flat_stride(slices, shape) != 1:
                    place = number % _DEPTH
                    places[place] = max(places[place], chunk.numel * itemsize)
                number += 1
        total += sum(places)
    return total


def _num_powers(op: Partial) -> int:
    """Return 1 for a p-norm, whose terms are raised to a power first and back at the end."""
    return int(hasattr(op, "norm_type"))


def _num_packed(jobs: Sequence[Job], shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return how many elements are copied on the way to a buffer, and how many the buffer has."""
    if len(jobs) == 1 and jobs[0].is_whole:
        return 0, 0
    num_copied = num_packed = 0
    for job in jobs:
        collective = job.collective
        filled = (
            not job.is_term
            and isinstance(collective, AllReduce)
            and collective.op.reduce_op not in ("max", "min")
        )
        for piece in (piece for part in job.sent for piece in part):
            is_copied = filled or (
                _flat_stride(piece, shape) != 1 and _numel(piece) * itemsize <= _SMALL_BYTES
            )
            num_copied += _numel(piece) * is_copied
            num_packed += _numel(piece)
    return num_copied, num_packed


def _joint(messages: Sequence[Message], itemsize: int) -> tuple[int, int]:
    """Return the bytes of a buffer for all messages, and of the gaps in it."""
    end = gaps = 0
    for message in messages:
        gap = -end % _ALIGNMENT
        gaps += gap
        end += gap + message.num_elements * itemsize
    return end, gaps


def _small_bytes(messages: Iterable[Message], shape: tuple[int, ...], itemsize: int) -> int:
    """Return at most how many bytes of small strided pieces are copied before they are packed."""
    sizes = [
        _numel(piece) * itemsize
        for message in messages
        for piece in message.pieces
        if _flat_stride(piece, shape) != 1
    ]
    return sum(size for size in sizes if size <= _SMALL_BYTES)


def _is_alone(message: Message, shape: tuple[int, ...]) -> bool:
    return len(message.pieces) == 1 and _flat_stride(message.pieces[0], shape) == 1


def _flat_stride(piece: Slices, shape: tuple[int, ...]) -> int | None:
    """Return the stride of a slice of a contiguous tensor seen as 1-D; None where that takes a copy.

    1 means that the slice is contiguous.
    """
    inner: int | None = None
    reach, stride = 1, 1
    for part, extent in zip(reversed(piece), reversed(shape), strict=True):
        length = part.stop - part.start
        if length == 0:
            return 1
        if length > 1:
            if inner is None:
                inner = stride
            elif stride != reach:
                return None
            reach = stride * length
        stride *= extent
    return 1 if inner is None else inner


def _numel(piece: Slices) -> int:
    return math.prod(part.stop - part.start for part in piece)
