"""The layouts of a module's results for sizes that it was not seen with (``ops.shape_rule``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shape_rule import ShapeRule
from hdtensor.placements import checks
from hdtensor.placements.layout import contiguous_stride


class LayoutRule:
    """What one module makes of the layouts of its inputs: shapes, specs, and exact top extents."""

    __slots__ = ("_is_usable", "_shapes", "_specs", "_tops")

    def __init__(self) -> None:
        self._shapes = ShapeRule()
        self._specs: tuple[Any, ...] | None = None
        self._tops: list[set[int] | None] = []
        self._is_usable = True

    def observe(self, inputs: Sequence[BoundSpec], outs: Sequence[BoundSpec | None]) -> None:
        """Take in one call."""
        self._shapes.observe(
            [tuple(x.shape) for x in inputs], [None if o is None else tuple(o.shape) for o in outs]
        )
        specs = tuple(None if o is None else (o.spec, o.dtype) for o in outs)
        tops = [_same_extents(o, inputs) for o in outs]
        contiguous = all(o is None or o.stride == contiguous_stride(o.shape) for o in outs)
        self._is_usable = self._is_usable and contiguous and self._specs in (None, specs)
        if self._specs is None:
            self._specs, self._tops = specs, tops
            return
        for old, new in zip(self._tops, tops, strict=True):
            if old is not None and new is not None:
                old &= new

    def derive(self, inputs: Sequence[BoundSpec]) -> tuple[BoundSpec | None, ...] | None:
        """Return the results' layouts for other sizes, None where they must be observed."""
        if not self._is_usable or self._specs is None:
            return None
        shapes = self._shapes.derive([tuple(x.shape) for x in inputs])
        if shapes is None:
            return None
        outs: list[BoundSpec | None] = []
        for spec, shape, top in zip(self._specs, shapes, self._tops, strict=True):
            if spec is None or shape is None:
                outs.append(None)
                continue
            sizes = None
            if top is not None:
                found = {inputs[i].top_sizes for i in top}
                sizes = found.pop() if len(found) == 1 else None
                dim = checks.shard_dim(spec[0].top)
                if sizes is None or dim is None or sum(sizes) != shape[dim]:
                    return None
            outs.append(BoundSpec.of(spec[0], shape, contiguous_stride(shape), spec[1], sizes))
        return tuple(outs)


def _same_extents(out: BoundSpec | None, inputs: Sequence[BoundSpec]) -> set[int] | None:
    """Return the inputs with a result's top extents; None for a result without."""
    if out is None or out.top_sizes is None:
        return None
    return {i for i, bound in enumerate(inputs) if bound.top_sizes == out.top_sizes}
