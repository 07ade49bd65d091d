"""By which links a cell can get from its owners to a node's needers, with up to one relay at each end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hdtensor.placements import Box
from hdtensor.redistribute.flows import Demand, Option, Pool, Spread
from hdtensor.redistribute.topology import Topology
from hdtensor.redistribute.transfers import Row


#: Directions of a rank's links, in the order of ``busy``: link ``4 * rank + direction``.
NIC_OUT, NIC_IN, FAST_OUT, FAST_IN = range(4)
#: Owners in other nodes that may send to several needers one by one; all may send once to their node.
_MAX_LISTED = 4


class Part(NamedTuple):
    """A cell of a tensor.

    Attributes:
        tensor: Its place in the batch.
        cell: The cell.
        num_bytes: Its size.
    """

    tensor: int
    cell: Box
    num_bytes: int


@dataclass(slots=True)
class Needs:
    """Cells of the same owners that the same ranks of one node lack.

    Attributes:
        owners: Who holds them.
        needers: The ranks, of one node, none of them an owner.
        parts: The cells.
        num_bytes: Their size together.
    """

    owners: tuple[int, ...]
    needers: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)
    num_bytes: int = 0


class Leg(NamedTuple):
    """A part of a source: bytes that take an option of each spread, and then go to the needers.

    Attributes:
        spreads: Their tags, one after the other, are the ranks that the bytes pass.
        needers: Who then gets them from the last of these ranks.
    """

    spreads: tuple[Spread, ...]
    needers: tuple[int, ...]


class Ways(NamedTuple):
    """How needs can be served.

    Attributes:
        need: The needs.
        demand: Its sources, for the search.
        legs: Per source that does not go by way of the pool.
    """

    need: Needs
    demand: Demand
    legs: tuple[tuple[Leg, ...], ...]

    def source(self, place: int) -> tuple[Leg, ...]:
        """Return the legs of one of the demand's sources."""
        if place < len(self.legs):
            return self.legs[place]
        return (Leg(self.demand.sources[place], self.need.needers),)


