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

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hdtensor.redistribute.balance import Balance
from hdtensor.redistribute.fuse import Move, Scheme, table_of
from hdtensor.redistribute.paths import Needs, Paths, gather_needs
from hdtensor.redistribute.pour import Phases, Route, RouteWriter, phases_of
from hdtensor.redistribute.topology import UNIFORM, Topology


#: Needs of this share of all bytes, the smallest ones, are not worth a search: norms, biases, scalars.
_SMALL = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayScheme(Scheme):
    """Who sends what to whom, through whom, for a batch of tensors.

    Attributes:
        routes: Per tensor, in the order given.
        bound_seconds: No scheme of such routes has a smaller makespan.
    """

    routes: tuple[tuple[Route, ...], ...]
    bound_seconds: float

    def phases(self, index: int) -> Phases:
        """Return the hops of one tensor in the order in which they can be carried out."""
        return phases_of(self.routes[index], self.topology)


def relay(
    moves: Sequence[Move], *, topology: Topology = UNIFORM, exclude_ranks: Collection[int] = ()
) -> RelayScheme:
    """Route all cells of a batch so that the busiest link is done as early as possible.

    >>> from hdtensor.placements import Box
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
