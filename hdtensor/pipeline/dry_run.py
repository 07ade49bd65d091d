"""``dry_run``: what every rank of a plan would do, without any process."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.tensor import Replicate

from hdtensor.errors import PlanError, ScheduleError
from hdtensor.pipeline.exchanges import plan_lanes
from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule import (
    Durations,
    LaneRun,
    Schedule,
    Timeline,
    build_schedule,
    microbatch_sizes,
    simulate,
)
from hdtensor.pipeline.schedule.choose import DEFAULT_MICROBATCHES
from hdtensor.placements import HDSpec, local_shape
from hdtensor.plan import AnnotationPlan, ExpandedPlan, ModelDescription, Pipeline, StrategyPlan
from hdtensor.plan.sequences import Split
from hdtensor.redistribute import resolve
from hdtensor.redistribute.steps import PointToPoint
from hdtensor.redistribute.topology import UNIFORM, Topology


class StageMessage(NamedTuple):
    """What one rank sends another for each micro-batch.

    Attributes:
        src: The sender.
        dst: The receiver.
        edge: The sender's stage and the receiver's.
        num_bytes: Bytes, for the lane's largest micro-batch.
        link: Name of the class of links.
    """

    src: int
    dst: int
    edge: tuple[int, int]
    num_bytes: int
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDryRun:
    """What one lane would do.

    Attributes:
        lane: Its stages.
        layers: First and last layer of each stage, both included; None where a stage does not begin at a layer.
        schedule: Its schedule.
        sizes: Samples of each micro-batch.
        messages: Those of one micro-batch, activations and then gradients.
    """

    lane: Lane
    layers: tuple[tuple[int, int] | None, ...]
    schedule: Schedule
    sizes: tuple[int, ...]
    messages: tuple[StageMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What all ranks of a plan would do.

    Attributes:
        lanes: The lanes.
        num_parameters: Rank -> elements of its parts of all parameters.
        timeline: The step in unit durations: 1 for a stage's forward, 2 for its backward.
    """

    lanes: tuple[LaneDryRun, ...]
    num_parameters: Mapping[int, int]
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunOptions:
    """What a plan does not say.

    Attributes:
        schedules: Name or file of each lane's schedule; one for all; none for 1F1B, or its interleaved form
            where ranks have several stages.
        microbatches: Number of micro-batches where the plan does not give it.
        context: Length of a sequence, tokens; default the plan's, else 4096.
        itemsize: Bytes of an element of hidden states.
        topology: Links between ranks.
    """

    schedules: tuple[str, ...] = ()
    microbatches: int = DEFAULT_MICROBATCHES
    context: int | None = None
    itemsize: int = 2
    topology: Topology = UNIFORM


def dry_run(
    plan: AnnotationPlan, model: ModelDescription, options: DryRunOptions | None = None
) -> DryRun:
    """Return what every rank would do: layers, parameters, messages, schedule, times in units.

    Pure: no process, no device, any number of ranks.

    Args:
        plan: Either form of plan.
        model: The model's parameters and numbers.
        options: What the plan does not say.

    Raises:
        PlanError: If the plan does not fit the model, or is no set of pipelines.
        ScheduleError: If a schedule does not fit its lane.
        TopologyError: If the topology does not know a rank that sends or receives.
    """
    options = options or DryRunOptions()
    expanded = plan.expand(model)
    lanes = plan_lanes(expanded)
    sizes = _lane_sizes(plan, expanded, model, lanes, options)
    schedules = _schedules(lanes, sizes, options)
    context = options.context or _context(plan)
    moves = _stage_moves(expanded)
    found = tuple(
        LaneDryRun(
            lane=lane,
            layers=tuple(_layers(lane, model)),
            schedule=schedule,
            sizes=own,
            messages=tuple(
                _messages(lane, moves, (max(own, default=0), context, model.hidden_size), options)
            ),
        )
        for lane, schedule, own in zip(lanes, schedules, sizes, strict=True)
    )
    runs = [
        LaneRun(lane=run.lane, schedule=run.schedule, durations=_durations(run)) for run in found
    ]
    return DryRun(
        lanes=found,
        num_parameters=_num_parameters(expanded, model),
        timeline=simulate(runs),
    )


def _durations(run: LaneDryRun) -> Durations:
    num, largest = run.lane.num_stages, max(run.sizes, default=1)
    return Durations(
        forward=(1.0,) * num,
        backward=(2.0,) * num,
        sizes=tuple(size / largest for size in run.sizes),
    )


def _num_parameters(plan: ExpandedPlan, model: ModelDescription) -> dict[int, int]:
    """Return how many elements each rank holds; tensors of one spec and shape are counted once."""
    shapes = model.shapes
    kinds = Counter((spec, shapes[name]) for name, spec in plan.tensors.items())
    total: defaultdict[int, int] = defaultdict(int)
    for (spec, shape), num in kinds.items():
        for rank in spec.ranks:
            total[rank] += num * math.prod(local_shape(spec, shape, None, rank))
    return {rank: total[rank] for rank in sorted(total)}


def _context(plan: AnnotationPlan) -> int:
    said = plan.about.context if isinstance(plan, StrategyPlan) else None
    return said or 4096


