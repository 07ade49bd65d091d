"""Lanes: which ranks make one pipeline, and which stage of it, from the places where data moves (App. A.2).

Pure: ranks and names only. ``exchanges`` reads what is needed here from a plan.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from hdtensor.errors import PlanError
from hdtensor.pipeline.visits import Visits
from hdtensor.placements.checks import ranks_text


#: Global ranks.
Ranks: TypeAlias = tuple[int, ...]

#: When data moves: once before the passes, in each micro-batch, or once after them.
Phase: TypeAlias = Literal["pre", "pass", "post"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One place of the program where a tensor gets another spec. Its backward is its mirror image.

    Attributes:
        name: What errors and edges call it, for example "model.layers.8 input".
        src: The rank sets that hold the tensor before, one for each subgroup.
        dst: The rank sets that hold it afterwards.
        transfers: Pairs (sender, receiver) of messages; a rank that keeps something sends it to itself.
            What a set of ``dst`` holds whose ranks no message names, they held before.
        collectives: Rank sets that communicate collectively.
        phase: "pass" for what every micro-batch does; "pre" and "post" (ZeRO gathers, gradient
            synchronization) do not make pipelines.
        since: Name of the exchange that brought the tensor to ``src``, if a later one brought other
            data there; None for the last one.
        starts_stage: Whether a stage begins here even if the ranks stay, as at the turn of a V.
    """

    name: str
    src: tuple[Ranks, ...]
    dst: tuple[Ranks, ...]
    transfers: tuple[tuple[int, int], ...] = ()
    collectives: tuple[Ranks, ...] = ()
    phase: Phase = "pass"
    since: str | None = None
    starts_stage: bool = False


class LaneStage(NamedTuple):
    """One stage of a lane.

    Attributes:
        ranks: Its ranks.
        visit: How many earlier stages of the lane have these ranks.
    """

    ranks: Ranks
    visit: int = 0

    def __str__(self) -> str:
        return ranks_text(self.ranks) + (f"#{self.visit}" if self.visit else "")


class Edge(NamedTuple):
    """Data that goes from one stage of a lane to a later one, and its gradients back.

    Attributes:
        src: Number of the stage that sends forward.
        dst: Number of the stage that receives forward.
        exchanges: Names of the exchanges, in program order.
    """

    src: int
    dst: int
    exchanges: tuple[str, ...] = ()


class Place(NamedTuple):
    """Ranks of a lane that have the same stages, and so the same list of actions.

    Attributes:
        ranks: The ranks.
        stages: Numbers of their stages, ascending.
    """

    ranks: Ranks
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One pipeline: the stages that a micro-batch passes.

    >>> lane = Lane.chain([(0, 1), (2,), (0, 1)])
    >>> print(lane)
    0,1 -> 2 -> 0,1#1
    >>> lane.places
    (Place(ranks=(0, 1), stages=(0, 2)), Place(ranks=(2,), stages=(1,)))

    Attributes:
        stages: In the order in which a micro-batch passes them.
        edges: What goes from stage to stage, sorted; ``src < dst``.
    """

    stages: tuple[LaneStage, ...]
    edges: tuple[Edge, ...] = ()

    @classmethod
    def chain(cls, rank_sets: Iterable[Sequence[int]]) -> Lane:
        """Return the lane whose stages run on these rank sets, one after another."""
        seen: defaultdict[Ranks, int] = defaultdict(int)
        stages = []
        for ranks in map(tuple, rank_sets):
            stages.append(LaneStage(ranks, seen[ranks]))
            seen[ranks] += 1
        edges = tuple(Edge(i, i + 1) for i in range(len(stages) - 1))
        return cls(stages=tuple(stages), edges=edges)

    @property
    def ranks(self) -> Ranks:
        """Every rank of the lane, sorted."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def places(self) -> tuple[Place, ...]:
        """Ranks with the same stages together, in the order of their first stages."""
        stages_of: defaultdict[int, list[int]] = defaultdict(list)
        for number, stage in enumerate(self.stages):
            for rank in stage.ranks:
                stages_of[rank].append(number)
        places: dict[tuple[int, ...], list[int]] = {}
        for rank, numbers in stages_of.items():
            places.setdefault(tuple(numbers), []).append(rank)
        return tuple(Place(tuple(ranks), numbers) for numbers, ranks in sorted(places.items()))

    def place_of(self, rank: int) -> int:
        """Return the number of the place that a rank is in.

        Raises:
            PlanError: If the rank is not in the lane.
        """
        for number, place in enumerate(self.places):
            if rank in place.ranks:
                return number
        raise PlanError(f"rank {rank} is not in the lane {self}; its ranks are {self.ranks}.")

    def __str__(self) -> str:
        chain = " -> ".join(map(str, self.stages))
        skips = [f"{e.src} -> {e.dst}" for e in self.edges if e.dst != e.src + 1]
        return chain + (f" (and stages {', '.join(skips)})" if skips else "")


