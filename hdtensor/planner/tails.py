"""``Tails``: what comes after the passes of a stage, gradient synchronization and optimizer, for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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


def fastest_tails(space: Space, least: int, most: int, degree: int | None = None) -> Tails:
    """Return what no strategy beats: synchronization over the fastest links that copies can have.

    The fewest copies synchronize fastest; the most share an optimizer's states best.

    Args:
        space: What the search knows.
        least: The smallest number of lanes, each of which has a copy of each layer.
        most: The largest one.
        degree: TP that no stage of some lane is above; None if there need not be such a lane.
    """
    known = [k for k in range(len(space.kinds)) if np.isfinite(space.prices.layer[k]).any()]
    seconds = np.zeros((4, len(space.kinds)))
    if least > 1:
        links = _links_between(space)
        like = {k: _fastest_parts(space, (space.kinds[k].group,) * least, links) for k in known}
        low = [k for k in known if degree is None or space.kinds[k].group.tp <= degree]
        # Unlike copies take no less than like ones of any of their kinds: of a stage's own one, and of one in the lane of low TP.
        lowest = np.min([like[k] for k in low], axis=0)
        for k in known:
            between = like[k] if degree is None or like[k][1] >= lowest[1] else lowest
            seconds[:, k] = np.minimum(between, _inside_parts(space, k, least, degree))
    for k in known:
        seconds[:, k] += _update_parts(space, k, most)
    return _as_tails(seconds)


def _inside_parts(space: Space, kind: int, num_lanes: int, degree: int | None) -> Floats:
    """Return what a synchronization of copies in one node takes at least, infinity if it has no room for them.

    The smallest copy has no more ranks than its part of the node, and than its part of what a stage leaves to the others; as
    many are the most for its TP.
    """
    group, pool = space.kinds[kind].group, space.pools[space.kinds[kind].pool]
    most, size = max(map(len, pool.ranks)), space.kinds[kind].size
    part = min(most // num_lanes, (most - size) // (num_lanes - 1))
    few = [k.group.tp for k in space.kinds if k.size <= part and k.pool == space.kinds[kind].pool]
    if not few:
        return np.full(4, np.inf)
    least = min(max(few), group.tp, degree or group.tp)
    copies = (group,) * (num_lanes - 1) + (group._replace(tp=least),)
    return _fastest_parts(space, copies, [pool.inside])


def _fastest_parts(space: Space, copies: tuple[StageGroup, ...], links: Sequence[Link]) -> Floats:
    """Return seconds beside, of a layer, and beside with the embedding and the head, of the fastest of links for each."""
    parts = [_parts(partial(space.costs.synchronize, copies, link=link)) for link in links]
    found: Floats = np.min(parts, axis=0)
    return found


def _update_parts(space: Space, kind: int, num_lanes: int) -> Floats:
    group = space.kinds[kind].group
    return _parts(lambda span: space.costs.update(group, span, num_lanes))


def _parts(seconds: Callable[[LayerSpan], float]) -> Floats:
    """Return seconds beside, of a layer, and beside with the embedding and the head."""
    one, two, first, last = (seconds(span) for span in _SPANS)
    return np.array([max(0.0, 2 * one - two), two - one, first - one, last - one])


def _as_tails(seconds: Floats) -> Tails:
    return Tails(beside=seconds[0], per_layer=seconds[1], first=seconds[2], last=seconds[3])


def _tails(space: Space, num_lanes: int, sync: Callable[[int, LayerSpan], float]) -> Tails:
    seconds = np.zeros((4, len(space.kinds)))
    for k in range(len(space.kinds)):
        if np.isfinite(space.prices.layer[k]).any():
            seconds[:, k] = _update_parts(space, k, num_lanes)
            if num_lanes > 1:
                seconds[:, k] += _parts(partial(sync, k))
    return _as_tails(seconds)


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
