"""``summarize``: what a plan's step is made of, as values that texts, JSON and pages show alike."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hdtensor.placements.checks import ranks_text
from hdtensor.planner.attribution import LaneSeconds
from hdtensor.planner.copies import Copies, find_copies
from hdtensor.planner.decompose import Share, find_shares, place_lanes
from hdtensor.planner.emit import Planned
from hdtensor.planner.link_rates import link_rates
from hdtensor.planner.memory import RankMemory
from hdtensor.planner.roofline import BYTES
from hdtensor.planner.simulate import Prediction
from hdtensor.planner.unit_sizes import span_parameters


#: Letters of a list of lanes.
_MOST_LETTERS = 24

_PASSES = ("F", "B", "I", "W")
_SYNCS, _OPTIMIZERS, _GATHERS = ("sync",), ("optimizer",), ("gather",)


class StageSummary(NamedTuple):
    """One stage in a step.

    Attributes:
        lane: Number of its lane.
        stage: Number in the lane.
        ranks: Its ranks.
        device: Their kind.
        layers: First and last layer, both included.
        tp: Degree of tensor parallelism.
        cp: Degree of context parallelism.
        forward: Seconds of a micro-batch.
        backward: Seconds of a micro-batch.
        busy: Seconds of all its passes.
        waiting: Seconds, until its last pass ends, in which it waits for messages and other stages.
        sync: Seconds from then to the end of the gradients' synchronization, waiting for other lanes included.
        optimizer: Seconds.
        gather: Seconds from then to the end of ZeRO's gathers of parameters, waiting included.
        memory: Bytes on each of its ranks, by what they are for.
        capacity: Bytes of a device.
        in_flight: Micro-batches whose activations it holds at most.
    """

    lane: int
    stage: int
    ranks: tuple[int, ...]
    device: str
    layers: tuple[int, int]
    tp: int
    cp: int
    forward: float
    backward: float
    busy: float
    waiting: float
    sync: float
    optimizer: float
    gather: float
    memory: RankMemory
    capacity: int
    in_flight: int

    @property
    def free(self) -> float:
        """Bytes that are left on each device; negative if it is overfull."""
        return self.capacity - self.memory.total


class Traffic(NamedTuple):
    """What goes over some links in a step.

    Attributes:
        kind: ``messages`` between stages, ``tensor parallel`` inside of a stage, or ``gradients`` between lanes.
        what: Between whom, in words.
        link: ``inside`` of a node, or ``between`` nodes.
        bandwidth: Bytes per second of the slowest link on the way, one direction.
        num_bytes: Bytes, all ranks together.
        seconds: How long the busiest rank's link is in use; 0 where passes' seconds contain it.
    """

    kind: str
    what: str
    link: str
    bandwidth: float
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a step is made of.

    Attributes:
        planned: The strategy and what it is for.
        prediction: What the simulator says.
        stages: In the order of lanes.
        traffic: What goes over links.
        lane_seconds: What each lane's seconds go to; they add up to the step.
        critical: What a chain of work that sets the step's length is made of, in words -> seconds, longest first.
        why: What the planner says of its choice, JSON values; empty if nobody searched.
    """

    planned: Planned
    prediction: Prediction
    stages: tuple[StageSummary, ...]
    traffic: tuple[Traffic, ...]
    lane_seconds: tuple[LaneSeconds, ...]
    critical: Mapping[str, float]
    why: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bottleneck(self) -> StageSummary:
        """The stage that computes longest."""
        return max(self.stages, key=lambda stage: stage.busy)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over its seconds."""
        workload = self.planned.workload
        return workload.batch * workload.context / self.prediction.seconds

    @property
    def bubble(self) -> float:
        """Part of the time of all ranks of lanes in which they compute nothing, from start to end of the step."""
        busy = sum(stage.busy * len(stage.ranks) for stage in self.stages)
        num_ranks = sum(len(stage.ranks) for stage in self.stages)
        return 1 - busy / (num_ranks * self.prediction.seconds)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks of the cluster that have no part."""
        used = {rank for stage in self.stages for rank in stage.ranks}
        return tuple(rank for rank in range(self.planned.cluster.num_ranks) if rank not in used)

    @property
    def overfull(self) -> tuple[StageSummary, ...]:
        """Stages whose devices have too little memory."""
        return tuple(stage for stage in self.stages if stage.free < 0)

    @property
    def copies(self) -> Copies:
        """What single devices and nodes alone hold."""
        return find_copies(self.planned)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the timeline as JSON values; numbers are seconds and bytes."""
        bottleneck = self.bottleneck
        return {
            "step_seconds": self.prediction.seconds,
            "tokens_per_second": self.tokens_per_second,
            "bubble": self.bubble,
            "bottleneck": {"lane": bottleneck.lane, "stage": bottleneck.stage},
            "fits": not self.overfull,
            "idle_ranks": list(self.idle_ranks),
            "links": [rate._asdict() for rate in link_rates(self.planned.cluster)],
            "copies": self.copies.to_dict(),
            "stages": [
                {**stage._asdict(), "memory": stage.memory._asdict()} for stage in self.stages
            ],
            "traffic": [traffic._asdict() for traffic in self.traffic],
            "lanes": [lane._asdict() for lane in self.lane_seconds],
            "critical_path": dict(self.critical),
            "why": dict(self.why),
        }


def summarize(
    planned: Planned, prediction: Prediction, why: Mapping[str, Any] | None = None
) -> Summary:
    """Return what a step is made of.

    Args:
        planned: The strategy and what it is for.
        prediction: What ``simulate_strategy`` said of it.
        why: What the planner says of its choice.
    """
    return Summary(
        planned=planned,
        prediction=prediction,
        stages=tuple(_stages(planned, prediction)),
        traffic=tuple(_traffic(planned, prediction)),
        lane_seconds=prediction.attribution(),
        critical=_critical(prediction),
        why=why or {},
    )


class LaneGroup(NamedTuple):
    """Lanes that do the same at the same times.

    Attributes:
        lanes: Their numbers.
        stages: The stages of the first one.
    """

    lanes: tuple[int, ...]
    stages: tuple[StageSummary, ...]

    @property
    def title(self) -> str:
        """Their name."""
        if len(self.lanes) == 1:
            return f"lane {self.lanes[0]}"
        return f"lanes {self.numbers} (alike)"

    @property
    def numbers(self) -> str:
        """Their numbers; of many that are not one after another the first ones, and how many there are."""
        text = ranks_text(self.lanes)
        if len(text) <= _MOST_LETTERS:
            return text
        return f"{text[: text.rindex(',', 0, _MOST_LETTERS)]},... ({len(self.lanes)} lanes)"


def group_lanes(summary: Summary) -> list[LaneGroup]:
    """Return the lanes of a step, those that do the same at the same times together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    by_lane: dict[int, tuple[StageSummary, ...]] = {}
    for lane, stages in itertools.groupby(summary.stages, key=lambda stage: stage.lane):
        by_lane[lane] = tuple(stages)
        choice = summary.planned.strategy.lanes[lane]
        facts = tuple(stage._replace(lane=0, ranks=()) for stage in by_lane[lane])
        key = (choice.num_microbatches, choice.mbs, facts)
        groups.setdefault(key, []).append(lane)
    return [LaneGroup(tuple(lanes), by_lane[lanes[0]]) for lanes in groups.values()]


