"""What a module makes of its inputs' sizes, learnt from the sizes it was seen with.

A module that ran op by op told the layout of its results. For other sizes the layout is *derived*: every dim of a result is
explained by the dims of inputs that had the same length each time, or by a constant. Sizes for which the explanations left
agree are derived; others are observed op by op once more, which leaves fewer explanations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdtensor.ops.bound import BoundSpec
from hdtensor.placements.layout import contiguous_stride


#: An explanation of a dim's length: ``("input", i, d)`` or ``("constant", length)``.
Explanation = tuple[Any, ...]


class ShapeRule:
    """Explanations of every dim of every result, and of its top extents."""

    __slots__ = ("_dims", "_specs", "_tops", "is_usable")

    def __init__(self) -> None:
        self._dims: list[list[set[Explanation]]] | None = None
        self._tops: list[set[int] | None] = []
        self._specs: tuple[Any, ...] = ()
        self.is_usable = True

    def observe(self, inputs: Sequence[BoundSpec], outs: Sequence[BoundSpec | None]) -> None:
        """Take in one call's sizes."""
        specs = tuple(None if o is None else (o.spec, o.dtype, len(o.shape)) for o in outs)
        dims = [[] if o is None else [_explanations(n, inputs) for n in o.shape] for o in outs]
        tops = [_top_explanations(o, inputs) for o in outs]
        if self._dims is None:
            self._dims, self._tops, self._specs = dims, tops, specs
            return
        if specs != self._specs:
            self.is_usable = False
            return
        for old, new in zip(self._dims, dims, strict=True):
            for a, b in zip(old, new, strict=True):
                a &= b
        for k, new_top in enumerate(tops):
            old_top = self._tops[k]
            if old_top is not None and new_top is not None:
                old_top &= new_top
        contiguous = all(o is None or o.stride == contiguous_stride(o.shape) for o in outs)
        self.is_usable = self.is_usable and contiguous and all(all(ds) for ds in self._dims)

    def derive(self, inputs: Sequence[BoundSpec]) -> tuple[BoundSpec | None, ...] | None:
        """Return the results' layouts for other sizes, None if the explanations left do not agree."""
        if not self.is_usable or self._dims is None:
            return None
        outs: list[BoundSpec | None] = []
        for spec, dims, top in zip(self._specs, self._dims, self._tops, strict=True):
            if spec is None:
                outs.append(None)
                continue
            shape = [_agreed({_length(e, inputs) for e in explanations}) for explanations in dims]
            if any(n is None for n in shape):
                return None
            sizes = None
            if top is not None:
                sizes = _agreed({inputs[i].top_sizes for i in top})
                if sizes is None or sum(sizes) != shape[spec[0].top.dim]:
                    return None
            whole = torch.Size([n for n in shape if n is not None])
            outs.append(BoundSpec.of(spec[0], whole, contiguous_stride(whole), spec[1], sizes))
        return tuple(outs)


def _explanations(length: int, inputs: Sequence[BoundSpec]) -> set[Explanation]:
    found: set[Explanation] = {("constant", length)}
    for i, bound in enumerate(inputs):
        found |= {("input", i, d) for d, n in enumerate(bound.shape) if n == length}
    return found


def _top_explanations(out: BoundSpec | None, inputs: Sequence[BoundSpec]) -> set[int] | None:
    if out is None or out.top_sizes is None:
        return None
    return {i for i, bound in enumerate(inputs) if bound.top_sizes == out.top_sizes}


def _length(explanation: Explanation, inputs: Sequence[BoundSpec]) -> int:
    if explanation[0] == "constant":
        return int(explanation[1])
    _, i, d = explanation
    return inputs[i].shape[d]


def _agreed(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else None
