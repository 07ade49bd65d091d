"""Small random clusters, costs by tables, and every strategy that they can run."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.collective_times import all_reduce_seconds, send_seconds
from hdtensor.planner.costs import CostModel, StageMemory, UnitSeconds
from hdtensor.planner.devices import Device
from hdtensor.planner.place import LaneDraft, place
from hdtensor.planner.shapes import fits
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import Workload


def device(name, memory_bytes=1e12):
    return Device(
        name=name,
        memory_bytes=int(memory_bytes),
        flops={"float32": 1.0},
        memory_bandwidth=1.0,
        link_bandwidth=1.0,
        source="made up",
    )


@dataclass(frozen=True)
class TableCosts(CostModel):
    """Seconds of a layer by device, divided by TP with some loss; bytes of one layer are 1."""

    layer: dict = field(default_factory=lambda: {"a": 1.0})
    loss: float = 0.1
    forward: float = 1 / 3
    first: float = 0.3
    last: float = 0.5
    fixed: float = 0.2
    num_bytes: float = 0.5
    num_bytes_sent: float | None = None  # of a message; default as many as a layer has
    memory_per_layer: float = 1.0
    held_per_layer: float = 0.2
    is_zero: bool = False

    def seconds(self, unit, group, mbs):
        share = {"layer": 1.0, "embedding": self.first, "head": self.last}[unit]
        each = self.layer[group.device.name] * share * (mbs + self.fixed)
        total = each / group.tp * (1 + self.loss * (group.tp - 1))
        return UnitSeconds(self.forward * total, (1 - self.forward) * total)

    def message(self, sender, receiver, link, mbs):
        sent = self.num_bytes if self.num_bytes_sent is None else self.num_bytes_sent
        return send_seconds(sent * mbs, link)

    def memory(self, group, layers, mbs):
        count = (layers.num_layers + layers.is_first + layers.is_last) / group.tp
        parameters = self.memory_per_layer * count
        return StageMemory(
            parameters, parameters, 2 * parameters, self.held_per_layer * count * mbs, 0.1
        )

    def synchronize(self, shares, layers, link):
        count = layers.num_layers + layers.is_first + layers.is_last
        return all_reduce_seconds(
            self.num_bytes * count / min(s.tp for s in shares), len(shares), link
        )

    def update(self, group, layers, num_copies):
        count = layers.num_layers + layers.is_first + layers.is_last
        return 0.01 * count / group.tp / (num_copies if self.is_zero else 1)


def random_space(seed, *, num_layers=None, batch=None, schedule="1F1B"):
    """Return a space of about four devices of two kinds."""
    rng = random.Random(seed)
    zero = rng.choice([0, 1])
    memory = rng.choice([1e3, 1e3, rng.uniform(12, 30)])
    fast, slow = device("a", 1000 * memory), device("b", 1000 * memory * rng.uniform(0.5, 1.5))
    sizes = rng.choice([(2, 2), (2, 1), (3, 1), (1, 1, 2), (4,), (2, 2)])
    inside, between = Link(rng.uniform(5, 50), 1e-3), Link(rng.uniform(2, 20), 2e-3)
    nodes = [
        Node(device=rng.choice([fast, slow]), num_devices=size, inside=inside) for size in sizes
    ]
    costs = TableCosts(
        layer={"a": 1.0, "b": rng.uniform(1, 5)},
        loss=rng.uniform(0, 0.4),
        forward=rng.choice([1 / 3, 0.45, 0.25]),
        first=rng.uniform(0, 0.5),
        last=rng.uniform(0, 1),
        fixed=rng.uniform(0, 1),
        num_bytes=rng.uniform(0, 1),
        memory_per_layer=1000.0,
        held_per_layer=rng.uniform(0, 1000),
        is_zero=bool(zero),
    )
    workload = Workload(
        batch=batch or rng.choice([2, 4, 5, 6]),
        context=1,
        precision="float32",
        zero=zero,
        schedule=schedule,
    )
    options = SearchOptions(tp_degrees=(1, 2, 4), mbs=(1, 2), max_stages=rng.choice([2, 3, 4]))
    layers = num_layers or rng.randint(3, 5)
    return make_space(
        Cluster(nodes=tuple(nodes), between=between), costs, workload, layers, options
    )


def compositions(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def lane_drafts(space):
    """Return every lane but for its number of micro-batches."""
    shapes, todo = [], [()]
    while todo:
        shape = todo.pop()
        if shape:
            shapes.append(shape)
        if len(shape) < min(space.options.max_stages, space.num_layers):
            todo += [(*shape, k) for k in range(len(space.kinds)) if fits(space, (*shape, k))]
    return [
        LaneDraft(shape, layers, mbs)
        for shape in shapes
        for layers in compositions(space.num_layers, len(shape))
        for mbs in space.prices.mbs
    ]


def all_strategies(space):
    """Yield every strategy of a space, one placement of each."""
    drafts = lane_drafts(space)
    todo = [((), 0)]
    while todo:
        lanes, start = todo.pop()
        kinds = tuple(k for lane in lanes for k in lane.kinds)
        if lanes:
            left = space.workload.batch - sum(lane.mbs for lane in lanes)
            for counts in itertools.product(*(range(left // lane.mbs + 1) for lane in lanes)):
                if sum(c * lane.mbs for c, lane in zip(counts, lanes, strict=True)) == left:
                    strategy = place(
                        space,
                        [
                            lane._replace(num_microbatches=1 + c)
                            for lane, c in zip(lanes, counts, strict=True)
                        ],
                    )
                    if strategy is not None:
                        yield strategy
        for index in range(start, len(drafts)):
            if fits(space, kinds + drafts[index].kinds):
                todo.append(((*lanes, drafts[index]), index))


def lanes_on_nodes(space):
    """Return every lane but for its number of micro-batches, with the node of each stage; nodes in the cluster's order."""
    sizes = [node.num_devices for node in space.cluster.nodes]
    home = {node: p for p, pool in enumerate(space.pools) for node in pool.nodes}
    places = [
        (k, node)
        for k, kind in enumerate(space.kinds)
        for node, pool in home.items()
        if pool == kind.pool
    ]
    found, todo = [], [()]
    while todo:
        stages = todo.pop()
        taken = [
            sum(space.kinds[k].size for k, n in stages if n == node) for node in range(len(sizes))
        ]
        if any(have > size for have, size in zip(taken, sizes, strict=True)):
            continue
        if stages:
            kinds, nodes = zip(*stages, strict=True)
            for layers in compositions(space.num_layers, len(stages)):
                found += [(LaneDraft(kinds, layers, mbs), nodes, taken) for mbs in space.prices.mbs]
        if len(stages) < min(space.options.max_stages, space.num_layers):
            todo += [(*stages, place) for place in places]
    return found


