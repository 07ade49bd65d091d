"""Calibration: the few numbers of a cost model that only whole steps, measured, can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.profiled import ProfiledCosts, RuntimeConstants
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.simulate import step_seconds, strategy_memory
from hdtensor.planner.strategy import Strategy


_MOST_HALVINGS = 60
_LONGEST = 1e9

#: Costs that one factor slows down.
_Costs = TypeVar("_Costs", RooflineCosts, ProfiledCosts)


class MeasuredStep(NamedTuple):
    """A step that really ran.

    Attributes:
        strategy: What ran.
        cluster: Where.
        costs: Of its model and workload.
        seconds: Of a step, measured; NaN if nobody did.
        memory_bytes: Of the fullest device, measured; None if nobody did, or if it cannot be right.
    """

    strategy: Strategy
    cluster: Cluster
    costs: ProfiledCosts
    seconds: float
    memory_bytes: float | None = None


class StepErrors(NamedTuple):
    """How far a prediction is from a measured step, relatively; above 0 it is too much.

    Attributes:
        seconds: Of the step.
        memory: Of the fullest device; None where nothing was measured.
    """

    seconds: float
    memory: float | None


def step_errors(step: MeasuredStep, constants: RuntimeConstants) -> StepErrors:
    """Return how far the prediction of a step is from what was measured."""
    return StepErrors(_seconds_error(step, constants), _memory_error(step, constants))


def _seconds_error(step: MeasuredStep, constants: RuntimeConstants) -> float:
    costs = replace(step.costs, constants=constants)
    predicted = step_seconds(step.strategy, step.cluster, costs, costs.roofline.workload)
    return predicted / step.seconds - 1


def _memory_error(step: MeasuredStep, constants: RuntimeConstants) -> float | None:
    if step.memory_bytes is None:
        return None
    costs = replace(step.costs, constants=constants)
    memory = strategy_memory(step.strategy, step.cluster, costs, costs.roofline.workload)
    return max(need.total for need in memory.values()) / step.memory_bytes - 1


def fit_runtime(steps: Sequence[MeasuredStep], first: RuntimeConstants) -> RuntimeConstants:
    """Return the constants of a training system that predict measured steps best.

    Seconds: ``message`` and ``start`` have the least mean absolute relative error, found by a search over one
    of them after the other. Memory: ``reserved_bytes`` of each group of devices and ``workspace`` likewise.
    The mean of absolute errors lets one odd measurement be odd.

    Args:
        steps: Measured, three or more.
        first: Where to begin; ``is_blocking`` is kept, and names of devices that share one reserved number are
            those with the same one here.

    Raises:
        PlannerError: If there are too few steps.
    """
    if len(steps) < 3:
        raise PlannerError(
            f"steps: three measured steps or more are needed for as many numbers, got {len(steps)}."
        )
    if not all(0 < step.seconds < _LONGEST for step in steps):
        raise PlannerError(
            f"steps: each must have measured seconds, more than 0 and less than {_LONGEST:g}."
        )

    def with_times(values: Mapping[str, float]) -> RuntimeConstants:
        return replace(first, message=values["message"], start=values["start"])

    timed = _coordinate_search(
        {"message": first.message or 1e-4, "start": first.start or 1e-2},
        lambda values: _mean_error([_seconds_error(step, with_times(values)) for step in steps]),
    )
    constants = with_times(timed)
    groups = sorted(set(constants.reserved_bytes.values()))
    names = {
        f"reserved {i}": [n for n, b in constants.reserved_bytes.items() if b == each]
        for i, each in enumerate(groups)
    }

    def with_memory(values: Mapping[str, float]) -> RuntimeConstants:
        reserved = {name: values[group] for group, some in names.items() for name in some}
        return replace(constants, reserved_bytes=reserved, workspace=values["workspace"])

    start = {f"reserved {i}": each for i, each in enumerate(groups)}
    found = _coordinate_search(
        {**start, "workspace": constants.workspace or 0.1},
        lambda values: _mean_error([_memory_error(step, with_memory(values)) for step in steps]),
    )
    return with_memory(found)


def _mean_error(errors: Sequence[float | None]) -> float:
    return float(np.mean([abs(error) for error in errors if error is not None] or [0.0]))


def _coordinate_search(
    first: Mapping[str, float], error: Callable[[Mapping[str, float]], float]
) -> dict[str, float]:
    """Return values, none negative, with a small error: one after another is multiplied by finer and finer factors."""
    values, best = dict(first), error(first)
    for factor in (4.0, 2.0, 1.4, 1.15, 1.05):
        improved = True
        while improved:
            improved = False
            for name in values:
                for trial in (values[name] * factor, values[name] / factor):
                    other = {**values, name: trial}
                    new = error(other)
                    if new < best - 1e-6:
                        values, best, improved = other, new, True
    for name in values:  # what helps nothing is left out
        other = {**values, name: 0.0}
        new = error(other)
        if new <= best + 1e-6:
            values, best = other, new
    return values


def calibrate(costs: _Costs, strategy: Strategy, cluster: Cluster, seconds: float) -> _Costs:
    """Return costs whose devices all compute slower, or faster, by one factor, so that a measured step comes out.

    Communication beside the passes stays as it is.

    Args:
        costs: To start from.
        strategy: What was measured.
        cluster: Where.
        seconds: Of the step, measured.

    Raises:
        PlannerError: If communication alone takes longer than the step, or the number is none.
    """
    if not 0 < seconds < _LONGEST:
        raise PlannerError(
            f"seconds: a step takes more than 0 and less than {_LONGEST:g}, got {seconds}."
        )
    names = {device.name for device in cluster.devices()}

    def step(factor: float) -> float:
        slowed = costs.slowed(dict.fromkeys(names, factor))
        return step_seconds(strategy, cluster, slowed, costs.workload)

    low, high = 0.0, 1.0
    if step(low) >= seconds:
        raise PlannerError(
            f"seconds: the measured step of {seconds:.4g} s is shorter than its communication alone, "
            f"{step(low):.4g} s. Check the links of the cluster."
        )
    while step(high) < seconds:
        low, high = high, 2 * high
    for _ in range(_MOST_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if step(middle) < seconds else (low, middle)
    return costs.slowed(dict.fromkeys(names, (low + high) / 2))
