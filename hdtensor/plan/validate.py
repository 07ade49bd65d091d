"""Checks of a compact plan as a whole: every rank once, every layer once, shares of one kind."""

from __future__ import annotations

from collections.abc import Sequence

from hdtensor.errors import PlanError
from hdtensor.placements.checks import ranks_text
from hdtensor.plan.fields import MAX_LAYERS, MAX_RANKS, check_int
from hdtensor.plan.stages import Pipeline, Stage, Uniform


_MAX_SHOWN = 16


def stage_path(pipeline: int, stage: int) -> str:
    """Return the JSON path of a stage.

    >>> stage_path(0, 1)
    'pipelines[0].stages[1]'
    """
    return f"pipelines[{pipeline}].stages[{stage}]"


def some_ranks_text(ranks: tuple[int, ...]) -> str:
    """Return the first of some ranks, for messages: ``rank 3``, ``ranks 0-2,5``."""
    text = ranks_text(ranks[:_MAX_SHOWN]) + ("..." if len(ranks) > _MAX_SHOWN else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def check_pipelines(pipelines: Sequence[Pipeline]) -> None:
    """Raise unless the pipelines make one plan.

    Raises:
        PlanError: If a rank is in two stages, layers are missing, doubled or out of order, or some
            pipelines say their part of the batch and others do not.
    """
    _check_ranks(pipelines)
    _check_layers(pipelines)
    _check_shares(pipelines)


def check_world(pipelines: Sequence[Pipeline], uniform: Uniform | None, world_size: int) -> None:
    """Raise if the plan names a rank that a world of this size does not have.

    Raises:
        PlanError: The message names the field and the ranks.
    """
    check_int("world_size", world_size, 1, MAX_RANKS)
    if uniform is not None and uniform.num_ranks > world_size:
        raise PlanError(
            f"uniform: the degrees multiply to {uniform.num_ranks} ranks, "
            f"but the world has {world_size}."
        )
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            beyond = tuple(rank for rank in stage.ranks if rank >= world_size)
            if beyond:
                raise PlanError(
                    f"{stage_path(p, s)}.ranks: {some_ranks_text(beyond)} beyond the world, "
                    f"which has ranks 0 to {world_size - 1}. Start more processes, or use other "
                    f"ranks."
                )


def check_executable(pipelines: Sequence[Pipeline]) -> None:
    """Raise if a stage asks for parallelism that this version cannot run.

    Raises:
        PlanError: On expert parallelism.
    """
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.ep > 1:
                raise PlanError(
                    f"{stage_path(p, s)}.ep: {stage.ep} is valid in a plan, but this "
                    f"version runs ep = 1 only. Use tp, cp, or more pipelines."
                )


def uniform_pipelines(uniform: Uniform, num_layers: int) -> tuple[Pipeline, ...]:
    """Return the pipelines of a uniform plan; ``StrategyPlan.with_pipelines`` says the order.

    Raises:
        PlanError: If there are fewer layers than stages, or on sequence parallelism.
    """
    check_int("num_layers", num_layers, 0, MAX_LAYERS)
    if uniform.sp > 1:
        raise PlanError(
            f"uniform.sp: {uniform.sp} is valid in a plan, but this version runs sp = 1 only. "
            f"Use tp or dp."
        )
    num_layers = max(
        num_layers, 1
    )  # a model without layers is one piece, as in one-stage pipelines
    if uniform.pp > num_layers:
        raise PlanError(
            f"uniform.pp: {uniform.pp} stages need as many layers; the model has {num_layers}."
        )
    size = uniform.tp * uniform.cp * uniform.ep
    least, more = divmod(num_layers, uniform.pp)
    pipelines = []
    for p in range(uniform.dp):
        stages, first = [], 0
        for s in range(uniform.pp):
            last = first + least + (s < more) - 1
            rank = (p * uniform.pp + s) * size
            stages.append(
                Stage(
                    ranks=tuple(range(rank, rank + size)),
                    layers=(first, last),
                    cp=uniform.cp,
                    ep=uniform.ep,
                )
            )
            first = last + 1
        both = uniform.microbatches is not None and uniform.mbs is not None
        pipelines.append(
            Pipeline(
                stages=tuple(stages),
                microbatches=uniform.microbatches,
                mbs=uniform.mbs,
                share=None if both else 1,
            )
        )
    return tuple(pipelines)


def _check_ranks(pipelines: Sequence[Pipeline]) -> None:
    seen: dict[int, tuple[int, int]] = {}
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            shared = tuple(rank for rank in stage.ranks if rank in seen)
            if not shared:
                seen.update(dict.fromkeys(stage.ranks, (p, s)))
                continue
            q, before = seen[shared[0]]
            path = stage_path(p, s)
            if q != p:
                raise PlanError(
                    f"{path}.ranks: {some_ranks_text(shared)} also in {stage_path(q, before)}.ranks; "
                    f"a rank is in one pipeline at most."
                )
            if not _is_same_group(stage, pipeline.stages[before]):
                raise PlanError(
                    f"{path}.ranks: {some_ranks_text(shared)} also in {stage_path(q, before)}.ranks; "
                    f"a rank has several stages of its pipeline only where all have the same ranks in the "
                    f"same order, and the same tp, cp and ep."
                )


def _is_same_group(stage: Stage, other: Stage) -> bool:
    return (stage.ranks, stage.tp, stage.cp, stage.ep) == (
        other.ranks,
        other.tp,
        other.cp,
        other.ep,
    )


def _check_layers(pipelines: Sequence[Pipeline]) -> None:
    for p, pipeline in enumerate(pipelines):
        expected = 0
        for s, stage in enumerate(pipeline.stages):
            first = stage.layers[0]
            if first != expected:
                before = (
                    "a pipeline" if s == 0 else f"the stage before ends at {expected - 1}, this"
                )
                fault = (
                    f"layer {expected} is missing"
                    if first > expected
                    else f"layer {first} is doubled"
                )
                raise PlanError(
                    f"{stage_path(p, s)}.layers: {before} must begin at layer {expected}, "
                    f"got {list(stage.layers)}: {fault}."
                )
            expected = stage.layers[1] + 1
        wanted = pipelines[0].stages[-1].layers[1] + 1
        if expected != wanted:
            raise PlanError(
                f"{stage_path(p, len(pipeline.stages) - 1)}.layers: ends at layer {expected - 1}, "
                f"but pipelines[0] at {wanted - 1}; every pipeline must cover all layers."
            )


def _check_shares(pipelines: Sequence[Pipeline]) -> None:
    """Raise unless all parts of the batch are of one kind: shares, samples, or nothing said."""
    if not pipelines:
        return
    kinds = [_share_kind(pipeline) for pipeline in pipelines]
    for p, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise PlanError(
                f"pipelines[{p}]: its part of the batch is given by {kind}, that of pipelines[0] "
                f"by {kinds[0]}; use one way for all."
            )
    if all(pipeline.samples == 0 for pipeline in pipelines):
        raise PlanError("pipelines[0].share: all shares are 0; one pipeline at least needs data.")


def _share_kind(pipeline: Pipeline) -> str:
    if pipeline.share is not None:
        return "share"
    return "nothing" if pipeline.samples is None else "microbatches x mbs"
