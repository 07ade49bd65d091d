"""Who sends what to whom in a batched send-receive: the BSR table and the BSR scheme (Sec. 5.3, Fig. 11).

Cells come from the intersection of the boxes that ranks hold and want, never from common multiples of
shard counts: TP 2 beside TP 3 and uneven chunks need nothing of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hdtensor.errors import RedistributeError
from hdtensor.placements import Box
from hdtensor.placements.box import Grid
from hdtensor.redistribute.topology import UNIFORM, Topology


class Transfer(NamedTuple):
    """One cell on its way; ``src == dst`` is a copy that stays on the rank.

    Attributes:
        box: The cell.
        src: Rank that holds it.
        dst: Rank that wants it.
    """

    box: Box
    src: int
    dst: int


class Row(NamedTuple):
    """A row of the BSR table.

    Attributes:
        cell: A finest-grained slice.
        owners: Ranks that hold it, in the order of the source.
        needers: Ranks that want it, in the order of the destination.
    """

    cell: Box
    owners: tuple[int, ...]
    needers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderRules:
    """How a sender is chosen among a cell's owners; the defaults are the paper's heuristics.

    Attributes:
        fastest_link: Prefer owners on the fastest link to the receiver (rule ii).
        least_sent: Prefer the owner that sent least so far over links of that class (rule iii).
        tie: Among equals: the "first" owner of the table, or the "lowest" rank.
        scan: Order in which the tensors of a batch are scanned: as they were "registered", or in
            "reverse".
    """

    fastest_link: bool = True
    least_sent: bool = True
    tie: Literal["first", "lowest"] = "first"
    scan: Literal["registered", "reverse"] = "reverse"


#: The paper's baseline in Table 4: "minimal rank IDs for broadcasting".
LOWEST_RANK = SenderRules(fastest_link=False, least_sent=False, tie="lowest", scan="registered")


class SendLoad:
    """Bytes that each rank sent so far, separately over each class of links.

    One load over all tensors of a batch balances them together (Sec. 7); a new one for each tensor
    balances nothing.
    """

    __slots__ = ("sent",)

    def __init__(self) -> None:
        #: (rank, class of links) -> bytes; 0 for whoever sent nothing.
        self.sent: Counter[tuple[int, int]] = Counter()

    def add(self, rank: int, link: int, num_bytes: int) -> None:
        """Count a message."""
        self.sent[rank, link] += num_bytes


class Choice(NamedTuple):
    """Who may send a cell to one needer, as far as this is known before anything was sent.

    Attributes:
        needer: The rank that wants the cell.
        senders: (owner, class of its link to the needer) of the owners that are equally near; empty
            if the needer holds the cell itself.
    """

    needer: int
    senders: tuple[tuple[int, int], ...]


def transfer_table(
    src: Mapping[int, Iterable[Box]], dst: Mapping[int, Iterable[Box]]
) -> tuple[Row, ...]:
    """Return the BSR table: for each cell that somebody wants, its owners and its needers.

    >>> halves = {0: [Box((0,), (4,))], 1: [Box((4,), (8,))]}
    >>> for row in transfer_table(halves, {1: [Box((0,), (8,))]}):
    ...     print(row.cell.start, row.owners, row.needers)
    (0,) (0,) (1,)
    (4,) (1,) (1,)

    Args:
        src: Rank -> boxes held now.
        dst: Rank -> boxes wanted.

    Returns:
        Rows in the order of their cells.

    Raises:
        RedistributeError: If nobody holds a wanted cell.
    """
    held = {rank: tuple(boxes) for rank, boxes in src.items()}
    wanted = {rank: tuple(boxes) for rank, boxes in dst.items()}
    grid = Grid(box for side in (held, wanted) for boxes in side.values() for box in boxes)
    owners = _ranks_of(held, grid)
    needers = _ranks_of(wanted, grid)
    rows = []
    for cell, own, need in zip(grid.cells, owners, needers, strict=True):
        if need and not own:
            raise RedistributeError(
                f"ranks {need} need [{cell.start} to {cell.stop}), which no rank holds; the source's "
                f"ranks are {list(held)}."
            )
        if need:
            rows.append(Row(cell, tuple(own), tuple(need)))
    return tuple(rows)


def choose_senders(
    table: Iterable[Row],
    *,
    topology: Topology = UNIFORM,
    load: SendLoad | None = None,
    itemsize: int = 1,
    rules: SenderRules | None = None,
) -> tuple[Transfer, ...]:
    """Choose one sender for each cell and needer: the BSR scheme.

    ====  ========================================  ==================
    rule  condition                                 sender
    ====  ========================================  ==================
    (i)   the needer owns the cell                  itself, no message
    (ii)  owners differ in bandwidth to the needer  fastest link
    (iii) equal bandwidth                           fewest bytes sent
    ====  ========================================  ==================

    >>> halves = {0: [Box((0,), (4,))], 1: [Box((4,), (8,))]}
    >>> for t in choose_senders(transfer_table(halves, {1: [Box((0,), (8,))]})):
    ...     print(t.box.start, t.src, "->", t.dst)
    (0,) 0 -> 1
    (4,) 1 -> 1

    Args:
        table: What ``transfer_table`` returned.
        topology: Links between the ranks.
        load: What was sent before; it is updated. None starts from nothing.
        itemsize: Bytes per element.
        rules: Which rules hold, and how ties break; default the paper's.

    Returns:
        Transfers in the order of the table, those that stay on a rank too. The same on every rank.
    """
    rules = SenderRules() if rules is None else rules
    load = SendLoad() if load is None else load
    transfers: list[Transfer] = []
    for row in table:
        choose(row.cell, choices(row, topology, rules), load, itemsize, transfers)
    return tuple(transfers)


def choices(row: Row, topology: Topology, rules: SenderRules) -> tuple[Choice, ...]:
    """Return the possible senders of a row's cell to each of its needers (rules i and ii).

    They depend on nothing that was sent, so that tensors of one table share them.
    """
    owners = tuple(sorted(row.owners)) if rules.tie == "lowest" else row.owners
    held = frozenset(owners)
    most = len(owners) if rules.least_sent else 1
    by_node = _by_node(owners, topology) if rules.fastest_link else {}
    network = topology.network
    far = tuple([(owner, network) for owner in owners[:most]])
    found = []
    for needer in row.needers:
        if needer in held:
            senders: tuple[tuple[int, int], ...] = ()
        elif not rules.fastest_link:
            senders = tuple([(owner, topology.link(owner, needer)) for owner in owners[:most]])
        elif near := by_node.get(topology.node(needer)):
            links = [(owner, topology.link(owner, needer)) for owner in near]
            fastest = min([link for _, link in links])
            senders = tuple([pair for pair in links if pair[1] == fastest][:most])
        else:
            senders = far
        found.append(Choice(needer, senders))
    return tuple(found)


def _by_node(owners: Sequence[int], topology: Topology) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for owner in owners:
        found.setdefault(topology.node(owner), []).append(owner)
    return found


def choose(
    cell: Box,
    of_needers: Iterable[Choice],
    load: SendLoad,
    itemsize: int,
    transfers: list[Transfer],
) -> None:
    """Append one transfer of a cell per needer, from the sender with the least load (rule iii)."""
    num_bytes = cell.numel * itemsize
    sent = load.sent
    for needer, senders in of_needers:
        if not senders:
            transfers.append(Transfer(cell, needer, needer))
            continue
        sender = senders[0] if len(senders) == 1 else min(senders, key=sent.__getitem__)
        sent[sender] += num_bytes
        transfers.append(Transfer(cell, sender[0], needer))


def _ranks_of(boxes_of: Mapping[int, Sequence[Box]], grid: Grid) -> list[list[int]]:
    """Return the ranks that have each cell of a grid in a box."""
    found: list[list[int]] = [[] for _ in grid.cells]
    by_boxes: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in boxes_of.items():
        numbers = by_boxes.get(tuple(boxes))
        if numbers is None:
            numbers = [number for box in boxes for number in grid.numbers(box)]
            by_boxes[tuple(boxes)] = numbers
        for number in numbers:
            found[number].append(rank)
    return found
