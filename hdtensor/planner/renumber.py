"""``renumber``: a plan for some of a cluster's ranks as a plan for a cluster that has no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hdtensor.errors import PlannerError
from hdtensor.placements.checks import ranks_text
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.emit import Planned
from hdtensor.planner.strategy import LaneChoice


def renumber(planned: Planned, lost: Iterable[int]) -> Planned:
    """Return the plan for a restart with as many processes as ranks are left, numbered from 0 in their old order.

    >>> from hdtensor.planner.cluster_text import cluster_of_text
    >>> smaller(cluster_of_text("2x 8x H800 + 1x 8x H20"), range(12)).num_ranks
    12

    Args:
        planned: The plan.
        lost: Ranks of its cluster that are gone.

    Raises:
        PlannerError: If no rank is lost, the plan uses one that is, or none is left.
    """
    gone = set(lost)
    if not gone:
        raise PlannerError(
            "renumber: all ranks of the cluster are there and keep their numbers; name those that are lost (without)."
        )
    used = {r for lane in planned.strategy.lanes for stage in lane.stages for r in stage.ranks}
    if used & gone:
        raise PlannerError(
            f"renumber: the plan uses ranks {ranks_text(tuple(sorted(used & gone)))}, which are lost; re-plan without them first."
        )
    left = [rank for rank in range(planned.cluster.num_ranks) if rank not in gone]
    numbers = {rank: number for number, rank in enumerate(left)}
    lanes = tuple(_moved(lane, numbers) for lane in planned.strategy.lanes)
    return planned._replace(
        strategy=dataclasses.replace(planned.strategy, lanes=lanes),
        cluster=smaller(planned.cluster, gone),
    )


def smaller(cluster: Cluster, lost: Iterable[int]) -> Cluster:
    """Return a cluster without some devices; nodes that have none left are gone, links stay as they are.

    Args:
        cluster: The devices and links.
        lost: Ranks that are gone.

    Raises:
        PlannerError: If none is left.
    """
    gone = set(lost)
    left = [
        sum(rank not in gone for rank in cluster.ranks_of(n)) for n in range(len(cluster.nodes))
    ]
    nodes = tuple(
        dataclasses.replace(node, num_devices=count)
        for node, count in zip(cluster.nodes, left, strict=True)
        if count
    )
    return dataclasses.replace(cluster, nodes=nodes)


def _moved(lane: LaneChoice, numbers: Mapping[int, int]) -> LaneChoice:
    stages = (stage._replace(ranks=tuple(numbers[r] for r in stage.ranks)) for stage in lane.stages)
    return lane._replace(stages=tuple(stages))
