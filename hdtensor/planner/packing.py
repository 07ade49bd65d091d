"""Which lanes to take: the most samples that a cluster's devices do in a given time.

::

    maximize    sum_l x_l cap_l                    samples
    subject to  sum_l x_l devices_lp <= D_p        for every pool p
                x_l >= 0, integer

``relax`` solves it without "integer", by the simplex method, however many lanes there are; ``pack`` solves it
exactly on a lattice of numbers of devices, for small numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hdtensor.planner.space import Floats, Ints


_TOLERANCE = 1e-9
_MOST_STEPS = 400


def relax(caps: Floats, devices: Floats, room: Floats) -> tuple[float, Floats, Floats]:
    """Return the best value, how much of each lane, and what one more unit of room is worth, of the relaxation.

    A primal simplex on few rows: each step prices all lanes at once. Room is never negative, so taking no lane
    is where it starts.

    >>> value, amounts, worth = relax(np.array([3.0, 2.0]), np.array([[2.0], [1.0]]), np.array([5.0]))
    >>> value, amounts.tolist(), worth.tolist()
    (10.0, [0.0, 5.0], [2.0])

    Args:
        caps: Value of each lane, of shape (lanes,).
        devices: What each takes of each row, of shape (lanes, rows).
        room: What rows have, of shape (rows,).
    """
    rows, num = len(room), len(caps)
    columns = np.concatenate([devices, np.eye(rows)])  # the last ones: what rows have left
    prices = np.concatenate([caps, np.zeros(rows)])
    inverse, values = np.eye(rows), room.astype(float)
    basis = np.arange(num, num + rows)
    for step in range(_MOST_STEPS):
        reduced = prices - columns @ (prices[basis] @ inverse)
        gains = reduced > _TOLERANCE * max(1.0, float(caps.max(initial=0)))
        if not gains.any():
            break
        # Bland's rule after many steps: it cannot go in circles.
        enter = int(reduced.argmax()) if step < _MOST_STEPS // 2 else int(gains.argmax())
        direction = inverse @ columns[enter]
        uses = direction > _TOLERANCE
        ratios = np.where(uses, values / np.where(uses, direction, 1.0), np.inf)
        leave = int(ratios.argmin())
        step_size = ratios[leave]
        values = np.maximum(values - step_size * direction, 0.0)
        values[leave] = step_size
        pivot = inverse[leave] / direction[leave]
        inverse = inverse - np.outer(direction, pivot)
        inverse[leave] = pivot
        basis[leave] = enter
    amounts = np.zeros(num + rows)
    amounts[basis] = values
    return float(amounts @ prices), amounts[:num], np.maximum(prices[basis] @ inverse, 0.0)


def lattice_units(room: Sequence[int], most: int) -> tuple[int, ...]:
    """Return powers of two in which to count devices of pools, so that a lattice has about a number of points."""
    units = [1] * len(room)
    while math.prod(r // u + 1 for r, u in zip(room, units, strict=True)) > most:
        widest = max(range(len(room)), key=lambda i: room[i] // units[i])
        units[widest] *= 2
    return tuple(units)


def pack(
    caps: Ints,
    devices: Ints,
    room: Sequence[int],
    most_lanes: int | None = None,
    most_points: int = 400,
) -> list[int]:
    """Return the lanes, by their numbers, with the most samples in all; one may be taken often.

    Exact where the lattice counts single devices; else a lane takes the next multiple of the lattice's unit.
    The best of up to n lanes at each point is the best split of the point between up to n / 2 lanes twice, and one more
    if n is odd.

    >>> pack(np.array([3, 2]), np.array([[2], [1]]), [5])
    [1, 1, 1, 1, 1]

    Args:
        caps: Samples of each lane, of shape (lanes,).
        devices: What each takes of each pool, of shape (lanes, pools).
        room: Devices of each pool.
        most_lanes: How many lanes may be taken; None for any number.
        most_points: Points of the lattice.
    """
    units = np.array(lattice_units(room, most_points))
    places = -(-devices // units)
    shape = tuple(r // u + 1 for r, u in zip(room, units, strict=True))
    usable = np.flatnonzero((caps > 0) & (places < np.array(shape)).all(axis=1))
    order = usable[np.argsort(caps[usable], kind="stable")]
    index = tuple(places[order].T)
    exact = np.zeros(shape, dtype=np.int64)
    exact[index] = caps[order]  # the last of equal places is the best one
    lane_at = np.full(shape, -1, dtype=np.int64)
    lane_at[index] = order
    single = _Table(_not_falling(exact))
    single.exact, single.lane_at = exact, lane_at
    best = _best_of(single, most_lanes)
    top = np.unravel_index(int(best.values.argmax()), shape)
    return sorted(best.lanes(tuple(int(i) for i in top)))


def _not_falling(values: Ints) -> Ints:
    """Return, at each point, the greatest value of all points that take no more."""
    found = values.copy()
    for axis in range(values.ndim):
        np.maximum.accumulate(found, axis=axis, out=found)
    return found


class _Table:
    """The most samples of some lanes at each point or below it, as of one lane or joined of two tables."""

    def __init__(
        self, values: Ints, one: _Table | None = None, other: _Table | None = None
    ) -> None:
        self.values, self.one, self.other = values, one, other
        self.exact: Ints = values
        self.lane_at: Ints = values

    def join(self, other: _Table) -> _Table:
        """Return the table of the lanes of both. Only points where one device less does less need be tried."""
        best = np.maximum(self.values, other.values)
        steps = self.values > 0
        for axis in range(steps.ndim):
            steps &= np.diff(self.values, axis=axis, prepend=0) > 0
        if other is self:  # of two like parts one has no more than half of the first pool
            steps[(len(steps) + 1) // 2 :] = False
        for point in zip(*(axis.tolist() for axis in np.nonzero(steps)), strict=True):
            low = tuple(slice(i, None) for i in point)
            high = tuple(slice(0, n - i) for i, n in zip(point, best.shape, strict=True))
            np.maximum(best[low], other.values[high] + self.values[point], out=best[low])
        return _Table(best, self, other)

    def lanes(self, point: tuple[int, ...]) -> list[int]:
        """Return the lanes whose samples an entry is the sum of."""
        value = int(self.values[point])
        if value == 0:
            return []
        if self.one is None or self.other is None:
            near = self.exact[tuple(slice(0, i + 1) for i in point)]
            place = np.unravel_index(int(near.argmax()), near.shape)
            return [int(self.lane_at[place])]
        for table in (self.one, self.other):
            if int(table.values[point]) == value:
                return table.lanes(point)
        near = self.one.values[tuple(slice(0, i + 1) for i in point)]
        rest = self.other.values[tuple(slice(0, i + 1) for i in point)]
        rest = rest[tuple(slice(None, None, -1) for _ in point)]
        split = np.unravel_index(int((near + rest).argmax()), near.shape)
        first = tuple(int(i) for i in split)
        second = tuple(p - i for p, i in zip(point, first, strict=True))
        return self.one.lanes(first) + self.other.lanes(second)


def _best_of(single: _Table, most_lanes: int | None) -> _Table:
    """Return the table of up to a number of lanes."""
    if most_lanes is None:
        now = single
        while True:
            joined = now.join(now)
            if (joined.values == now.values).all():
                return now
            now = joined
    if most_lanes == 1:
        return single
    half = _best_of(single, most_lanes // 2)
    both = half.join(half)
    return single.join(both) if most_lanes % 2 else both
