"""Choosing lanes: the relaxation and the exact lattice against brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hdtensor.planner.packing import lattice_units, pack, relax


def best_by_force(caps, devices, room):
    best, todo = 0, [(0, tuple(room), 0)]
    while todo:
        start, left, value = todo.pop()
        best = max(best, value)
        for lane in range(start, len(caps)):
            rest = tuple(a - b for a, b in zip(left, devices[lane], strict=True))
            if min(rest) >= 0:
                todo.append((lane, rest, value + caps[lane]))
    return best


def random_lanes(rng, num_pools):
    num = rng.randint(1, 7)
    devices = [[rng.randint(0, 3) for _ in range(num_pools)] for _ in range(num)]
    devices = [row if any(row) else [1] * num_pools for row in devices]
    return [rng.randint(0, 9) for _ in range(num)], devices


@pytest.mark.parametrize("seed", range(40))
def test_pack_finds_the_most_samples(seed):
    rng = random.Random(seed)
    num_pools = rng.randint(1, 3)
    caps, devices = random_lanes(rng, num_pools)
    room = [rng.randint(0, 4) for _ in range(num_pools)]
    chosen = pack(np.array(caps), np.array(devices), room)
    taken = np.array([devices[lane] for lane in chosen] or [[0] * num_pools]).sum(axis=0)
    assert (taken <= room).all()
    best = best_by_force(caps, devices, room)
    assert sum(caps[lane] for lane in chosen) == best
    value, amounts, worth = relax(
        np.array(caps, float), np.array(devices, float), np.array(room, float)
    )
    assert value >= best - 1e-9
    assert amounts @ np.array(caps) == pytest.approx(value)
    assert (amounts @ np.array(devices) <= np.array(room) + 1e-9).all()
    # Duality: the worth of the room proves that there is no better value.
    assert worth @ room == pytest.approx(value)
    assert (np.array(devices) @ worth >= np.array(caps) - 1e-9).all()


def test_a_coarse_lattice_still_fits():
    rng = random.Random(5)
    caps = [rng.randint(1, 50) for _ in range(30)]
    devices = [[rng.randint(0, 12), rng.randint(1, 20)] for _ in range(30)]
    room = [60, 90]
    assert lattice_units(room, 400) != (1, 1)
    chosen = pack(np.array(caps), np.array(devices), room)
    taken = np.array([devices[lane] for lane in chosen]).sum(axis=0)
    assert (taken <= room).all()
    singles = max(c for c, d in zip(caps, devices, strict=True))
    assert sum(caps[lane] for lane in chosen) > 3 * singles
    assert list(itertools.accumulate(chosen, max)) == chosen
