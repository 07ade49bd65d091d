"""``replan``: the plan after devices were lost or came back, by reuse of the tables of the plan before.

Lanes that lost nothing stay where they are, so that nothing moves but micro-batches. What is left of the others,
with devices that had nothing to do, forms new lanes. Beside that the tables of the search are asked again, with fewer
devices. The best of all is taken.

Source: HSPMD, appendix A.1 (b): the search space of the first level is cut by what the first plan found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hdtensor.planner.bounds import Bound, work_bound
from hdtensor.planner.exhaustive import search_all
from hdtensor.planner.levels import Level, deal_among, describe
from hdtensor.planner.place import LaneDraft, place
from hdtensor.planner.refine import refine_microbatches
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import Candidate, SearchResult, best_of, search
from hdtensor.planner.shapes import find_shapes, fits
from hdtensor.planner.space import Pool, Space, find_kinds, make_space
from hdtensor.planner.strategy import LaneChoice, Strategy


#: New lanes that are tried, and shapes that they are chosen from.
_TRIED = 2
_SHAPES = 100


def replan(result: SearchResult, ranks: Iterable[int]) -> SearchResult:
    """Return the best plan for the ranks that are left.

    Args:
        result: What the search, or an earlier re-plan, found.
        ranks: All ranks that may be used, in the numbering of the cluster; any set of them.

    Raises:
        PlannerError: If no strategy fits in what is left.
    """
    old = result.space
    allowed = set(ranks) & set(range(old.cluster.num_ranks))
    space = with_ranks(old, allowed)
    if space is None:  # other kinds of stages are possible now: the tables do not hold
        new = make_space(
            old.cluster, old.costs, old.workload, old.num_layers, old.options, ranks=allowed
        )
        return search(new)
    scorer = Scorer(space)
    candidates: list[Candidate] = []
    for lanes, strategy in (*_kept_and_new(result, space), *_from_tables(result, space)):
        scored = scorer.score(strategy)
        if scored is not None:
            candidates.append(
                Candidate(scored.seconds, describe(space, lanes), strategy, tuple(lanes))
            )
    best = min((c.seconds for c in candidates), default=math.inf)
    every = search_all(space, scorer, best)
    candidates += [
        Candidate(each.seconds, describe(space, lanes), each.strategy, lanes)
        for each, lanes in every.faster
    ]
    if not candidates:
        return search(space)
    work = work_bound(space)
    found = best_of(space, candidates, None, Bound(work, work), scorer.num_scored)
    if every.is_complete:
        found = replace(found, bound=Bound(found.seconds, min(work, found.seconds)))
    return replace(found, levels=result.levels)


def with_ranks(space: Space, allowed: set[int]) -> Space | None:
    """Return a space on some of its cluster's ranks with the same kinds and prices, None if a pool is gone or new."""
    pools = []
    for pool in space.pools:
        nodes = [
            (number, tuple(r for r in space.cluster.ranks_of(number) if r in allowed))
            for number in _all_nodes(space, pool)
        ]
        kept = [(number, left) for number, left in nodes if left]
        if not kept:
            return None
        numbers, left = zip(*kept, strict=True)
        pools.append(pool._replace(nodes=numbers, ranks=left))
    if sum(len(left) for pool in pools for left in pool.ranks) < len(allowed):
        return None
    if find_kinds(pools, space.options) != space.kinds:
        return None
    return replace(space, pools=tuple(pools))


def _all_nodes(space: Space, pool: Pool) -> Iterator[int]:
    """Yield the numbers of all nodes of the cluster that are like those of a pool."""
    like = space.cluster.nodes[pool.nodes[0]]
    for number, node in enumerate(space.cluster.nodes):
        if (node.device, node.inside, node.zone, node.uplink) == (
            like.device,
            like.inside,
            like.zone,
            like.uplink,
        ):
            yield number


def _kept_and_new(
    result: SearchResult, space: Space
) -> Iterator[tuple[Sequence[LaneDraft], Strategy]]:
    """Yield lanes that lost nothing, with new ones of what else is left."""
    usable = {rank for pool in space.pools for node in pool.ranks for rank in node}
    kept = [
        lane
        for lane in result.strategy.lanes
        if all(rank in usable for stage in lane.stages for rank in stage.ranks)
    ]
    yield from _fill_up(result, space, kept, usable)
    if len(kept) > 1:  # one lane more to work with; the last is as good as another
        yield from _fill_up(result, space, kept[:-1], usable)


def _fill_up(
    result: SearchResult, space: Space, kept: Sequence[LaneChoice], usable: set[int]
) -> Iterator[tuple[Sequence[LaneDraft], Strategy]]:
    """Yield these lanes with new ones of all other ranks."""
    busy = {rank for lane in kept for stage in lane.stages for rank in stage.ranks}
    rest = _rest(space, usable - busy)
    drafts = [_draft_of(space, lane) for lane in kept]
    level = Level(rest, find_shapes(rest, _SHAPES)[0], len(kept) + 1) if rest else None
    options: list[list[LaneDraft]] = [[]]
    if level is not None and rest is not None:
        options += [[lane] for lane in level.fastest(_TRIED)]
        seconds = result.seconds * (1 + 1 / max(len(kept), 1))
        options.append([level.draft(i, 1) for i in level.whole(seconds, np.array(rest.devices))])
    for new in options:
        placed = place(rest, new) if rest and new else Strategy(())
        if placed is None or (not kept and not new):
            continue
        clock = level.clock if level else result.levels[0].clock
        lanes = deal_among(clock, [*drafts, *new], result.space.workload.batch)
        if lanes is not None:
            better = refine_microbatches(clock, lanes)
            yield better, _with_counts([*kept, *placed.lanes], better)


def _rest(space: Space, ranks: set[int]) -> Space | None:
    """Return a space of some ranks; its pools have the same numbers, and may be empty."""
    pools = tuple(
        pool._replace(ranks=tuple(tuple(r for r in node if r in ranks) for node in pool.ranks))
        for pool in space.pools
    )
    return replace(space, pools=pools) if ranks else None


def _draft_of(space: Space, lane: LaneChoice) -> LaneDraft:
    kinds = []
    for stage in lane.stages:
        node = space.cluster.node_of(stage.ranks[0])
        kinds.append(
            next(
                k
                for k, kind in enumerate(space.kinds)
                if node in space.pools[kind.pool].nodes
                and (kind.group.tp, kind.group.cp) == (stage.tp, stage.cp)
            )
        )
    layers = tuple(stage.num_layers for stage in lane.stages)
    return LaneDraft(tuple(kinds), layers, lane.mbs, lane.num_microbatches)


def _with_counts(lanes: Sequence[LaneChoice], drafts: Sequence[LaneDraft]) -> Strategy:
    return Strategy(
        tuple(
            lane._replace(num_microbatches=draft.num_microbatches, mbs=draft.mbs)
            for lane, draft in zip(lanes, drafts, strict=True)
        )
    )


def _from_tables(
    result: SearchResult, space: Space
) -> Iterator[tuple[Sequence[LaneDraft], Strategy]]:
    """Yield lanes that the tables of the search give for the devices that are left."""
    number = len(result.strategy.lanes)
    near = [level for level in result.levels if level.num_lanes <= number]
    if not near:
        return
    level = max(near, key=lambda each: each.num_lanes).on(space)
    options = level.equal(1) if level.num_lanes > 1 else [[lane] for lane in level.single(1)]
    for lanes in options:
        if fits(space, [k for lane in lanes for k in lane.kinds]):
            strategy = place(space, lanes)
            if strategy is not None:
                yield lanes, strategy
