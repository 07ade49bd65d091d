"""From plans to exchanges: which rank sets a model's hidden states pass, and who may send to whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.distributed.tensor import Shard

from hdtensor.pipeline.lanes import Exchange, Lane, Phase, Ranks, find_lanes
from hdtensor.placements import HDSpec
from hdtensor.plan import ExpandedPlan
from hdtensor.redistribute import RedistributePlan, resolve
from hdtensor.redistribute.steps import PointToPoint


#: Extents beside the batch in a shape that stands for any: every usual degree divides it.
_PROXY = 5040


def plan_lanes(plan: ExpandedPlan) -> tuple[Lane, ...]:
    """Return the lanes of a plan; lane i begins with subgroup i of the inputs, unless lanes share sequences.

    Raises:
        PlanError: If the plan is no set of pipelines; the message draws the graph.
    """
    return find_lanes(plan_exchanges(plan))


def plan_exchanges(plan: ExpandedPlan) -> Iterator[Exchange]:
    """Yield where hidden states go, in program order: the inputs, each stage point, the labels.

    Points inside subgroups (kind "tp") are left out, since a subgroup is always in one stage.
    """
    here = plan.inputs
    yield _between("inputs", here, here)
    for point in plan.points:
        if point.kind == "stage":
            yield _between(f"{point.module} {point.side}", here, point.spec)
            here = point.spec
    yield _between("labels", here, plan.labels)


def exchange_of(
    name: str,
    plan: RedistributePlan,
    *,
    phase: Phase = "pass",
    since: str | None = None,
    starts_stage: bool = False,
) -> Exchange:
    """Return what a resolved redistribute means for lanes.

    >>> move = resolve("S0 / 0,3:P 1:R", "S0 / 0,3:R 5,6:S1", (4, 4))
    >>> for lane in find_lanes([exchange_of("y", move)]):
    ...     print(lane)
    0,3
    1 -> 5,6

    Args:
        name: What errors and edges call it.
        plan: Its steps.
        phase: When it happens.
        since: As ``Exchange.since``.
        starts_stage: As ``Exchange.starts_stage``.
    """
    pairs = {
        (t.src, t.dst)
        for step in plan.steps
        if isinstance(step, PointToPoint)
        for t in step.transfers
    }
    return Exchange(
        name=name,
        src=_rank_sets(plan.src),
        dst=_rank_sets(plan.dst),
        transfers=tuple(sorted(pairs)),
        collectives=tuple(plan.rank_sets()),
        phase=phase,
        since=since,
        starts_stage=starts_stage,
    )


def _between(name: str, src: HDSpec, dst: HDSpec) -> Exchange:
    """Return the exchange between two specs of hidden states, whatever their extents will be.

    Where both cut the value alike, subgroup i sends to subgroup i, even one that has no share now.
    """
    shared = tuple(src.ranks) if isinstance(src.top, Shard) and src.top.dim == 1 else ()
    if (src.top, src.top_ratio, src.num_subgroups) != (dst.top, dst.top_ratio, dst.num_subgroups):
        parts = sum(src.top_ratio or ()) or src.num_subgroups
        batch = parts * (sum(dst.top_ratio or ()) or dst.num_subgroups)
        return exchange_of(name, resolve(src, dst, (batch, _PROXY, _PROXY)))
    pairs: set[tuple[int, int]] = set()
    for before, after in zip(_rank_sets(src), _rank_sets(dst), strict=True):
        if set(before) != set(after):
            length = max(len(before), len(after))
            turns = zip(itertools.cycle(before), itertools.cycle(after), strict=False)
            pairs.update(itertools.islice(turns, length))
    return Exchange(
        name=name,
        src=_rank_sets(src),
        dst=_rank_sets(dst),
        transfers=tuple(sorted(pairs)),
        collectives=(shared,) if shared else (),
    )


def _rank_sets(spec: HDSpec) -> tuple[Ranks, ...]:
    return tuple(group.ranks for group in spec.subgroups)