def find_lanes(exchanges: Iterable[Exchange]) -> tuple[Lane, ...]:
    """Return the lanes of a program, in the order of their first stages (App. A.2, Fig. 21).

    Each rank starts alone. Exchanges are read in program order:

    ============================================  =====================================================
    what                                          what follows
    ============================================  =====================================================
    "pre", "post"                                 nothing
    ranks of one subgroup, or of one collective   one stage
    messages inside the ranks of one stage        nothing, unless a stage is said to start
    messages to ranks that were not yet reached   these are the next stage
    messages back to ranks of an earlier stage    their next visit, a stage of its own
    messages to ranks that are further on         an edge that skips stages
    several subgroups that one exchange joins     one stage each on its two sides, with all of them
    ============================================  =====================================================

    >>> def move(name, src, dst):
    ...     return Exchange(name=name, src=(src,), dst=(dst,), transfers=((src[0], dst[0]),))
    >>> for lane in find_lanes([move("a", (0, 1), (2,)), move("b", (3,), (4,)), move("c", (2,), (0, 1))]):
    ...     print(lane)
    0,1 -> 2 -> 0,1#1
    3 -> 4

    Args:
        exchanges: In program order.

    Raises:
        PlanError: If the stages make a cycle, or a rank is in two lanes; the message draws the
            graph. Or if an exchange names ranks that do not fit together.
    """
    visits = Visits()
    for exchange in exchanges:
        if exchange.phase == "pass":
            visits.pass_(exchange)
    ranks, edges = visits.nodes, visits.edges
    order = _in_order(ranks, edges)
    by_lane = _connected(order, edges)
    lanes = tuple(_lane(nodes, ranks, edges) for nodes in by_lane)
    _check_ranks(lanes, ranks, edges)
    return lanes


#: (node before, node after) -> names of exchanges.
_Edges: TypeAlias = Mapping[tuple[int, int], Sequence[str]]


def _in_order(ranks: Mapping[int, Ranks], edges: _Edges) -> list[int]:
    """Return the nodes so that every edge goes forward; program order where edges leave a choice."""
    waits_for = dict.fromkeys(ranks, 0)
    followers = defaultdict(list)
    for src, dst in edges:
        waits_for[dst] += 1
        followers[src].append(dst)
    ready = [node for node, num in waits_for.items() if num == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for follower in followers[node]:
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                heapq.heappush(ready, follower)
    if len(order) < len(ranks):
        left = set(ranks) - set(order)
        # What only follows the cycle is no part of it.
        while ends := {n for n in left if not left.intersection(followers[n])}:
            left -= ends
        raise PlanError(
            f"the plan is no pipeline: data must pass stage {ranks_text(ranks[min(left)])} before it can get "
            f"there. A collective joins ranks of stages that follow one another; let it run over ranks of one "
            f"stage.\n{_drawing(ranks, edges, left)}"
        )
    return order


def _connected(order: Sequence[int], edges: _Edges) -> list[list[int]]:
    """Return the nodes of each connected part, parts and nodes in order."""
    part = {node: {node} for node in order}
    for src, dst in edges:
        if part[src] is not part[dst]:
            small, large = sorted((part[src], part[dst]), key=len)
            large |= small
            for node in small:
                part[node] = large
    found: dict[int, list[int]] = {}
    for node in order:
        found.setdefault(id(part[node]), []).append(node)
    return list(found.values())


def _lane(nodes: Sequence[int], ranks: Mapping[int, Ranks], edges: _Edges) -> Lane:
    number = {node: i for i, node in enumerate(nodes)}
    chain = Lane.chain(ranks[node] for node in nodes)
    own = sorted(
        Edge(number[src], number[dst], tuple(names))
        for (src, dst), names in edges.items()
        if src in number
    )
    return Lane(stages=chain.stages, edges=tuple(own))


def _check_ranks(lanes: Sequence[Lane], ranks: Mapping[int, Ranks], edges: _Edges) -> None:
    lane_of: dict[int, int] = {}
    for index, lane in enumerate(lanes):
        for rank in lane.ranks:
            first = lane_of.setdefault(rank, index)
            if first != index:
                shared = {n for n, members in ranks.items() if rank in members}
                raise PlanError(
                    f"the plan is no set of pipelines: rank {rank} is in two of them, {lanes[first]} and "
                    f"{lane}. Give it layers of one pipeline, or let data flow between the two.\n"
                    f"{_drawing(ranks, edges, shared)}"
                )


def _drawing(ranks: Mapping[int, Ranks], edges: _Edges, marked: set[int]) -> str:
    """Return the graph, an edge a line; ``<-- here`` marks edges between the marked nodes, and these."""
    visit: dict[int, int] = {}
    for members, nodes in itertools.groupby(
        sorted(ranks, key=lambda n: (ranks[n], n)), key=ranks.__getitem__
    ):
        del members
        visit.update({node: i for i, node in enumerate(nodes)})
    text = {n: str(LaneStage(ranks[n], visit[n])) for n in ranks}
    lines = []
    for (src, dst), names in sorted(edges.items()):
        is_marked = src in marked and dst in marked
        lines.append((f"{text[src]} -> {text[dst]}", ", ".join(names), is_marked))
    inside = {node for pair in edges for node in pair}
    lines += [(text[n], "", n in marked) for n in sorted(ranks) if n in marked or n not in inside]
    return "\n".join(_aligned(lines))


def _aligned(lines: Sequence[tuple[str, str, bool]]) -> Iterator[str]:
    width = max(len(left) for left, _, _ in lines)
    width_names = max(len(names) for _, names, _ in lines)
    for left, names, is_marked in lines:
        text = f"  {left:<{width}}  {names:<{width_names}}"
        yield (text + "  <-- here" if is_marked else text).rstrip()
