"""``lower_bound``: a time that no strategy's step beats, by the event simulator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdtensor.planner.space import Space


class Bound(NamedTuple):
    """A lower bound on the step.

    Attributes:
        seconds: No strategy of the space has a shorter step.
        work: All work spread over all devices, each at its best; no bubble, no whole layers or micro-batches.
    """

    seconds: float
    work: float


def work_bound(space: Space) -> float:
    """Return the seconds of all work of a step, spread over all devices without any loss.

    Every device does layers at the best rate that any kind has; head and embedding count at their best rates too.

    Args:
        space: What the search knows.
    """
    prices = space.prices
    mbs = np.array(prices.mbs)
    sizes = np.array([kind.size for kind in space.kinds])[:, None]
    with np.errstate(invalid="ignore"):
        beside = np.nanmin((prices.first + prices.last) / prices.layer)
        rates = mbs / prices.layer / sizes
    total = 0.0
    for pool, count in enumerate(space.devices):
        total += count * max(
            rates[k].max() for k, kind in enumerate(space.kinds) if kind.pool == pool
        )
    return float(space.workload.batch * (space.num_layers + beside) / total)


def lower_bound(space: Space) -> Bound:
    """Return the lower bound on the step of every strategy of a space.

    Args:
        space: What the search knows.
    """
    work = work_bound(space)
    return Bound(work, work)
