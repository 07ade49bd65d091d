"""Integer programs for the second level, and the first level as a nonlinear one: certificates for the search.

The search never asks a solver; these models say the same problems in mathematics, for HiGHS and SCIP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pulp
import pyomo.environ as pyo

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


class LaneKind(NamedTuple):
    """A way of holding a stage, for the first level.

    Attributes:
        seconds: Of a layer, forward and backward of a micro-batch.
        pool: Number of the pool that it takes devices of.
        size: How many devices it takes.
    """

    seconds: float
    pool: int
    size: int


class CertifiedLane(NamedTuple):
    """A lane of the first level's optimum.

    Attributes:
        kinds: Number of the kind of each stage.
        layers: Layers of each stage.
        num_microbatches: Of a step.
    """

    kinds: tuple[int, ...]
    layers: tuple[int, ...]
    num_microbatches: int


def certify_lanes(
    kinds: Sequence[LaneKind],
    devices: Sequence[int],
    num_layers: int,
    batch: int,
    most: tuple[int, int],
) -> tuple[float, list[CertifiedLane]]:
    """Return the least step of any lanes by the closed form for equal stages, and those lanes, by SCIP.

    For lanes l, places of stages s and kinds k::

        minimize    T
        subject to  a_ls  = n_ls * sum_k x_lsk seconds_k                      (time of a stage)
                    (m_l + sum_sk x_lsk - 1) a_ls <= T                        (time of a lane)
                    sum_k x_lsk <= 1,  sum_k x_l,s+1,k <= sum_k x_lsk         (no holes)
                    sum_{k in p} x_lsk size_k <= devices_p   over all l, s    (devices of a pool)
                    sum_s n_ls = num_layers * sum_k x_l0k                     (a lane has all layers)
                    sum_k x_lsk <= n_ls <= num_layers * sum_k x_lsk           (a stage has some)
                    sum_l m_l = batch,  m_l <= batch * sum_k x_l0k            (batch)
                    x binary; n, m integer

    Args:
        kinds: Ways of holding a stage.
        devices: Devices of each pool.
        num_layers: Decoder layers.
        batch: Micro-batches of a step.
        most: Lanes, and stages of a lane, that there may be.

    Raises:
        PlannerError: If SCIP proves no optimum.

    Source: HSPMD, appendix A.1, first-level problem.
    """
    model = _lanes_model(kinds, devices, num_layers, batch, most)
    found = pyo.SolverFactory("scip_direct").solve(
        model, load_solutions=False, raise_exception_on_nonoptimal_result=False
    )
    if found.solver.termination_condition != pyo.TerminationCondition.optimal:
        raise PlannerError(
            f"lanes: SCIP proves no optimum for {num_layers} layers on {list(devices)} devices "
            f"({found.solver.termination_condition})."
        )
    model.solutions.load_from(found)
    lanes = []
    for lane in model.lanes:
        chosen = [
            (kind, stage)
            for stage in model.places
            for kind in model.kinds
            if pyo.value(model.takes[lane, stage, kind]) > 0.5
        ]
        if chosen:
            layers = tuple(round(pyo.value(model.layers[lane, stage])) for _, stage in chosen)
            count = round(pyo.value(model.microbatches[lane]))
            lanes.append(CertifiedLane(tuple(kind for kind, _ in chosen), layers, count))
    return float(pyo.value(model.step)), lanes


def _lanes_model(
    kinds: Sequence[LaneKind],
    devices: Sequence[int],
    num_layers: int,
    batch: int,
    most: tuple[int, int],
) -> pyo.ConcreteModel:
    longest = batch * num_layers * max(kind.seconds for kind in kinds)
    model = pyo.ConcreteModel("lanes")
    model.lanes, model.places = pyo.RangeSet(0, most[0] - 1), pyo.RangeSet(0, most[1] - 1)
    model.kinds, model.pools = pyo.RangeSet(0, len(kinds) - 1), pyo.RangeSet(0, len(devices) - 1)
    model.takes = pyo.Var(model.lanes, model.places, model.kinds, domain=pyo.Binary)
    model.layers = pyo.Var(
        model.lanes, model.places, domain=pyo.NonNegativeIntegers, bounds=(0, num_layers)
    )
    model.microbatches = pyo.Var(model.lanes, domain=pyo.NonNegativeIntegers, bounds=(0, batch))
    model.seconds = pyo.Var(model.lanes, model.places, bounds=(0, longest))
    model.step = pyo.Var(bounds=(0, longest * (1 + most[1])))
    model.goal = pyo.Objective(expr=model.step)

    def stage_time(model: Any, lane: int, place: int) -> Any:
        each = sum(model.takes[lane, place, k] * kinds[k].seconds for k in model.kinds)
        return model.seconds[lane, place] == model.layers[lane, place] * each

    model.stage_time = pyo.Constraint(model.lanes, model.places, rule=stage_time)

    def lane_time(model: Any, lane: int, place: int) -> Any:
        stages = sum(_used(model, lane, other) for other in model.places)
        passes = model.microbatches[lane] + stages - 1
        return passes * model.seconds[lane, place] <= model.step

    model.lane_time = pyo.Constraint(model.lanes, model.places, rule=lane_time)

    def no_holes(model: Any, lane: int, place: int) -> Any:
        return _used(model, lane, place) <= (_used(model, lane, place - 1) if place else 1)

    model.no_holes = pyo.Constraint(model.lanes, model.places, rule=no_holes)

    def devices_of_pool(model: Any, pool: int) -> Any:
        taken = (
            model.takes[lane, place, k] * kinds[k].size
            for lane in model.lanes
            for place in model.places
            for k in model.kinds
            if kinds[k].pool == pool
        )
        return sum(taken) <= devices[pool]

    model.devices_of_pool = pyo.Constraint(model.pools, rule=devices_of_pool)

    _add_layers(model, num_layers)

    def some_microbatches(model: Any, lane: int) -> Any:
        return model.microbatches[lane] <= batch * _used(model, lane, 0)

    model.some_microbatches = pyo.Constraint(model.lanes, rule=some_microbatches)

    model.batch = pyo.Constraint(expr=sum(model.microbatches[i] for i in model.lanes) == batch)
    return model


def _used(model: Any, lane: int, place: int) -> Any:
    """Return whether a lane has a stage in a place."""
    return sum(model.takes[lane, place, kind] for kind in model.kinds)


def _add_layers(model: Any, num_layers: int) -> None:
    """Let each lane that is used hold all layers, one or more in each of its stages."""

    def all_layers(model: Any, lane: int) -> Any:
        return sum(model.layers[lane, p] for p in model.places) == num_layers * _used(
            model, lane, 0
        )

    model.all_layers = pyo.Constraint(model.lanes, rule=all_layers)

    def some_layers(model: Any, lane: int, place: int) -> Any:
        return model.layers[lane, place] >= _used(model, lane, place)

    model.some_layers = pyo.Constraint(model.lanes, model.places, rule=some_layers)

    def no_layers(model: Any, lane: int, place: int) -> Any:
        return model.layers[lane, place] <= num_layers * _used(model, lane, place)

    model.no_layers = pyo.Constraint(model.lanes, model.places, rule=no_layers)
