"""Carry out plans on this rank: pack, start the collectives, copy what is local meanwhile, unpack."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from hdtensor._rank import current_rank
from hdtensor.collectives import observe, operators, pairs, split
from hdtensor.collectives.groups import group_of
from hdtensor.collectives.memory import new_buffer
from hdtensor.collectives.pack import flatten, unflatten
from hdtensor.collectives.wire import is_on_host, wire_device
from hdtensor.errors import RedistributeError
from hdtensor.placements import Box, HDSpec, Subgroup
from hdtensor.placements.box import cut_box
from hdtensor.redistribute import messages
from hdtensor.redistribute.program import Job, Pieces, Program, RankStep, Round, compile_plan
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Ranks,
    RedistributePlan,
    ReduceScatter,
    neutral_element,
)


#: Default size of a fused buffer.
BUCKET_BYTES = 25 * 2**20


def execute(plan: RedistributePlan, local: Tensor) -> Tensor:
    """Return this rank's local tensor after the plan.

    Collective over the plan's ranks; its ``rank_sets()`` must have been given to ``ensure_groups``.

    Args:
        plan: What ``resolve`` returned; the same on every rank.
        local: This rank's local tensor under ``plan.src``, of any strides; ``(0,)`` where it holds
            nothing.

    Returns:
        A new contiguous tensor; ``local`` itself if the plan has no steps.

    Raises:
        RedistributeError: If the local tensor has not the shape that ``plan.src`` says, or a
            reduction is not defined on its dtype.
        GroupError: If a group is missing, or inside ``as_rank`` where the plan communicates.
    """
    rank = current_rank()
    program = compile_plan(plan, rank)
    check_local(plan, program, local, rank)
    return run_program(program, local)


def execute_many(
    plans: Sequence[RedistributePlan],
    locals_: Sequence[Tensor],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    donate: bool = False,
) -> list[Tensor]:
    """Carry out several plans at once, with like collectives fused into shared flat buffers.

    Collectives are fused if they agree in kind, group, reduction and dtype, and belong to the same
    round: bottom steps before the top, the top, bottom steps after it.

    Args:
        plans: One per tensor, in the same order on every rank.
        locals_: This rank's local tensors.
        bucket_bytes: A buffer takes no further tensor once its cells are this large together.
        donate: Whether the local tensors are not needed any more: those that are only reduced keep their
            memory and are overwritten.

    Returns:
        The new local tensors, each as ``execute`` returns it.

    Raises:
        RedistributeError: As ``execute``, before anything is sent.
        GroupError: As ``execute``.
    """
    rank = current_rank()
    programs = [compile_plan(plan, rank) for plan in plans]
    rounds: defaultdict[Round, list[tuple[int, RankStep]]] = defaultdict(list)
    for i, program in enumerate(programs):
        check_local(plans[i], program, locals_[i], rank)
        for number, step in program.steps:
            rounds[number].append((i, step))
    state = [local.detach() for local in locals_]
    for number in sorted(rounds):
        run_round(rounds[number], state, bucket_bytes, donate=donate)
    return [_as_new(*each) for each in zip(programs, locals_, state, strict=True)]


def convert(
    local: Tensor,
    subgroup: Subgroup,
    dst_placements: Sequence[Placement],
    block_shape: Sequence[int],
) -> Tensor:
    """Return this rank's local tensor after a change of placements inside one subgroup.

    Args:
        local: This rank's local tensor under ``subgroup``.
        subgroup: The subgroup with the placements before.
        dst_placements: The placements after.
        block_shape: Extents of the subgroup's block.

    Raises:
        RedistributeError: As ``execute``.
        GroupError: As ``execute``.
    """
    return make_converter(subgroup, subgroup.placements, dst_placements, block_shape)(local)


def make_converter(
    subgroup: Subgroup,
    src_placements: Sequence[Placement],
    dst_placements: Sequence[Placement],
    block_shape: Sequence[int],
) -> Callable[[Tensor], Tensor]:
    """Plan a change of placements inside one subgroup once, and return the function that makes it.

    The function checks nothing: the caller knows the placements and the block. Where the change is
    one collective on the local tensor as it is (along one axis Partial -> Replicate, Shard(0) ->
    Replicate, Partial -> Shard(0)), the function is that collective.

    Args:
        subgroup: Ranks and mesh; the rank that calls the function is one of them.
        src_placements: Placements before.
        dst_placements: Placements after.
        block_shape: Extents of the subgroup's block.

    Returns:
        Local tensor before -> local tensor after, for the rank that is current now. Collective over
        the lines of the mesh axes whose placements change.

    Raises:
        SpecError: If a placement does not fit the mesh or the block.
    """
    src = HDSpec((subgroup.with_placements(src_placements),))
    dst = HDSpec((subgroup.with_placements(dst_placements),))
    return make_runner(resolve(src, dst, block_shape))


def make_runner(plan: RedistributePlan, *, reverse: bool = False) -> Callable[[Tensor], Tensor]:
    """Return ``execute`` of one plan for the rank that is current now, with all decisions made.

    It checks nothing: the caller knows that the local tensor is the plan's. Where the plan is one
    collective on the local tensor as it is, the function is that collective.

    Args:
        plan: What ``resolve`` returned.
        reverse: Whether it is part of a backward pass, whose messages have their own channel.

    Returns:
        Local tensor before -> local tensor after. Collective over the plan's ranks.
    """
    program = compile_plan(plan, current_rank())
    if len(program.steps) == 1:
        step = program.steps[0][1]
        if step.is_direct and step.jobs[0].is_whole and not _may_pair(step.jobs[0]):
            job, shape = step.jobs[0], step.shape
            sizes = job.num_sent, job.num_received
            return lambda local: _start(job, local.reshape(-1), *sizes)().view(shape)
    return lambda local: run_program(program, local, reverse=reverse)


def _may_pair(job: Job) -> bool:
    """Return whether elements of eight bytes would make the job large enough to go in a pair."""
    is_pair = isinstance(job.collective, AllReduce) and len(job.collective.ranks) == 2
    return is_pair and 8 * job.num_total >= pairs.MIN_BYTES


def run_program(program: Program, local: Tensor, *, reverse: bool = False) -> Tensor:
    """Return the new local tensor; the caller has checked the old one."""
    state = [local.detach()]
    for _, step in program.steps:
        run_round([(0, step)], state, BUCKET_BYTES, reverse=reverse)
    return _as_new(program, local, state[0])


def _as_new(program: Program, local: Tensor, result: Tensor) -> Tensor:
    """Return the result, a copy where it is the old tensor and the plan has steps (elsewhere perhaps)."""
    if not program.is_new:
        return local
    return result.clone(memory_format=torch.contiguous_format) if program.is_kept else result


def run_round(
    todo: Sequence[tuple[int, RankStep]],
    state: list[Tensor],
    bucket_bytes: int,
    *,
    reverse: bool = False,
    donate: bool = False,
) -> None:
    """Carry out one step of each of several tensors, replacing their local tensors in ``state``.

    Args:
        todo: (place in ``state``, this rank's step).
        state: Local tensors.
        bucket_bytes: As for ``execute_many``.
        reverse: Whether messages go on the channel of backward passes.
        donate: Whether the local tensors may be overwritten.
    """
    items = [_Item(i, step, job, state[i]) for i, step in todo for job in step.jobs]
    in_pairs = [item for item in items if _is_in_pair(item)]
    if in_pairs:
        items = [item for item in items if not _is_in_pair(item)]
    started = [(bucket, _launch(bucket, donate)) for bucket in _buckets(items, bucket_bytes)]
    apart = {item.position for item in in_pairs}
    fresh = {
        i: _new_local(step, state[i], donate)
        for i, step in todo
        if i in apart or not step.is_direct
    }
    reductions = [_start_pair(item, fresh[item.position], donate) for item in in_pairs]
    parcels = [
        messages.Parcel(step, _plain(state[i]), fresh[i])
        for i, step in todo
        if step.sent or step.received or step.op
    ]
    finish = messages.start(parcels, reverse=reverse) if parcels else None
    for i, step in todo:  # what a rank does alone hides behind the communication
        if i in fresh:
            if step.op is None and not step.is_kept:
                _copy(step, state[i], fresh[i])
            state[i] = fresh[i]
    for bucket, pending in started:
        _deliver(bucket, pending(), state)
    pairs.finish_all(reductions)
    if finish is not None:
        finish()


def _is_in_pair(item: _Item) -> bool:
    collective = item.job.collective
    if not isinstance(collective, AllReduce) or len(collective.ranks) != 2:
        return False
    num_bytes = item.job.num_total * item.local.element_size()
    is_real = type(item.local) is Tensor
    return is_real and pairs.is_pair(item.local.dtype, collective.op, num_bytes)


def _start_pair(item: _Item, new: Tensor, donate: bool) -> pairs.PairReduction:
    """Start an all-reduce of two ranks, chunk by chunk."""
    collective = item.job.collective
    assert isinstance(collective, AllReduce), "only all-reduces go in pairs"
    old, most = _plain(item.local), pairs.CHUNK_BYTES // item.local.element_size()
    chunks = []
    for source, target in zip(item.job.sent[0], item.job.received[0], strict=True):
        whole, into = old[source], new[target]
        for box in cut_box(Box.whole(whole.shape), most):
            chunk = box.slices_from((0,) * whole.ndim)
            chunks.append((whole[chunk], into[chunk]))
    if observe.listeners:
        observe.notify("all_reduce", collective.ranks, sum(term.nbytes for term, _ in chunks))
    group = group_of(collective.ranks)
    return pairs.PairReduction(chunks, collective.op, group, donate=donate)


def _plain(local: Tensor) -> Tensor:
    """Return a tensor without a lazy conjugate or negation: bytes are what is sent."""
    return local.resolve_conj().resolve_neg()


def check_local(plan: RedistributePlan, program: Program, local: Tensor, rank: int) -> None:
    """Raise unless the local tensor is one of ``plan.src`` and has the reductions the plan needs.

    Raises:
        RedistributeError: Otherwise.
    """
    if local.shape != program.shape:
        raise RedistributeError(
            f"rank {rank} has a local tensor of shape {tuple(local.shape)}, but {plan.src} cuts a "
            f"tensor of shape {plan.shape} so that this rank holds {program.shape}. Pass the local "
            f"tensor of the plan's source."
        )
    for op in program.reductions:
        split.check_reducible(op, local.dtype)


class _Item(NamedTuple):
    """A job of one of the tensors in flight."""

    position: int
    step: RankStep
    job: Job
    local: Tensor

    @property
    def key(self) -> tuple[str, Ranks, str, str]:
        """What collectives must agree in to share a buffer; also the order in which they start."""
        collective = self.job.collective
        op = repr(collective.op) if isinstance(collective, AllReduce | ReduceScatter) else ""
        return type(collective).__name__, collective.ranks, op, str(self.local.dtype)


def _buckets(items: Sequence[_Item], bucket_bytes: int) -> list[list[_Item]]:
    """Return which jobs share a buffer, in the order in which all ranks start them.

    A rank may be in several groups that overlap: the order is by content, never by arrival.
    """
    if len(items) == 1:
        return [list(items)]
    found: defaultdict[tuple[str, Ranks, str, str], list[list[_Item]]] = defaultdict(lambda: [[]])
    for item in items:
        buckets = found[item.key]
        if sum(i.job.num_total * i.local.element_size() for i in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(item)
    return [bucket for key in sorted(found) for bucket in found[key]]


def _launch(bucket: Sequence[_Item], donate: bool) -> split.Pending:
    """Pack one buffer and start its collective."""
    first = bucket[0].job
    if len(bucket) == 1 and first.is_whole:
        flat = bucket[0].local.reshape(-1)
        return _start(first, flat, first.num_sent, first.num_received, is_own=donate)
    parts = [
        piece
        for receiver in range(len(first.sent))
        for item in bucket
        for piece in _pack(item, item.job.sent[receiver])
    ]
    flat = flatten(parts, bucket[0].local)
    sent = tuple(map(sum, zip(*(item.job.num_sent for item in bucket), strict=True)))
    received = tuple(map(sum, zip(*(item.job.num_received for item in bucket), strict=True)))
    return _start(first, flat, sent, received, is_own=True)


def _start(
    job: Job,
    flat: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    *,
    is_own: bool = False,
) -> split.Pending:
    """Start a job's collective on a packed buffer, which may hold other jobs' parts too."""
    # A lazy conjugate or negation must not be sent as the bytes below it.
    flat = flat.resolve_conj().resolve_neg().contiguous()
    collective = job.collective
    if observe.listeners:
        kind = re.sub("(?<=.)([A-Z])", r"_\1", type(collective).__name__).lower()
        observe.notify(kind, collective.ranks, flat.nbytes)
    if type(flat) is not Tensor:
        return _start_traced(collective, flat, sent, received)
    wire = flat.device
    if not is_on_host(wire):
        wire = wire_device(wire, collective.ranks)
    if wire == flat.device:
        return _start_on_wire(collective, flat, sent, received, is_own)
    host, device = flat.to(wire), flat.device
    pending = _start_on_wire(collective, host, sent, received, True)
    return lambda: pending().to(device)


def _start_on_wire(
    collective: Collective, flat: Tensor, sent: Sequence[int], received: Sequence[int], is_own: bool
) -> split.Pending:
    """Start a collective on a buffer that the backend takes."""
    group = group_of(collective.ranks)
    match collective:
        case AllReduce():
            op, num_terms = collective.op, len(collective.terms)
            return split.all_reduce(flat, op, num_terms, group, is_own=is_own)
        case ReduceScatter():
            return split.reduce_scatter(flat, sent, collective.op, len(collective.ranks), group)
        case AllGather():
            return split.all_gather(flat, received, group)
        case AllToAll():
            return split.all_to_all(flat, sent, received, group)
        case _:
            assert_never(collective)


def _start_traced(
    collective: Collective, flat: Tensor, sent: Sequence[int], received: Sequence[int]
) -> split.Pending:
    """Put the collective's operator into the graph that is being traced."""
    ranks = list(collective.ranks)
    place = ranks.index(current_rank())
    args: tuple[Any, ...]
    match collective:
        case AllReduce(op=op):
            args = "split_all_reduce", flat, op.reduce_op, len(collective.terms), ranks
        case ReduceScatter(op=op):
            args = "split_reduce_scatter", flat, sent, place, op.reduce_op, len(ranks), ranks
        case AllGather():
            args = "split_all_gather", flat, received, place, ranks
        case AllToAll():
            args = "split_all_to_all", flat, sent, received, ranks
        case _:
            assert_never(collective)
    result = operators.start(*args)
    return lambda: result


def _pack(item: _Item, pieces: Pieces) -> list[Tensor]:
    """Return the pieces flat; for a rank without a term, what changes nothing."""
    views = [item.local[piece] for piece in pieces]
    collective = item.job.collective
    if not item.job.is_term and isinstance(collective, AllReduce):
        op = collective.op
        if op.reduce_op not in ("max", "min"):  # these may count a copy twice
            return [torch.full_like(view, neutral_element(op)) for view in views]
    return views


def _deliver(bucket: Sequence[_Item], flat: Tensor, state: list[Tensor]) -> None:
    """Write a collective's flat result into the new local tensors."""
    if len(bucket) == 1 and bucket[0].step.is_direct:
        state[bucket[0].position] = flat.view(bucket[0].step.shape)
        return
    for item in bucket:
        if item.step.is_direct:
            state[item.position] = _start_local(item.step, item.local)
    targets = [
        state[item.position][piece]
        for sender in range(len(bucket[0].job.received))
        for item in bucket
        for piece in item.job.received[sender]
    ]
    unflatten(flat, targets)


def _start_local(step: RankStep, local: Tensor) -> Tensor:
    """Return the new local tensor with what this rank writes alone."""
    out = _new_local(step, local)
    _copy(step, local, out)
    return out


def _new_local(step: RankStep, local: Tensor, donate: bool = False) -> Tensor:
    if step.is_kept or (donate and step.is_in_place and local.is_contiguous()):
        return local
    if step.fill is None:
        return new_buffer(local, step.shape)
    return local.new_full(step.shape, step.fill)


def _copy(step: RankStep, local: Tensor, out: Tensor) -> None:
    for new, old in step.copies:
        out[new].copy_(local[old])
