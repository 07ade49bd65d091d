"""Writing a constant into a tensor whose reduction is pending: the terms must add up to it.

DTensor writes the value on every rank, so that ``1 - x`` (``empty_like``, ``fill_``, ``sub_``) counts it once a rank.
Here an empty tensor is never pending, and a fill keeps the value in one term.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor.errors import DeductionError
from hdtensor.ops.binding import check_writable
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import deduced, is_hdtensor, special, wrap


aten = torch.ops.aten

#: What the other terms hold beside the one with the value; the value itself for the reductions not named.
_NEUTRAL = {"sum": 0, "product": 1}


@special(aten.empty_like.default, is_local=True)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a tensor without pending reductions: nothing is in it yet."""
    bound = args[0]._spec
    if not bound.spec.has_partial():
        return None
    whole = bound.spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)
    if isinstance(whole.top, Partial):
        whole = whole.replace(top=Replicate())
    like = BoundSpec.of(whole, bound.shape, bound.stride, bound.dtype, bound.top_sizes)
    run = deduced(func, (wrap(args[0]._local_tensor, like),), kwargs)
    return lambda x, kw: run(wrap(x._local_tensor, like), kw)


@special(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    if not bound.spec.has_partial():
        return None
    if is_hdtensor(args[1]) and args[1]._spec.spec.has_partial():
        raise DeductionError(
            f"{func}: the value's reduction is pending ({args[1]._spec}). Redistribute it to Replicate() first."
        )
    check_writable(func, "self", bound)
    neutral = _neutral_here(bound)

    def run(x: Any, value: Any, kw: Any) -> Any:
        if bound.index is None:
            return x
        if neutral is not None:
            x._local_tensor.fill_(neutral)
        else:
            x._local_tensor.fill_(getattr(value, "_local_tensor", value))
        return x

    return run


def _neutral_here(bound: BoundSpec) -> int | None:
    """Return what this rank's term holds; None for the value itself."""
    if bound.index is None:
        return None
    group = bound.spec.subgroups[bound.index]
    tiers = [(bound.spec.top, bound.index)]
    tiers += list(zip(group.placements, group.coordinate(bound.rank), strict=True))
    for placement, position in tiers:
        if isinstance(placement, Partial) and position and placement.reduce_op in _NEUTRAL:
            return _NEUTRAL[placement.reduce_op]
    return None
