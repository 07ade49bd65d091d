"""Operators that divide by a count: means and losses, exact over cut dims (DESIGN section 4, "Denominators").

A shard's own mean is wrong wherever shards hold unequal counts: uneven blocks, ``ignore_index``, class weights. Where
a reduced dim is cut at either tier, the operator becomes a local *sum* over the *global effective weight*; its result is
``Partial(sum)``. Cases 18 and 51 of the users' list: DTensor refuses the first and multiplies gradients in the second.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor.collectives import observe
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import call, is_hdtensor, special
from hdtensor.ops.special.move import move
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec


aten = torch.ops.aten

_MEAN, _SUM = 1, 2

#: Losses with a ``reduction`` argument, by its position; all tensors before it have the input's shape.
LOSSES = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
LOSS_BACKWARDS = {
    aten.mse_loss_backward.default: 3,
    aten.smooth_l1_loss_backward.default: 3,
    aten.huber_loss_backward.default: 3,
    aten.soft_margin_loss_backward.default: 3,
    aten.binary_cross_entropy_backward.default: 4,
}

#: Losses over classes, whose denominator is the sum of the weights of the targets that count.
NLL = {
    aten.nll_loss_forward.default: aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default: aten.nll_loss2d_forward.default,
}


def cut_dims(bound: BoundSpec) -> set[int]:
    """Return the dims that either tier cuts."""
    dims = {checks.shard_dim(p) for g in bound.spec.subgroups for p in g.placements}
    return {d for d in (*dims, checks.shard_dim(bound.spec.top)) if d is not None}


def is_pending(bound: BoundSpec) -> bool:
    """Return whether a reduction is pending at either tier."""
    return bound.spec.has_partial()


@special(aten.mean.default, aten.mean.dim)
def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    num_dims = len(bound.shape)
    dims = args[1] if len(args) > 1 and args[1] else range(num_dims)
    dims = [d % num_dims for d in dims] if num_dims else []
    if not cut_dims(bound) & set(dims) and not _has_average(bound):
        return None
    count = math.prod(bound.shape[d] for d in dims)
    if func is aten.mean.default:
        return lambda x, kw: call(aten.div.Scalar, call(aten.sum.default, x, **kw), count)

    def run(x: Any, over: Any, *rest: Any) -> Any:
        *keep, kw = rest
        return call(aten.div.Scalar, call(aten.sum.dim_IntList, x, dims, *keep, **kw), count)

    return run


def _has_average(bound: BoundSpec) -> bool:
    return any(isinstance(p, Partial) and p.reduce_op == "avg" for p in (bound.spec.top,))


def _loss_rule(position: int, backward: bool) -> Any:
    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reduction = args[position] if len(args) > position else kwargs.get("reduction", _MEAN)
        first = 1 if backward else 0
        operands = [a for a in args[first : first + 2] if is_hdtensor(a)]
        if reduction != _MEAN or not any(cut_dims(a._spec) for a in operands):
            return None
        shape = torch.broadcast_shapes(*(a.shape for a in args[first : first + 2]))
        return _loss_run(func, position, math.prod(shape), backward)

    return rule


def _loss_run(func: Any, position: int, count: int, backward: bool) -> Any:
    names = [a.name for a in func._schema.arguments]

    def summed(args: list[Any], kw: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        if len(args) > position:
            return [*args[:position], _SUM, *args[position + 1 :]], kw
        missing = names[len(args) : position]
        return args, {**{n: None for n in missing if n not in kw}, **kw, "reduction": _SUM}

    def forward(*args_and_kw: Any) -> Any:
        *args, kw = args_and_kw
        args, kw = summed(args, kw)
        return call(aten.div.Scalar, call(func, *args, **kw), count)

    def back(*args_and_kw: Any) -> Any:
        *args, kw = args_and_kw
        args, kw = summed(args, kw)
        grad = args[0]
        args[0] = call(aten.div.Scalar, grad, count) if is_hdtensor(grad) else grad / count
        return call(func, *args, **kw)

    return back if backward else forward


for _op, _position in LOSSES.items():
    special(_op)(_loss_rule(_position, backward=False))
for _op, _position in LOSS_BACKWARDS.items():
    special(_op)(_loss_rule(_position, backward=True))


@special(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scores, target = args[0], args[1]
    reduction = args[3]
    cut = any(cut_dims(a._spec) for a in (scores, target) if is_hdtensor(a))
    if reduction != _MEAN or not cut:
        return None

    def run(
        scores: Any, target: Any, weight: Any, reduction: int, ignore_index: int, kw: Any
    ) -> Any:
        total, effective = call(func, scores, target, weight, _SUM, ignore_index)
        with observe.because(f"{func} (effective weight of the loss)"):
            effective = reduced(effective)
        return call(aten.div.Tensor, total, effective), effective

    return run


@special(aten.div.Tensor)
def _ratio(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Divide a scalar by the global weight: what losses with label smoothing end in."""
    total, weight = args
    if not is_hdtensor(weight) or total.ndim or weight.ndim or not weight._spec.spec.has_partial():
        return None
    return lambda total, weight, kw: call(func, total, reduced(weight))


def reduced(x: Any) -> Any:
    """Return a scalar with every pending reduction done: the one implicit top-tier communication.

    A loss over a split batch needs the global weight before it can divide (``ignore_index`` counts are data). The
    group over the subgroups' ranks was created with the tensors that brought the data.
    """
    spec = x._spec.spec
    if not spec.has_partial():
        return x
    return move(x, _whole(spec), None)


@functools.lru_cache(maxsize=1024)
def _whole(spec: HDSpec) -> HDSpec:
    return spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
