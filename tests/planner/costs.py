"""Costs by a table, and small clusters, for tests that are worked out by hand."""

from dataclasses import dataclass, field

from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.costs import CostModel, RuntimeTraits, StageMemory, UnitSeconds
from hdtensor.planner.devices import Device
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy


FAST, SLOW = (
    Device(
        name=name,
        memory_bytes=1000,
        flops={"float32": rate},
        memory_bandwidth=rate,
        link_bandwidth=100.0,
        source="made up",
    )
    for name, rate in (("fast", 2.0), ("slow", 1.0))
)


@dataclass(frozen=True)
class TableCosts(CostModel):
    """Layers of 1 s forward and 2 s backward on a device of rate 1; what else a test says."""

    message_seconds: float = 0.0
    sync_seconds: float = 0.0
    update_seconds: float = 0.0
    head: float = 0.0
    traits: RuntimeTraits = field(default_factory=RuntimeTraits)

    def seconds(self, unit, group, mbs):
        if unit == "layer":
            each = mbs / (group.device.flops["float32"] * group.tp)
            return UnitSeconds(each, 2 * each)
        return UnitSeconds(self.head, 2 * self.head) if unit == "head" else UnitSeconds(0.0, 0.0)

    def message(self, sender, receiver, link, mbs):
        return self.message_seconds

    def memory(self, group, layers, mbs):
        n = layers.num_layers / group.tp
        return StageMemory(10 * n, 10 * n, 40 * n, 5 * n * mbs, 7.0)

    def synchronize(self, shares, layers, link):
        return self.sync_seconds * layers.num_layers

    def update(self, group, layers, num_copies):
        return self.update_seconds * layers.num_layers

    def runtime(self):
        return self.traits


def cluster(*kinds, uplink=None):
    """Return a cluster of nodes (device, number of devices)."""
    nodes = tuple(
        Node(device=device, num_devices=n, inside=Link(100.0, 0.0), uplink=uplink)
        for device, n in kinds
    )
    return Cluster(nodes=nodes, between=Link(10.0, 1.0))


def lane(*stages, count, mbs=1):
    """Return a lane of stages (ranks, number of layers)."""
    choices = tuple(StageChoice(tuple(ranks), layers, len(ranks)) for ranks, layers in stages)
    return LaneChoice(choices, count, mbs)


def strategy(*lanes):
    return Strategy(tuple(lanes))
