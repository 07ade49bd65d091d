"""What a computation makes of its inputs' sizes, learnt from the sizes it was seen with.

Every dim of a result is explained by the input dims that had the same length each time, or by a constant. Sizes are
derived where all explanations that are left agree, and only between lengths that were seen: ``x[:5]`` is as long as
``x`` until that is longer than 5, and beyond the seen ones nothing tells. Other sizes are observed.
"""

from __future__ import annotations

from collections.abc import Sequence


Shape = tuple[int, ...]

#: An explanation of a length: (input, dim), or (-1, constant).
Explanation = tuple[int, int]

_CONSTANT = -1


class ShapeRule:
    """Explanations of every dim of every result of one computation.

    >>> rule = ShapeRule()
    >>> rule.observe([(2, 5), (5, 3)], [(2, 3)])
    >>> rule.derive([(4, 5), (5, 3)]) is None  # no such length was seen
    True
    >>> rule.observe([(6, 5), (5, 3)], [(6, 3)])
    >>> rule.derive([(4, 5), (5, 3)])
    [(4, 3)]
    """

    __slots__ = ("_dims", "_first", "_seen", "is_usable")

    def __init__(self) -> None:
        self._first: tuple[Shape, ...] | None = None
        self._seen: dict[Explanation, tuple[int, int]] = {}  # the least and the greatest length
        self._dims: list[list[set[Explanation]] | None] = []
        self.is_usable = True

    def observe(self, inputs: Sequence[Shape], outs: Sequence[Shape | None]) -> None:
        """Take in one call's sizes; None for results that are no tensors."""
        dims = [
            None if out is None else [_explanations(length, inputs) for length in out]
            for out in outs
        ]
        if self._first is None:
            self._first, self._dims = tuple(inputs), dims
            return
        for where, length in self._changes(inputs):
            least, most = self._seen.get(where, (self._first[where[0]][where[1]],) * 2)
            self._seen[where] = min(least, length), max(most, length)
        if len(dims) != len(self._dims):  # as many results as the split dim is long
            self.is_usable = False
            return
        for old, new in zip(self._dims, dims, strict=True):
            if (old is None) != (new is None) or len(old or ()) != len(new or ()):
                self.is_usable = False
                return
            for a, b in zip(old or (), new or (), strict=True):
                a &= b
                self.is_usable = self.is_usable and bool(a)

    def derive(self, inputs: Sequence[Shape]) -> list[Shape | None] | None:
        """Return the results' shapes for other sizes, None where they must be observed."""
        if self._first is None or not self.is_usable:
            return None
        for where, length in self._changes(inputs):
            least, most = self._seen.get(where, (length + 1, length))
            if not least <= length <= most:
                return None
        outs: list[Shape | None] = []
        for dims in self._dims:
            if dims is None:
                outs.append(None)
                continue
            shape: list[int] = []
            for explanations in dims:
                lengths = {c if i == _CONSTANT else inputs[i][c] for i, c in explanations}
                if len(lengths) > 1:
                    return None
                shape += lengths
            outs.append(tuple(shape))
        return outs

    def _changes(self, inputs: Sequence[Shape]) -> list[tuple[Explanation, int]]:
        """Return the input dims that differ from the first time, with their lengths."""
        assert self._first is not None, "something was observed before"
        return [
            ((i, d), length)
            for i, (now, first) in enumerate(zip(inputs, self._first, strict=True))
            if now != first
            for d, length in enumerate(now)
            if length != first[d]
        ]


def _explanations(length: int, inputs: Sequence[Shape]) -> set[Explanation]:
    found = {(_CONSTANT, length)}
    for i, shape in enumerate(inputs):
        found |= {(i, d) for d, n in enumerate(shape) if n == length}
    return found
