"""``ProfileLines``: straight lines through a profile's measurements, of each unit and degree.

Each unit and degree of tensor parallelism has a line over the work of a micro-batch::

    seconds = fixed + per_work * work        work = operations of the whole model's unit

fitted by least squares of relative errors. Of a degree t that was not measured, ``per_work`` is ``p / t``
where the profile leaves collectives out, and ``p / t + q (t - 1) / t`` where it has them: what divides among
t ranks, and what a ring among them sends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hdtensor.planner.costs import StageGroup, Unit
from hdtensor.planner.model import ModelShape
from hdtensor.planner.profiles import Profile, UnitTime
from hdtensor.planner.regression import Line, fit_line, held_out_errors
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.unit_sizes import unit_work


class UnitLines(NamedTuple):
    """Lines of one unit on one device with one degree of tensor parallelism.

    Attributes:
        forward: Of forward.
        backward: Of backward.
    """

    forward: Line
    backward: Line


class Measured(NamedTuple):
    """One measurement of a unit.

    Attributes:
        work: Operations, as ``unit_operations`` counts them.
        forward: Seconds.
        backward: Seconds.
        update: Seconds of the optimizer; None if not measured.
    """

    work: float
    forward: float
    backward: float
    update: float | None


def unit_operations(model: ModelShape, unit: Unit, tokens: float, context: int) -> float:
    """Return what a unit's seconds grow with: operations of the whole unit; of an embedding, its tokens."""
    work = unit_work(model, unit, 1, tokens, context)
    return work.matmul + work.attention if unit != "embedding" else tokens


class ProfileLines:
    """What one profile says about seconds."""

    def __init__(self, profile: Profile, roofline: RooflineCosts) -> None:
        """Fit a profile; the roofline says how one measured degree grows to another."""
        self._profile = profile
        self._roofline = roofline
        self._points = _points(profile)
        self._lines = {where: _fit(points) for where, points in self._points.items()}

    def at(self, unit: Unit, group: StageGroup) -> UnitLines | None:
        """Return a unit's lines on a stage; None where the unit was not measured at any degree."""
        where = (unit, group.tp)
        if where not in self._lines:
            tps = sorted(tp for what, tp in self._points if what == unit)
            if not tps:
                return None
            self._lines[where] = self._extrapolated(unit, group, tps)
        return self._lines[where]

    def _extrapolated(self, unit: Unit, group: StageGroup, tps: Sequence[int]) -> UnitLines:
        near = min(tps, key=lambda tp: (abs(math.log2(tp / group.tp)), tp))
        lines = self._lines[unit, near]
        if not self._profile.has_collectives:
            scale = near / group.tp
        elif len(tps) == 1:
            there = self._roofline.seconds(unit, group._replace(tp=near), 1)
            scale = self._roofline.seconds(unit, group, 1).forward / there.forward
        else:
            found = [self._lines[unit, tp] for tp in tps]
            forward = _divide([each.forward.per_work for each in found], tps, group.tp)
            backward = _divide([each.backward.per_work for each in found], tps, group.tp)
            return UnitLines(
                Line(lines.forward.fixed, forward), Line(lines.backward.fixed, backward)
            )
        return UnitLines(*(Line(line.fixed, line.per_work * scale) for line in lines))

    def measured(self, unit: Unit, tp: int, work: float) -> Measured | None:
        """Return the measurement of just this work; None if there is none."""
        points = self._points.get((unit, tp), ())
        return next((p for p in points if math.isclose(p.work, work, rel_tol=1e-9)), None)

    def update(self, unit: Unit, tp: int) -> float | None:
        """Return the seconds of the optimizer for a unit, which micro-batches do not change; None if unknown."""
        points = self._points.get((unit, tp), ())
        found = [point.update for point in points if point.update is not None]
        return float(np.median(found)) if found else None

    def held_out_errors(self) -> list[float]:
        """Return the relative error of each measurement as the line through the others predicts it."""
        errors: list[float] = []
        for points in self._points.values():
            whole = [point.forward + point.backward for point in points]
            errors += held_out_errors([point.work for point in points], whole)
        return errors


def _points(profile: Profile) -> dict[tuple[Unit, int], list[Measured]]:
    """Return the measurements by unit and degree; attention and MLP of one size together are a layer."""
    halves: defaultdict[tuple[int, int, int], dict[str, UnitTime]] = defaultdict(dict)
    table: defaultdict[tuple[Unit, int], list[Measured]] = defaultdict(list)
    for time in profile.units:
        if time.unit == "attention" or time.unit == "mlp":
            halves[time.tp, time.mbs, time.context][time.unit] = time
        else:
            table[time.unit, time.tp].append(_point(profile.model, time.unit, [time]))
    for (tp, _, _), both in halves.items():
        if len(both) == 2:
            table["layer", tp].append(_point(profile.model, "layer", list(both.values())))
    return dict(table)


def _point(model: ModelShape, unit: Unit, times: Sequence[UnitTime]) -> Measured:
    updates = [time.update for time in times if time.update is not None]
    return Measured(
        unit_operations(model, unit, times[0].mbs * times[0].context, times[0].context),
        sum(time.forward for time in times),
        sum(time.backward for time in times),
        sum(updates) if len(updates) == len(times) else None,
    )


def _fit(points: Sequence[Measured]) -> UnitLines:
    works = [point.work for point in points]
    forward = fit_line(works, [point.forward for point in points])
    return UnitLines(forward, fit_line(works, [point.backward for point in points]))


def _divide(rates: Sequence[float], tps: Sequence[int], tp: int) -> float:
    """Return p / t + q (t - 1) / t for a new t, with p and q from measured ones, none below 0."""
    t, measured = np.asarray(tps, float), np.maximum(np.asarray(rates), 1e-30)
    columns = np.stack([1 / t, (t - 1) / t], 1) / measured[:, None]
    (p, q), *_ = np.linalg.lstsq(columns, np.ones(len(tps)), rcond=None)
    if q < 0:
        p, q = float(np.mean(measured * t)), 0.0
    return max(float(p / tp + q * (tp - 1) / tp), 0.0)
