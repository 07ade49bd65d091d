"""Which rank writes which boxes of a tensor: every element once, whatever ranks hold it.

Ranks of unlike subgroups hold boxes that overlap without being equal, so the unit is the *piece*: a cell (the finest
boxes that all holders' boxes are made of), and a part of one where a cell is large and has several holders::

    ranks 0, 1 hold halves, rank 2 holds all      pieces        writers of "w"    of "v"
    +-------+     +-------+                      +-------+
    |   0   |     |       |                      |   a   |     a: 0             a: 2
    +-------+     |   2   |                  ->  +-------+
    |   1   |     |       |                      |   b   |     b: 2             b: 1
    +-------+     +-------+                      +-------+

A piece's holders take turns by the tensor's name, so that replicas of a model write about as much as one another. All
of it is a function of names and layouts: every rank finds the same without asking.
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

from hdtensor.ops.bound import BoundSpec
from hdtensor.placements.box import Box, Grid, cut_box
from hdtensor.placements.layout import owned_boxes
from hdtensor.placements.spec import HDSpec


#: A cell is cut so that its holders share the writing, into parts of this many bytes or more ...
PART_BYTES = 256 << 10
#: ... and into a few at most, since each is an entry of the checkpoint's metadata.
MAX_PARTS = 4


class Piece(NamedTuple):
    """A box that every rank concerned holds whole or not at all.

    Attributes:
        box: Where it lies in the global tensor.
        holders: Global ranks that hold it, ascending.
    """

    box: Box
    holders: tuple[int, ...]

    def writer(self, name: str, number: int) -> int:
        """Return the rank that writes this piece, the ``number``-th of the tensor ``name``."""
        return self.holders[(zlib.crc32(name.encode()) + number) % len(self.holders)]


@functools.lru_cache(maxsize=4096)
def pieces(
    spec: HDSpec, shape: tuple[int, ...], top_sizes: tuple[int, ...] | None, itemsize: int
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor; they tile it, and there is none of an empty tensor.

    >>> spec = HDSpec.from_text("R / 0,1:S0 2:R")
    >>> [(p.box.start, p.box.stop, p.holders) for p in pieces(spec, (4,), None, 4)]
    [((0,), (2,), (0, 2)), ((2,), (4,), (1, 2))]

    Args:
        spec: How the tensor is cut, without ``Partial``.
        shape: Global shape.
        top_sizes: Exact top extents (``check_top_sizes``'s result).
        itemsize: Bytes per element.
    """
    held = {
        rank: [owned.box for owned in owned_boxes(spec, shape, top_sizes, rank)]
        for rank in sorted(spec.ranks)
    }
    grid = Grid(box for boxes in held.values() for box in boxes)
    holders: list[list[int]] = [[] for _ in grid.cells]
    for rank, boxes in held.items():
        for number in sorted({n for box in boxes for n in grid.numbers(box)}):
            holders[number].append(rank)
    return tuple(
        Piece(part, tuple(ranks))
        for cell, ranks in zip(grid.cells, holders, strict=True)
        for part in _parts(cell, len(ranks), itemsize)
    )


def _parts(cell: Box, num_holders: int, itemsize: int) -> list[Box]:
    num = min(num_holders, MAX_PARTS, cell.numel * itemsize // PART_BYTES)
    return [cell] if num < 2 else list(cut_box(cell, -(-cell.numel // num)))


def local_pieces(bound: BoundSpec) -> dict[tuple[int, ...], tuple[int, Box, tuple[slice, ...]]]:
    """Return what a rank's local tensor is made of.

    Returns:
        A piece's start -> its number in ``pieces``, its box, and its index in the local tensor.
    """
    return _local_pieces(
        bound.spec, tuple(bound.shape), bound.top_sizes, bound.dtype.itemsize, bound.rank
    )


@functools.lru_cache(maxsize=4096)
def _local_pieces(
    spec: HDSpec,
    shape: tuple[int, ...],
    top_sizes: tuple[int, ...] | None,
    itemsize: int,
    rank: int,
) -> dict[tuple[int, ...], tuple[int, Box, tuple[slice, ...]]]:
    owned = owned_boxes(spec, shape, top_sizes, rank)
    found = {}
    for number, piece in enumerate(pieces(spec, shape, top_sizes, itemsize)):
        if rank in piece.holders:
            home = next(own for own in owned if own.box.contains(piece.box))
            origin = tuple(a - o for a, o in zip(home.box.start, home.offset, strict=True))
            found[piece.box.start] = (number, piece.box, piece.box.slices_from(origin))
    return found
