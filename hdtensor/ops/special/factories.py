"""``x.new_empty(...)`` and its like: a buffer that is as large as ``x`` but for one dim is cut as ``x`` is.

A model makes such a buffer to write parts of ``x``'s size into it. DTensor replicates it, and the write would then have to
gather; at the top tier it could not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import special, wrap
from hdtensor.ops.special.means import cut_dims
from hdtensor.ops.special.strided import flat_zeros
from hdtensor.placements.layout import contiguous_stride


aten = torch.ops.aten

#: With fewer dims an equal extent may well be a coincidence.
_MIN_DIMS = 3


@special(
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    is_local=True,
)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound, shape = args[0]._spec, tuple(args[1])
    if len(shape) != len(bound.shape) or len(shape) < _MIN_DIMS:
        return flat_zeros(func, args, kwargs)
    cut = cut_dims(bound)
    changed = {d for d, (a, b) in enumerate(zip(bound.shape, shape, strict=True)) if a != b}
    if len(changed) != 1 or not cut or changed & cut:
        return None
    spec = bound.spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)
    if isinstance(spec.top, Partial):
        spec = spec.replace(top=Replicate())
    dtype = kwargs.get("dtype") or bound.dtype
    out = BoundSpec.of(spec, shape, contiguous_stride(shape), dtype, bound.top_sizes)

    def run(x: Any, shape: Any, *rest: Any) -> Any:
        *given, kw = rest
        return wrap(func(x._local_tensor, out.local_shape(), *given, **(kw or {})), out)

    return run
