"""``simulate_strategy``: what a strategy's step takes and needs, by the one event simulator of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hdtensor.errors import PlannerError
from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.actions import Schedule
from hdtensor.pipeline.schedule.choose import build_schedule
from hdtensor.pipeline.schedule.simulate import Durations, Event, LaneRun, simulate
from hdtensor.pipeline.schedule.timeline import Span, Timeline
from hdtensor.planner.attribution import LaneSeconds, attribute, critical_path
from hdtensor.planner.blocking_times import blocking_end_times
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.costs import CostModel
from hdtensor.planner.decompose import (
    PlacedStage,
    Share,
    find_shares,
    lane_times,
    place_lanes,
    sync_seconds,
)
from hdtensor.planner.lane_times import LaneTimes, end_times
from hdtensor.planner.memory import RankMemory, held_microbatches, in_flight, rank_memory
from hdtensor.planner.strategy import Strategy
from hdtensor.planner.workload import Workload


#: Stages are as busy as one another if their seconds differ by less, relatively.
_SAME = 1e-12

#: Micro-batches of all stages that events are simulated for; that many take some seconds.
MAX_PASSES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step takes and needs.

    Attributes:
        seconds: Of the step.
        timeline: All that happens in it.
        memory: Bytes on each rank that has a part.
        lanes: What each lane's stages take.
        runs: What the simulator was given: each lane's schedule and durations.
        events: What it was given beside the passes.
    """

    seconds: float
    timeline: Timeline
    memory: Mapping[int, RankMemory]
    lanes: tuple[LaneTimes, ...]
    runs: tuple[LaneRun, ...]
    events: tuple[Event, ...]

    def attribution(self) -> tuple[LaneSeconds, ...]:
        """Return what the seconds of the step go to, for each lane. It takes one more simulation."""
        quiet = [
            replace(run, durations=replace(run.durations, message={}, latency=0.0))
            for run in self.runs
        ]
        return attribute(self.timeline, simulate(quiet, self.events))

    def critical_path(self) -> tuple[Span, ...]:
        """Return a chain of spans from the start to the end of the step that sets its length."""
        return critical_path(self.timeline)

    def overfull(self, cluster: Cluster) -> dict[int, float]:
        """Return the ranks whose memory is too small, and by how many bytes."""
        devices = list(cluster.devices())
        over = {rank: need.total - devices[rank].memory_bytes for rank, need in self.memory.items()}
        return {rank: more for rank, more in over.items() if more > 0}


def simulate_strategy(
    strategy: Strategy, cluster: Cluster, costs: CostModel, workload: Workload
) -> Prediction:
    """Return what a step takes and needs, by discrete events over the lanes' schedules.

    Args:
        strategy: What each rank does.
        cluster: The devices and links.
        costs: Seconds and bytes of units.
        workload: The step.

    Raises:
        PlannerError: If the strategy does not fit the cluster or the batch.
        ScheduleError: If the schedule cannot be followed by a lane.
    """
    check_batch(strategy, workload)
    placed = place_lanes(strategy, cluster)
    shares = find_shares(placed)
    runs, memory, times = [], {}, []
    num_sharers = len(strategy.lanes) if workload.zero else 1
    for choice, stages in zip(strategy.lanes, placed, strict=True):
        seconds = lane_times(choice, stages, cluster, costs)
        lane = Lane.chain([stage.choice.ranks for stage in stages])
        schedule = _schedule(workload.schedule, _visits(stages), choice.num_microbatches)
        run = LaneRun(
            lane=lane,
            schedule=schedule,
            durations=durations(seconds),
            is_blocking=costs.runtime().is_blocking,
        )
        runs.append(run)
        held = _in_flight(workload.schedule, _visits(stages), choice.num_microbatches)
        memory.update(rank_memory(stages, held, choice.mbs, costs, num_sharers))
        times.append(seconds)
    events = tuple(_events(workload, placed, shares, cluster, costs))
    timeline = simulate(runs, events)
    return Prediction(
        seconds=timeline.seconds,
        timeline=timeline,
        memory=memory,
        lanes=tuple(times),
        runs=tuple(runs),
        events=events,
    )


