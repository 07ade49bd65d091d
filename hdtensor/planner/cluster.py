"""``Cluster``: the devices at hand, by nodes, and the links between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from hdtensor.errors import PlannerError
from hdtensor.planner.devices import Device


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two devices.

    Attributes:
        bandwidth: Bytes per second, one direction.
        latency: Seconds.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with devices of one kind.

    Attributes:
        device: Their kind.
        num_devices: How many.
        inside: The link between two of them.
        name: A host name, or "".
        zone: Nodes of unlike zones may have slower links.
        uplink: Bytes per second, one direction, that all devices of the node share towards other nodes;
            None if each has the whole bandwidth of its own link, as with one network card a device.
    """

    device: Device
    num_devices: int
    inside: Link
    name: str = ""
    zone: str = ""
    uplink: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes in the order of ranks: those of the first node come first.

    Attributes:
        nodes: The nodes.
        between: The link of one device to a device of another node.
        links: Links of other speed: (one, other) -> link, by names of zones, or of devices.
        first_ranks: The first rank of each node; found, not given.
    """

    nodes: tuple[Node, ...]
    between: Link
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    first_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes or any(node.num_devices < 1 for node in self.nodes):
            raise PlannerError(
                "nodes: a cluster has one node or more, each with one device or more."
            )
        firsts = (0, *accumulate(node.num_devices for node in self.nodes))[:-1]
        object.__setattr__(self, "first_ranks", firsts)

    @property
    def num_ranks(self) -> int:
        """How many devices there are."""
        return sum(node.num_devices for node in self.nodes)

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node, by its number."""
        first = self.first_ranks[node]
        return range(first, first + self.nodes[node].num_devices)

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return bisect_right(self.first_ranks, rank) - 1

    def devices(self) -> Iterator[Device]:
        """Yield each rank's device."""
        for node in self.nodes:
            for _ in range(node.num_devices):
                yield node.device

    def link(self, a: int, b: int) -> Link:
        """Return the link between two ranks."""
        one, other = self.node_of(a), self.node_of(b)
        if one == other:
            return self.nodes[one].inside
        return self.link_between(self.nodes[one], self.nodes[other])

    def link_between(self, one: Node, other: Node) -> Link:
        """Return the link between devices of two nodes."""
        for a, b in ((one.zone, other.zone), (one.device.name, other.device.name)):
            found = self.links.get((a, b)) or self.links.get((b, a))
            if found is not None:
                return found
        return self.between
