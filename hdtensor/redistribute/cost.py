"""What a plan costs, before it runs: bytes by link, seconds, and memory beside the local tensors.

=================  ========================================================================
step               who sends how much
=================  ========================================================================
all-gather         around the ring of the group's ranks: all parts but the next rank's
reduce-scatter     around the ring: all parts but the own one
all-reduce         a reduce-scatter and an all-gather of equal parts
all-to-all         each part directly
point-to-point     each transfer directly
=================  ========================================================================

Messages between all pairs of ranks run at once; each rank sends, and receives, over its network port and
its port inside the node. A ring runs at the pace of its slowest link. Latency is not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, assert_never

from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    ReduceScatter,
)
from hdtensor.redistribute.memory import extra_bytes
from hdtensor.redistribute.steps import (
    PointToPoint,
    RedistributePlan,
    Step,
)
from hdtensor.redistribute.topology import UNIFORM, Topology


#: (sender, receiver, elements).
Hop: TypeAlias = tuple[int, int, int]


class Flow(NamedTuple):
    """All that one rank sends another in one step.

    Attributes:
        src: The sender.
        dst: The receiver.
        num_bytes: Bytes, at least one.
        link: Class of their link, an index into the topology's ``links``.
    """

    src: int
    dst: int
    num_bytes: int
    link: int


class RankBytes(NamedTuple):
    """What one rank sends and receives.

    Attributes:
        sent: Bytes over each class of links.
        received: Bytes over each class of links.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step costs.

    Attributes:
        flows: One for each pair of ranks and direction, sorted.
        seconds: From the start of the step until its slowest rank is done.
    """

    flows: tuple[Flow, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """What a plan costs.

    Attributes:
        links: Names of the link classes.
        steps: One for each step of the plan.
        seconds: From the start until the slowest rank is done. A step waits for all of its ranks;
            steps of different subgroups run at once.
        extra_bytes: Rank -> most bytes that ``execute`` holds at once beside the rank's old local
            tensor: the new local tensors and the buffers of its worst step.
    """

    links: tuple[str, ...]
    steps: tuple[StepCost, ...]
    seconds: float
    extra_bytes: Mapping[int, int]

    @property
    def link_bytes(self) -> tuple[int, ...]:
        """Bytes that all ranks together send over each class of links."""
        totals = [0] * len(self.links)
        for flow in self.flows():
            totals[flow.link] += flow.num_bytes
        return tuple(totals)

    @property
    def peak_bytes(self) -> int:
        """The largest of ``extra_bytes``."""
        return max(self.extra_bytes.values(), default=0)

    def flows(self) -> Iterator[Flow]:
        """Yield the flows of all steps, step by step."""
        for step in self.steps:
            yield from step.flows

    def by_rank(self) -> dict[int, RankBytes]:
        """Return what each rank of the plan sends and receives, by class of links."""
        sent: Counter[tuple[int, int]] = Counter()
        received: Counter[tuple[int, int]] = Counter()
        for src, dst, num_bytes, link in self.flows():
            sent[src, link] += num_bytes
            received[dst, link] += num_bytes
        classes = range(len(self.links))
        return {
            rank: RankBytes(
                tuple(sent[rank, link] for link in classes),
                tuple(received[rank, link] for link in classes),
            )
            for rank in sorted(self.extra_bytes)
        }


def cost(plan: RedistributePlan, *, itemsize: int, topology: Topology = UNIFORM) -> PlanCost:
    """Return what a plan costs. Pure: any process can ask for any number of ranks.

    >>> from hdtensor.redistribute.resolve import resolve
    >>> found = cost(resolve("P / 0,1:S1 2:R", "R / 0,1:S1 2:R", (4, 4)), itemsize=4)
    >>> found.link_bytes, found.by_rank()[2].sent, found.extra_bytes[2]
    ((128,), (64,), 128)

    Args:
        plan: What ``resolve`` returned.
        itemsize: Bytes per element.
        topology: Links between the ranks.

    Raises:
        TopologyError: If the topology does not know a rank that sends or receives.
    """
    steps = tuple(_step_cost(step, itemsize, topology) for step in plan.steps)
    ready: dict[int, float] = {}
    for step, found in zip(plan.steps, steps, strict=True):
        ranks = {*step.src.spec.ranks, *step.dst.spec.ranks}
        end = max(ready.get(rank, 0.0) for rank in ranks) + found.seconds
        ready.update(dict.fromkeys(ranks, end))
    return PlanCost(
        links=topology.links,
        steps=steps,
        seconds=max(ready.values(), default=0.0),
        extra_bytes={
            rank: extra_bytes(plan, rank, itemsize)
            for rank in sorted({*plan.src.ranks, *plan.dst.ranks})
        },
    )


def _step_cost(step: Step, itemsize: int, topology: Topology) -> StepCost:
    pairs: Counter[tuple[int, int]] = Counter()
    busy: defaultdict[tuple[int, str, bool], float] = defaultdict(float)
    for hops, is_ring in _traffic(step):
        times = {(src, dst): topology.seconds_per_byte(src, dst) for src, dst, _ in hops}
        slowest = max((max(both) for both in times.values()), default=0.0)
        for src, dst, num in hops:
            num_bytes = num * itemsize
            pairs[src, dst] += num_bytes
            out, into = (slowest, slowest) if is_ring else times[src, dst]
            is_network = topology.link(src, dst) == topology.network
            busy[src, "out", is_network] += num_bytes * out
            busy[dst, "in", is_network] += num_bytes * into
    flows = tuple(
        Flow(src, dst, num_bytes, topology.link(src, dst))
        for (src, dst), num_bytes in sorted(pairs.items())
    )
    return StepCost(flows=flows, seconds=max(busy.values(), default=0.0))


def _traffic(step: Step) -> Iterator[tuple[list[Hop], bool]]:
    """Yield hops that start together, and whether they are a ring, which has one pace."""
    if isinstance(step, PointToPoint):
        yield (
            [(t.src, t.dst, n) for t in step.transfers if t.src != t.dst and (n := t.box.numel)],
            False,
        )
        return
    for collective in step.collectives:
        hops = [hop for hop in _hops(collective) if hop[2]]
        yield hops, not isinstance(collective, AllToAll)


def _hops(collective: Collective) -> list[Hop]:
    match collective:
        case AllReduce(ranks=ranks, num_cells=total):
            num, longer = divmod(total, len(ranks))
            parts = [num + (i < longer) for i in range(len(ranks))]
            here = _ring(ranks, [total - part for part in parts])
            there = _ring(ranks, [total - part for part in [*parts[1:], parts[0]]])
            return here + there
        case ReduceScatter(ranks=ranks, cells=cells, num_cells=total):
            own = [sum(cell.numel for cell in part) for part in cells]
            return _ring(ranks, [total - num for num in own])
        case AllGather(ranks=ranks, cells=cells, num_cells=total):
            own = [sum(cell.numel for cell in part) for part in cells]
            return _ring(ranks, [total - num for num in [*own[1:], own[0]]])
        case AllToAll():
            return [
                (src, dst, cell.numel) for src, dst, cell in collective.messages() if src != dst
            ]
        case _:
            assert_never(collective)


def _ring(ranks: tuple[int, ...], sent: list[int]) -> list[Hop]:
    """Return the hops by which each rank sends its number of elements to the next."""
    following = (*ranks[1:], ranks[0])
    return [(a, b, num) for a, b, num in zip(ranks, following, sent, strict=True) if a != b]
