"""Sailor's plan files, read as strategies and written from them, so that its own simulator can judge our plans.

A file has, for each pipeline, the layers of its stages (0 is the embedding, the last one the head), the
replicas of each stage as ``[[[device, count, zone]], tp]``, and their number ``dp``. Beside them stand the
samples of a micro-batch (``mbs``) and of a step (``gbs``), and in measured files seconds (``real``) and bytes
(``max_mem``). Replica j of every stage makes a lane here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import check_object, check_sequence, check_text, shown
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.library import find_device
from hdtensor.planner.quantities import planner_errors, read_quantity, whole_number
from hdtensor.planner.sailor import read_node
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


_MOST = 1 << 20


class Replica(NamedTuple):
    """Devices that hold one copy of a stage.

    Attributes:
        device: Sailor's name of their kind.
        num_devices: How many, all of one tensor-parallel group.
        zone: Where they are.
    """

    device: str
    num_devices: int
    zone: str


class PlannedStage(NamedTuple):
    """A stage of a file.

    Attributes:
        num_layers: Decoder layers.
        replicas: One for each lane.
    """

    num_layers: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorPlan:
    """What a file says.

    Attributes:
        pipelines: The stages of each pipeline.
        mbs: Samples of a micro-batch.
        batch: Samples of a step.
        seconds: Measured seconds of a step; None where nothing was measured.
        memory_bytes: Measured bytes of the fullest device; None where nothing was measured.
    """

    pipelines: tuple[tuple[PlannedStage, ...], ...]
    mbs: int
    batch: int
    seconds: float | None = None
    memory_bytes: float | None = None

    @property
    def num_lanes(self) -> int:
        """Replicas of the model."""
        return sum(len(stages[0].replicas) for stages in self.pipelines)

    def lanes(self) -> tuple[tuple[tuple[int, Replica], ...], ...]:
        """Return, for each lane, the decoder layers and the devices of its stages."""
        return tuple(
            tuple((stage.num_layers, stage.replicas[j]) for stage in stages)
            for stages in self.pipelines
            for j in range(len(stages[0].replicas))
        )


def read_plan(value: Any, num_layers: int) -> SailorPlan:
    """Return what a plan file of Sailor's says.

    Args:
        value: Its JSON.
        num_layers: Decoder layers of the model. Only how many layers a stage has is read: their numbers
            follow from that, and some published files misspell one.

    Raises:
        PlannerError: If a field is missing or none, or the layers are not all of the model's.
    """
    with planner_errors():
        fields = check_object("plan", value)
        entries = check_sequence("pipeline_list", fields.get("pipeline_list"), "pipelines")
        pipelines = tuple(
            _read_pipeline(f"pipeline_list[{i}]", entry, num_layers)
            for i, entry in enumerate(entries)
        )
        if not pipelines:
            raise PlannerError("pipeline_list: must have one pipeline or more.")
        measured = [
            None if fields.get(name) is None else read_quantity(name, fields[name], {})
            for name in ("real", "max_mem")
        ]
        plan = SailorPlan(
            pipelines=pipelines,
            mbs=whole_number("mbs", fields.get("mbs"), 1, _MOST),
            batch=whole_number("gbs", fields.get("gbs"), 1, _MOST),
            seconds=measured[0],
            memory_bytes=measured[1],
        )
    if plan.batch % (plan.mbs * plan.num_lanes):
        raise PlannerError(
            f"gbs: {plan.batch} samples are no equal shares of {plan.num_lanes} lanes with micro-batches of "
            f"{plan.mbs}. Give a multiple of {plan.mbs * plan.num_lanes}."
        )
    return plan


def _read_pipeline(where: str, entry: Any, num_layers: int) -> tuple[PlannedStage, ...]:
    fields = check_object(where, entry)
    layers = check_sequence(
        f"{where}.layers_per_stage", fields.get("layers_per_stage"), "lists of layers"
    )
    groups = check_sequence(f"{where}.tmp_per_stage", fields.get("tmp_per_stage"), "stages")
    counts = [
        len(check_sequence(f"{where}.layers_per_stage[{i}]", some, "layers"))
        for i, some in enumerate(layers)
    ]
    if not counts or len(counts) != len(groups) or min(counts) < 1:
        raise PlannerError(
            f"{where}.tmp_per_stage: there are {len(groups)} stages, but layers_per_stage has {len(counts)}; "
            f"both must be of the same stages, one or more, each with a layer or more."
        )
    num_tail = sum(counts) - num_layers - 1  # layers behind the decoder's
    counts[0] -= 1
    counts[-1] -= num_tail
    if num_tail not in (1, 2) or min(counts) < 0:
        raise PlannerError(
            f"{where}.layers_per_stage: there are {sum(map(len, layers))} layers; the model has {num_layers} "
            f"between an embedding and a head."
        )
    stages = tuple(
        PlannedStage(count, _read_replicas(f"{where}.tmp_per_stage[{i}]", group))
        for i, (count, group) in enumerate(zip(counts, groups, strict=True))
    )
    if len({len(stage.replicas) for stage in stages}) > 1:
        raise PlannerError(f"{where}.tmp_per_stage: every stage must have as many replicas.")
    return stages


def _read_replicas(where: str, value: Any) -> tuple[Replica, ...]:
    found = []
    for j, entry in enumerate(check_sequence(where, value, "replicas")):
        at = f"{where}[{j}]"
        parts = check_sequence(at, entry, "devices and a degree")
        groups = check_sequence(at, parts[0], "groups") if len(parts) == 2 else ()
        group = check_sequence(at, groups[0], "a device, a number, a zone") if groups else ()
        if len(groups) != 1 or len(group) != 3:
            raise PlannerError(
                f"{at}: must be [[[device, number, zone]], tp], of one kind of device, got {shown(entry)}."
            )
        count = whole_number(f"{at}: the number", group[1], 1, _MOST)
        if whole_number(f"{at}: tp", parts[1], 1, _MOST) != count:
            raise PlannerError(
                f"{at}: tp is {parts[1]}, but there are {count} devices; they must be equal."
            )
        found.append(
            Replica(check_text(f"{at}: the device", group[0]), count, check_text(at, group[2]))
        )
    if not found:
        raise PlannerError(f"{where}: must have one replica or more.")
    return tuple(found)


def plan_cluster(plan: SailorPlan, devices_per_node: Mapping[str, int], network: Any) -> Cluster:
    """Return the cluster of just the devices that a plan names.

    Args:
        plan: The plan.
        devices_per_node: Sailor's name of a device -> devices of a node.
        network: The JSON of ``network_coeffs_all_homo.json``.

    Raises:
        PlannerError: If a device or a fit is unknown.
    """
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for lane in plan.lanes():
        for _, replica in lane:
            counts[replica.device, replica.zone] += replica.num_devices
    nodes: list[Node] = []
    alone: dict[str, Link] = {}
    for (device, zone), count in counts.items():
        size = devices_per_node.get(device)
        if size is None:
            raise PlannerError(f"device: the configuration has no {device!r}.")
        while count:
            here = min(size, count)
            node, alone[device] = read_node(device, here, network, zone=zone)
            nodes.append(node)
            count -= here
    return Cluster(nodes=tuple(nodes), **node_links(alone))


def node_links(alone: Mapping[str, Link]) -> dict[str, Any]:
    """Return a cluster's links between nodes: between unlike devices the slower one's.

    Args:
        alone: Sailor's name of a device -> the link of one of them to another node.
    """
    names = sorted(alone)
    links = {
        (find_device(a).name, find_device(b).name): max(
            alone[a], alone[b], key=lambda link: 1 / link.bandwidth
        )
        for a in names
        for b in names
    }
    slowest = min(alone.values(), key=lambda link: link.bandwidth)
    return {"between": slowest, "links": links}


def plan_strategy(plan: SailorPlan, cluster: Cluster) -> Strategy:
    """Return a plan as a strategy on a cluster: each lane takes the first free ranks of its devices.

    Raises:
        PlannerError: If the cluster has too few of them.
    """
    free: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, node in enumerate(cluster.nodes):
        free[node.device.name, node.zone].extend(cluster.ranks_of(number))
    lanes = []
    for lane in plan.lanes():
        stages = []
        for num_layers, (device, count, zone) in lane:
            ranks = free[find_device(device).name, zone]
            if len(ranks) < count:
                raise PlannerError(f"nodes: the cluster has too few {device} in zone {zone!r}.")
            taken = tuple(ranks[:count])
            del ranks[:count]
            stages.append(StageChoice(taken, num_layers, count))
        number = plan.batch // plan.num_lanes // plan.mbs
        lanes.append(LaneChoice(tuple(stages), number, plan.mbs))
    return Strategy(tuple(lanes))


def write_plan(
    strategy: Strategy, cluster: Cluster, names: Mapping[str, str] | None = None, zone: str = ""
) -> dict[str, Any]:
    """Return a strategy as the JSON of Sailor's plan files.

    Lanes with the same layers in their stages are replicas of one pipeline.

    Args:
        strategy: It must have equal micro-batches in all lanes: Sailor's have.
        cluster: Its devices.
        names: Our name of a device -> Sailor's, where they differ.
        zone: Written for nodes that have none.

    Raises:
        PlannerError: If the lanes' micro-batches differ, or a stage has context parallelism.
    """
    shares = {(lane.num_microbatches, lane.mbs) for lane in strategy.lanes}
    if len(shares) != 1:
        raise PlannerError(
            f"lanes: Sailor's files have equal micro-batches in all lanes, these have {sorted(shares)}."
        )
    if any(stage.cp > 1 for lane in strategy.lanes for stage in lane.stages):
        raise PlannerError("cp: Sailor's files have no context parallelism.")
    alike: defaultdict[tuple[int, ...], list[LaneChoice]] = defaultdict(list)
    for lane in strategy.lanes:
        alike[tuple(stage.num_layers for stage in lane.stages)].append(lane)
    ((number, mbs),) = shares
    home = zone or next((node.zone for node in cluster.nodes if node.zone), "zone-a")
    names = {"GH200": "GH-96", **(names or {})}
    return {
        "zone": home,
        "pipeline_list": [
            _write_pipeline(counts, lanes, cluster, names, home) for counts, lanes in alike.items()
        ],
        "mbs": mbs,
        "gbs": mbs * number * len(strategy.lanes),
    }


def _write_pipeline(
    counts: Sequence[int],
    lanes: Sequence[LaneChoice],
    cluster: Cluster,
    names: Mapping[str, str],
    home: str,
) -> dict[str, Any]:
    layers, first = [], 0
    for number, count in enumerate(counts):
        size = count + (number == 0) + (number == len(counts) - 1)
        layers.append(list(range(first, first + size)))
        first += size
    return {
        "num_stages": len(counts),
        "layers_per_stage": layers,
        "tmp_per_stage": [
            [
                _write_replica(
                    lane.stages[number].ranks, lane.stages[number].tp, cluster, names, home
                )
                for lane in lanes
            ]
            for number in range(len(counts))
        ],
        "dp": [len(lanes)] * len(counts),
    }


def _write_replica(
    ranks: Iterable[int], tp: int, cluster: Cluster, names: Mapping[str, str], home: str
) -> list[Any]:
    node = cluster.nodes[cluster.node_of(next(iter(ranks)))]
    name = names.get(node.device.name, node.device.name)
    return [[[name, tp, node.zone or home]], tp]