def step_seconds(
    strategy: Strategy, cluster: Cluster, costs: CostModel, workload: Workload
) -> float:
    """Return the seconds of a step: ``simulate_strategy``'s number, hundreds of times faster.

    Only where messages block both ends, and the schedule is not 1F1B, the events of each lane are asked.

    Raises:
        PlannerError: If the strategy does not fit the cluster or the batch.
    """
    traits = costs.runtime()
    check_batch(strategy, workload)
    placed = place_lanes(strategy, cluster)
    shares = find_shares(placed)
    free = {}
    for choice, stages in zip(strategy.lanes, placed, strict=True):
        start = traits.start if len(stages) > 1 else 0.0
        times, count = lane_times(choice, stages, cluster, costs), choice.num_microbatches
        ends = end_of_passes(times, count, workload.schedule, traits.is_blocking)
        for stage, end in zip(stages, ends, strict=True):
            free[stage.choice.ranks] = start + end
    synced = sync_seconds(shares, placed, cluster, costs) if len(placed) > 1 else []
    parts = _halves(workload)
    _share_out(free, shares, [seconds * parts[0] for seconds in synced])
    for stages in placed:
        for stage in stages:
            free[stage.choice.ranks] += costs.update(stage.group, stage.layers, len(placed))
    _share_out(free, shares, [seconds * parts[1] for seconds in synced])
    return max(free.values())


def is_fast(costs: CostModel, workload: Workload) -> bool:
    """Return whether the ends of lanes are known without events."""
    return workload.schedule == "1F1B" or not costs.runtime().is_blocking


def end_of_passes(
    times: LaneTimes, num_microbatches: int, schedule: str, is_blocking: bool
) -> tuple[float, ...]:
    """Return when each stage of a lane has done its last pass, and message where these block, in seconds.

    Args:
        times: Seconds of passes and messages.
        num_microbatches: Micro-batches of a step.
        schedule: ``1F1B``, ``ZB-H1`` or ``GPipe``.
        is_blocking: Whether sender and receiver do nothing else during a message.
    """
    if not is_blocking:
        return end_times(times, num_microbatches, schedule)
    if schedule == "1F1B":
        return blocking_end_times(times, num_microbatches)
    stages = tuple(range(times.num_stages))
    run = LaneRun(
        lane=Lane.chain([(stage,) for stage in stages]),
        schedule=_schedule(schedule, stages, num_microbatches),
        durations=durations(times),
        is_blocking=True,
    )
    ends = dict.fromkeys(stages, 0.0)
    for span in simulate([run]).spans:
        for stage in span.ranks:  # stage i of the chain is rank i
            ends[stage] = max(ends[stage], span.end)
    return tuple(ends.values())


def slowest_lane(
    strategy: Strategy, cluster: Cluster, costs: CostModel, workload: Workload
) -> LaneSeconds:
    """Return what a step's seconds go to in the lane whose passes end last, without the step's events.

    The numbers are those of ``Prediction.attribution``, but that its short waits count as synchronization.

    Raises:
        PlannerError: If the strategy does not fit the cluster or the batch.
    """
    traits, schedule = costs.runtime(), workload.schedule
    step = step_seconds(strategy, cluster, costs, workload)
    found: list[LaneSeconds] = []
    num_lanes = len(strategy.lanes)
    for number, stages in enumerate(place_lanes(strategy, cluster)):
        choice = strategy.lanes[number]
        times, count = lane_times(choice, stages, cluster, costs), choice.num_microbatches
        none = (0.0,) * (times.num_stages - 1)
        quiet = times._replace(send_forward=none, send_backward=none)
        end, quiet_end = (
            max(end_of_passes(each, count, schedule, traits.is_blocking)) for each in (times, quiet)
        )
        busy = [count * sum(each) for each in zip(times.forward, times.backward, strict=True)]
        balanced, most = sum(busy) / len(busy), max(busy)
        start = traits.start if len(stages) > 1 else 0.0
        update = max(costs.update(stage.group, stage.layers, num_lanes) for stage in stages)
        found.append(
            LaneSeconds(
                lane=number,
                bottleneck=busy.index(most),
                balanced=balanced,
                imbalance=most - balanced,
                start=start,
                messages=end - quiet_end,
                fill=quiet_end - most,
                wait=0.0,
                sync=max(step - start - end - update, 0.0),
                optimizer=min(update, step - start - end),
            )
        )
    return max(
        found,
        key=lambda lane: lane.start + lane.messages + lane.fill + lane.balanced + lane.imbalance,
    )


def _share_out(
    free: dict[tuple[int, ...], float], shares: Sequence[Share], seconds: Sequence[float]
) -> None:
    """Let the stages of each share do something together, one share after the other."""
    for share, each in zip(shares, seconds, strict=False):  # with one lane nothing is shared
        members = [stage.choice.ranks for stage in share.stages]
        free.update(dict.fromkeys(members, max(free[m] for m in members) + each))


def _halves(workload: Workload) -> tuple[float, float]:
    """Return what part of a synchronization comes before the optimizer, and what part after it.

    ZeRO 1 scatters gradients before and gathers parameters after, which a ring does in the same time.
    """
    return (0.5, 0.5) if workload.zero else (1.0, 0.0)


