"""The plans of the paper's Tables 9, 11 and 12 as strategies, and costs that agree with their speeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hdtensor.planner.cluster import Cluster
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.costs import StageGroup
from hdtensor.planner.lane_times import LaneTimes
from hdtensor.planner.models import find_model
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import Workload


DATA = Path(__file__).resolve().parent.parent / "tests" / "paper" / "data" / "plans.json"

#: Degree of TP -> seconds of a layer on H20 over those on H800, in the middle of what explains the tables' splits.
RATIOS = {4: 3.235, 8: 2.63}

#: Ranks 0-15 are H800, 16-47 H20, as in the tables.
CLUSTER = "16x H800 + 32x H20"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPlan:
    """One plan of the paper.

    Attributes:
        label: As in its table.
        table: Number of the table.
        model: Name of a preset.
        strategy: Ranks in the numbering of ``CLUSTER``.
        ranks: The ranks that there were.
        zero: Stage of ZeRO.
    """

    label: str
    table: int
    model: str
    strategy: Strategy
    ranks: tuple[int, ...]
    zero: int


def read_plans() -> tuple[PaperPlan, ...]:
    """Return the 13 plans for all lengths of sequences alike."""
    entries = json.loads(DATA.read_text())["plans"]
    return tuple(_plan(entry) for entry in entries if entry["source_table"] in (9, 11, 12))


def _plan(entry: dict[str, Any]) -> PaperPlan:
    shift = 16 if entry["source_table"] == 11 else 0  # that table has H20 only, from rank 0
    lanes = []
    for lane in entry["pipelines"]:
        stages = []
        for stage in lane["stages"]:
            first, last = stage["layers"]
            ranks = tuple(rank + shift for rank in stage["ranks"])
            stages.append(StageChoice(ranks, last - first + 1, len(ranks)))
        lanes.append(LaneChoice(tuple(stages), lane["microbatches"], lane["mbs"]))
    cluster = entry["cluster"]
    ranks = (*range(cluster.get("H800", 0)), *range(16, 16 + cluster["H20"]))
    return PaperPlan(
        label=entry["label"],
        table=entry["source_table"],
        model=entry["model"],
        strategy=Strategy(tuple(lanes)),
        ranks=ranks,
        zero=entry["zero"],
    )


def make_costs(plan: PaperPlan, cluster: Cluster) -> tuple[RooflineCosts, Workload]:
    """Return roofline costs in which an H800 is as much faster than an H20 as the tables say."""
    workload = Workload(batch=64, context=4096, zero=plan.zero)
    costs = RooflineCosts(model=find_model(plan.model), workload=workload)
    tp = 8 if plan.model == "llama-70B" else 4
    low, high = 0.2, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        if _ratio(replace(costs, slowness={"H800": middle}), cluster, tp) > RATIOS[tp]:
            low = middle
        else:
            high = middle
    return replace(costs, slowness={"H800": low}), workload


def _ratio(costs: RooflineCosts, cluster: Cluster, tp: int) -> float:
    seconds = {}
    for node in cluster.nodes:
        group = StageGroup(node.device, node.inside, tp)
        seconds[node.device.name] = sum(costs.seconds("layer", group, 1))
    return seconds["H20"] / seconds["H800"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """How a lane whose stages have one degree of TP splits the layers.

    Attributes:
        label: Of its plan.
        tp: Degree of TP.
        devices: Name of each stage's device.
        layers: Layers of each stage.
    """

    label: str
    tp: int
    devices: tuple[str, ...]
    layers: tuple[int, ...]


def unlike_splits() -> Iterator[LayerSplit]:
    """Yield the splits of all lanes with both kinds of devices and one degree of TP."""
    for plan in read_plans():
        for lane in plan.strategy.lanes:
            devices = tuple("H800" if s.ranks[0] < 16 else "H20" for s in lane.stages)
            degrees = {stage.tp for stage in lane.stages}
            if len(degrees) == 1 and len(set(devices)) == 2:
                layers = tuple(stage.num_layers for stage in lane.stages)
                yield LayerSplit(label=plan.label, tp=degrees.pop(), devices=devices, layers=layers)


def split_times(split: LayerSplit, ratio: float, layer: float, message: float) -> LaneTimes:
    """Return what the stages of a split take, forwards a third of it.

    Args:
        split: The lane.
        ratio: Seconds of a layer on H20 over those on H800.
        layer: Seconds of a layer on H800.
        message: Seconds of a message.
    """
    each = {"H800": layer, "H20": layer * ratio}
    work = [each[d] * n for d, n in zip(split.devices, split.layers, strict=True)]
    messages = (message,) * (len(work) - 1)
    return LaneTimes(tuple(w / 3 for w in work), tuple(2 * w / 3 for w in work), messages, messages)


def whole_cluster() -> Cluster:
    """Return the cluster of which all configurations are parts."""
    return cluster_of_text(CLUSTER)