def _lane_sizes(
    plan: AnnotationPlan,
    expanded: ExpandedPlan,
    model: ModelDescription,
    lanes: Sequence[Lane],
    options: DryRunOptions,
) -> list[tuple[int, ...]]:
    """Return the micro-batches of each lane, samples each."""
    split: Split = "batch"
    if isinstance(plan, StrategyPlan):
        split, mbs = plan.split, (plan.uniform.mbs or 1) if plan.uniform is not None else None
        pipelines = plan.with_pipelines(model.num_layers).pipelines
        said = [_said_sizes(pipeline, mbs, options) for pipeline in pipelines]
    else:
        said = [_shared_sizes(share, options) for share in expanded.shares]
    if len(lanes) == len(said) and split == "batch":
        return said
    # Lanes that share sequences, or are joined further on, run the same micro-batches.
    return [max(said, key=len)] * len(lanes)


def _said_sizes(
    pipeline: Pipeline, uniform_mbs: int | None, options: DryRunOptions
) -> tuple[int, ...]:
    count, size, share = pipeline.microbatches, pipeline.mbs, pipeline.share
    if share == 0:
        return ()
    if uniform_mbs is not None and count is None:
        return (uniform_mbs,) * options.microbatches
    if count is not None and size is not None:
        return (size,) * count
    if share is None:
        return (size or 1,) * options.microbatches
    if count is not None:
        return microbatch_sizes(share, count)
    if size is not None:
        whole, rest = divmod(share, size)
        return (size,) * whole + ((rest,) if rest else ())
    return _shared_sizes(share, options)


def _shared_sizes(share: int, options: DryRunOptions) -> tuple[int, ...]:
    return microbatch_sizes(share, min(share, options.microbatches))


def _schedules(
    lanes: Sequence[Lane], sizes: Sequence[Sequence[int]], options: DryRunOptions
) -> Iterator[Schedule]:
    """Yield the schedule of each lane; lanes of one form and number share theirs."""
    names = options.schedules
    if len(names) not in (0, 1, len(lanes)):
        raise ScheduleError(
            f"{len(names)} schedules are given for {len(lanes)} lanes; give one for each, or one for all."
        )
    known: dict[tuple[object, ...], Schedule] = {}
    for index, (lane, own) in enumerate(zip(lanes, sizes, strict=True)):
        places = tuple(place.stages for place in lane.places)
        if names:
            name = names[index % len(names)]
        else:
            name = "1F1B" if all(len(stages) == 1 for stages in places) else "Interleaved1F1B"
        key = (places, tuple(edge[:2] for edge in lane.edges), name, len(own))
        if key not in known:
            known[key] = build_schedule(name, lane, len(own))
        yield known[key]


def _layers(lane: Lane, model: ModelDescription) -> Iterator[tuple[int, int] | None]:
    """Yield the layers of each stage, from the names of the exchanges that begin stages."""
    begins: list[int | None] = [0] + [None] * (lane.num_stages - 1)
    for edge in reversed(lane.edges):
        if edge.dst == edge.src + 1 or begins[edge.dst] is None:
            found = model.layer_of(f"{edge.exchanges[0].rpartition(' ')[0]}.")
            begins[edge.dst] = None if found is None else found[1]
    for begin, end in zip(begins, [*begins[1:], model.num_layers], strict=True):
        yield None if begin is None or end is None or end <= begin else (begin, end - 1)


def _stage_moves(plan: ExpandedPlan) -> dict[str, tuple[HDSpec, HDSpec]]:
    """Return the specs of hidden states before and after each exchange between stages."""
    moves, here = {}, plan.inputs
    for point in plan.points:
        if point.kind == "stage":
            moves[f"{point.module} {point.side}"] = (here, point.spec)
            here = point.spec
    moves["labels"] = (here, plan.labels)
    return moves


def _messages(
    lane: Lane,
    moves: Mapping[str, tuple[HDSpec, HDSpec]],
    shape: tuple[int, int, int | None],
    options: DryRunOptions,
) -> Iterator[StageMessage]:
    """Yield what ranks send for the largest micro-batch: activations of all edges, then gradients."""
    batch, context, hidden = shape
    if hidden is None:
        raise PlanError(
            "the model says no hidden_size, so the bytes of messages are unknown; give a description that does."
        )
    if batch == 0:
        return
    for is_forward in (True, False):
        for edge in lane.edges:
            for name in edge.exchanges:
                before, after = (
                    _part_of(spec, lane.stages[stage].ranks)
                    for spec, stage in zip(moves[name], edge[:2], strict=True)
                )
                pair = (before, after) if is_forward else (after, before)
                ends = edge[:2] if is_forward else (edge.dst, edge.src)
                yield from _sent(pair, ends, (batch, context, hidden), options)


def _sent(
    pair: tuple[HDSpec, HDSpec],
    ends: tuple[int, int],
    shape: tuple[int, int, int],
    options: DryRunOptions,
) -> Iterator[StageMessage]:
    topology = options.topology
    num: Counter[tuple[int, int]] = Counter()
    for step in resolve(*pair, shape, topology=topology).steps:
        if isinstance(step, PointToPoint):
            for transfer in step.transfers:
                if transfer.src != transfer.dst:
                    num[transfer.src, transfer.dst] += transfer.box.numel
    for (src, dst), elements in sorted(num.items()):
        link = topology.links[topology.link(src, dst)]
        yield StageMessage(src, dst, ends, elements * options.itemsize, link)


def _part_of(spec: HDSpec, ranks: Sequence[int]) -> HDSpec:
    """Return what a lane has of a spec: its subgroups, cut as they are cut among themselves."""
    own = set(ranks)
    kept = [i for i, group in enumerate(spec.subgroups) if own.issuperset(group.ranks)]
    groups = [spec.subgroups[i] for i in kept]
    if len(groups) == 1:
        return HDSpec(groups, Replicate())
    ratio = [spec.top_ratio[i] for i in kept] if spec.top_ratio else None
    return HDSpec(groups, spec.top, ratio)