class Straight(NamedTuple):
    """A way without a search.

    Attributes:
        need: The needs.
        prefixes: The ranks that the cells pass, and who then gets them from the last of these.
    """

    need: Needs
    prefixes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def gather_needs(
    tables: Sequence[tuple[Row, ...]], itemsizes: Sequence[int], topology: Topology
) -> list[Needs]:
    """Return what the ranks of each node lack, over all tensors."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Needs] = {}
    known: dict[int, list[tuple[Box, int, list[Needs]]]] = {}
    for index, (rows, itemsize) in enumerate(zip(tables, itemsizes, strict=True)):
        of_rows = known.get(id(rows))
        if of_rows is None:
            of_rows = known[id(rows)] = []
            for row in rows:
                keys = [(row.owners, needers) for needers in _lacking_by_node(row, topology)]
                needs = [found.setdefault(key, Needs(*key)) for key in keys]
                of_rows.append((row.cell, row.cell.numel, needs))
        for cell, numel, needs in of_rows:
            part = Part(index, cell, numel * itemsize)
            for need in needs:
                need.parts.append(part)
                need.num_bytes += part.num_bytes
    return [need for need in found.values() if need.num_bytes]


def _lacking_by_node(row: Row, topology: Topology) -> Iterable[tuple[int, ...]]:
    held = frozenset(row.owners)
    by_node: dict[int, list[int]] = {}
    for needer in row.needers:
        if needer not in held:
            by_node.setdefault(topology.node(needer), []).append(needer)
    return map(tuple, by_node.values())


class Paths:
    """Turns needs into demands over shared spreads.

    ========  =========================  ==========================  ==================================
    source    spread                     option (its tag)            links
    ========  =========================  ==========================  ==================================
    direct    one per needer             owner                       its fast out, needer's fast in; or
                                                                     its NIC, needer's NIC
    handed    one per owner in the node  first receiver              and its fast out to the others
    remote    leave: one per owner       rank whose NIC sends        owner's fast out, its fast in, NIC
    \\         enter: one per needers     rank whose NIC receives     NIC, its fast out to the needers
    ========  =========================  ==========================  ==================================
    """

    def __init__(self, topology: Topology, excluded: frozenset[int]) -> None:
        """Start with idle links."""
        self._topology = topology
        self._excluded = excluded
        self.busy: list[float] = [0.0] * (4 * len(topology.nodes))
        self._spreads: dict[tuple[object, ...], Spread] = {}
        self._pools: dict[tuple[int, ...], Pool] = {}
        self._inside: dict[tuple[int, int], Option] = {}

    def ways(self, need: Needs) -> Ways:
        """Return all ways of serving the needs."""
        owners, needers = need.owners, need.needers
        self._reach(owners, needers)
        near = self._near(need)
        legs: list[tuple[Leg, ...]] = []
        far = tuple(owner for owner in owners if owner not in near)
        alone = (*near, *far[:_MAX_LISTED]) if len(needers) > 1 else near
        if alone:
            legs.append(tuple(Leg((self._direct(alone, rank),), (rank,)) for rank in needers))
        if near and (len(needers) > 1 or self._topology.inside):  # a detour may use faster links
            legs += [(Leg((self._handed(owner, needers),), needers),) for owner in near]
        demand = Demand(
            float(need.num_bytes),
            [tuple(s for leg in source for s in leg.spreads) for source in legs],
        )
        if far:
            demand.pool = self._pool(owners)
            demand.enter = self._enter(needers)
            demand.home = self._topology.node(needers[0])
            if len(needers) > 1 and len(far) > _MAX_LISTED:
                demand.unlisted = tuple(self._hop(far[0], needer)[1:] for needer in needers)
        return Ways(need, demand, tuple(legs))

    def straight(self, need: Needs) -> Straight:
        """Choose the least busy owners without a search, and count what they send."""
        owners, needers, busy = need.owners, need.needers, self.busy
        self._reach(owners, needers)
        near = self._near(need)
        if near:
            prefixes = []
            for needer in needers:
                sender = min(near, key=lambda owner: busy[4 * owner + FAST_OUT])
                self._count(self._hop(sender, needer), need.num_bytes)
                prefixes.append(((sender,), (needer,)))
            return Straight(need, tuple(prefixes))
        sender = min(owners, key=lambda owner: busy[4 * owner + NIC_OUT])
        entry = min(needers, key=lambda rank: busy[4 * rank + NIC_IN])
        self._count(self._hop(sender, entry), need.num_bytes)
        for needer in needers:
            if needer != entry:
                self._count(self._hop(entry, needer), need.num_bytes)
        return Straight(need, (((sender, entry), needers),))

    def _near(self, need: Needs) -> tuple[int, ...]:
        node = self._topology.node
        home = node(need.needers[0])
        return tuple(owner for owner in need.owners if node(owner) == home)

    def _reach(self, owners: Sequence[int], needers: Sequence[int]) -> None:
        # Without nodes any rank is known; the list of links grows with them.
        if not self._topology.nodes:
            missing = 4 * (max(*owners, *needers) + 1) - len(self.busy)
            self.busy += [0.0] * max(missing, 0)

    def _count(self, option: Option, num_bytes: int) -> None:
        for link, seconds in option:
            self.busy[link] += seconds * num_bytes

    def _alive(self, rank: int) -> list[int]:
        return [r for r in self._topology.neighbours(rank) if r not in self._excluded]

    def _hop(self, src: int, dst: int) -> Option:
        option = self._inside.get((src, dst))
        if option is None:
            out, into = self._topology.seconds_per_byte(src, dst)
            kinds = (FAST_OUT, FAST_IN)
            if self._topology.node(src) != self._topology.node(dst):
                kinds = (NIC_OUT, NIC_IN)
            option = ((4 * src + kinds[0], out), (4 * dst + kinds[1], into))
            self._inside[src, dst] = option
        return option

    def _star(self, first: int, needers: Sequence[int]) -> list[tuple[int, float]]:
        out, into = 0.0, []
        for needer in needers:
            if needer != first:
                (_, seconds), receiver = self._hop(first, needer)
                out += seconds
                into.append(receiver)
        return [(4 * first + FAST_OUT, out), *into] if into else []

    def _pool(self, owners: tuple[int, ...]) -> Pool:
        if owners not in self._pools:
            homes = tuple(map(self._topology.node, owners))
            self._pools[owners] = Pool(tuple(map(self._leave, owners)), homes)
        return self._pools[owners]

    def _direct(self, owners: tuple[int, ...], needer: int) -> Spread:
        key = ("direct", owners, needer)
        if key not in self._spreads:
            options = tuple(self._hop(owner, needer) for owner in owners)
            self._spreads[key] = Spread(tuple((owner,) for owner in owners), options)
        return self._spreads[key]

    def _handed(self, owner: int, needers: tuple[int, ...]) -> Spread:
        key = ("handed", owner, needers)
        if key not in self._spreads:
            firsts = tuple(rank for rank in self._alive(owner) if rank != owner)
            options = tuple(
                (*self._hop(owner, first), *self._star(first, needers)) for first in firsts
            )
            self._spreads[key] = Spread(tuple((owner, rank) for rank in firsts), options)
        return self._spreads[key]

    def _leave(self, owner: int) -> Spread:
        key = ("leave", owner)
        if key not in self._spreads:
            exits = (owner, *(rank for rank in self._alive(owner) if rank != owner))
            options = []
            for rank in exits:
                nic = (4 * rank + NIC_OUT, 1 / self._topology.bandwidth(rank).nic_out)
                options.append((nic,) if rank == owner else (*self._hop(owner, rank), nic))
            tags = tuple((owner,) if rank == owner else (owner, rank) for rank in exits)
            self._spreads[key] = Spread(tags, tuple(options))
        return self._spreads[key]

    def _enter(self, needers: tuple[int, ...]) -> Spread:
        key = ("enter", needers)
        if key not in self._spreads:
            others = (rank for rank in self._alive(needers[0]) if rank not in needers)
            entries = (*needers, *others)
            options = []
            for rank in entries:
                nic = (4 * rank + NIC_IN, 1 / self._topology.bandwidth(rank).nic_in)
                options.append((nic, *self._star(rank, needers)))
            self._spreads[key] = Spread(tuple((rank,) for rank in entries), tuple(options))
        return self._spreads[key]
