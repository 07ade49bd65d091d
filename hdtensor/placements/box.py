"""``Box``: a half-open interval of indices in N dimensions, and the cells several boxes cut."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """A half-open N-d interval of global indices; ``()`` and ``()`` for a 0-d tensor.

    Attributes:
        start: First index on each dim.
        stop: One past the last index on each dim; ``stop >= start``.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return the box of a whole tensor.

        >>> Box.whole((2, 3))
        Box(start=(0, 0), stop=(2, 3))
        """
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent on each dim."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(map(operator.sub, self.stop, self.start))

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None where no element is in both.

        >>> Box((0,), (4,)).intersect(Box((2,), (9,)))
        Box(start=(2,), stop=(4,))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(operator.lt, start, stop)) else None

    def contains(self, other: Box) -> bool:
        """Return whether every element of ``other`` is in this box."""
        if other.numel == 0:
            return True
        return all(map(operator.le, self.start, other.start)) and all(
            map(operator.ge, self.stop, other.stop)
        )

    def slices_from(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the index of this box in a tensor whose first element is at ``origin``."""
        return tuple(
            slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin, strict=True)
        )


def merge(boxes: Iterable[Box], fits: Callable[[Box], bool] = lambda box: True) -> list[Box]:
    """Join boxes that share a whole face, where ``fits`` allows the joined box; return them sorted.

    The boxes are disjoint. What one message carries comes out as few large pieces.

    >>> merge([Box((0, 0), (2, 2)), Box((0, 2), (2, 4)), Box((2, 0), (3, 4))])
    [Box(start=(0, 0), stop=(3, 4))]
    """
    merged = sorted(boxes)
    if len(merged) < 2:
        return merged
    for dim in reversed(range(len(merged[0].start))):
        merged = _merge_along(dim, merged, fits)
    return sorted(merged)


def _merge_along(dim: int, boxes: list[Box], fits: Callable[[Box], bool]) -> list[Box]:
    def others(box: Box) -> tuple[int, ...]:
        return (*box.start[:dim], *box.start[dim + 1 :], *box.stop[:dim], *box.stop[dim + 1 :])

    joined: list[Box] = []
    for box in sorted(boxes, key=lambda box: (others(box), box.start[dim])):
        if joined:
            last = joined[-1]
            if last.stop[dim] == box.start[dim] and others(last) == others(box):
                both = Box(last.start, box.stop)
                if fits(both):
                    joined[-1] = both
                    continue
        joined.append(box)
    return joined


def cells(boxes: Iterable[Box]) -> list[Box]:
    """Cut space at every face of ``boxes``; return the cells that some box covers, sorted.

    These are the paper's finest-grained slices (Sec. 5.2, 5.3). Two row halves against two column
    halves give the four quadrants::

        +-------+      +---+---+      +---+---+
        |       |      |   |   |      | 0 | 1 |
        +-------+  +   |   |   |  ->  +---+---+
        |       |      |   |   |      | 2 | 3 |
        +-------+      +---+---+      +---+---+

    >>> rows = [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))]
    >>> cols = [Box((0, 0), (4, 2)), Box((0, 2), (4, 4))]
    >>> [cell.start for cell in cells(rows + cols)]
    [(0, 0), (0, 2), (2, 0), (2, 2)]
    """
    return Grid(boxes).cells


class Grid:
    """The cells that boxes cut, and which of them each box is made of.

    Attributes:
        cells: As ``cells`` returns them.
    """

    __slots__ = ("_number", "_place", "cells")

    def __init__(self, boxes: Iterable[Box]) -> None:
        """Cut space at every face of ``boxes``; empty boxes cut nothing."""
        boxes = [box for box in dict.fromkeys(boxes) if box.numel]
        faces = [
            sorted({x for corner in sides for x in corner})
            for sides in zip(*(zip(*box, strict=True) for box in boxes), strict=True)
        ]
        self._place = [{x: i for i, x in enumerate(cuts)} for cuts in faces]
        # Only the part of the grid that a box covers: sparse boxes stay cheap.
        keys = sorted({key for box in boxes for key in self._keys(box)})
        self._number = {key: i for i, key in enumerate(keys)}
        self.cells = [
            Box(
                tuple(cuts[i] for cuts, i in zip(faces, key, strict=True)),
                tuple(cuts[i + 1] for cuts, i in zip(faces, key, strict=True)),
            )
            for key in keys
        ]

    def numbers(self, box: Box) -> list[int]:
        """Return the places in ``cells`` of the cells of one of the boxes."""
        if not box.numel:
            return []
        return [self._number[key] for key in self._keys(box)]

    def _keys(self, box: Box) -> Iterator[tuple[int, ...]]:
        spans = [
            range(place[a], place[b])
            for place, a, b in zip(self._place, box.start, box.stop, strict=True)
        ]
        return itertools.product(*spans)


def cut_box(box: Box, most: int) -> Iterator[Box]:
    """Yield parts of a box of at most ``most`` elements, whole rows where that is possible.

    >>> [part.shape for part in cut_box(Box((0, 0), (5, 3)), 7)]
    [(2, 3), (2, 3), (1, 3)]
    >>> [part.shape for part in cut_box(Box((0, 0), (2, 3)), 2)]
    [(1, 2), (1, 1), (1, 2), (1, 1)]
    """
    if box.numel <= most or not box.start:
        yield box
        return
    shape = box.shape
    dim = next(d for d, size in enumerate(shape) if size > 1)
    rows = max(1, most // math.prod(shape[dim + 1 :]))
    for first in range(box.start[dim], box.stop[dim], rows):
        last = min(first + rows, box.stop[dim])
        part = Box(
            (*box.start[:dim], first, *box.start[dim + 1 :]),
            (*box.stop[:dim], last, *box.stop[dim + 1 :]),
        )
        yield from cut_box(part, most)
