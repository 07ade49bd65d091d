"""Batch norm where samples are cut. In training its statistics are those of the whole batch.

They are sums over all parts, two numbers a channel in each direction. Like the weight of a loss (``means.reduced``) they are
summed inside the operator, also between subgroups: one device normalizes by all samples, so a part's own statistics would
be wrong, and no ``redistribute`` in a model could say so. In evaluation the statistics are known, and every element is
computed alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate

from hdtensor.collectives import observe
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import call, events, is_hdtensor, special, wrap
from hdtensor.ops.special.means import cut_dims, is_pending, reduced
from hdtensor.ops.writes import copy_into


aten = torch.ops.aten

_WHY = "batch norm (statistics of the whole batch)"


def cuts_samples(x: Any) -> bool:
    """Return whether a tier cuts another dim than the channels', so that statistics need all parts."""
    return is_hdtensor(x) and bool(cut_dims(x._spec) - {1}) and not is_pending(x._spec)


def _spread(x: Any, values: Any) -> Any:
    """Return values of shape (channels,) as they broadcast over ``x``."""
    shape = [1, -1, *[1] * (x.ndim - 2)]
    if not is_hdtensor(values):
        return values.view(shape)
    return call(aten.view.default, values, shape) if values.ndim else values


def _sum(x: Any) -> Any:
    """Return the sum over everything but the channels, over all parts of the batch."""
    return reduced(call(aten.sum.dim_IntList, x, [d for d in range(x.ndim) if d != 1]))


def over_the_whole_batch(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """Normalize by the statistics of all samples, and follow them with the running ones."""
    running_mean, running_var, _training, momentum, eps, _kw = rest
    events[0] += 1  # plain local tensors would give the statistics of a part
    count = x.numel() // max(x.shape[1], 1)
    with observe.because(_WHY):
        mean = call(aten.div.Scalar, _sum(x), count)
        centered = call(aten.sub.Tensor, x, _spread(x, mean))
        variance = call(aten.div.Scalar, _sum(call(aten.mul.Tensor, centered, centered)), count)
    inverse = call(aten.rsqrt.default, call(aten.add.Scalar, variance, eps))
    out = call(aten.mul.Tensor, centered, _spread(x, inverse))
    if weight is not None:
        out = call(aten.mul.Tensor, out, _spread(x, weight))
    if bias is not None:
        out = call(aten.add.Tensor, out, _spread(x, bias))
    unbiased = call(aten.mul.Scalar, variance, count / max(count - 1, 1))
    for running, new in ((running_mean, mean), (running_var, unbiased)):
        _follow(running, new, momentum)
    return out, mean, inverse


def by_running_statistics(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """Normalize by the running statistics; nothing is saved for backward."""
    running_mean, running_var = rest[:2]
    eps = rest[-2]
    out = call(aten.mul.Tensor, *_normal_parts(x, running_mean, running_var, eps))
    if weight is not None:
        out = call(aten.mul.Tensor, out, _spread(x, weight))
    if bias is not None:
        out = call(aten.add.Tensor, out, _spread(x, bias))
    if out.dtype is not x.dtype:
        out = call(aten._to_copy.default, out, dtype=x.dtype)
    whole = x._spec.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
    dtype = running_mean.dtype
    empty = [x._local_tensor.new_empty(0, dtype=dtype) for _ in range(2)]
    return (out, *(wrap(e, BoundSpec.of(whole, (0,), (1,), dtype, None)) for e in empty))


def _normal_parts(x: Any, mean: Any, variance: Any, eps: float) -> tuple[Any, Any]:
    """Return the distance of values from the mean, and what it is multiplied by; in shapes that broadcast."""
    mean, variance = _spread(x, mean), _spread(x, variance)
    if is_hdtensor(variance):
        inverse = call(aten.rsqrt.default, call(aten.add.Scalar, variance, eps))
    else:
        inverse = (variance + eps).rsqrt()
    return call(aten.sub.Tensor, x, mean), inverse


def _follow(running: Any, new: Any, momentum: float) -> None:
    """Move a running statistic; a plain one, on ranks that hold a part of the batch only."""
    if is_hdtensor(running):
        followed = call(aten.lerp.Scalar, running, new, momentum)
        copy_into(
            aten.native_batch_norm.default, running, followed, "running"
        )  # which may be cut otherwise
    elif running is not None and new._spec.index is not None:
        running.lerp_(new._local_tensor, momentum)


def _backward_by_running_statistics(
    grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, *rest: Any
) -> Any:
    centered, inverse = _normal_parts(x, running_mean, running_var, rest[3])
    of_x = call(aten.mul.Tensor, grad, inverse)
    if weight is None:
        return of_x, None, None
    dims = [d for d in range(x.ndim) if d != 1]
    normal = call(aten.mul.Tensor, centered, inverse)
    return (
        call(aten.mul.Tensor, of_x, _spread(x, weight)),
        call(aten.sum.dim_IntList, call(aten.mul.Tensor, grad, normal), dims),
        call(aten.sum.dim_IntList, grad, dims),
    )


@special(aten.native_batch_norm_backward.default)
def _batch_norm_backward_over_samples(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Sum the two numbers a channel that the gradient needs over all parts of the batch."""
    if not cuts_samples(args[1]):
        return None
    if not args[7]:
        return _backward_by_running_statistics

    def run(
        grad: Any, x: Any, weight: Any, _mean: Any, _var: Any, mean: Any, inverse: Any, *_: Any
    ) -> Any:
        count = x.numel() // max(x.shape[1], 1)
        scale = _spread(x, inverse)
        normal = call(aten.mul.Tensor, call(aten.sub.Tensor, x, _spread(x, mean)), scale)
        dims = [d for d in range(x.ndim) if d != 1]
        of_bias = call(aten.sum.dim_IntList, grad, dims)
        of_weight = call(aten.sum.dim_IntList, call(aten.mul.Tensor, grad, normal), dims)
        with observe.because(_WHY):
            first = call(aten.div.Scalar, reduced(of_bias), count)
            second = call(aten.div.Scalar, reduced(of_weight), count)
        of_x = call(aten.sub.Tensor, grad, _spread(x, first))
        of_x = call(aten.sub.Tensor, of_x, call(aten.mul.Tensor, normal, _spread(x, second)))
        of_x = call(aten.mul.Tensor, of_x, scale)
        if weight is None:
            return of_x, None, None
        return call(aten.mul.Tensor, of_x, _spread(x, weight)), of_weight, of_bias

    return run
