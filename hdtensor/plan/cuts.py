"""How the ranks of one stage cut a parameter: from roles to placements, and the checks of heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import StridedShard
from hdtensor.errors import PlanError
from hdtensor.placements import Subgroup, checks
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import HEAD_ROLES, Role
from hdtensor.plan.sites import Use
from hdtensor.plan.stages import Pipeline, Stage
from hdtensor.plan.validate import stage_path


#: How many equal pieces a fused weight consists of.
_PIECES = {Role.QKV: 3, Role.GATE_UP: 2, Role.EXPERT_GATE_UP: 2}


def placement(use: Use, stage: Stage, model: ModelDescription) -> Placement:
    """Return the placement of a parameter along a stage's tp axis (the table of ``Role``).

    A stage of one rank holds all of it. Extents that tp does not divide are cut as DTensor cuts
    them, unevenly; heads are never cut apart (``check_heads``).

    Raises:
        PlanError: If the parameter has too few dims for its role.
    """
    num_dims = len(use.shape)
    if stage.tp == 1 or use.role is Role.REPLICATE:
        return Replicate()
    if use.role is Role.KV_HEADS and not divides_kv_heads(stage, model):
        return Replicate()
    needed = 3 if use.role.is_expert else 1
    if num_dims < needed:
        what = f"of shape {use.shape} has {num_dims} dims" if num_dims else "is a scalar"
        raise PlanError(
            f"the parameter {use.name!r} {what}, so it cannot have the role {use.role}; give it the role "
            f"'replicate' by a pattern."
        )
    if use.role is Role.EXPERT_ROW:
        return Shard(2)
    if use.role is Role.ROW:
        return Shard(0 if use.transposed else 1) if num_dims > 1 else Replicate()
    dim = 1 if use.role.is_expert or use.transposed else 0
    pieces = _PIECES.get(use.role)
    if pieces is None:
        return Shard(dim)
    if use.shape[dim] % pieces:
        raise PlanError(
            f"the parameter {use.name!r} has the role {use.role}, but dim {dim} of its shape {use.shape} "
            f"is not {pieces} equal pieces."
        )
    return StridedShard(dim, split_factor=pieces)


def is_cut(use: Use, stages: Sequence[Stage], model: ModelDescription) -> bool:
    """Return whether some stage that uses the parameter cuts it."""
    return any(checks.is_cut(placement(use, stage, model)) for stage in stages)


def stage_group(
    stage: Stage, along_tp: Placement | None = None, along_cp: Placement | None = None
) -> Subgroup:
    """Return a stage's ranks as a subgroup: the one place that knows the axes of its mesh.

    cp is the outer axis, tp the inner one; an axis of one rank is left out, if the other is not.

    Args:
        stage: The stage.
        along_tp: Placement along the tp axis; default ``Replicate()``.
        along_cp: Placement along the cp axis; default ``Replicate()``.
    """
    axes = [
        (degree, Replicate() if placement is None else placement)
        for degree, placement in ((stage.cp, along_cp), (stage.tp, along_tp))
        if degree > 1
    ] or [(1, Replicate())]
    shape, placements = zip(*axes, strict=True)
    return Subgroup(stage.ranks, placements, shape)


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
    by_heads = [use for use in uses if use.role in HEAD_ROLES]
    if not by_heads:
        return
    heads = model.num_attention_heads
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.tp > 1 and heads is None:
                raise PlanError(
                    f"{stage_path(p, s)}.tp: {stage.tp} cuts {by_heads[0].name!r} by heads, but "
                    f"the model's config has no num_attention_heads. Set it before, for example "
                    f"model.config = {{'num_attention_heads': 8, 'num_key_value_heads': 2}}."
                )
            if heads is not None and heads % stage.tp:
                raise PlanError(
                    f"{stage_path(p, s)}.tp: {stage.tp} does not divide the model's "
                    f"num_attention_heads = {heads}. Use a tp that does."
                )
    counts = {
        Role.HEADS: heads,
        Role.KV_HEADS: model.num_key_value_heads,
        Role.QKV: None if heads is None else 3 * heads,
    }
    for use in by_heads:
        count, shape = counts[use.role], use.shape
        rows = (shape[-1] if use.transposed else shape[0]) if shape else 0
        if count is not None and rows % count:
            raise PlanError(
                f"the parameter {use.name!r} has the role {use.role}, but the {rows} rows of "
                f"its shape {shape} do not divide by the model's {count} heads."
            )
