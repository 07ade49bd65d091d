"""``fuse``: one batched send-receive of many tensors, balanced over all of them (Sec. 7, Fig. 14)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdtensor.errors import RedistributeError
from hdtensor.placements import Box
from hdtensor.redistribute.steps import (
    Layout,
)
from hdtensor.redistribute.topology import UNIFORM, Topology
from hdtensor.redistribute.transfers import (
    Choice,
    Row,
    SenderRules,
    SendLoad,
    Transfer,
    choices,
    choose,
    transfer_table,
)


_MAX_CELLS_SHOWN = 3


class Move(NamedTuple):
    """A tensor of a batch, from one layout to another.

    Attributes:
        src: How it is cut now: a layout, or rank -> boxes.
        dst: How it shall be cut.
        itemsize: Bytes per element.
        name: What errors call it.
    """

    src: Layout | Mapping[int, Sequence[Box]]
    dst: Layout | Mapping[int, Sequence[Box]]
    itemsize: int = 1
    name: str = ""


class Table(NamedTuple):
    """A BSR table without the ranks that take no part.

    Attributes:
        rows: Cells with owners and needers.
        lost: Cells that are wanted, but that only left-out ranks held.
    """

    rows: tuple[Row, ...]
    lost: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a batch of tensors sends over the links.

    Attributes:
        topology: The links that it was made for.
        sent: (rank, class of links) -> bytes, at each hop.
        received: (rank, class of links) -> bytes, at each hop.
    """

    topology: Topology
    sent: Mapping[tuple[int, int], int]
    received: Mapping[tuple[int, int], int]

    @property
    def seconds(self) -> float:
        """Makespan: the time of the busiest direction of a NIC or of a rank's fast links."""
        return self.topology.makespan(self.sent, self.received)

    @property
    def num_bytes(self) -> int:
        """Bytes that travel between ranks, counted at each hop."""
        return sum(self.sent.values())

    def sent_by(self, rank: int) -> tuple[int, ...]:
        """Return the bytes that a rank sends over each class of links."""
        return tuple(self.sent.get((rank, i), 0) for i in range(len(self.topology.links)))

    def received_by(self, rank: int) -> tuple[int, ...]:
        """Return the bytes that a rank receives over each class of links."""
        return tuple(self.received.get((rank, i), 0) for i in range(len(self.topology.links)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedScheme(Scheme):
    """Who sends what to whom for a batch of tensors: the fused BSR scheme.

    Attributes:
        transfers: Per tensor, in the order given; ``src == dst`` stays on the rank.
    """

    transfers: tuple[tuple[Transfer, ...], ...]


def fuse(
    moves: Sequence[Move],
    *,
    topology: Topology = UNIFORM,
    rules: SenderRules | None = None,
    exclude_ranks: Collection[int] = (),
    load: SendLoad | None = None,
) -> FusedScheme:
    """Choose the senders of all tensors of a batch with one count of what was sent.

    >>> halves = {0: [Box((0,), (4,))], 1: [Box((4,), (8,))]}
    >>> copies = {rank: [Box((0,), (8,))] for rank in (0, 1)}
    >>> moves = [Move(copies, {2: [Box((0,), (8,))]}, 4), Move(copies, {2: [Box((0,), (8,))]}, 4)]
    >>> [tensor[0].src for tensor in fuse(moves).transfers]
    [1, 0]

    Args:
        moves: Tensors in registration order; ``rules.scan`` says in which order they are scanned.
        topology: Links between the ranks.
        rules: Which rules hold, and how ties break; default the paper's.
        exclude_ranks: Ranks that neither hold nor want anything, such as dead ones.
        load: What was sent before; it is updated. None starts from nothing.

    Returns:
        The scheme, the same on every rank.

    Raises:
        RedistributeError: If a cell is wanted that no remaining rank holds; the message names the
            tensor and the cells.
        TopologyError: If a rank is not in the topology.
    """
    rules = SenderRules() if rules is None else rules
    load = SendLoad() if load is None else load
    before = Counter(load.sent)
    received: Counter[tuple[int, int]] = Counter()
    excluded = frozenset(exclude_ranks)
    known: dict[int, list[tuple[Box, tuple[Choice, ...]]]] = {}
    transfers: list[tuple[Transfer, ...]] = [()] * len(moves)
    order = range(len(moves))
    tables = [table_of(move, excluded) for move in moves]  # kept, so that their ids stay theirs
    for i in order if rules.scan == "registered" else reversed(order):
        rows = tables[i].rows
        of_rows = known.get(id(rows))
        if of_rows is None:
            of_rows = known[id(rows)] = [(row.cell, choices(row, topology, rules)) for row in rows]
        found: list[Transfer] = []
        for cell, of_needers in of_rows:
            choose(cell, of_needers, load, moves[i].itemsize, found)
        transfers[i] = tuple(found)
        _count_received(found, moves[i].itemsize, topology, received)
    sent = {key: count - before[key] for key, count in load.sent.items() if count > before[key]}
    return FusedScheme(
        topology=topology, transfers=tuple(transfers), sent=sent, received=dict(received)
    )


def table_of(move: Move, excluded: frozenset[int]) -> Table:
    """Return the BSR table of a tensor; tensors that move alike share one.

    Raises:
        RedistributeError: If a cell is wanted that no remaining rank holds.
    """
    try:
        if isinstance(move.src, Layout) and isinstance(move.dst, Layout):
            table = _layout_table(move.src, move.dst, excluded)
        else:
            table = _without(transfer_table(_boxes(move.src), _boxes(move.dst)), excluded)
    except RedistributeError as error:
        raise RedistributeError(f"tensor {move.name!r}: {error}") from None
    if table.lost:
        shown = ", ".join(f"[{c.start} to {c.stop})" for c in table.lost[:_MAX_CELLS_SHOWN])
        more = len(table.lost) - _MAX_CELLS_SHOWN
        raise RedistributeError(
            f"tensor {move.name!r}: {shown}{f' and {more} more cells' if more > 0 else ''} "
            f"were held by none but the left-out ranks {sorted(excluded)}. Restore the tensor from "
            f"a checkpoint, or keep a copy of each cell on another rank."
        )
    return table


@functools.lru_cache(maxsize=4096)
def _layout_table(src: Layout, dst: Layout, excluded: frozenset[int]) -> Table:
    return _without(transfer_table(_boxes(src), _boxes(dst)), excluded)


def _boxes(side: Layout | Mapping[int, Sequence[Box]]) -> Mapping[int, Sequence[Box]]:
    if isinstance(side, Layout):
        return {rank: [owned.box for owned in side.boxes(rank)] for rank in side.spec.ranks}
    return side


def _without(rows: Iterable[Row], excluded: frozenset[int]) -> Table:
    if not excluded:
        return Table(tuple(rows), ())
    kept, lost = [], []
    for cell, owners, needers in rows:
        owners = tuple(rank for rank in owners if rank not in excluded)
        needers = tuple(rank for rank in needers if rank not in excluded)
        if needers and owners:
            kept.append(Row(cell, owners, needers))
        elif needers:
            lost.append(cell)
    return Table(tuple(kept), tuple(lost))


def _count_received(
    transfers: Iterable[Transfer],
    itemsize: int,
    topology: Topology,
    received: Counter[tuple[int, int]],
) -> None:
    for box, src, dst in transfers:
        if src != dst:
            received[dst, topology.link(src, dst)] += box.numel * itemsize
