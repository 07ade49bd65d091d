"""Integer programs for the second level, and the first level as a nonlinear one: certificates for the search.

The search never asks a solver; these models say the same problems in mathematics, for HiGHS and SCIP.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from hdtensor.errors import PlannerError
from hdtensor.planner.assign import LaneLoad, StageLoad


def certify_layers(stages: Sequence[StageLoad], num_layers: int) -> list[int]:
    """Return the same as ``assign_layers``, up to order among equal stages, by HiGHS.

    ::

        minimize    T
        subject to  beside_s + n_s * per_layer_s <= T    for every stage s   (time)
                    1 <= n_s <= max_layers_s, integer                        (memory)
                    sum_s n_s = num_layers                                   (cover)

    Args:
        stages: The stages of a lane, in order.
        num_layers: Decoder layers of the model.

    Raises:
        PlannerError: If the layers do not fit, or the solver stops early.
    """
    model = pulp.LpProblem("assign_layers", pulp.LpMinimize)
    slowest = model.add_variable("slowest_stage_seconds", lowBound=0)
    counts = [
        model.add_variable(f"num_layers_{s}", lowBound=1, upBound=stage.max_layers, cat="Integer")
        for s, stage in enumerate(stages)
    ]
    model += slowest
    for s, (stage, count) in enumerate(zip(stages, counts, strict=True)):
        model += stage.beside + stage.per_layer * count <= slowest, f"time_{s}"
    model += pulp.lpSum(counts) == num_layers, "cover"
    return _solve(model, counts, f"{num_layers} layers on {len(stages)} stages")


def certify_microbatches(lanes: Sequence[LaneLoad], batch: int) -> list[int]:
    """Return numbers of micro-batches as good as those of ``assign_microbatches``, by HiGHS.

    ::

        minimize    T
        subject to  beside_l + m_l * per_microbatch_l <= T   for every lane l   (time)
                    sum_l m_l * mbs_l = batch                                   (cover)
                    m_l >= 1, integer

    Args:
        lanes: The lanes.
        batch: Samples of a step.

    Raises:
        PlannerError: If no numbers make the batch, or the solver stops early.
    """
    model = pulp.LpProblem("assign_microbatches", pulp.LpMinimize)
    slowest = model.add_variable("slowest_lane_seconds", lowBound=0)
    counts = [
        model.add_variable(f"num_microbatches_{i}", lowBound=1, cat="Integer")
        for i in range(len(lanes))
    ]
    model += slowest
    for i, (lane, count) in enumerate(zip(lanes, counts, strict=True)):
        model += lane.beside + lane.per_microbatch * count <= slowest, f"time_{i}"
    model += (
        pulp.lpSum(lane.mbs * count for lane, count in zip(lanes, counts, strict=True)) == batch,
        "cover",
    )
    return _solve(model, counts, f"{batch} samples in {len(lanes)} lanes")


def _solve(model: pulp.LpProblem, counts: Sequence[pulp.LpVariable], what: str) -> list[int]:
    status = pulp.LpStatus[model.solve(pulp.HiGHS(msg=False, gapRel=0.0))]
    if status != "Optimal":
        raise PlannerError(f"{model.name}: HiGHS finds no way to place {what} ({status}).")
    return [round(count.value()) for count in counts]
