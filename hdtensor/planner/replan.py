"""``replan``: the plan after devices were lost or came back, by reuse of the tables of the plan before.

Lanes that lost nothing stay where they are, so that nothing moves but micro-batches. What is left of the others,
with devices that had nothing to do, forms new lanes. Beside that the tables of the search are asked again, with fewer
devices. Where more than one device is lost, nodes have odd numbers of devices, for which the search had no shapes of lanes: then
tables for about as many lanes are made anew. The best of all is taken.

Source: HSPMD, appendix A.1 (b): the search space of the first level is cut by what the first plan found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from hdtensor.errors import PlannerError
from hdtensor.planner.bounds import Bound, work_bound
from hdtensor.planner.columns import ColumnMaker, find_messages
from hdtensor.planner.exhaustive import search_all
from hdtensor.planner.levels import Level, deal, deal_among, describe
from hdtensor.planner.place import LaneDraft, place
from hdtensor.planner.refine import LaneClock, refine_layers, refine_microbatches
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import Candidate, SearchResult, best_of, search
from hdtensor.planner.shapes import find_shapes, fits
from hdtensor.planner.space import Pool, Space, find_kinds, make_space
from hdtensor.planner.strategy import LaneChoice, Strategy


#: New lanes that are tried, and shapes that they are chosen from.
_TRIED = 2
_SHAPES = 100
#: Shapes of which tables are made anew at most; on large clusters the lanes that stay are nearly as good.
_MOST_SHAPES = 6_000
#: By how much lanes may be larger or smaller than their part of all devices, where there is little time.
_ABOUT = 0.12
#: Sets of equal lanes that are tried of each such table, times at which unlike ones are chosen, and what is not simulated.
_EQUAL = 6
_NEAR = (1.0, 1.012, 1.03)
_HOPELESS = 1.03
_NEIGHBORS: tuple[Literal["lane", "stage"], ...] = ("lane", "stage")


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
    if not allowed:
        raise PlannerError(
            f"ranks: none of the cluster's ranks 0 to {old.cluster.num_ranks - 1} is left, so there is nothing to plan on."
        )
    space = with_ranks(old, allowed)
    levels = result.levels
    if space is None:  # other kinds of stages are possible now: the tables do not hold
        space, levels = (
            make_space(
                old.cluster, old.costs, old.workload, old.num_layers, old.options, ranks=allowed
            ),
            (),
        )
    scorer = Scorer(space)
    candidates: list[Candidate] = []

    def add(found: Iterable[tuple[Sequence[LaneDraft], Strategy]]) -> float:
        for lanes, strategy in found:
            scored = scorer.score(strategy)
            if scored is not None:
                what = describe(space, lanes)
                candidates.append(Candidate(scored.seconds, what, strategy, tuple(lanes)))
        return min((c.seconds for c in candidates), default=math.inf)

    is_quick = bool(levels) and sum(old.devices) - sum(space.devices) in (0, 1)
    best = add(_kept_and_new(result, space, is_quick=is_quick))
    best = add(_from_tables(levels, len(result.strategy.lanes), space))
    near = _near_levels(space, len(result.strategy.lanes), is_quick=is_quick)
    levels = levels or near
    for level in near:
        best = add(_from_level(level, space, best, is_quick=is_quick))
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
    return replace(found, levels=levels)


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
    result: SearchResult, space: Space, *, is_quick: bool
) -> Iterator[tuple[Sequence[LaneDraft], Strategy]]:
    """Yield lanes that lost nothing, with new ones of what else is left."""
    usable = {rank for pool in space.pools for node in pool.ranks for rank in node}
    kept = [
        lane
        for lane in result.strategy.lanes
        if all(rank in usable for stage in lane.stages for rank in stage.ranks)
    ]
    sets = [kept]
    if len(kept) > 1 and not is_quick:  # one lane more to work with; the last is as good as another
        sets.append(kept[:-1])
    level = None
    for some in reversed(sets):  # the table of more ranks holds for fewer ones
        busy = {rank for lane in some for stage in lane.stages for rank in stage.ranks}
        rest = _rest(space, usable - busy)
        if rest is not None:
            if level is None:
                level = Level(rest, find_shapes(rest, _SHAPES)[0], len(some) + 1)
            level = level.on(rest)
        yield from _fill_up(result, space, some, level if rest else None)


def _fill_up(
    result: SearchResult, space: Space, kept: Sequence[LaneChoice], level: Level | None
) -> Iterator[tuple[Sequence[LaneDraft], Strategy]]:
    """Yield these lanes with new ones of a table, which is of all other ranks."""
    rest = level.space if level is not None else None
    drafts = [_draft_of(space, lane) for lane in kept]
    options: list[list[LaneDraft]] = [[]]
    if level is not None and rest is not None:
        options += [[lane] for lane in level.fastest(_TRIED)]
        seconds = result.seconds * (1 + 1 / max(len(kept), 1))
        options.append([level.draft(i, 1) for i in level.whole(seconds, np.array(rest.devices))])
    for new in options:
        placed = place(rest, new) if rest and new else Strategy(())
        if placed is None or (not kept and not new):
            continue
        clock = level.clock if level else LaneClock(space, ColumnMaker(space, len(kept)))
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


def _near_levels(space: Space, num_lanes: int, *, is_quick: bool) -> tuple[Level, ...]:
    """Return tables for about a number of lanes, with shapes that use odd numbers of devices.

    Args:
        space: What is left.
        num_lanes: Of the plan before.
        is_quick: Whether only half as many lanes are asked, each of about its part of all devices.
    """
    options, usual = space.options, 1 << (num_lanes.bit_length() - 1)
    most = min(sum(space.devices), space.workload.batch, options.max_lanes or 1 << 30)
    wanted = (usual // 2,) if is_quick else (usual, usual // 2)
    numbers = [max(n, options.min_lanes) for n in wanted if 1 <= n <= most]
    if not numbers:
        return ()
    shapes, _ = find_shapes(space)
    if is_quick:
        part = sum(space.devices) / numbers[0]
        sizes = [sum(space.kinds[k].size for k in shape) for shape in shapes]
        shapes = [s for s, size in zip(shapes, sizes, strict=True) if abs(size / part - 1) < _ABOUT]
    if len(shapes) > _MOST_SHAPES:
        return ()
    messages = find_messages(space)
    levels = (Level(space, shapes, number, messages) for number in dict.fromkeys(numbers))
    return tuple(level for level in levels if len(level))


def _from_level(
    level: Level, space: Space, best: float, *, is_quick: bool
) -> Iterator[tuple[Sequence[LaneDraft], Strategy]]:
    """Yield the fastest equal lanes of a table, and about the fastest unlike ones, each improved, that may be faster than a time.

    Where there is little time, only the latter, as the table has them.
    """
    for lanes in _of_level(level, space, best, is_quick=is_quick):
        refined = {lane: lane for lane in lanes}
        if not is_quick:
            refined = {lane: refine_layers(level.clock, lane) for lane in refined}
        better = refine_microbatches(level.clock, [refined[lane] for lane in lanes])
        if max(map(level.clock.seconds, better)) > best * _HOPELESS:
            continue
        for drafts in (better, lanes):  # memory may not hold the better ones where nodes are far
            for neighbors in _NEIGHBORS[: 1 if is_quick else 2]:
                strategy = place(space, drafts, neighbors)
                if strategy is not None:
                    yield drafts, strategy
            if is_quick:
                break


def _of_level(level: Level, space: Space, best: float, *, is_quick: bool) -> list[list[LaneDraft]]:
    """Return the fastest lanes of a table that may be faster than a time."""
    room, work = np.array(space.devices), work_bound(space)
    if level.num_lanes == 1:
        return [[lane] for lane in level.single(1 if is_quick else _EQUAL)]
    low = work
    if not is_quick:
        low = level.relaxed_seconds(work, min(best, 64 * work), room)
        if low >= best:
            return []
    options = [] if is_quick else level.equal(_EQUAL)
    if not space.options.equal_lanes:
        seconds = level.whole_seconds(low, best, room)
        for factor in _NEAR[: 1 if is_quick else len(_NEAR)]:
            lanes = level.whole(seconds * factor, room)
            dealt = deal(level, lanes, seconds) if lanes else None
            options += [list(dealt)] if dealt else []
    return options


def _from_tables(
    levels: Sequence[Level], number: int, space: Space
) -> Iterator[tuple[Sequence[LaneDraft], Strategy]]:
    """Yield lanes that the tables of the search give for the devices that are left, for about a number of lanes."""
    near = [level for level in levels if level.num_lanes <= number]
    if not near:
        return
    level = max(near, key=lambda each: each.num_lanes).on(space)
    options = level.equal(1) if level.num_lanes > 1 else [[lane] for lane in level.single(1)]
    for lanes in options:
        if fits(space, [k for lane in lanes for k in lane.kinds]):
            strategy = place(space, lanes)
            if strategy is not None:
                yield lanes, strategy