class LinkUse(NamedTuple):
    """Traffic of one kind over like links.

    Attributes:
        kind: As ``Traffic.kind``.
        link: As ``Traffic.link``.
        bandwidth: Bytes per second.
        num_bytes: Bytes of a step, all links together.
        seconds: How long the busiest of them is in use.
    """

    kind: str
    link: str
    bandwidth: float
    num_bytes: float
    seconds: float


def link_uses(summary: Summary) -> list[LinkUse]:
    """Return a step's traffic by kind and link."""
    groups: dict[tuple[str, str, float], list[Traffic]] = {}
    for traffic in summary.traffic:
        groups.setdefault((traffic.kind, traffic.link, traffic.bandwidth), []).append(traffic)
    return [
        LinkUse(*key, sum(e.num_bytes for e in each), max(e.seconds for e in each))
        for key, each in sorted(groups.items())
    ]


def _stages(planned: Planned, prediction: Prediction) -> Iterator[StageSummary]:
    placed = place_lanes(planned.strategy, planned.cluster)
    last = {
        kinds: _last_ends(prediction, kinds) for kinds in (_PASSES, _SYNCS, _OPTIMIZERS, _GATHERS)
    }
    held = prediction.timeline.peak_activations()
    for lane, (choice, stages, times) in enumerate(
        zip(planned.strategy.lanes, placed, prediction.lanes, strict=True)
    ):
        first = 0
        for number, stage in enumerate(stages):
            rank = stage.choice.ranks[0]
            busy = choice.num_microbatches * (times.forward[number] + times.backward[number])
            # What a rank does after its passes, each part from the end of the one before.
            ends = [last[_PASSES][rank]]
            for kinds in (_SYNCS, _OPTIMIZERS, _GATHERS):
                ends.append(max(ends[-1], last[kinds].get(rank, 0.0)))
            sync, optimizer, gather = (b - a for a, b in itertools.pairwise(ends))
            yield StageSummary(
                lane=lane,
                stage=number,
                ranks=stage.choice.ranks,
                device=stage.group.device.name,
                layers=(first, first + stage.choice.num_layers - 1),
                tp=stage.choice.tp,
                cp=stage.choice.cp,
                forward=times.forward[number],
                backward=times.backward[number],
                busy=busy,
                waiting=max(ends[0] - busy, 0.0),
                sync=sync,
                optimizer=optimizer,
                gather=gather,
                memory=prediction.memory[rank],
                capacity=stage.group.device.memory_bytes,
                in_flight=held.get((lane, number), 0),
            )
            first += stage.choice.num_layers


