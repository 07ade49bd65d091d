"""``Visits``: how data passes rank sets, node by node: the growing graph behind ``find_lanes``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hdtensor.errors import PlanError
from hdtensor.placements.checks import ranks_text


if TYPE_CHECKING:
    from hdtensor.pipeline.lanes import Exchange, Ranks


class Visits:
    """Nodes are visits of rank sets, numbered in program order; edges are exchanges between them.

    Nodes that a collective joins are one: they keep the smallest number.
    """

    def __init__(self) -> None:
        self._ranks: list[dict[int, None]] = []  # node -> ranks, in the order of joining
        self._parent: list[int] = []
        self._edges: list[tuple[int, int, str]] = []
        self._now: dict[int, int] = {}  # rank -> the node that it is in now
        self._after: dict[tuple[str, Ranks], int] = {}  # (exchange, rank set) -> node

    @property
    def nodes(self) -> dict[int, Ranks]:
        """Node -> its ranks."""
        return {
            node: tuple(self._ranks[node])
            for node, parent in enumerate(self._parent)
            if node == parent
        }

    @property
    def edges(self) -> dict[tuple[int, int], list[str]]:
        """(node, later node) -> names of the exchanges, in program order."""
        found: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for src, dst, name in self._edges:
            found[self._find(src), self._find(dst)].append(name)
        return dict(found)

    def pass_(self, exchange: Exchange) -> None:
        """Let the data of one exchange pass.

        Raises:
            PlanError: If its ranks do not fit together.
        """
        sources = [self._source(exchange, ranks) for ranks in exchange.src]
        holder = _set_of(exchange, "src")
        taker = _set_of(exchange, "dst")
        for ranks in exchange.collectives:
            if all(rank in holder for rank in ranks):
                self._join(sources[holder[rank]] for rank in ranks)
        going = self._going(exchange, sources, _linked(exchange, holder, taker))
        # Ranks that send here hold another part of the same tensor: they are not further on.
        senders = set(going)
        for origin, sets in going.items():
            self._arrive(exchange, origin, sets, senders)
        for ranks in exchange.collectives:
            if not all(rank in holder for rank in ranks):
                _check_inside(exchange, ranks, taker, "dst")
                self._join(self._now[rank] for rank in ranks)

    def _going(
        self,
        exchange: Exchange,
        sources: Sequence[int],
        groups: Sequence[tuple[list[int], list[int]]],
    ) -> dict[int, list[Ranks]]:
        """Return node -> the rank sets that its data goes to.

        Sets that are one stage already go on to one stage, though no message joins them.
        """
        for src_sets, _ in groups:
            if src_sets:
                self._join(sources[i] for i in src_sets)
        going: dict[int, list[Ranks]] = {}
        for src_sets, dst_sets in groups:
            found = [exchange.dst[j] for j in dst_sets]
            if src_sets:
                going.setdefault(self._find(sources[src_sets[0]]), []).extend(found)
                continue
            for ranks in found:  # nothing is sent there: the tensor begins there
                self._after[exchange.name, ranks] = self._meet(ranks)
        return going

    def _source(self, exchange: Exchange, ranks: Ranks) -> int:
        """Return the node where the tensor is before the exchange."""
        if exchange.since is not None:
            node = self._after.get((exchange.since, ranks))
            if node is None:
                raise PlanError(
                    f"the exchange {exchange.name!r} says that {exchange.since!r} brought its tensor to ranks "
                    f"{ranks_text(ranks)}, which it did not; name one that did, before it in the program."
                )
            return self._find(node)
        return self._meet(ranks)

    def _meet(self, ranks: Ranks) -> int:
        """Return the one node that some ranks are in now: theirs joined, or a first one."""
        known = [self._now[rank] for rank in ranks if rank in self._now]
        fresh = [rank for rank in ranks if rank not in self._now]
        if fresh:
            known.append(self._new(fresh))
        return self._join(known)

    def _arrive(
        self, exchange: Exchange, before: int, sets: Sequence[Ranks], senders: set[int]
    ) -> None:
        """Bring data from a node to rank sets, which are one stage afterwards."""
        if not sets:
            return
        stays = not exchange.starts_stage and all(
            rank in self._ranks[before] for ranks in sets for rank in ranks
        )
        if stays:
            node = before
        else:
            later = [self._later(ranks, before, senders) for ranks in sets]
            known = [found for found in later if found is not None]
            fresh = [
                rank
                for ranks, found in zip(sets, later, strict=True)
                if found is None
                for rank in ranks
            ]
            if fresh:
                known.append(self._new(fresh))
            node = self._join(known)
            self._edges.append((before, node, exchange.name))
        for ranks in sets:
            self._after[exchange.name, ranks] = node
            self._now.update(dict.fromkeys(ranks, node))

    def _later(self, ranks: Ranks, before: int, senders: set[int]) -> int | None:
        """Return the node that all of the ranks are in, if it comes after ``before``."""
        nodes = {self._find(self._now[rank]) if rank in self._now else -1 for rank in ranks}
        if len(nodes) > 1:
            return None
        (node,) = nodes
        return node if node > before and node not in senders else None

    def _new(self, ranks: Iterable[int]) -> int:
        node = len(self._ranks)
        self._ranks.append(dict.fromkeys(ranks))
        self._parent.append(node)
        self._now.update(dict.fromkeys(self._ranks[node], node))
        return node

    def _join(self, nodes: Iterable[int]) -> int:
        """Make nodes one; the first in program order stands for them."""
        roots = sorted({self._find(node) for node in nodes})
        first = roots[0]
        for node in roots[1:]:
            self._parent[node] = first
            self._ranks[first].update(self._ranks[node])
        return first

    def _find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node


def _set_of(exchange: Exchange, side: str) -> dict[int, int]:
    """Return rank -> index of its rank set."""
    found: dict[int, int] = {}
    for index, ranks in enumerate(getattr(exchange, side)):
        for rank in ranks:
            if rank in found:
                raise PlanError(
                    f"the exchange {exchange.name!r} has rank {rank} in two sets of {side}; keep one."
                )
            found[rank] = index
    return found


def _linked(
    exchange: Exchange, holder: dict[int, int], taker: dict[int, int]
) -> list[tuple[list[int], list[int]]]:
    """Return which rank sets belong together: (indices of ``src``, indices of ``dst``)."""
    num_src = len(exchange.src)
    joined = Joined(num_src + len(exchange.dst))
    for src, dst in exchange.transfers:
        _check_inside(exchange, (src,), holder, "src")
        _check_inside(exchange, (dst,), taker, "dst")
        joined.join(holder[src], num_src + taker[dst])
    reached = {taker[dst] for _, dst in exchange.transfers}
    for rank, index in holder.items():
        if rank in taker and taker[rank] not in reached:  # it keeps what it has
            joined.join(index, num_src + taker[rank])
    return [
        ([i for i in part if i < num_src], [i - num_src for i in part if i >= num_src])
        for part in joined.parts()
    ]


def _check_inside(exchange: Exchange, ranks: Ranks, sets: dict[int, int], side: str) -> None:
    outside = [rank for rank in ranks if rank not in sets]
    if outside:
        raise PlanError(
            f"the exchange {exchange.name!r} lets ranks {ranks_text(tuple(outside))} communicate, which are in no "
            f"set of {side}; name every rank that holds a part."
        )


class Joined:
    """Numbers 0 to n - 1, joined to parts."""

    def __init__(self, num: int) -> None:
        self._part = {i: [i] for i in range(num)}

    def join(self, a: int, b: int) -> None:
        """Make the parts of two numbers one."""
        first, second = self._part[a], self._part[b]
        if first is not second:
            if len(first) < len(second):
                first, second = second, first
            first += second
            for i in second:
                self._part[i] = first

    def parts(self) -> list[list[int]]:
        """Return the parts, sorted, in the order of their smallest numbers."""
        found = {id(part): part for part in self._part.values()}
        return sorted(sorted(part) for part in found.values())