def strategy_memory(
    strategy: Strategy, cluster: Cluster, costs: CostModel, workload: Workload
) -> dict[int, RankMemory]:
    """Return the bytes on each rank that has a part: ``simulate_strategy``'s, without its events.

    Raises:
        PlannerError: If the strategy does not fit the cluster or the batch.
        ScheduleError: If the schedule cannot be followed by a lane.
    """
    check_batch(strategy, workload)
    num_sharers = len(strategy.lanes) if workload.zero else 1
    memory: dict[int, RankMemory] = {}
    for choice, stages in zip(strategy.lanes, place_lanes(strategy, cluster), strict=True):
        held = _in_flight(workload.schedule, _visits(stages), choice.num_microbatches)
        memory |= rank_memory(stages, held, choice.mbs, costs, num_sharers)
    return memory


def busiest_stage(strategy: Strategy, cluster: Cluster, costs: CostModel) -> tuple[int, int]:
    """Return the numbers of the lane and, in it, of the stage whose passes take longest in a step."""
    busiest, most = (0, 0), -1.0
    for p, stages in enumerate(place_lanes(strategy, cluster)):
        choice = strategy.lanes[p]
        times = lane_times(choice, stages, cluster, costs)
        for s, seconds in enumerate(zip(times.forward, times.backward, strict=True)):
            busy = sum(seconds) * choice.num_microbatches
            if busy > most * (1 + _SAME):
                busiest, most = (p, s), busy
    return busiest


def _visits(stages: Sequence[PlacedStage]) -> tuple[int, ...]:
    """Return, for each stage, the first one on its ranks: all that a schedule depends on."""
    ranks = [stage.choice.ranks for stage in stages]
    return tuple(ranks.index(each) for each in ranks)


@lru_cache(maxsize=1024)
def _schedule(name: str, visits: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Return a schedule, built and checked once for all lanes alike."""
    lane = Lane.chain([(first,) for first in visits])
    return build_schedule(name, lane, num_microbatches)


@lru_cache(maxsize=1024)
def _in_flight(name: str, visits: tuple[int, ...], num_microbatches: int) -> dict[int, int]:
    if visits == tuple(range(len(visits))):
        return dict(enumerate(held_microbatches(name, len(visits), num_microbatches)))
    return in_flight(_schedule(name, visits, num_microbatches))


def num_passes(strategy: Strategy) -> int:
    """Return how many micro-batches the stages of all lanes do together."""
    return sum(lane.num_microbatches * len(lane.stages) for lane in strategy.lanes)


def check_batch(strategy: Strategy, workload: Workload) -> None:
    """Refuse lanes that do not make up the batch.

    Raises:
        PlannerError: If so.
    """
    if not strategy.lanes or not all(lane.stages for lane in strategy.lanes):
        raise PlannerError("lanes: a strategy has one lane or more, each with one stage or more.")
    samples = sum(lane.num_microbatches * lane.mbs for lane in strategy.lanes)
    if samples != workload.batch:
        raise PlannerError(
            f"batch: the lanes' micro-batches have {samples} samples in all, the batch has {workload.batch}."
        )


def durations(times: LaneTimes) -> Durations:
    """Return a lane's seconds as the event simulator takes them."""
    message = {(i, i + 1): seconds for i, seconds in enumerate(times.send_forward)}
    message |= {(i + 1, i): seconds for i, seconds in enumerate(times.send_backward)}
    return Durations(forward=times.forward, backward=times.backward, message=message)


def _events(
    workload: Workload,
    placed: tuple[tuple[PlacedStage, ...], ...],
    shares: tuple[Share, ...],
    cluster: Cluster,
    costs: CostModel,
) -> Iterator[Event]:
    """Yield what there is beside the passes, in program order."""
    start = costs.runtime().start
    for lane in placed:
        if start and len(lane) > 1:
            ranks = {rank for stage in lane for rank in stage.choice.ranks}
            yield Event("start", "gather", start, tuple(sorted(ranks)), "before")
    together: list[tuple[tuple[int, ...], float]] = []
    if len(placed) > 1:
        for share, each in zip(shares, sync_seconds(shares, placed, cluster, costs), strict=True):
            ranks = {rank for stage in share.stages for rank in stage.choice.ranks}
            together.append((tuple(sorted(ranks)), each))
    before, after = _halves(workload)
    for members, each in together:
        yield Event("gradient sync", "sync", each * before, members)
    for stages in placed:
        for stage in stages:
            each = costs.update(stage.group, stage.layers, len(placed))
            yield Event("optimizer", "optimizer", each, stage.choice.ranks)
    for members, each in together:
        if after:
            yield Event("parameter gather", "gather", each * after, members)
