"""The collectives of redistribute steps: which ranks give and get which *cells*, boxes that each of them holds or wants as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.tensor import Partial

from hdtensor.placements import Box


Ranks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Every rank of the group gets the reduction of the cells.

    Attributes:
        ranks: The group, in its order.
        cells: The same for all ranks.
        op: The reduction.
        terms: The ranks that contribute a term; the others contribute nothing (a maximum or minimum
            takes their copy, which changes nothing).
    """

    ranks: Ranks
    cells: tuple[Box, ...]
    op: Partial
    terms: Ranks

    @property
    def num_cells(self) -> int:
        """Elements of all cells."""
        return _numel(self.cells)

    @property
    def num_moved(self) -> int:
        """Elements sent by all ranks together, as a ring all-reduce does."""
        return 2 * (len(self.ranks) - 1) * self.num_cells


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Every rank of the group gets all ranks' cells.

    Attributes:
        ranks: The group, in its order.
        cells: Per rank of the group, what it contributes.
    """

    ranks: Ranks
    cells: tuple[tuple[Box, ...], ...]

    @property
    def num_cells(self) -> int:
        """Elements of all cells."""
        return sum(map(_numel, self.cells))

    @property
    def num_moved(self) -> int:
        """Elements sent by all ranks together."""
        return (len(self.ranks) - 1) * self.num_cells

    def senders(self) -> Iterator[tuple[int, Box]]:
        """Yield (rank, cell) for each cell."""
        for rank, part in zip(self.ranks, self.cells, strict=True):
            yield from ((rank, cell) for cell in part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter:
    """Every rank of the group gets the reduction of its own cells; all ranks contribute.

    Attributes:
        ranks: The group, in its order.
        cells: Per rank of the group, what it gets.
        op: The reduction.
    """

    ranks: Ranks
    cells: tuple[tuple[Box, ...], ...]
    op: Partial

    @property
    def num_cells(self) -> int:
        """Elements of all cells."""
        return sum(map(_numel, self.cells))

    @property
    def num_moved(self) -> int:
        """Elements sent by all ranks together, as a ring reduce-scatter does."""
        return (len(self.ranks) - 1) * self.num_cells

    def receivers(self) -> Iterator[tuple[int, Box]]:
        """Yield (rank, cell) for each cell."""
        for rank, part in zip(self.ranks, self.cells, strict=True):
            yield from ((rank, cell) for cell in part)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll:
    """Every rank of the group sends other cells to every rank.

    Attributes:
        ranks: The group, in its order.
        cells: ``cells[i][j]`` goes from rank i of the group to rank j.
    """

    ranks: Ranks
    cells: tuple[tuple[tuple[Box, ...], ...], ...]

    @property
    def num_cells(self) -> int:
        """Elements of all cells."""
        return sum(_numel(part) for row in self.cells for part in row)

    @property
    def num_moved(self) -> int:
        """Elements sent by all ranks to others."""
        return sum(cell.numel for sender, to, cell in self.messages() if sender != to)

    def messages(self) -> Iterator[tuple[int, int, Box]]:
        """Yield (sender, receiver, cell) for each cell."""
        for sender, row in zip(self.ranks, self.cells, strict=True):
            for receiver, part in zip(self.ranks, row, strict=True):
                yield from ((sender, receiver, cell) for cell in part)


Collective: TypeAlias = AllReduce | AllGather | ReduceScatter | AllToAll


def _numel(cells: Sequence[Box]) -> int:
    return sum(cell.numel for cell in cells)
