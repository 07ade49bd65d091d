"""``refine``: the last percent of a strategy, by the exact end of its lanes' schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from hdtensor.planner.columns import ColumnMaker
from hdtensor.planner.lane_times import end_times
from hdtensor.planner.place import LaneDraft
from hdtensor.planner.space import Ints, Space


#: Rounds of improvement of a lane's layers.
_ROUNDS = 4
#: A lane is faster than another one if its time is less than this part of the other's.
_FASTER = 1 - 1e-9


class LaneClock:
    """Says when lanes end, their synchronization and optimizer included; remembers what it has said."""

    def __init__(self, space: Space, maker: ColumnMaker) -> None:
        """Take the costs of a number of lanes."""
        self.space, self.maker = space, maker
        self.seconds = lru_cache(maxsize=None)(self._seconds)
        self.max_layers = lru_cache(maxsize=None)(self._max_layers)

    def _max_layers(self, kinds: tuple[int, ...], mbs: int) -> tuple[int, ...]:
        index = self.space.prices.mbs.index(mbs)
        return tuple(self.maker.max_layers(np.array([kinds]), index)[0].tolist())

    def least(self, draft: LaneDraft, ways: Ints) -> list[float]:
        """Return what a lane takes at least for each of many ways to split its layers.

        Args:
            draft: The lane.
            ways: Layers of its stages, of shape (ways, stages).
        """
        m = self.space.prices.mbs.index(draft.mbs)
        least = self.maker.least_seconds(draft.kinds, ways, m, draft.num_microbatches)
        found: list[float] = least.tolist()
        return found

    def _seconds(self, draft: LaneDraft) -> float:
        m = self.space.prices.mbs.index(draft.mbs)
        ends = end_times(
            self.maker.lane_times(draft.kinds, draft.layers, m),
            draft.num_microbatches,
            self.space.workload.schedule,
        )
        tails = self.maker.tail_seconds(draft.kinds, draft.layers)
        return max(end + tail for end, tail in zip(ends, tails, strict=True))


def refine_layers(clock: LaneClock, draft: LaneDraft) -> LaneDraft:
    """Return a lane with layers moved between its stages while that makes it faster.

    Args:
        clock: What says when lanes end.
        draft: The lane, with its micro-batches.
    """
    room = np.array(clock.max_layers(draft.kinds, draft.mbs))
    best = clock.seconds(draft)
    for _ in range(_ROUNDS):
        moved = None
        ways = np.array(draft.layers) + _moves(len(draft.layers))
        ways = ways[((ways > 0) & (ways <= np.maximum(room, draft.layers))).all(axis=1)]
        for layers, least in zip(ways.tolist(), clock.least(draft, ways), strict=True):
            if least >= best * _FASTER:
                continue
            other = draft._replace(layers=tuple(layers))
            seconds = clock.seconds(other)
            if seconds < best * _FASTER:
                best, moved = seconds, other
        if moved is None:
            break
        draft = moved
    return draft


@cache
def _moves(num_stages: int) -> Ints:
    """Return all moves of a layer from one stage to another, of shape (moves, stages)."""
    one = np.eye(num_stages, dtype=np.int64)
    pairs = itertools.permutations(range(num_stages), 2)
    return np.array([one[dst] - one[src] for src, dst in pairs]).reshape(-1, num_stages)


def refine_microbatches(clock: LaneClock, drafts: Sequence[LaneDraft]) -> list[LaneDraft]:
    """Return lanes with micro-batches moved from the slowest lane while that makes the slowest one faster.

    Args:
        clock: What says when lanes end.
        drafts: The lanes.
    """
    lanes = list(drafts)
    for _ in range(4 * len(lanes)):
        times = [clock.seconds(lane) for lane in lanes]
        slowest = max(range(len(lanes)), key=times.__getitem__)
        moved = _move(clock, lanes, slowest, times[slowest])
        if not moved:
            break
    return lanes


def _move(clock: LaneClock, lanes: list[LaneDraft], slowest: int, seconds: float) -> bool:
    """Move micro-batches out of the slowest lane to where both lanes are faster than it was; say whether."""
    src = lanes[slowest]
    best, pair = seconds * (1 - 1e-9), None
    seen = set()
    for index, dst in enumerate(lanes):
        if index == slowest or dst in seen:
            continue
        seen.add(dst)
        step = int(np.lcm(src.mbs, dst.mbs))
        if src.num_microbatches <= step // src.mbs:
            continue
        less = src._replace(num_microbatches=src.num_microbatches - step // src.mbs)
        more = dst._replace(num_microbatches=dst.num_microbatches + step // dst.mbs)
        new = max(clock.seconds(less), clock.seconds(more))
        if new < best:
            best, pair = new, (index, less, more)
    if pair is None:
        return False
    lanes[pair[0]], lanes[slowest] = pair[2], pair[1]
    return True
