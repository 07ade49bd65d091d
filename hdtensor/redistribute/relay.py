"""``relay``: a batch of moves whose cells may pass through neighbours, so that no NIC idles.

The paper's scheme (Sec. 5.3, 7) sends a cell straight from an owner to each needer. Where one rank holds
what another node lacks, one NIC works and those beside it idle (Table 4: rank 15). Here a cell may be cut,
and its parts relayed over the fast links at either end; a cell that several ranks of a node lack crosses
the network once::

    straight   15 ========================> 30          one NIC out, one NIC in
    relayed    15 -> 8  ----------> 24 -> 30            eight out, seven in, each an eighth or seventh
               15 -> 9  ----------> 25 -> 30
               15 -----------------------> 30           --> fast link, ----> network

Time is that of the busiest direction of a NIC or of a rank's fast links, as if hops overlapped perfectly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdtensor.redistribute.balance import Balance
from hdtensor.redistribute.fuse import Move, table_of
from hdtensor.redistribute.paths import Needs, Paths, gather_needs
from hdtensor.redistribute.pour import Route, RouteWriter
from hdtensor.redistribute.topology import UNIFORM, Topology
from hdtensor.redistribute.transfers import Transfer


#: Needs of this share of all bytes, the smallest ones, are not worth a search: norms, biases, scalars.
_SMALL = 1e-3


class Phases(NamedTuple):
    """The hops of a tensor's routes, to be carried out one phase after the other.

    A hop that several routes share (the same cell over the same first ranks) stands once.

    Attributes:
        gather: Inside the owner's node, to the rank whose NIC sends.
        cross: Between nodes; inside a node, from an owner to the first of several needers.
        spread: Inside the needer's node.
    """

    gather: tuple[Transfer, ...]
    cross: tuple[Transfer, ...]
    spread: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayScheme:
    """Who sends what to whom, through whom, for a batch of tensors.

    Attributes:
        topology: The links that the routes were chosen by.
        routes: Per tensor, in the order given.
        sent: (rank, class of links) -> bytes, relayed ones too.
        received: (rank, class of links) -> bytes.
        bound_seconds: No scheme of such routes has a smaller makespan.
    """

    topology: Topology
    routes: tuple[tuple[Route, ...], ...]
    sent: Mapping[tuple[int, int], int]
    received: Mapping[tuple[int, int], int]
    bound_seconds: float

    @property
    def seconds(self) -> float:
        """Makespan: the time of the busiest direction of a NIC or of a rank's fast links."""
        return self.topology.makespan(self.sent, self.received)

    @property
    def num_bytes(self) -> int:
        """Bytes that travel between ranks, counted at each hop."""
        return sum(self.sent.values())

    def phases(self, index: int) -> Phases:
        """Return the hops of one tensor in the order in which they can be carried out."""
        node = self.topology.node
        found: tuple[dict[tuple[int, ...], Transfer], ...] = ({}, {}, {})
        for box, hops in self.routes[index]:
            crossing = [k for k in range(len(hops) - 1) if node(hops[k]) != node(hops[k + 1])]
            first = 1 - crossing[0] if crossing else 4 - len(hops)
            for k in range(len(hops) - 1):
                key = (*box.start, *box.stop, *hops[: k + 2])
                found[first + k].setdefault(key, Transfer(box, hops[k], hops[k + 1]))
        return Phases(*(tuple(hops.values()) for hops in found))


def relay(
    moves: Sequence[Move], *, topology: Topology = UNIFORM, exclude_ranks: Collection[int] = ()
) -> RelayScheme:
    """Route all cells of a batch so that the busiest link is done as early as possible.

    >>> whole = [Box((0,), (64,))]
    >>> topology = Topology.of_nodes(2, 4)
    >>> scheme = relay([Move({0: whole}, {2: whole})], topology=topology)
    >>> for route in scheme.routes[0]:
    ...     print(route.box.start[0], route.box.stop[0], route.hops)
    0 32 (0, 2)
    32 64 (0, 1, 3, 2)

    Args:
        moves: Tensors in registration order.
        topology: Links between the ranks. Every live rank of a node may relay, whether it has a part
            of any tensor or not.
        exclude_ranks: Ranks that neither hold nor want nor relay anything, such as dead ones.

    Returns:
        The scheme, the same on every rank. Cells are cut along their longest dim.

    Raises:
        RedistributeError: If a cell is wanted that no remaining rank holds; the message names the
            tensor and the cells.
        TopologyError: If a rank is not in the topology.
    """
    excluded = frozenset(exclude_ranks)
    tables = [table_of(move, excluded) for move in moves]
    needs = gather_needs([table.rows for table in tables], [m.itemsize for m in moves], topology)
    small, large = _by_size(needs)
    paths = Paths(topology, excluded)
    straight = [paths.straight(need) for need in small]
    ways = [paths.ways(need) for need in large]
    balance = Balance(paths.busy, [way.demand for way in ways])
    balance.solve()
    writer = RouteWriter(topology, len(moves), balance.makespan)
    for i, table in enumerate(tables):
        for row in table.rows:
            writer.keep(i, row)
    for path in straight:
        writer.write_straight(path)
    for way in ways:
        writer.write(way)
    return RelayScheme(
        topology=topology,
        routes=tuple(map(tuple, writer.routes)),
        sent=dict(writer.sent),
        received=dict(writer.received),
        bound_seconds=balance.bound,
    )


def _by_size(needs: Sequence[Needs]) -> tuple[list[Needs], list[Needs]]:
    """Return the needs that are small even together, and the others, each in its order."""
    room = _SMALL * sum(need.num_bytes for need in needs)
    small: set[int] = set()
    for i in sorted(range(len(needs)), key=lambda i: needs[i].num_bytes):
        room -= needs[i].num_bytes
        if room < 0:
            break
        small.add(i)
    return (
        [need for i, need in enumerate(needs) if i in small],
        [need for i, need in enumerate(needs) if i not in small],
    )
