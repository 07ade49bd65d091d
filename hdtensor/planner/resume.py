"""``resume``: what a search knew when it found a strategy, made again for that strategy, so that it can be re-planned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hdtensor.errors import PlannerError
from hdtensor.planner.bounds import Bound, work_bound
from hdtensor.planner.levels import Level
from hdtensor.planner.replan import replan
from hdtensor.planner.search import SearchResult
from hdtensor.planner.shapes import find_shapes
from hdtensor.planner.simulate import step_seconds
from hdtensor.planner.space import SearchOptions, Space
from hdtensor.planner.strategy import Strategy


def options_for(strategy: Strategy, options: SearchOptions) -> SearchOptions:
    """Return options that allow what a strategy has, beside what they allowed before.

    Args:
        strategy: With lanes.
        options: What else plans may look like.

    Raises:
        PlannerError: If a degree of the strategy is no power of two.
    """
    stages = [stage for lane in strategy.lanes for stage in lane.stages]
    return replace(
        options,
        tp_degrees=_joined(options.tp_degrees, (stage.tp for stage in stages)),
        cp_degrees=_joined(options.cp_degrees, (stage.cp for stage in stages)),
        mbs=_joined(options.mbs, (lane.mbs for lane in strategy.lanes)),
        max_stages=max(options.max_stages, *(len(lane.stages) for lane in strategy.lanes)),
    )


def resume(space: Space, strategy: Strategy) -> SearchResult:
    """Return a result whose strategy is this one, with the table of lanes for its number of lanes.

    That is what ``replan`` needs of a search, without the search.

    Args:
        space: With all ranks that the strategy could use, by options of ``options_for``.
        strategy: What a plan file says.

    Raises:
        PlannerError: If the search could not have found it: a stage leaves its node, or uses a rank that is not
            in the space.
    """
    _check_stages(space, strategy)
    num_lanes = 1 << (len(strategy.lanes).bit_length() - 1)
    level = Level(space, find_shapes(space)[0], num_lanes)
    work = work_bound(space)
    return SearchResult(
        space=space,
        strategy=strategy,
        seconds=step_seconds(strategy, space.cluster, space.costs, space.workload),
        bound=Bound(work, work),
        uniform=None,
        candidates=(),
        num_scored=1,
        is_complete=True,
        levels=(level,) if len(level) else (),
    )


def kept_lanes(before: Strategy, after: Strategy) -> tuple[int, ...]:
    """Return the numbers of the lanes of a strategy whose stages are still what they were in an earlier one."""
    known = {lane.stages for lane in before.lanes}
    return tuple(number for number, lane in enumerate(after.lanes) if lane.stages in known)


def replan_strategy(space: Space, strategy: Strategy, ranks: set[int]) -> SearchResult:
    """Return the best strategy for the ranks that are left of a plan that is only known by its file.

    Args:
        space: As for ``resume``.
        strategy: What the file says.
        ranks: All that may be used now.

    Raises:
        PlannerError: As ``resume``, or if nothing fits in what is left.
    """
    return replan(resume(space, strategy), ranks)


def _joined(one: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*one, *other}))


def _check_stages(space: Space, strategy: Strategy) -> None:
    homes = {
        rank: (pool, node)
        for pool, each in enumerate(space.pools)
        for node, ranks in zip(each.nodes, each.ranks, strict=True)
        for rank in ranks
    }
    kinds = {(kind.pool, kind.group.tp, kind.group.cp) for kind in space.kinds}
    for p, lane in enumerate(strategy.lanes):
        for s, stage in enumerate(lane.stages):
            where = {homes.get(rank) for rank in stage.ranks}
            home = where.pop()
            if where or home is None or (home[0], stage.tp, stage.cp) not in kinds:
                raise PlannerError(
                    f"lanes[{p}].stages[{s}]: {len(stage.ranks)} ranks with tp {stage.tp} that leave their node, or "
                    f"that are lost; only stages inside of a node are re-planned. Plan anew, without a plan file."
                )
