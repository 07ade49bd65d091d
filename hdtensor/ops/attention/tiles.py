"""Which scores of a causal attention a rank computes: rectangles and triangles of rows and keys. Pure.

A rank holds runs of the sequence (``Span``), not always one: with zigzag shares a run near the begin and one near the
end. Rows and keys are cut at each other's boundaries, so that every pair of runs is whole, skipped, or a triangle::

    positions   keys 0..2   keys 2..4   keys 4..6
    rows 2..4   whole       triangle    skipped
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Consecutive rows of a tensor that are consecutive in the sequence.

    Attributes:
        offset: First row in the tensor.
        position: Its place in the sequence.
        length: Number of rows.
    """

    offset: int
    position: int
    length: int


class Tile(NamedTuple):
    """Scores that one kernel call computes.

    Attributes:
        rows: First row and number of rows, in the queries' tensor.
        keys: Likewise, in the keys' tensor.
        is_causal: Whether row i sees keys 0 to i only; rows and keys are equally many then.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool

    @property
    def num_scores(self) -> int:
        """How many scores are not masked."""
        n = self.rows[1]
        return n * (n + 1) // 2 if self.is_causal else n * self.keys[1]


def length_of(spans: Iterable[Span]) -> int:
    """Return the number of rows in all spans."""
    return sum(span.length for span in spans)


def whole_tile(rows: Sequence[Span], keys: Sequence[Span]) -> tuple[Tile, ...]:
    """Return the tile of all scores, for attention that is not causal; none where there are no scores."""
    num_rows, num_keys = length_of(rows), length_of(keys)
    if not num_rows or not num_keys:
        return ()
    return (Tile((0, num_rows), (0, num_keys), is_causal=False),)


def causal_tiles(rows: Sequence[Span], keys: Sequence[Span]) -> tuple[Tile, ...]:
    """Return the tiles where a row sees the keys up to its own position.

    >>> causal_tiles([Span(0, 2, 2)], [Span(0, 0, 6)])
    (Tile(rows=(0, 2), keys=(0, 2), is_causal=False), Tile(rows=(0, 2), keys=(2, 2), is_causal=True))

    Args:
        rows: What the queries' tensor holds.
        keys: What the keys' tensor holds.
    """
    cuts = sorted({p for s in (*rows, *keys) for p in (s.position, s.position + s.length)})
    tiles: list[Tile] = []
    pieces = _split(keys, cuts)
    for row in _split(rows, cuts):
        before = sorted((k.offset, k.length) for k in pieces if k.position < row.position)
        tiles += (Tile((row.offset, row.length), run, is_causal=False) for run in _joined(before))
        tiles += (
            Tile((row.offset, row.length), (k.offset, k.length), is_causal=True)
            for k in pieces
            if k.position == row.position
        )
    return tuple(tiles)


def _split(spans: Iterable[Span], cuts: Sequence[int]) -> list[Span]:
    """Return the spans without empty ones, cut at every position of ``cuts`` inside them."""
    pieces = []
    for offset, position, length in spans:
        inside = [c for c in cuts if position < c < position + length]
        for a, b in itertools.pairwise([position, *inside, position + length]):
            if b > a:
                pieces.append(Span(offset + a - position, a, b - a))
    return pieces


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return runs (start, length) with neighbours made one."""
    out: list[tuple[int, int]] = []
    for start, length in runs:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out


def natural(length: int) -> tuple[Span, ...]:
    """Return the order in which row i is at position i."""
    return (Span(0, 0, length),)


def zigzag(blocks: Sequence[int]) -> tuple[Span, ...]:
    """Return the order in which block i holds a run from the begin and its mirror image from the end.

    Early rows see few keys and late ones many: of a run and its mirror image, each row sees half of the sequence on
    the mean. So causal work is in proportion to the blocks' lengths, whatever these are.

    >>> zigzag([4, 4])
    (Span(offset=0, position=0, length=2), Span(offset=2, position=6, length=2), Span(offset=4, position=2, length=4))

    Args:
        blocks: Rows of each block, in the order in which they follow one another in the tensor.
    """
    total, offset, first = sum(blocks), 0, 0
    last = total
    spans: list[Span] = []
    for size in blocks:
        front, back = (size + 1) // 2, size // 2
        last -= back
        spans += [Span(offset, first, front), Span(offset + front, last, back)]
        offset, first = offset + size, first + front
    return _merged(spans)


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    out: list[Span] = []
    for span in spans:
        if not span.length:
            continue
        before = out[-1] if out else None
        if before is not None and before.position + before.length == span.position:
            out[-1] = before._replace(length=before.length + span.length)
        else:
            out.append(span)
    return tuple(out)


def held(order: Sequence[Span], runs: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
    """Return the spans of a tensor that holds some rows of another.

    >>> held(zigzag([4, 4]), [(2, 6)])
    (Span(offset=0, position=6, length=2), Span(offset=2, position=2, length=2))

    Args:
        order: What the other tensor holds.
        runs: First and behind the last row of each run that is taken, in the order in which they are put.
    """
    out, offset = [], 0
    for start, stop in runs:
        for span in order:
            a, b = max(start, span.offset), min(stop, span.offset + span.length)
            if b > a:
                out.append(Span(offset + a - start, span.position + a - span.offset, b - a))
        offset += stop - start
    return _merged(out)


def arranged(x: torch.Tensor, order: Sequence[Span] | None, dim: int) -> torch.Tensor:
    """Return a tensor whose rows are put in an order; the tensor itself for None."""
    if order is None:
        return x
    return torch.cat([x.narrow(dim, s.position, s.length) for s in order], dim)


def in_order(x: torch.Tensor, order: Sequence[Span] | None, dim: int) -> torch.Tensor:
    """Return a tensor whose rows are at their positions again: ``arranged``'s inverse."""
    if order is None:
        return x
    runs = sorted(order, key=lambda span: span.position)
    return torch.cat([x.narrow(dim, s.offset, s.length) for s in runs], dim)
