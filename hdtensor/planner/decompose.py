"""``decompose``: a strategy as what cost models know, stages, shared layers and messages (section 8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hdtensor.errors import PlannerError
from hdtensor.placements.checks import ranks_text
from hdtensor.planner.cluster import Cluster, Link
from hdtensor.planner.costs import CostModel, LayerSpan, StageGroup
from hdtensor.planner.lane_times import LaneTimes
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


class PlacedStage(NamedTuple):
    """A stage with where it stands.

    Attributes:
        choice: The stage.
        group: Its devices.
        layers: What it holds.
        nodes: Number of each node that it is on -> its ranks there.
    """

    choice: StageChoice
    group: StageGroup
    layers: LayerSpan
    nodes: Mapping[int, int]


class Share(NamedTuple):
    """Layers that one stage of each lane holds.

    Attributes:
        layers: They.
        stages: The stage that holds them, of each lane.
    """

    layers: LayerSpan
    stages: tuple[PlacedStage, ...]


def place_lanes(strategy: Strategy, cluster: Cluster) -> tuple[tuple[PlacedStage, ...], ...]:
    """Return the stages of each lane with their devices and nodes.

    Raises:
        PlannerError: If a stage has ranks that the cluster has not, too few, or unlike devices.
    """
    return tuple(
        tuple(_place(lane.stages, number, cluster) for number in range(len(lane.stages)))
        for lane in strategy.lanes
    )


def _place(stages: Sequence[StageChoice], number: int, cluster: Cluster) -> PlacedStage:
    choice = stages[number]
    where = f"stages: the stage of ranks {ranks_text(choice.ranks)}"
    if not choice.ranks or len(choice.ranks) != choice.tp * choice.cp:
        raise PlannerError(
            f"{where} has {len(choice.ranks)} ranks, but tp * cp is {choice.tp} * {choice.cp}."
        )
    last = cluster.first_ranks[-1] + cluster.nodes[-1].num_devices - 1
    if min(choice.ranks) < 0 or max(choice.ranks) > last:
        raise PlannerError(f"{where} is not within the cluster's 0-{last}.")
    nodes: defaultdict[int, int] = defaultdict(int)
    for rank in choice.ranks:
        nodes[cluster.node_of(rank)] += 1
    devices = {cluster.nodes[node].device for node in nodes}
    if len(devices) > 1:
        names = ", ".join(sorted(device.name for device in devices))
        raise PlannerError(f"{where} has unlike devices, {names}. Give each kind its own stage.")
    first = next(iter(nodes))
    inside = cluster.nodes[first].inside
    if len(nodes) > 1:
        inside = slowest_link(cluster, nodes, nodes, dict.fromkeys(nodes, 1))
    group = StageGroup(devices.pop(), inside, choice.tp, choice.cp)
    layers = LayerSpan(choice.num_layers, number == 0, number == len(stages) - 1)
    return PlacedStage(choice, group, layers, nodes)


def slowest_link(
    cluster: Cluster, ones: Iterable[int], others: Iterable[int], num_users: Mapping[int, int]
) -> Link:
    """Return the slowest link between two sets of nodes, as fast as it is while it is shared.

    Args:
        cluster: The nodes.
        ones: Numbers of nodes.
        others: Numbers of nodes.
        num_users: Number of a node -> how many of its devices use its uplink at once.
    """
    others = tuple(others)
    bandwidth, latency = float("inf"), 0.0
    for a in ones:
        for b in others:
            node = cluster.nodes[a]
            link = node.inside if a == b else cluster.link_between(node, cluster.nodes[b])
            rate = link.bandwidth
            if a != b:
                for end in (a, b):
                    uplink = cluster.nodes[end].uplink
                    if uplink is not None:
                        rate = min(rate, uplink / num_users.get(end, 1))
            bandwidth, latency = min(bandwidth, rate), max(latency, link.latency)
    return Link(bandwidth, latency)


def lane_times(
    lane: LaneChoice, stages: Sequence[PlacedStage], cluster: Cluster, costs: CostModel
) -> LaneTimes:
    """Return what each stage of a lane, and each message, takes for a micro-batch."""
    forward, backward = [], []
    for stage in stages:
        units = [(costs.seconds("layer", stage.group, lane.mbs), stage.layers.num_layers)]
        if stage.layers.is_first:
            units.append((costs.seconds("embedding", stage.group, lane.mbs), 1))
        if stage.layers.is_last:
            units.append((costs.seconds("head", stage.group, lane.mbs), 1))
        forward.append(sum(unit.forward * count for unit, count in units))
        backward.append(sum(unit.backward * count for unit, count in units))
    there, back = [], []
    for one, other in zip(stages, stages[1:], strict=False):  # noqa: RUF007 - as everywhere here
        users = {**one.nodes, **other.nodes}
        link = slowest_link(cluster, one.nodes, other.nodes, users)
        there.append(costs.message(one.group, other.group, link, lane.mbs))
        back.append(costs.message(other.group, one.group, link, lane.mbs))
    return LaneTimes(tuple(forward), tuple(backward), tuple(there), tuple(back))


def find_shares(lanes: Sequence[Sequence[PlacedStage]]) -> tuple[Share, ...]:
    """Return the runs of layers that lie in one stage of each lane, the last layers first.

    Raises:
        PlannerError: If lanes have unlike numbers of layers.
    """
    totals = {sum(stage.layers.num_layers for stage in lane) for lane in lanes}
    if len(totals) > 1:
        raise PlannerError(f"num_layers: lanes hold {sorted(totals)} layers, which must be equal.")
    total = totals.pop() + 2  # the embedding and the head are units too
    position = [0] * len(lanes)  # of the stage that holds the next units
    left = [_num_units(lane[0].layers) for lane in lanes]
    shares, done = [], 0
    while done < total:
        for index, lane in enumerate(lanes):
            while left[index] == 0:
                position[index] += 1
                left[index] = _num_units(lane[position[index]].layers)
        count = min(left)
        stages = tuple(lane[at] for lane, at in zip(lanes, position, strict=True))
        is_first, is_last = done == 0, done + count == total
        shares.append(Share(LayerSpan(count - is_first - is_last, is_first, is_last), stages))
        done += count
        left = [rest - count for rest in left]
    return tuple(reversed(shares))


def _num_units(layers: LayerSpan) -> int:
    return layers.num_layers + layers.is_first + layers.is_last


def sync_seconds(
    shares: Sequence[Share],
    lanes: Sequence[Sequence[PlacedStage]],
    cluster: Cluster,
    costs: CostModel,
) -> list[float]:
    """Return what the gradient synchronization of each share takes.

    Devices of a node that reach other nodes by one uplink share it, while all of them synchronize.
    """
    users = _sync_users(shares, lanes)
    seconds = []
    for share in shares:
        groups = tuple(stage.group for stage in share.stages)
        nodes = _two_of_each(cluster, users, (n for stage in share.stages for n in stage.nodes))
        link = slowest_link(cluster, nodes, nodes, users)
        seconds.append(costs.synchronize(groups, share.layers, link))
    return seconds


def _two_of_each(
    cluster: Cluster, num_users: Mapping[int, int], numbers: Iterable[int]
) -> list[int]:
    """Return two of each set of nodes that links do not tell apart, as that is all that the slowest link depends on."""
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for number in dict.fromkeys(numbers):
        node = cluster.nodes[number]
        key = (node.device.name, node.inside, node.zone, node.uplink, num_users.get(number))
        if len(alike[key]) < 2:
            alike[key].append(number)
    return [number for numbers in alike.values() for number in numbers]


def _sync_users(shares: Sequence[Share], lanes: Sequence[Sequence[PlacedStage]]) -> dict[int, int]:
    """Return how many rings cross the edge of each node: a ring passes all replicas of a node in one go."""
    crossing: set[tuple[int, ...]] = set()
    for share in shares:
        nodes = {node for stage in share.stages for node in stage.nodes}
        if len(nodes) > 1:
            crossing.update(stage.choice.ranks for stage in share.stages)
    users: dict[int, int] = {}
    for lane in lanes:
        mine: defaultdict[int, int] = defaultdict(int)
        for stage in lane:
            if stage.choice.ranks in crossing:
                for node, count in stage.nodes.items():
                    mine[node] += count
        for node, count in mine.items():
            users[node] = max(users.get(node, 0), count)
    return users
