"""Clusters as one line: ``16x H800 + 32x H20``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.devices import Device
from hdtensor.planner.library import DESKTOP_NETWORK, find_device


#: Devices of a node where nobody says it.
NODE_SIZE = 8
MAX_RANKS = 1 << 16

#: Seconds before the first byte arrives, where nobody says it.
INSIDE_LATENCY = 5e-6
NETWORK_LATENCY = 10e-6

_GROUP = re.compile(
    r"(?:(?P<nodes>\d{1,6}) ?[x*] ?)?(?P<count>\d{1,6}) ?[x*] ?(?P<device>[^\d\s+/@x*][^+/@]{0,50}|"
    r"\d+[A-Za-z][^+/@]{0,50}?)(?: ?/ ?(?P<size>\d{1,6}))?(?: ?@ ?(?P<zone>[\w.-]{1,60}))?"
)


class NodeGroup(NamedTuple):
    """Equal nodes.

    Attributes:
        device: The kind of their devices.
        sizes: Devices of each node.
        zone: Their zone, or "".
    """

    device: Device
    sizes: tuple[int, ...]
    zone: str = ""


def parse_groups(
    text: str,
    own: Mapping[str, Device] | None = None,
    node_size: int = NODE_SIZE,
    field: str = "cluster",
) -> tuple[NodeGroup, ...]:
    """Return the groups of nodes of a short text.

    ==================  ==============================================================
    text                nodes
    ==================  ==============================================================
    ``20x H20``         20 devices in nodes of 8, the last one smaller
    ``96x V100/4``      96 devices in nodes of 4
    ``4x 8x H20``       4 nodes of 8 devices
    ``8x H20 @ east``   a node in zone east
    ``... + ...``       both, the ranks of the first group first
    ==================  ==============================================================

    >>> [group.sizes for group in parse_groups("2x 8x H800 + 12x H20")]
    [(8, 8), (8, 4)]

    Args:
        text: The text.
        own: Devices of the user.
        node_size: Devices of a node where the text does not say it.
        field: What an error begins with.

    Raises:
        PlannerError: If it is something else.
    """
    if not isinstance(text, str) or len(text) > 10_000:
        raise PlannerError(f"{field}: must be a text such as '16x H800 + 32x H20'.")
    if "," in text:
        joined = " + ".join(" ".join(part.split()) for part in text.split(",") if part.strip())
        raise PlannerError(
            f"{field}: groups of devices are joined by +, not by a comma: write {joined[:200]!r}."
        )
    groups = []
    total = 0
    for part in text.split("+"):
        part = " ".join(part.split())
        match = _GROUP.fullmatch(part)
        if match is None:
            raise PlannerError(
                f"{field}: {part[:60]!r} is no group of devices; allowed: 16x H800, 4x 8x H20 (4 nodes of 8), "
                f"32x V100/4 (nodes of 4), 8x H20 @ east (a zone), joined by +."
            )
        device = find_device(match["device"].strip(), own, field)
        sizes = _sizes(match, node_size, field)
        total += sum(sizes)
        if total > MAX_RANKS:
            raise PlannerError(f"{field}: more than {MAX_RANKS} devices; allowed: {MAX_RANKS}.")
        groups.append(NodeGroup(device, sizes, match["zone"] or ""))
    return tuple(groups)


def _sizes(match: re.Match[str], node_size: int, field: str) -> tuple[int, ...]:
    num_nodes, count, size = (int(match[key] or 0) for key in ("nodes", "count", "size"))
    if match["nodes"] is not None and match["size"] is not None:
        raise PlannerError(
            f"{field}: {match[0]!r} says the size of a node twice; write {num_nodes}x {count}x or /{size}."
        )
    if 0 in (count, num_nodes if match["nodes"] else 1, size if match["size"] else 1):
        raise PlannerError(
            f"{field}: {match[0]!r} is no device at all; every number must be 1 or more."
        )
    if max(count, count * num_nodes) > MAX_RANKS:
        raise PlannerError(f"{field}: more than {MAX_RANKS} devices; allowed: {MAX_RANKS}.")
    if num_nodes:
        return (count,) * num_nodes
    size = size or node_size
    whole, rest = divmod(count, size)
    return (size,) * whole + ((rest,) if rest else ())


def make_cluster(nodes: Sequence[Node], network: Link | None = None) -> Cluster:
    """Return a cluster; without a network, each device's usual one, the slower end of two.

    Args:
        nodes: The nodes.
        network: What each device has to other nodes; nodes whose devices would usually share one no longer do.
    """
    if network is not None:
        return Cluster(nodes=tuple(nodes), between=network)
    rates = {node.device.name: node.device.network_bandwidth for node in nodes}
    slowest = min(rates.values(), default=1.0)
    links = {}
    for one, other in _pairs(sorted(rates)):
        rate = min(rates[one], rates[other])
        if rate > slowest:
            links[one, other] = Link(rate, NETWORK_LATENCY)
    return Cluster(nodes=tuple(nodes), between=Link(slowest, NETWORK_LATENCY), links=links)


def nodes_of(groups: Iterable[NodeGroup]) -> Iterator[Node]:
    """Yield the nodes of some groups, with their devices' links."""
    for device, sizes, zone in groups:
        for size in sizes:
            yield Node(
                device=device,
                num_devices=size,
                inside=usual_inside(device),
                zone=zone,
                uplink=usual_uplink(device),
            )


def usual_inside(device: Device) -> Link:
    """Return the link inside a node by the datasheet."""
    return Link(device.link_bandwidth, INSIDE_LATENCY)


def usual_uplink(device: Device) -> float | None:
    """Return what all devices of a node share towards other nodes, bytes per second; None: each has its own.

    Desktop cards stand in machines with one network port.
    """
    rate = device.network_bandwidth
    return rate if rate <= DESKTOP_NETWORK else None


def cluster_of_text(text: str) -> Cluster:
    """Return the cluster that a short text describes; ``parse_groups`` says how.

    >>> cluster_of_text("16x H800 + 32x H20").num_ranks
    48

    Raises:
        PlannerError: If it is no such text.
    """
    return make_cluster(tuple(nodes_of(parse_groups(text))))


def _pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from ((name, name) for name in names)
    yield from combinations(names, 2)
