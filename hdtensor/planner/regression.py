"""Straight lines through measurements: what a unit takes by the size of its micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """seconds = fixed + per_work * work.

    Attributes:
        fixed: Seconds that do not grow with the work: launches, latencies.
        per_work: Seconds of a unit of work.
    """

    fixed: float
    per_work: float

    def at(self, work: float) -> float:
        """Return the seconds of some work."""
        return self.fixed + self.per_work * work


def fit_line(works: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the line with the least squares of relative errors, both of whose parts are no less than 0.

    >>> [round(part, 9) for part in fit_line([1.0, 2.0, 4.0], [3.0, 5.0, 9.0])]
    [1.0, 2.0]

    Args:
        works: Such as tokens; positive.
        seconds: Measured; what is 0 counts as a nanosecond.
    """
    x, y = np.asarray(works, float), np.maximum(np.asarray(seconds, float), 1e-9)
    only_slope = Line(0.0, float((x / y).sum() / ((x / y) ** 2).sum()))
    if len(set(works)) < 2:
        return only_slope
    columns = np.stack([1 / y, x / y], 1)
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)
    if fixed < 0:
        return only_slope
    if slope < 0:
        return Line(float((1 / y).sum() / (1 / y**2).sum()), 0.0)
    return Line(float(fixed), float(slope))


def held_out_errors(
    works: Sequence[float],
    seconds: Sequence[float],
    fit: Callable[[Sequence[float], Sequence[float]], Line] = fit_line,
) -> list[float]:
    """Return the relative error of each measurement as the line through all others predicts it.

    Empty with fewer than three measurements, of which two would remain.
    """
    if len(works) < 3:
        return []
    errors = []
    for i, (work, truth) in enumerate(zip(works, seconds, strict=True)):
        rest = [j for j in range(len(works)) if j != i]
        line = fit([works[j] for j in rest], [seconds[j] for j in rest])
        errors.append(line.at(work) / max(truth, 1e-9) - 1)
    return errors
