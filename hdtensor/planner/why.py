"""Why a plan is as it is: what binds it, and what each rejected one loses, both asked of the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hdtensor.planner.attribution import LaneSeconds
from hdtensor.planner.cluster import Cluster
from hdtensor.planner.costs import CostModel
from hdtensor.planner.search import SearchResult
from hdtensor.planner.simulate import is_fast, slowest_lane, step_seconds, strategy_memory
from hdtensor.planner.strategy import LaneChoice, Strategy
from hdtensor.planner.summary import Summary
from hdtensor.planner.text_report import (
    LANE_WORDS,
    bytes_text,
    seconds_text,
    stage_text,
    strategy_text,
)
from hdtensor.planner.whole_parts import WholeParts, find_whole_parts
from hdtensor.planner.workload import SCHEDULES, Workload


#: Rejected plans that are reported.
_MOST_ALTERNATIVES = 8
#: What differs by less, relatively, is the same.
_SAME = 1e-9
#: Parts of a step that are worth naming.
_LEAST = 0.01


class Move(NamedTuple):
    """A small change of a plan.

    Attributes:
        what: In words.
        seconds: Of the step after it.
        lacking: Bytes that some device would then lack; 0 if all fits.
        where: The stage that has the least left, in words.
    """

    what: str
    seconds: float
    lacking: float
    where: str


@dataclass(frozen=True, slots=True)
class Why:
    """What binds a plan.

    Attributes:
        constraint: The name of what costs most; ``work`` if nothing costs much.
        costs: Name -> seconds of the step that the plan loses by it, the most first.
        moves: Every move of a layer away from the bottleneck, and of a micro-batch to another lane, the best first.
    """

    constraint: str
    costs: Mapping[str, float]
    moves: tuple[Move, ...]


def find_why(summary: Summary, costs: CostModel, parts: WholeParts | None = None) -> Why:
    """Return what binds a plan: which of these costs most of the step's seconds.

    ====================  =========================================================================
    constraint            seconds
    ====================  =========================================================================
    memory                less, if the best move were made that a device has not enough memory for
    whole layers          less, if stages could have parts of layers; no more than the imbalance
    whole micro-batches   less, if lanes could do parts of micro-batches
    imbalance             that the bottleneck computes beyond the mean stage, but for whole layers
    fill and drain        in which the bottleneck has no micro-batch, but for messages
    messages              that the passes end later by them
    gradients, optimizer  after the passes
    other lanes, start    before and after the passes, in which the lane waits
    work                  nothing costs much: it is what all stages compute
    ====================  =========================================================================

    Args:
        summary: The plan and its step. The lane that is asked is the one whose passes end last.
        costs: What it was predicted with.
        parts: What it costs that layers and micro-batches are whole; None if nobody knows: then layers count as imbalance.
    """
    planned, bottleneck = summary.planned, summary.bottleneck
    step = summary.prediction.seconds
    changed = (
        *layer_moves(planned.strategy, bottleneck.lane, bottleneck.stage),
        *batch_moves(planned.strategy, bottleneck.lane),
    )
    tried = (_move(summary, costs, strategy, what) for strategy, what in changed)
    moves = tuple(sorted(tried, key=lambda move: move.seconds))
    lane = min(summary.lane_seconds, key=lambda each: each.wait)
    found = {words: getattr(lane, part) for part, words in LANE_WORDS.items() if part != "balanced"}
    found["memory"] = step - min((m.seconds for m in moves if m.lacking), default=step)
    if parts is not None:
        found["whole layers"] = min(parts.layers, found["imbalance"])
        found["whole micro-batches"] = parts.microbatches
        found["imbalance"] -= found["whole layers"]
    lost = {what: seconds for what, seconds in found.items() if seconds > _SAME * step}
    ordered = dict(sorted(lost.items(), key=lambda item: -item[1]))
    most = next(iter(ordered), "work")
    return Why(most if ordered.get(most, 0.0) >= _LEAST * step else "work", ordered, moves)


def why_of(result: SearchResult, summary: Summary, costs: CostModel) -> dict[str, Any]:
    """Return what a search says of its choice, as JSON values.

    Args:
        result: What it found.
        summary: The step of its strategy.
        costs: What it was predicted with.
    """
    uniform = result.uniform
    parts = result.bound.parts or find_whole_parts(result.space, result.strategy, result.seconds)
    why = find_why(summary, costs, parts)
    schedules = other_schedules(summary, costs)
    return {
        "bound_seconds": result.bound.seconds,
        "work_seconds": result.bound.work,
        "lanes_bound_seconds": None if parts is None else parts.seconds,
        "whole_layers_seconds": None if parts is None else parts.layers,
        "whole_microbatches_seconds": None if parts is None else parts.microbatches,
        "gap": result.gap,
        "num_simulated": result.num_scored,
        "is_complete": result.is_complete,
        "uniform_seconds": None if uniform is None else uniform.seconds,
        "uniform": "" if uniform is None else strategy_text(uniform.strategy),
        "constraint": why.constraint,
        "costs": dict(why.costs),
        "schedules": {name: other._asdict() for name, other in schedules.items()},
        "reasons": [*_reasons(result, summary, why, parts), *_schedule_reasons(summary, schedules)],
        "alternatives": list(_alternatives(result, summary, costs)),
    }


def _reasons(
    result: SearchResult, summary: Summary, why: Why, parts: WholeParts | None
) -> Iterator[str]:
    step = summary.prediction.seconds
    work = result.bound.work
    if 0 < work <= result.bound.seconds:
        yield (
            f"All work spread over all devices without loss takes {seconds_text(work)}; that layers and micro-batches "
            f"are whole and pipelines fill and drain raises the bound to {seconds_text(result.bound.seconds)}."
        )
    if parts is not None:
        yield (
            f"Lanes of these stages take at least {seconds_text(parts.seconds)}, in any order: of that, whole layers cost "
            f"{parts.layers / step:.2%} of the step, and whole micro-batches {parts.microbatches / step:.2%}."
        )
    named = [f"{what} {each / step:.1%}" for what, each in why.costs.items() if each >= step / 1e3]
    shares = f" Costs of the step: {', '.join(named)}." if named else ""
    yield f"What binds: {why.constraint}.{shares} The bottleneck is {stage_text(summary.bottleneck)}."
    for move in why.moves[:3]:
        change = move.seconds / step - 1
        verdict = f"{abs(change):.2%} {'longer' if change >= 0 else 'shorter'}"
        if move.lacking:
            yield f"{move.what}: the step is {verdict}, but {move.where} lacks {bytes_text(move.lacking)}."
        else:
            yield f"{move.what}: the step is {verdict}."
    if not result.is_complete:
        yield "The search was stopped before its end: this is the best plan so far."


class OtherSchedule(NamedTuple):
    """What the same lanes would take with another schedule.

    Attributes:
        seconds: Of the step.
        lacking: Bytes that some device would then lack; 0 if all fits.
    """

    seconds: float
    lacking: float


def other_schedules(summary: Summary, costs: CostModel) -> dict[str, OtherSchedule]:
    """Return what a plan's lanes would take with each other schedule that the planner knows.

    Args:
        summary: The plan and its step.
        costs: What it was predicted with.

    Returns:
        Name -> seconds and bytes; without schedules that only events know, where messages block both ends.
    """
    strategy, _, cluster, workload = summary.planned
    others = [replace(workload, schedule=name) for name in SCHEDULES if name != workload.schedule]
    return {
        other.schedule: OtherSchedule(
            step_seconds(strategy, cluster, costs, other),
            _lacking(strategy, cluster, costs, other)[0],
        )
        for other in others
        if is_fast(costs, other)
    }


def _schedule_reasons(summary: Summary, schedules: Mapping[str, OtherSchedule]) -> Iterator[str]:
    """Yield which other schedules are worth to be tried."""
    step = summary.prediction.seconds
    for name, other in sorted(schedules.items(), key=lambda item: item[1].seconds):
        if not other.lacking and other.seconds <= step * (1 - _LEAST):
            yield (
                f"With {name} these lanes would take {seconds_text(other.seconds)}, {1 - other.seconds / step:.1%} less: plan "
                f"anew with schedule {name}."
            )


def _alternatives(
    result: SearchResult, summary: Summary, costs: CostModel
) -> Iterator[dict[str, Any]]:
    planned, step = summary.planned, summary.prediction.seconds
    rejected = [c for c in result.candidates if c.strategy != result.strategy]
    cluster, workload = planned.cluster, planned.workload
    chosen = slowest_lane(planned.strategy, cluster, costs, workload)
    for candidate in rejected[:_MOST_ALTERNATIVES]:
        lane = slowest_lane(candidate.strategy, cluster, costs, workload)
        reason = f"{candidate.seconds / step - 1:.2%} slower: {_loss(lane, chosen)}"
        yield {"what": candidate.what, "seconds": candidate.seconds, "reason": reason}


def _loss(lane: LaneSeconds, chosen: LaneSeconds) -> str:
    """Return which part of the step is longest in comparison with the chosen plan's, in words."""
    name = max(LANE_WORDS, key=lambda part: getattr(lane, part) - getattr(chosen, part))
    theirs, ours = getattr(lane, name), getattr(chosen, name)
    if theirs - ours <= _SAME * lane.seconds:
        return "as long in every part, by other ranks or layers"
    return f"{LANE_WORDS[name]} {seconds_text(theirs)}, here {seconds_text(max(ours, 0.0))}"


