"""Tensors whose reduction is pending: copies, constants and bits.

DTensor writes a constant on every rank, so that ``1 - x`` (``empty_like``, ``fill_``, ``sub_``) counts it once a rank. Here
an empty tensor is never pending, a fill keeps the value in one term, and one term alone is added to. A clone stays pending,
which DTensor reduces; the bits of a term are no term of the bits, which DTensor overlooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor.errors import DeductionError
from hdtensor.ops.binding import check_writable
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import call, deduced, is_hdtensor, special, wrap


aten = torch.ops.aten

#: What the other terms hold beside the one with the value; the value itself for the reductions not named.
_NEUTRAL = {"sum": 0, "product": 1}


@special(aten.empty_like.default, is_local=True)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a tensor without pending reductions: nothing is in it yet."""
    bound = args[0]._spec
    if not bound.spec.has_partial():
        return None
    like = without_reductions(bound)
    run = deduced(func, (wrap(args[0]._local_tensor, like),), kwargs)
    return lambda x, kw: run(wrap(x._local_tensor, like), kw)


@special(aten.clone.default, is_local=True)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the terms; autograd clones gradients, which are pending where data is split."""
    bound = args[0]._spec
    if not bound.spec.has_partial():
        return None
    like = without_reductions(bound)
    run = deduced(func, (wrap(args[0]._local_tensor, like),), kwargs)

    def run_on_terms(x: Any, kw: Any) -> Any:
        out = run(wrap(x._local_tensor, like), kw)
        own = BoundSpec.of(bound.spec, out.shape, out._spec.stride, out.dtype, bound.top_sizes)
        return wrap(out._local_tensor, own)

    return run_on_terms


@special(aten.view.dtype)
def _bits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    if not bound.spec.has_partial():
        return None
    whole = without_reductions(bound).spec
    if whole.top != bound.spec.top:
        raise DeductionError(
            f"{func}: the bits of a sum are no sum of bits, and the top tier's reduction is pending ({bound}). Insert: "
            f"x = x.redistribute({str(whole)!r})."
        )

    def run(x: Any, *rest: Any) -> Any:
        reduced = torch.ops.hdtensor.redistribute(x, whole.text, bound.top_sizes, False)
        return call(func, reduced, *rest[:-1])

    return run


def without_reductions(bound: BoundSpec) -> BoundSpec:
    """Return the layout of the same tensor with no reduction pending."""
    spec = bound.spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)
    if isinstance(spec.top, Partial):
        spec = spec.replace(top=Replicate())
    return BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes)


@special(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    if not bound.spec.has_partial():
        return None
    value = args[1]._spec if is_hdtensor(args[1]) else None
    if "norm" in _reductions(bound) or (value is not None and value.spec.has_partial()):
        shown = bound if value is None else value
        raise DeductionError(
            f"{func}: a value cannot be kept in a term of {bound} ({shown} is pending). Redistribute to "
            f"Replicate() first."
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


@special(aten.add_.Scalar, aten.add_.Tensor, aten.sub_.Scalar, aten.sub_.Tensor)
def _add_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add to the first term of a sum, and to every term of another reduction; the layout stays (``mean().add_(eps)``)."""
    bound = args[0]._spec if is_hdtensor(args[0]) else None
    if bound is None or not bound.spec.has_partial() or isinstance(args[1], torch.Tensor):
        return None
    if not _reductions(bound) <= {"sum", "avg", "max", "min"}:
        return None
    check_writable(func, "self", bound)
    skips = bound.index is None or _neutral_here(bound) is not None

    def run(x: Any, *rest: Any) -> Any:
        if not skips:
            func(x._local_tensor, *rest[:-1], **(rest[-1] or {}))
        return x

    return run


def _reductions(bound: BoundSpec) -> set[str]:
    """Return which reductions are pending; a p-norm's placement calls itself a sum."""
    pending = (bound.spec.top, *(p for g in bound.spec.subgroups for p in g.placements))
    return {
        "norm" if getattr(p, "norm_type", None) is not None else p.reduce_op
        for p in pending
        if isinstance(p, Partial)
    }


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
