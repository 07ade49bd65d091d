"""From inputs to a plan: costs by what was measured, the search, and what it says of its choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hdtensor.errors import PlannerError
from hdtensor.planner.bounds import lower_bound
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.costs import CostModel
from hdtensor.planner.emit import Planned
from hdtensor.planner.model import ModelShape
from hdtensor.planner.profiled import ProfiledCosts
from hdtensor.planner.profiles import Profile
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import Progress, SearchResult, search
from hdtensor.planner.simulate import (
    MAX_PASSES,
    busiest_stage,
    is_fast,
    num_passes,
    simulate_strategy,
)
from hdtensor.planner.space import SearchOptions, Space, make_space
from hdtensor.planner.summary import StageSummary, Summary, summarize
from hdtensor.planner.why import batch_moves, layer_moves, why_of
from hdtensor.planner.workload import Workload


#: Moves of a layer or a micro-batch after the search, and what part of the step each must save.
_MOST_MOVES = 16
_LEAST_GAIN = 1e-6
#: Micro-batches of a step where only events say when lanes end, which hundreds of plans are asked for.
_MOST_EVENTS = 1 << 9


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
                f"profile: it is of {profile.device}, but the cluster has {', '.join(kinds)}. Devices of a name of your own "
                f"are measured by `hdtensor profile --device NAME`."
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
    number = num_passes(planned.strategy)
    if number > MAX_PASSES:
        raise PlannerError(
            f"microbatches: the lanes' stages do {number} micro-batches; at most {MAX_PASSES} are simulated. Take "
            f"larger micro-batches, or a smaller batch."
        )
    prediction = simulate_strategy(planned.strategy, planned.cluster, costs, planned.workload)
    return summarize(planned, prediction, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan with all that is to be said of it.

    Attributes:
        planned: The strategy, and what it is for; ``emit`` makes the plan file of it.
        result: What the search says of it; ``replan`` goes on from it.
        summary: What its step is made of; ``page_html`` draws it.
        costs: What it was found with.
    """

    planned: Planned
    result: SearchResult
    summary: Summary
    costs: CostModel

    @property
    def seconds(self) -> float:
        """Of the step, by the event simulator."""
        return self.summary.prediction.seconds

    @property
    def bound_seconds(self) -> float:
        """No strategy of the space has a shorter step."""
        return self.result.bound.seconds

    @property
    def gap(self) -> float:
        """(seconds - bound) / bound."""
        return self.seconds / self.bound_seconds - 1

    @property
    def bottleneck(self) -> StageSummary:
        """The stage that computes longest."""
        return self.summary.bottleneck

    @property
    def constraint(self) -> str:
        """What binds, such as ``memory``, ``fill and drain`` or ``whole layers``: what costs most, see ``find_why``."""
        return str(self.summary.why["constraint"])

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the plan is as it is, in sentences."""
        return tuple(self.summary.why["reasons"])

    @property
    def alternatives(self) -> tuple[Mapping[str, Any], ...]:
        """The best rejected strategies: ``what``, ``seconds``, and the ``reason`` against each."""
        return tuple(self.summary.why["alternatives"])


def make_plan(
    model: ModelShape,
    cluster: Cluster,
    workload: Workload,
    *,
    profiles: Sequence[Profile] = (),
    options: SearchOptions | None = None,
    report: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> FoundPlan:
    """Return the fastest plan of a model on a cluster, with its bound, its bottleneck, what binds it, and what was rejected.

    Args:
        model: Sizes.
        cluster: The devices and links.
        workload: The step.
        profiles: At most one of each kind of device; the roofline for all others.
        options: What plans may look like.
        report: Is told how far the search is.
        should_stop: Is asked now and then; once it says yes, the best so far is returned.

    Raises:
        PlannerError: If an input is wrong, or nothing fits in memory.
    """
    costs = make_costs(model, workload, cluster, profiles)
    space = make_space(cluster, costs, workload, model.num_layers, options)
    planned, result = find_plan(model, space, report=report, should_stop=should_stop)
    return explained(planned, result, costs)


def explained(planned: Planned, result: SearchResult, costs: CostModel) -> FoundPlan:
    """Return what a search or a re-plan found, with all that is to be said of it.

    Args:
        planned: The strategy, and what it is for.
        result: What found it.
        costs: What it was found with.
    """
    summary = predict(planned, costs)
    summary = replace(summary, why=why_of(result, summary, costs))
    return FoundPlan(planned=planned, result=result, summary=summary, costs=costs)


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
        PlannerError: If nothing fits in memory, or there are more micro-batches than can be simulated.
    """
    check_passes(space)
    try:
        result = search(space, report=report, should_stop=should_stop)
    except PlannerError as error:
        if space.workload.batch <= MAX_PASSES * min(space.prices.mbs):
            raise
        raise PlannerError(
            f"{error} Plans whose stages do more than {MAX_PASSES} micro-batches are left out: a smaller batch helps too."
        ) from None
    planned = Planned(result.strategy, model, space.cluster, space.workload)
    planned, result = _polished(planned, result, should_stop)
    if space.options.tight_bound:
        if report:
            report(Progress(1.0, result.seconds, "the bound"))
        result = with_tight_bound(result, should_stop)
    return planned, result


def with_tight_bound(
    result: SearchResult, should_stop: Callable[[], bool] | None = None
) -> SearchResult:
    """Return the same with a bound as near to the step as can be.

    Args:
        result: What was found.
        should_stop: Is asked now and then; once it says yes, the best bound so far is taken.
    """
    if result.gap <= 0:
        return result
    bound = lower_bound(result.space, result.seconds, is_tight=True, should_stop=should_stop)
    best = max(bound.seconds, result.bound.seconds)
    return replace(result, bound=result.bound._replace(seconds=best))


def check_passes(space: Space) -> None:
    """Refuse a batch of which every plan has more micro-batches than can be simulated.

    Raises:
        PlannerError: It says which batch is allowed.
    """
    most = MAX_PASSES if is_fast(space.costs, space.workload) else _MOST_EVENTS
    largest = max(space.prices.mbs)
    if space.workload.batch > most * largest:
        raise PlannerError(
            f"batch: {space.workload.batch} samples are {space.workload.batch // largest} micro-batches or more, of {largest} "
            f"samples each; at most {most} are simulated. Allowed: a batch up to {most * largest}, or larger "
            f"micro-batches (mbs)."
        )


def _polished(
    planned: Planned, result: SearchResult, should_stop: Callable[[], bool] | None
) -> tuple[Planned, SearchResult]:
    """Return a plan after layers and micro-batches were moved one by one, as long as that makes the step shorter.

    The search gives them out lane by lane; the step ends with the slowest lane and what all lanes do together.
    """
    space = result.space
    scorer = Scorer(space)
    for _ in range(_MOST_MOVES):
        if should_stop is not None and should_stop():
            break
        lane, stage = busiest_stage(planned.strategy, planned.cluster, space.costs)
        moves = (
            *layer_moves(planned.strategy, lane, stage),
            *batch_moves(planned.strategy, lane),
        )
        scored = [found for strategy, _ in moves if (found := scorer.score(strategy)) is not None]
        best = min(scored, key=lambda found: found.seconds, default=None)
        if best is None or best.seconds >= result.seconds * (1 - _LEAST_GAIN):
            break
        planned = planned._replace(strategy=best.strategy)
        result = replace(result, strategy=best.strategy, seconds=best.seconds)
    return planned, result
