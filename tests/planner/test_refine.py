"""Layers are moved between stages as if all moves were timed, though most are known not to help."""

from __future__ import annotations

import itertools
import random

import pytest

from hdtensor.planner.columns import ColumnMaker
from hdtensor.planner.place import LaneDraft
from hdtensor.planner.refine import LaneClock, refine_layers
from tests.planner.small import random_space


def neighbours(draft, room):
    """Yield the lane with a layer moved from any stage to any other that has room."""
    for src, dst in itertools.permutations(range(len(draft.layers)), 2):
        if draft.layers[src] > 1 and draft.layers[dst] < room[dst]:
            layers = list(draft.layers)
            layers[src], layers[dst] = layers[src] - 1, layers[dst] + 1
            yield draft._replace(layers=tuple(layers))


def refined_by_force(clock, draft):
    room = clock.max_layers(draft.kinds, draft.mbs)
    for _ in range(4):
        best = draft
        for other in neighbours(draft, room):
            if clock.seconds(other) < clock.seconds(best) * (1 - 1e-9):
                best = other
        if best == draft:
            break
        draft = best
    return draft


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB-H1"])
@pytest.mark.parametrize("seed", range(12))
def test_moves_that_are_not_timed_would_not_have_helped(seed, schedule):
    rng = random.Random(seed)
    space = random_space(seed, num_layers=rng.randint(4, 12), schedule=schedule)
    clock = LaneClock(space, ColumnMaker(space, rng.randint(1, 3)))
    moved = 0
    for _ in range(8):
        num = rng.randint(1, min(4, space.num_layers))
        cuts = sorted(rng.sample(range(1, space.num_layers), num - 1))
        layers = tuple(b - a for a, b in itertools.pairwise((0, *cuts, space.num_layers)))
        kinds = tuple(rng.randrange(len(space.kinds)) for _ in range(num))
        draft = LaneDraft(
            kinds=kinds,
            layers=layers,
            mbs=rng.choice(space.prices.mbs),
            num_microbatches=rng.randint(1, 20),
        )
        found = refine_layers(clock, draft)
        assert found == refined_by_force(clock, draft)
        moved += found != draft
    assert moved
