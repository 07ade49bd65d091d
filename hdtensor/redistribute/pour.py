"""Cuts cells into parts whose sizes follow a fluid answer, and writes down their routes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hdtensor.placements import Box
from hdtensor.redistribute.flows import Spread
from hdtensor.redistribute.paths import Part, Straight, Ways
from hdtensor.redistribute.topology import Topology
from hdtensor.redistribute.transfers import Row, Transfer


#: Parts that take less than this share of the makespan on a network link are not cut off.
_GRAIN = 1e-3


class Route(NamedTuple):
    """A cell, or a part of one, on its way to one needer.

    Routes of one box that begin with the same ranks share those hops: the box is sent once.

    Attributes:
        box: A true box of the tensor.
        hops: The ranks that it passes: the owner, up to two relays, the needer. One rank alone keeps
            what it holds.
    """

    box: Box
    hops: tuple[int, ...]


class Phases(NamedTuple):
    """The hops of some routes, to be carried out one phase after the other.

    Attributes:
        gather: The first hop of a route, if it is inside a node.
        cross: Hops between nodes.
        spread: Later hops inside a node.
    """

    gather: tuple[Transfer, ...]
    cross: tuple[Transfer, ...]
    spread: tuple[Transfer, ...]


def phases_of(routes: Iterable[Route], topology: Topology) -> Phases:
    """Return the hops of one tensor's routes in the order in which they can be carried out.

    A hop that several routes share (the same box over the same first ranks) stands once.
    """
    found: tuple[dict[tuple[int, ...], Transfer], ...] = ({}, {}, {})
    for box, hops in routes:
        for k, (src, dst) in enumerate(itertools.pairwise(hops)):
            phase = 1 if topology.node(src) != topology.node(dst) else 2 if k else 0
            key = (*box.start, *box.stop, *hops[: k + 2])
            found[phase].setdefault(key, Transfer(box, src, dst))
    return Phases(*(tuple(hops.values()) for hops in found))


class Pour:
    """Gives out the bytes of a flow, option after option."""

    __slots__ = ("_at", "_grain", "_left", "_options")

    def __init__(self, flow: Sequence[float], grain: float) -> None:
        used = [i for i, num_bytes in enumerate(flow) if num_bytes > grain]
        if not used:
            used = [max(range(len(flow)), key=flow.__getitem__)]
        self._options = used
        self._left = [flow[i] for i in used]
        self._grain = grain
        self._at = 0

    def room(self) -> float:
        """Return how much the current option still takes; the last one takes all."""
        while self._at < len(self._left) - 1 and self._left[self._at] <= self._grain:
            self._left[self._at + 1] += self._left[self._at]
            self._at += 1
        return math.inf if self._at == len(self._left) - 1 else self._left[self._at]

    def take(self, num_bytes: float) -> int:
        """Take from the current option; return which it is."""
        self._left[self._at] -= num_bytes
        return self._options[self._at]


class RouteWriter:
    """Collects the routes of a batch and counts their hops."""

    def __init__(self, topology: Topology, num_tensors: int, makespan: float) -> None:
        """Start without routes.

        Args:
            topology: Links between the ranks.
            num_tensors: Tensors of the batch.
            makespan: Seconds of the busiest link; parts much smaller than that are not cut off.
        """
        self.routes: list[list[Route]] = [[] for _ in range(num_tensors)]
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self._topology = topology
        self._grain = _GRAIN * makespan * topology.bytes_per_s[-1]
        self._pours: dict[int, Pour] = {}
        self._first_hops: set[tuple[int, Box, int, int]] = set()

    def keep(self, index: int, row: Row) -> None:
        """Write down who has a cell of a tensor already."""
        held = frozenset(row.owners)
        self.routes[index] += [
            Route(row.cell, (needer,)) for needer in row.needers if needer in held
        ]

    def write_straight(self, path: Straight) -> None:
        """Write down whole cells."""
        for part in path.need.parts:
            for prefix, needers in path.prefixes:
                self._hand(part, prefix, needers)

    def write(self, ways: Ways) -> None:
        """Cut cells as the demand flows."""
        sources = (Pour(ways.demand.flow, self._grain),)
        for part in ways.need.parts:
            for (k,), piece in self._split(part, sources):
                for leg in ways.source(k):
                    pours = tuple(map(self._pour, leg.spreads))
                    for taken, cut in self._split(piece, pours):
                        tags = [s.tags[o] for s, o in zip(leg.spreads, taken, strict=True)]
                        self._hand(cut, tuple(rank for tag in tags for rank in tag), leg.needers)

    def _pour(self, spread: Spread) -> Pour:
        pour = self._pours.get(id(spread))
        if pour is None:
            pour = self._pours[id(spread)] = Pour(spread.flow, self._grain)
        return pour

    def _split(self, part: Part, pours: Sequence[Pour]) -> Sequence[tuple[tuple[int, ...], Part]]:
        """Cut a cell along its longest dim where one of the flows changes to its next option."""
        tensor, cell, num_bytes = part
        length = 1
        if min([pour.room() for pour in pours]) < num_bytes:
            length = max(cell.shape, default=1)
        if length == 1:
            return [(tuple([pour.take(num_bytes) for pour in pours]), part)]
        row_bytes = num_bytes // length
        least = math.ceil(self._grain / row_bytes)
        cuts = []
        done = 0
        while done < length:
            room = min([pour.room() for pour in pours])
            left = length - done
            num_rows = left
            if room < left * row_bytes:
                num_rows = min(left, max(1, round(room / row_bytes)))
            if left - num_rows < least:
                num_rows = left
            taken = tuple([pour.take(num_rows * row_bytes) for pour in pours])
            rows = _rows(cell, done, done + num_rows)
            cuts.append((taken, Part(tensor, rows, num_rows * row_bytes)))
            done += num_rows
        return cuts

    def _hand(self, part: Part, prefix: tuple[int, ...], needers: Sequence[int]) -> None:
        tensor, cell, num_bytes = part
        routes = self.routes[tensor]
        if len(prefix) > 1:
            self._first_hop(part, prefix[0], prefix[1])
            for src, dst in itertools.pairwise(prefix[1:]):
                self._count(src, dst, num_bytes)
        last = prefix[-1]
        for needer in needers:
            if needer == last:
                routes.append(Route(cell, prefix))
                continue
            routes.append(Route(cell, (*prefix, needer)))
            if len(prefix) > 1:
                self._count(last, needer, num_bytes)
            else:
                self._first_hop(part, last, needer)

    def _first_hop(self, part: Part, owner: int, dst: int) -> None:
        # Later hops differ in their ranks, but parts for several nodes may leave by one neighbour.
        key = (part.tensor, part.cell, owner, dst)
        if key not in self._first_hops:
            self._first_hops.add(key)
            self._count(owner, dst, part.num_bytes)

    def _count(self, src: int, dst: int, num_bytes: int) -> None:
        link = self._topology.link(src, dst)
        self.sent[src, link] += num_bytes
        self.received[dst, link] += num_bytes


def _rows(cell: Box, first: int, last: int) -> Box:
    """Return indices ``first`` to ``last`` of a cell's longest dim, counted from its start."""
    dim = cell.shape.index(max(cell.shape))
    at = cell.start[dim]
    return Box(
        (*cell.start[:dim], at + first, *cell.start[dim + 1 :]),
        (*cell.stop[:dim], at + last, *cell.stop[dim + 1 :]),
    )
