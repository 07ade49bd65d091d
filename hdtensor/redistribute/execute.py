"""Carry out plans on this rank: pack, start the collectives, copy what is local meanwhile, unpack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from hdtensor._rank import current_rank
from hdtensor.collectives import observe, pairs, split
from hdtensor.errors import RedistributeError
from hdtensor.placements import HDSpec, Subgroup
from hdtensor.redistribute import jobs, messages
from hdtensor.redistribute.program import Program, RankStep, Round, compile_plan, partners
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import (
    RedistributePlan,
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
    _announce([plan])
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
    return start_many(plans, locals_, bucket_bytes=bucket_bytes, donate=donate)()


def start_many(
    plans: Sequence[RedistributePlan],
    locals_: Sequence[Tensor],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    donate: bool = False,
) -> Callable[[], list[Tensor]]:
    """Start what ``execute_many`` does, and return a function that waits for the new local tensors.

    All rounds start now, so that several calls launch their collectives in the order of the calls on every rank: where a
    plan has several rounds, all but the last are waited for.

    Args:
        plans: As for ``execute_many``.
        locals_: As for ``execute_many``; they must not be written before the wait.
        bucket_bytes: As for ``execute_many``.
        donate: As for ``execute_many``.

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
    _announce(plans)
    state = [local.detach() for local in locals_]
    wait: Callable[[], None] | None = None
    for number in sorted(rounds):
        if wait is not None:
            wait()
        wait = start_round(rounds[number], state, bucket_bytes, donate=donate, is_shared=True)

    def finish() -> list[Tensor]:
        if wait is not None:
            wait()
        return [_as_new(*each) for each in zip(programs, locals_, state, strict=True)]

    return finish


def _announce(plans: Sequence[RedistributePlan]) -> None:
    """Tell who listens of plans with messages, which only a pair of ranks sees; all of a plan's ranks must agree on it."""
    for plan in plans if observe.listeners else ():
        if plan.has_messages:
            sizes = f", extents {plan.src_top_sizes} -> {plan.dst_top_sizes}"
            observe.announce(
                "the messages",
                partners(plan, current_rank()),
                f"{plan.src} -> {plan.dst}, shape {tuple(plan.shape)}{sizes}",
            )


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
    if is_idle(program):
        return lambda local: local
    if len(program.steps) == 1:
        step = program.steps[0][1]
        if step.is_direct and step.jobs[0].is_whole and not jobs.may_pair(step.jobs[0]):
            job, shape = step.jobs[0], step.shape
            sizes = job.num_sent, job.num_received
            return lambda local: jobs.start(job, local.reshape(-1), *sizes)().view(shape)
    return lambda local: run_program(program, local, reverse=reverse)


def run_program(program: Program, local: Tensor, *, reverse: bool = False) -> Tensor:
    """Return the new local tensor; the caller has checked the old one."""
    if is_idle(program):
        return local
    state = [local.detach()]
    for _, step in program.steps:
        run_round([(0, step)], state, BUCKET_BYTES, reverse=reverse)
    return _as_new(program, local, state[0])


def is_idle(program: Program) -> bool:
    """Return whether a rank has no part in a plan and nothing before or after it: not even a copy is made."""
    return not program.steps and program.shape == (0,)


def _as_new(program: Program, local: Tensor, result: Tensor) -> Tensor:
    """Return the result, a copy where it is the old tensor and the plan has steps (elsewhere perhaps)."""
    if not program.is_new or is_idle(program):
        return local
    return result.clone(memory_format=torch.contiguous_format) if program.is_kept else result


def run_round(
    todo: Sequence[tuple[int, RankStep]],
    state: list[Tensor],
    bucket_bytes: int,
    *,
    reverse: bool = False,
    donate: bool = False,
    is_shared: bool = False,
) -> None:
    """Carry out one step of each of several tensors; arguments as for ``start_round``."""
    start_round(todo, state, bucket_bytes, reverse=reverse, donate=donate, is_shared=is_shared)()


def start_round(
    todo: Sequence[tuple[int, RankStep]],
    state: list[Tensor],
    bucket_bytes: int,
    *,
    reverse: bool = False,
    donate: bool = False,
    is_shared: bool = False,
) -> Callable[[], None]:
    """Start one step of each of several tensors.

    Args:
        todo: (place in ``state``, this rank's step).
        state: Local tensors.
        bucket_bytes: As for ``execute_many``.
        reverse: Whether messages go on the channel of backward passes.
        donate: Whether the local tensors may be overwritten.
        is_shared: Whether other tensors may be in the round, if not on this rank then on another.

    Returns:
        A function that waits; only then ``state`` has the new local tensors, and the old ones may be written.
    """
    items: list[jobs.Item] = []
    in_pairs: list[jobs.Item] = []
    for i, step in todo:
        for job in step.jobs:
            item = jobs.Item(i, step, job, state[i])
            (in_pairs if jobs.is_in_pair(item, is_shared=is_shared) else items).append(item)
    started = [
        (bucket, jobs.launch(bucket, donate)) for bucket in jobs.buckets_of(items, bucket_bytes)
    ]
    apart = {item.position for item in in_pairs}
    fresh = {
        i: jobs.new_local(step, state[i], donate)
        for i, step in todo
        if i in apart or not step.is_direct
    }
    reductions = [jobs.start_pair(item, fresh[item.position], donate) for item in in_pairs]
    parcels = [
        messages.Parcel(step, jobs.plain(state[i]), fresh[i])
        for i, step in todo
        if step.sent or step.received or step.op
    ]
    finish = messages.start(parcels, reverse=reverse) if parcels else None
    for i, step in todo:  # what a rank does alone hides behind the communication
        if i in fresh:
            if step.op is None and not step.is_kept:
                jobs.copy_own(step, state[i], fresh[i])
            state[i] = fresh[i]

    def wait() -> None:
        for bucket, pending in started:
            jobs.deliver(bucket, pending(), state)
        pairs.finish_all(reductions)
        if finish is not None:
            finish()

    return wait


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
