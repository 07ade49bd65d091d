"""How the ranks of one stage cut a parameter: from roles to placements, and the checks of heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.errors import PlanError
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import Role
from hdtensor.plan.sites import Use
from hdtensor.plan.stages import Pipeline, Stage
from hdtensor.plan.validate import stage_path


_HEAD_ROLES = (Role.HEADS, Role.KV_HEADS)


def placement(use: Use, stage: Stage, model: ModelDescription) -> Placement:
    """Return the bottom placement of a parameter in a stage (the table of ``Role``).

    A stage of one rank holds all of it. Extents that tp does not divide are cut as DTensor cuts
    them, unevenly; heads are never cut apart (``check_heads``).

    Raises:
        PlanError: If a scalar has a role that cuts it.
    """
    num_dims = len(use.shape)
    if stage.tp == 1 or use.role is Role.REPLICATE:
        return Replicate()
    if use.role is Role.KV_HEADS and not divides_kv_heads(stage, model):
        return Replicate()
    if num_dims == 0:
        raise PlanError(
            f"the parameter {use.name!r} is a scalar, so it cannot have the role {use.role}; "
            f"give it the role 'replicate' by a pattern."
        )
    if use.role is Role.ROW:
        return Shard(1) if num_dims > 1 else Replicate()
    return Shard(0)


def one_placement(uses: Sequence[Use], stage: Stage, model: ModelDescription) -> Placement:
    """Return the placement of a parameter that all its uses agree on.

    Raises:
        PlanError: If they do not.
    """
    cuts = {placement(use, stage, model) for use in uses}
    if len(cuts) > 1:
        roles = ", ".join(f"{use.name}: {use.role}" for use in uses)
        raise PlanError(
            f"the tied weight {uses[0].first_name!r} has roles that cut it in different ways "
            f"({roles}); give all its names one role by patterns."
        )
    return cuts.pop()


def divides_kv_heads(stage: Stage, model: ModelDescription) -> bool:
    """Return whether every rank of the stage gets whole KV heads."""
    heads = model.num_key_value_heads
    return heads is not None and heads % stage.tp == 0


def replicated_kv(
    pipelines: Sequence[Pipeline], model: ModelDescription, uses: Sequence[Use]
) -> tuple[str, ...]:
    """Return the paths of the stages that hold k and v projections whole though tp > 1."""
    if not any(use.role is Role.KV_HEADS for use in uses):
        return ()
    return tuple(
        stage_path(p, s)
        for p, pipeline in enumerate(pipelines)
        for s, stage in enumerate(pipeline.stages)
        if stage.tp > 1 and not divides_kv_heads(stage, model)
    )


def check_heads(
    pipelines: Sequence[Pipeline], model: ModelDescription, uses: Sequence[Use]
) -> None:
    """Raise unless every stage's tp divides the query heads, and heads the rows.

    Raises:
        PlanError: The message names the stage's field, the heads and tp.
    """
    by_heads = [use for use in uses if use.role in _HEAD_ROLES]
    if not by_heads:
        return
    heads = model.num_attention_heads
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.tp > 1 and heads is None:
                raise PlanError(
                    f"{stage_path(p, s)}.tp: {stage.tp} cuts {by_heads[0].name!r} by heads, but "
                    f"the model's config has no num_attention_heads. Expand "
                    f"ModelDescription.from_module(model).replace(num_attention_heads=..., "
                    f"num_key_value_heads=...)."
                )
            if heads is not None and heads % stage.tp:
                raise PlanError(
                    f"{stage_path(p, s)}.tp: {stage.tp} does not divide the model's "
                    f"num_attention_heads = {heads}. Use a tp that does."
                )
    counts = {Role.HEADS: heads, Role.KV_HEADS: model.num_key_value_heads}
    for use in by_heads:
        count, shape = counts[use.role], use.shape
        if count is not None and shape and shape[0] % count:
            raise PlanError(
                f"the parameter {use.name!r} has the role {use.role}, but the {shape[0]} rows of "
                f"its shape {shape} do not divide by the model's {count} heads."
            )
