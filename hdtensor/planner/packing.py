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


def pack(caps: Ints, devices: Ints, room: Sequence[int], most: int = 400) -> list[int]:
    """Return the lanes, by their numbers, with the most samples in all; one may be taken often.

    Exact where the lattice counts single devices; else lanes are counted as the next multiple of its unit.
    Tables of one lane, two, four and so on are joined by taking the best split at each point.

    >>> pack(np.array([3, 2]), np.array([[2], [1]]), [5])
    [1, 1, 1, 1, 1]

    Args:
        caps: Samples of each lane, of shape (lanes,).
        devices: What each takes of each pool, of shape (lanes, pools).
        room: Devices of each pool.
        most: Points of the lattice.
    """
    units = np.array(lattice_units(room, most))
    places = -(-devices // units)
    shape = tuple(r // u + 1 for r, u in zip(room, units, strict=True))
    usable = np.flatnonzero((caps > 0) & (places < np.array(shape)).all(axis=1))
    single = np.zeros(shape, dtype=np.int64)
    lane_at = np.full(shape, -1, dtype=np.int64)
    order = usable[np.argsort(caps[usable], kind="stable")]
    index = tuple(places[order].T)
    single[index] = caps[order]  # the last of equal places is the best one
    lane_at[index] = order
    tables = [single]
    while True:
        joined = _join(tables[-1])
        if (joined == tables[-1]).all():
            break
        tables.append(joined)
    top = np.unravel_index(int(tables[-1].argmax()), shape)
    return sorted(_lanes_at(tables, len(tables) - 1, tuple(int(i) for i in top), lane_at))


def _join(table: Ints) -> Ints:
    """Return, at each point, the best sum of two entries whose points add up to it."""
    best = table.copy()
    for point in zip(*np.nonzero(table), strict=True):
        low = tuple(slice(int(i), None) for i in point)
        high = tuple(slice(0, n - int(i)) for i, n in zip(point, table.shape, strict=True))
        np.maximum(best[low], table[high] + table[point], out=best[low])
    return best


def _lanes_at(
    tables: Sequence[Ints], level: int, point: tuple[int, ...], lane_at: Ints
) -> list[int]:
    """Return the lanes whose samples an entry is the sum of."""
    value = int(tables[level][point])
    while level and int(tables[level - 1][point]) == value:
        level -= 1
    if value == 0:
        return []
    if level == 0:
        return [int(lane_at[point])]
    table = tables[level - 1]
    near = table[tuple(slice(0, i + 1) for i in point)]
    rest = near[tuple(slice(None, None, -1) for _ in point)]
    split = np.unravel_index(int((near + rest).argmax()), near.shape)
    one = tuple(int(i) for i in split)
    other = tuple(p - i for p, i in zip(point, one, strict=True))
    return _lanes_at(tables, level - 1, one, lane_at) + _lanes_at(tables, level - 1, other, lane_at)
