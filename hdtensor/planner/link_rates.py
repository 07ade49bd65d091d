"""``link_rates``: the speeds of a cluster's links, as a plan takes them, by kinds of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple

from hdtensor.planner.cluster import Cluster, Node


#: Pairs of kinds of nodes that are named for one rate.
_MOST_NAMES = 3


class LinkRate(NamedTuple):
    """How fast some links are.

    Attributes:
        where: ``inside`` of nodes, ``between`` a device and one of another node, or ``uplink``: what all devices of a node
            share towards other nodes.
        of: Kinds of nodes, or pairs of kinds, in words.
        bandwidth: Bytes per second, one direction.
    """

    where: Literal["inside", "between", "uplink"]
    of: tuple[str, ...]
    bandwidth: float


def link_rates(cluster: Cluster) -> tuple[LinkRate, ...]:
    """Return how fast a cluster's links are: inside of nodes, between them, and what nodes share.

    Args:
        cluster: The devices and links. Of nodes that have one device only, nothing is inside.
    """
    counts = Counter((_label(node), node.inside, node.uplink) for node in cluster.nodes)
    kinds = {(_label(node), node.inside, node.uplink): node for node in cluster.nodes}
    rates: dict[tuple[Literal["inside", "between", "uplink"], float], dict[str, None]] = {}
    for node in cluster.nodes:
        if node.num_devices > 1:
            rates.setdefault(("inside", node.inside.bandwidth), {})[_label(node)] = None
    for (one, a), (other, b) in combinations_with_replacement(kinds.items(), 2):
        if one != other or counts[one] > 1:
            names = f"{_label(a)} <-> {_label(b)}"
            rates.setdefault(("between", cluster.link_between(a, b).bandwidth), {})[names] = None
    for node in kinds.values() if len(cluster.nodes) > 1 else ():
        if node.uplink is not None and node.num_devices > 1:
            rates.setdefault(("uplink", node.uplink), {})[_label(node)] = None
    return tuple(LinkRate(where, tuple(names), rate) for (where, rate), names in rates.items())


def links_text(cluster: Cluster) -> str:
    """Return how fast a cluster's links are, as one line.

    >>> from hdtensor.planner.cluster_text import cluster_of_text
    >>> links_text(cluster_of_text("16x H800"))
    '200 GB/s inside nodes, 50 GB/s (400 Gb/s) between nodes, for each device'
    """
    rates = link_rates(cluster)
    inside = [rate for rate in rates if rate.where == "inside"]
    between = [rate for rate in rates if rate.where == "between"]
    shared = [rate for rate in rates if rate.where == "uplink"]
    parts = [f"{_bytes(rate)} inside{_names(rate, inside)} nodes" for rate in inside]
    parts += [
        f"{_bytes(rate)} ({_bits(rate)}) between{_names(rate, between)} nodes" for rate in between
    ]
    if between:
        parts[-1] += ", " + _shared_text(cluster, between, shared)
    return ", ".join(parts) or "none: one device"


def _shared_text(cluster: Cluster, between: Sequence[LinkRate], shared: Sequence[LinkRate]) -> str:
    """Return who has a rate between nodes for itself."""
    if not shared:
        return "for each device"
    is_all = all(node.uplink is not None or node.num_devices == 1 for node in cluster.nodes)
    if is_all and len(between) == len(shared) == 1 and between[0].bandwidth == shared[0].bandwidth:
        return "shared by a node's devices"
    parts = []
    for rate in shared:
        names = "" if is_all and len(shared) == 1 else f"{' and '.join(rate.of)} "
        parts.append(f"the devices of each {names}node share {_bytes(rate)} ({_bits(rate)})")
    return ", ".join(parts)


def _names(rate: LinkRate, rates: Sequence[LinkRate]) -> str:
    """Return the kinds that a rate is of, if there are other rates."""
    if len(rates) == 1:
        return ""
    more = " and others" if len(rate.of) > _MOST_NAMES else ""
    return f" {', '.join(rate.of[:_MOST_NAMES])}{more}"


def _bytes(rate: LinkRate) -> str:
    return f"{_scaled(rate.bandwidth)}B/s"


def _bits(rate: LinkRate) -> str:
    return f"{_scaled(8 * rate.bandwidth)}b/s"


def _scaled(value: float) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value / 1e3:.4g} k"


def _label(node: Node) -> str:
    return f"{node.device.name}@{node.zone}" if node.zone else node.device.name
