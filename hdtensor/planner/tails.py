"""``Tails``: what comes after the passes of a stage, gradient synchronization and optimizer, for each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hdtensor.planner.cluster import Link
from hdtensor.planner.costs import LayerSpan, StageGroup
from hdtensor.planner.decompose import slowest_link
from hdtensor.planner.space import Floats, Ints, Space


_SPANS = (
    LayerSpan(1),
    LayerSpan(2),
    LayerSpan(1, is_first=True),
    LayerSpan(1, is_last=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails:
    """Seconds after the passes, all of shape (kinds,).

    Attributes:
        beside: Whatever the layers.
        per_layer: Of each layer.
        first: Beside, for the stage with the embedding.
        last: Beside, for the stage with the head.
    """

    beside: Floats
    per_layer: Floats
    first: Floats
    last: Floats

    def of(self, kinds: Ints, layers: Ints) -> Floats:
        """Return the seconds of each stage of lanes, of shape (lanes, stages)."""
        seconds: Floats = self.beside[kinds] + self.per_layer[kinds] * layers
        seconds[:, 0] += self.first[kinds[:, 0]]
        seconds[:, -1] += self.last[kinds[:, -1]]
        return seconds


def usual_tails(space: Space, num_lanes: int) -> Tails:
    """Return what to expect when all lanes have stages of the same kind.

    If a node has room for all copies of a stage, they are there; else every link between nodes is used.

    Args:
        space: What the search knows.
        num_lanes: Copies of each layer.
    """

    def sync(kind: int, span: LayerSpan) -> float:
        group, pool = space.kinds[kind].group, space.pools[space.kinds[kind].pool]
        is_inside = space.kinds[kind].size * num_lanes <= max(map(len, pool.ranks))
        link = pool.inside if is_inside else _crossing_link(space, kind)
        return space.costs.synchronize((group,) * num_lanes, span, link)

    return _tails(space, num_lanes, sync)


def fastest_tails(space: Space, num_lanes: int) -> Tails:
    """Return what no strategy beats: synchronization over the fastest links that so many copies can have.

    Args:
        space: What the search knows.
        num_lanes: Copies of each layer, or fewer than there are.
    """

    def sync(kind: int, span: LayerSpan) -> float:
        group: StageGroup = space.kinds[kind].group
        found = min(
            space.costs.synchronize((group,) * num_lanes, span, link)
            for link in _links_between(space)
        )
        pool = space.pools[space.kinds[kind].pool]
        if max(map(len, pool.ranks)) < space.kinds[kind].size + num_lanes - 1:
            return found
        # In one node some copy has no more than its part of the node; as many ranks is the most for its TP.
        part = max(map(len, pool.ranks)) // num_lanes
        few = max(
            k.group.tp for k in space.kinds if k.size <= part and k.pool == space.kinds[kind].pool
        )
        groups = (group,) * (num_lanes - 1) + (group._replace(tp=min(few, group.tp)),)
        return min(found, space.costs.synchronize(groups, span, pool.inside))

    return _tails(space, num_lanes, sync)


def _tails(space: Space, num_lanes: int, sync: Callable[[int, LayerSpan], float]) -> Tails:
    seconds = np.zeros((4, len(space.kinds)))
    for k, kind in enumerate(space.kinds):
        if np.isfinite(space.prices.layer[k]).any():
            one, two, first, last = (
                (sync(k, span) if num_lanes > 1 else 0.0)
                + space.costs.update(kind.group, span, num_lanes)
                for span in _SPANS
            )
            seconds[:, k] = (max(0.0, 2 * one - two), two - one, first - one, last - one)
    return Tails(beside=seconds[0], per_layer=seconds[1], first=seconds[2], last=seconds[3])


def _crossing_link(space: Space, kind: int) -> Link:
    """Return the slowest link from a stage's node to one of each pool, while the stage's devices use it at once."""
    pool = space.pools[space.kinds[kind].pool]
    nodes = [number for each in space.pools for number in each.nodes[:1]]
    nodes += pool.nodes[1:2]
    users = dict.fromkeys(nodes, space.kinds[kind].size)
    return slowest_link(space.cluster, pool.nodes[:1], nodes, users)


def _links_between(space: Space) -> list[Link]:
    """Return links of which one is at least as fast as any between nodes."""
    cluster = space.cluster
    links = [cluster.between, *cluster.links.values()]
    uplinks = [node.uplink for node in cluster.nodes]
    most = max((rate for rate in uplinks if rate is not None), default=None)
    if most is not None and None not in uplinks:
        links = [Link(min(link.bandwidth, most), link.latency) for link in links]
    return links