def _last_ends(prediction: Prediction, kinds: tuple[str, ...]) -> dict[int, float]:
    """Return the end of each rank's last span of some kinds."""
    ends: dict[int, float] = {}
    for span in prediction.timeline.spans:
        if span.kind in kinds:
            for rank in span.ranks:
                ends[rank] = max(ends.get(rank, 0.0), span.end)
    return ends


def _critical(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of the critical path by what they are."""
    words = {"message": "messages", "sync": "gradient synchronization", "gather": "gathers"}
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in prediction.critical_path():
        what = words.get(span.kind, span.kind)
        if span.kind in _PASSES:
            what = f"lane {span.lane} stage {span.stage}"
        seconds[what] += span.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _traffic(planned: Planned, prediction: Prediction) -> Iterator[Traffic]:
    strategy, model, _, workload = planned
    placed = place_lanes(strategy, planned.cluster)
    itemsize = BYTES[workload.precision]
    for lane, (choice, stages, times) in enumerate(
        zip(strategy.lanes, placed, prediction.lanes, strict=True)
    ):
        hidden = choice.mbs * workload.context * model.hidden * itemsize
        for number, stage in enumerate(stages):
            count = choice.num_microbatches
            tp, ranks = stage.choice.tp, stage.choice.ranks
            if tp > 1:
                # Two all-reduces a layer in each direction; a ring sends 2 (t - 1) times the tensor.
                yield Traffic(
                    "tensor parallel",
                    f"lane {lane} stage {number}, among ranks {ranks_text(ranks)}",
                    "inside" if len(stage.nodes) == 1 else "between",
                    stage.group.inside.bandwidth,
                    4 * stage.choice.num_layers * count * 2 * (tp - 1) * hidden,
                    0.0,
                )
            if number + 1 < len(stages):
                other = stages[number + 1]
                yield Traffic(
                    "messages",
                    f"lane {lane} stage {number} <-> {number + 1}, ranks {ranks_text(ranks)} <-> "
                    f"{ranks_text(other.choice.ranks)}",
                    *_link(planned, ranks, other.choice.ranks),
                    2 * count * hidden,
                    count * (times.send_forward[number] + times.send_backward[number]),
                )
    if len(placed) > 1:
        yield from _gradients(planned, prediction, find_shares(placed), itemsize)


def _gradients(
    planned: Planned, prediction: Prediction, shares: Sequence[Share], itemsize: int
) -> Iterator[Traffic]:
    seconds: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for span in prediction.timeline.spans:
        if span.kind in (*_SYNCS, *_GATHERS):
            seconds[span.ranks] += span.seconds
    for share in shares:
        ranks = tuple(sorted(rank for stage in share.stages for rank in stage.choice.ranks))
        heads = [stage.choice.ranks[:1] for stage in share.stages]
        links = [_link(planned, heads[0], other) for other in heads[1:]]
        link, bandwidth = min(links, key=lambda each: each[1])
        num_bytes = span_parameters(planned.model, share.layers, 1) * itemsize
        what = (
            f"{share.layers.num_layers} layers" if share.layers.num_layers else "embedding or head"
        )
        yield Traffic(
            "gradients",
            f"{what} of {len(share.stages)} lanes, ranks {ranks_text(ranks)}",
            link,
            bandwidth,
            2 * (len(share.stages) - 1) * num_bytes,
            seconds.get(ranks, 0.0),
        )


def _link(planned: Planned, ones: Sequence[int], others: Sequence[int]) -> tuple[str, float]:
    """Return whether ranks are of one node, and the bandwidth of the slowest link between them."""
    cluster = planned.cluster
    pairs = {(cluster.node_of(a), cluster.node_of(b)): (a, b) for a in ones for b in others}
    slowest = min(cluster.link(a, b).bandwidth for a, b in pairs.values())
    return "inside" if all(a == b for a, b in pairs) else "between", slowest