def _move(summary: Summary, costs: CostModel, strategy: Strategy, what: str) -> Move:
    """Return what a changed strategy takes, and whether it fits."""
    _, _, cluster, workload = summary.planned
    seconds = step_seconds(strategy, cluster, costs, workload)
    lacking, where = _lacking(strategy, cluster, costs, workload)
    return Move(what, seconds, lacking, where)


def _lacking(
    strategy: Strategy, cluster: Cluster, costs: CostModel, workload: Workload
) -> tuple[float, str]:
    """Return how many bytes the fullest device lacks, and which one it is; 0 and no one if all fits."""
    devices = list(cluster.devices())
    need = strategy_memory(strategy, cluster, costs, workload)
    lacking = {rank: each.total - devices[rank].memory_bytes for rank, each in need.items()}
    rank = max(lacking, key=lambda each: lacking[each])
    return (lacking[rank], f"rank {rank}") if lacking[rank] > 0 else (0.0, "")


def layer_moves(strategy: Strategy, lane: int, stage: int) -> Iterator[tuple[Strategy, str]]:
    """Yield the strategies with one layer moved from a stage to another one of its lane."""
    stages = strategy.lanes[lane].stages
    if stages[stage].num_layers < 2:
        return
    for other, choice in enumerate(stages):
        if other == stage:
            continue
        changed = list(stages)
        changed[stage] = stages[stage]._replace(num_layers=stages[stage].num_layers - 1)
        changed[other] = choice._replace(num_layers=choice.num_layers + 1)
        lanes = _with_lane(strategy, lane, strategy.lanes[lane]._replace(stages=tuple(changed)))
        yield lanes, f"A layer moved to stage {other}"


def batch_moves(strategy: Strategy, lane: int) -> Iterator[tuple[Strategy, str]]:
    """Yield the strategies with micro-batches moved from a lane to one lane of each other kind."""
    mine = strategy.lanes[lane]
    if mine.num_microbatches < 2:
        return
    seen: set[tuple[object, ...]] = set()
    for other, choice in enumerate(strategy.lanes):
        kind = (choice.num_microbatches, choice.mbs, tuple(s[1:] for s in choice.stages))
        if other == lane or kind in seen or mine.mbs % choice.mbs:
            continue
        seen.add(kind)
        fewer = _with_lane(
            strategy, lane, mine._replace(num_microbatches=mine.num_microbatches - 1)
        )
        more = choice.num_microbatches + mine.mbs // choice.mbs
        changed = _with_lane(fewer, other, choice._replace(num_microbatches=more))
        yield changed, f"A micro-batch moved to lane {other}"


def _with_lane(strategy: Strategy, index: int, lane: LaneChoice) -> Strategy:
    lanes = list(strategy.lanes)
    lanes[index] = lane
    return Strategy(tuple(lanes))