def all_placed_strategies(space):
    """Yield every strategy of a space on every choice of nodes; devices of a node are alike."""
    lanes, batch = lanes_on_nodes(space), space.workload.batch
    todo = [((), 0, [node.num_devices for node in space.cluster.nodes], batch)]
    while todo:
        chosen, start, free, left = todo.pop()
        if left == 0:
            yield strategy_on_nodes(space, chosen)
            continue
        for index in range(start, len(lanes)):
            draft, nodes, taken = lanes[index]
            rest = [have - take for have, take in zip(free, taken, strict=True)]
            if min(rest) >= 0:
                for count in range(1, left // draft.mbs + 1):
                    lane = (draft._replace(num_microbatches=count), nodes)
                    todo.append(((*chosen, lane), index, rest, left - count * draft.mbs))


def strategy_on_nodes(space, lanes):
    """Return lanes (draft, nodes) with ranks."""
    free = [list(space.cluster.ranks_of(node)) for node in range(len(space.cluster.nodes))]
    choices = []
    for draft, nodes in lanes:
        stages = []
        for k, num_layers, node in zip(draft.kinds, draft.layers, nodes, strict=True):
            group, size = space.kinds[k].group, space.kinds[k].size
            ranks, free[node] = tuple(free[node][:size]), free[node][size:]
            stages.append(StageChoice(ranks, num_layers, group.tp, group.cp))
        choices.append(LaneChoice(tuple(stages), draft.num_microbatches, draft.mbs))
    return Strategy(tuple(choices))


def space_of_nodes(seed):
    """Return a space of up to six devices on one to four nodes, whose synchronization is short or long beside the passes."""
    rng = random.Random(seed)
    devices = [device("a"), device("b")]
    sizes = rng.choice([(2, 2), (1, 1, 1, 1), (4,), (2, 1, 1), (3, 2), (1,) * 6, (6,), (4, 2)])
    nodes = [
        Node(
            device=rng.choice(devices),
            num_devices=size,
            inside=Link(rng.choice([0.5, 5, 100.0]) * rng.uniform(0.5, 2), rng.choice([0, 0.05])),
        )
        for size in sizes
    ]
    between = Link(rng.choice([0.2, 2, 20.0]) * rng.uniform(0.5, 2), rng.choice([0, 0.1]))
    zero, few = rng.choice([0, 1]), sum(sizes) < 5
    costs = TableCosts(
        layer={"a": 1.0, "b": rng.uniform(1, 5)},
        loss=rng.choice([0.0, rng.uniform(0, 0.6)]),
        forward=rng.choice([1 / 3, 0.45, 0.6]),
        first=rng.choice([0.0, 0.5]),
        last=rng.choice([0.0, 1.0]),
        fixed=rng.choice([0.0, 1.0]),
        num_bytes=rng.choice([0.0, 0.03, 0.3, 3.0]),
        num_bytes_sent=rng.choice([0.0, 0.1]),
        memory_per_layer=1000.0,
        held_per_layer=100.0,
        is_zero=bool(zero),
    )
    workload = Workload(
        batch=rng.randint(3, 7) if few else rng.randint(3, 4),
        context=1,
        precision="float32",
        zero=zero,
    )
    options = SearchOptions(
        tp_degrees=rng.choice([(1, 2, 4), (1, 2), (1,)]),
        mbs=rng.choice([(1,), (1, 2)]),
        max_stages=3 if few else 2,
        min_lanes=rng.choice([1, 1, 2, 3]),
    )
    cluster = Cluster(nodes=tuple(nodes), between=between)
    return make_space(cluster, costs, workload, rng.randint(2, 4 if few else 2), options)
