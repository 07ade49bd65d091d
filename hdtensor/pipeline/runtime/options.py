"""What a runner may be told beside its model, plan, loss and schedule."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hdtensor.errors import PlanError
from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.choose import DEFAULT_MICROBATCHES
from hdtensor.plan import AnnotationPlan, ExpandedPlan, ModelDescription, Pattern
from hdtensor.plan.strategy import StrategyPlan


#: All stages, none, or a choice: numbers of stages in every lane that has them, or pairs (lane, stage).
StageChoice: TypeAlias = bool | Collection[int | tuple[int, int]]

#: What else ``Runner`` takes by name.
_ARGUMENTS = ("loss_fn", "schedule", "num_microbatches")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Options of ``Runner``, which takes them as keyword arguments.

    Attributes:
        targets: Names in a batch that go to ``loss_fn`` and not to the model. Without a ``loss_fn`` the model gets them.
        keep_plain: Names in a batch that stay plain tensors, as for ``distribute_batch``.
        patterns: As for ``parallelize``.
        use_regions: As for ``parallelize``.
        activation_checkpointing: Stages whose layers keep only what they are called with, and compute the rest again in
            the backward.
        activation_offload: Stages whose saved activations wait for the backward in host memory.
        gradient_dtype: In which gradients of parameters of lower precision add up and are summed over lanes, before
            they are rounded to the parameter's own; None: in the parameter's own all along.
    """

    targets: Collection[str] = ("labels",)
    keep_plain: Collection[str] = ("attention_mask", "position_ids")
    patterns: Sequence[Pattern | tuple[str, str]] = ()
    use_regions: bool = True
    activation_checkpointing: StageChoice = False
    activation_offload: StageChoice = False
    gradient_dtype: torch.dtype | None = torch.float32


def runner_options(given: Mapping[str, Any]) -> RunnerOptions:
    """Return the options of a runner's keyword arguments.

    Args:
        given: Name -> value.

    Raises:
        PlanError: If there is no option of a name; it says the nearest one.
    """
    known = [field.name for field in dataclasses.fields(RunnerOptions)]
    for name in given:
        if name not in known:
            every = [*_ARGUMENTS, *known]
            near = difflib.get_close_matches(name, every, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise PlanError(
                f"{name[:60]}: a Runner has no such option; it has {', '.join(every)}.{hint}"
            )
    return RunnerOptions(**given)


def check_same(
    plan: AnnotationPlan,
    present: ExpandedPlan,
    model: ModelDescription,
    patterns: Sequence[Pattern | tuple[str, str]],
) -> None:
    """Raise unless a plan cuts a model as it is cut; lanes' parts of the batch may be others.

    Args:
        plan: What a runner is made with.
        present: What the model was parallelized by, or switched to.
        model: The model.
        patterns: As ``parallelize`` was told.

    Raises:
        PlanError: Otherwise.
    """
    given = plan.expand(model, () if isinstance(plan, ExpandedPlan) else patterns)
    found, wanted = ((p.tensors, p.points, p.zero) for p in (given, present))
    if found != wanted:
        raise PlanError(
            "the model is parallelized by another plan than the Runner's: hdtensor.switch(model, plan, optimizer) brings it "
            "to this one; or make the Runner by the plan that the model has."
        )


def chosen_stages(
    name: str, choice: StageChoice, lanes: Sequence[Lane], index: int
) -> frozenset[int]:
    """Return the numbers of a lane's stages that are in a choice.

    >>> lanes = [Lane.chain([(0,), (1,)]), Lane.chain([(2,)])]
    >>> sorted(chosen_stages("x", [1, (1, 0)], lanes, 0)), sorted(chosen_stages("x", [1, (1, 0)], lanes, 1))
    ([1], [0])

    Args:
        name: Of the option, for errors.
        choice: The stages of all lanes.
        lanes: The lanes.
        index: Which of them.

    Raises:
        PlanError: If the choice names a stage that no lane has.
    """
    if isinstance(choice, bool):
        return frozenset(range(lanes[index].num_stages) if choice else ())
    known = {(i, s) for i, lane in enumerate(lanes) for s in range(lane.num_stages)}
    chosen: set[tuple[int, int]] = set()
    for item in choice:
        found = {place for place in known if item in (place, place[1])}
        if not found:
            stages = ", ".join(
                f"lane {i}: 0 to {lane.num_stages - 1}" for i, lane in enumerate(lanes)
            )
            raise PlanError(
                f"{name}: there is no stage {item!r}; the stages are {stages}. Give True, numbers of stages, or pairs "
                f"(lane, stage)."
            )
        chosen |= found
    return frozenset(stage for lane, stage in chosen if lane == index)


def lane_counts(
    plan: AnnotationPlan, given: int | Sequence[int] | None, num_lanes: int
) -> list[int | None]:
    """Return each lane's number of micro-batches: what is given, or what the plan says; None where their size says it.

    Where nothing does it is that of a dry run.

    Raises:
        PlanError: If what is given does not fit the lanes.
    """
    if given is not None:
        counts = [given] * num_lanes if isinstance(given, int) else list(given)
        if len(counts) != num_lanes or any(not isinstance(n, int) or n < 1 for n in counts):
            raise PlanError(
                f"num_microbatches must be one number for each of the {num_lanes} lanes, at least 1, got {given}."
            )
        return list(counts)
    said = _said(plan, num_lanes)
    default = DEFAULT_MICROBATCHES
    return [default if count is None and size is None else count for count, size in said]


def lane_sizes(plan: AnnotationPlan, num_lanes: int) -> list[int | None]:
    """Return each lane's samples in a micro-batch, None where the plan does not say it."""
    return [size for _, size in _said(plan, num_lanes)]


def _said(plan: AnnotationPlan, num_lanes: int) -> list[tuple[int | None, int | None]]:
    """Return each lane's number of micro-batches and their size, as far as the plan says them."""
    if isinstance(plan, StrategyPlan) and plan.uniform is not None:
        return [(plan.uniform.microbatches, plan.uniform.mbs)] * num_lanes
    pipelines = plan.pipelines if isinstance(plan, StrategyPlan) else ()
    if len(pipelines) != num_lanes:
        return [(None, None)] * num_lanes
    return [(p.microbatches, p.mbs) for p in pipelines]
