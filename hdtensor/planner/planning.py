"""From inputs to a plan: costs by what was measured, the search, and what it says of its choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.costs import CostModel
from hdtensor.planner.emit import Planned
from hdtensor.planner.model import ModelShape
from hdtensor.planner.profiled import ProfiledCosts
from hdtensor.planner.profiles import Profile
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import Progress, SearchResult, search
from hdtensor.planner.simulate import simulate_strategy
from hdtensor.planner.space import Space
from hdtensor.planner.summary import Summary, summarize
from hdtensor.planner.why import batch_moves, layer_moves
from hdtensor.planner.workload import Workload


#: Moves of a layer or a micro-batch after the search, and what part of the step each must save.
_MOST_MOVES = 16
_LEAST_GAIN = 1e-6

#: Micro-batches of all stages that are simulated at most.
MAX_PASSES = 1 << 16


def make_costs(
    model: ModelShape, workload: Workload, cluster: Cluster, profiles: Sequence[Profile] = ()
) -> CostModel:
    """Return costs from profiles where there are some, else by the roofline.

    Args:
        model: Sizes.
        workload: The step.
        cluster: The devices; each must know the workload's precision.
        profiles: At most one of each kind of device.

    Raises:
        PlannerError: If a device does not know the precision, or a profile does not fit.
    """
    kinds = {device.name: device for device in cluster.devices()}
    for device in kinds.values():
        device.flops_of(workload.precision)
    roofline = RooflineCosts(model=model, workload=workload)
    if not profiles:
        return roofline
    by_device: dict[str, Profile] = {}
    for profile in profiles:
        if profile.device in by_device:
            raise PlannerError(f"profile: two are of {profile.device}; give one for each kind.")
        if profile.device not in kinds:
            raise PlannerError(
                f"profile: it is of {profile.device}, but the cluster has {', '.join(kinds)}."
            )
        by_device[profile.device] = profile
    return ProfiledCosts(roofline=roofline, profiles=by_device)


def predict(planned: Planned, costs: CostModel, why: dict[str, Any] | None = None) -> Summary:
    """Return what a strategy's step takes, by the event simulator.

    Args:
        planned: The strategy and what it is for.
        costs: Seconds and bytes.
        why: What the planner says of its choice.

    Raises:
        PlannerError: If there are more passes than the simulator does in a minute or so.
    """
    lanes = planned.strategy.lanes
    num_passes = sum(lane.num_microbatches * len(lane.stages) for lane in lanes)
    if num_passes > MAX_PASSES:
        raise PlannerError(
            f"microbatches: the lanes' stages do {num_passes} micro-batches; at most {MAX_PASSES} are simulated. Take "
            f"larger micro-batches, or a smaller batch."
        )
    prediction = simulate_strategy(planned.strategy, planned.cluster, costs, planned.workload)
    return summarize(planned, prediction, why)


def find_plan(
    model: ModelShape,
    space: Space,
    *,
    report: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[Planned, SearchResult]:
    """Return the fastest strategy found, and what the search says of it.

    Args:
        model: Sizes.
        space: What ``make_space`` returns for the cluster, costs and workload.
        report: Is told how far the search is.
        should_stop: Is asked now and then; once it says yes, the best so far is returned.

    Raises:
        PlannerError: If nothing fits in memory.
    """
    result = search(space, report=report, should_stop=should_stop)
    planned = Planned(result.strategy, model, space.cluster, space.workload)
    return _polished(planned, result)


def _polished(planned: Planned, result: SearchResult) -> tuple[Planned, SearchResult]:
    """Return a plan after layers and micro-batches were moved one by one, as long as that makes the step shorter.

    The search gives them out lane by lane; the step ends with the slowest lane and what all lanes do together.
    """
    space = result.space
    scorer = Scorer(space)
    for _ in range(_MOST_MOVES):
        bottleneck = predict(planned, space.costs).bottleneck
        moves = (
            *layer_moves(planned.strategy, bottleneck.lane, bottleneck.stage),
            *batch_moves(planned.strategy, bottleneck.lane),
        )
        scored = [found for strategy, _ in moves if (found := scorer.score(strategy)) is not None]
        best = min(scored, key=lambda found: found.seconds, default=None)
        if best is None or best.seconds >= result.seconds * (1 - _LEAST_GAIN):
            break
        planned = planned._replace(strategy=best.strategy)
        result = replace(result, strategy=best.strategy, seconds=best.seconds)
    return planned, result
