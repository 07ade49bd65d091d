"""``place``: which ranks hold which stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from hdtensor.planner.space import Space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


class LaneDraft(NamedTuple):
    """A lane before it has ranks.

    Attributes:
        kinds: Number of the kind of each stage.
        layers: Decoder layers of each stage.
        mbs: Samples of a micro-batch.
        num_microbatches: Of a step.
    """

    kinds: tuple[int, ...]
    layers: tuple[int, ...]
    mbs: int
    num_microbatches: int = 0


def place(
    space: Space, lanes: Sequence[LaneDraft], neighbors: Literal["lane", "stage"] = "lane"
) -> Strategy | None:
    """Return the lanes with ranks, or None if nodes have no room for so many groups.

    Larger groups choose their node first; sizes are powers of two, so that finds room whenever there is some. A
    group goes beside its lane's other stages if it can, so that messages stay in the node, or beside the same stage of
    other lanes, so that synchronization does; else into the fullest node with room.

    Args:
        space: What the search knows.
        lanes: What to place.
        neighbors: Whether stages of a lane, or the same stages of all lanes, share nodes.
    """
    free = [[list(ranks) for ranks in pool.ranks] for pool in space.pools]
    todo = [
        (lane, s, kind) for lane, draft in enumerate(lanes) for s, kind in enumerate(draft.kinds)
    ]
    if neighbors == "lane":
        todo.sort(key=lambda item: -space.kinds[item[2]].size)
    else:
        todo.sort(key=lambda item: (-space.kinds[item[2]].size, item[1]))
    ranks: dict[tuple[int, int], tuple[int, ...]] = {}
    homes: dict[tuple[int, int], int] = {}  # (lane or stage, pool) -> the node that was last taken
    for lane, stage, kind in todo:
        pool, size = space.kinds[kind].pool, space.kinds[kind].size
        nodes = free[pool]
        own = lane if neighbors == "lane" else stage
        home = homes.get((own, pool))
        if home is None or len(nodes[home]) < size:
            able = [n for n, left in enumerate(nodes) if len(left) >= size]
            if not able:
                return None
            home = min(able, key=lambda n: len(nodes[n]))
        homes[own, pool] = home
        ranks[lane, stage] = tuple(nodes[home][:size])
        del nodes[home][:size]
    return Strategy(
        tuple(
            LaneChoice(_stages(space, draft, ranks, lane), draft.num_microbatches, draft.mbs)
            for lane, draft in enumerate(lanes)
        )
    )


def _stages(
    space: Space, draft: LaneDraft, ranks: dict[tuple[int, int], tuple[int, ...]], lane: int
) -> tuple[StageChoice, ...]:
    stages = []
    for stage, (kind, layers) in enumerate(zip(draft.kinds, draft.layers, strict=True)):
        group = space.kinds[kind].group
        stages.append(StageChoice(ranks[lane, stage], layers, group.tp, group.cp))
    return tuple(stages)
