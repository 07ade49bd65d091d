"""Output metadata by formula, for the operators of a model that are called with new sizes at every step.

Torch's meta function of a slice costs 100 us in Python, the formula 2. What sizes were seen proves nothing of others
(``x[:5]`` is as long as ``x`` until that is longer than 5), so the formulas compute clamps, pads and joins as torch does.
A formula answers None where torch must be asked: other memory formats, other dtypes, and whatever torch refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hdtensor._torch_compat import TensorMeta
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import Call
from hdtensor.placements.layout import contiguous_stride
from hdtensor.placements.sizes import total


aten = torch.ops.aten

Formula = Callable[[Call], Any]


def exact_metas(call: Call) -> Any:
    """Return the metadata of a call's results, as ``output_metas`` does; None where torch must be asked."""
    formula = _FORMULAS.get(call.func)
    return None if formula is None else formula(call)


def _argument(call: Call, position: int, default: Any) -> Any:
    """Return a plain argument, given by position or by name."""
    if position < len(call.args):
        return call.args[position]
    return call.kwargs.get(call.func._schema.arguments[position].name, default)


def _meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(torch.Size(shape), tuple(stride), dtype)


def _contiguous(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    return _meta(shape, contiguous_stride(shape), dtype)


def _is_contiguous(bound: BoundSpec) -> bool:
    return bound.stride == contiguous_stride(bound.shape)


def _view(call: Call) -> TensorMeta | None:
    bound, shape = call.specs[(0,)], list(call.args[1])
    numel, unknown = math.prod(bound.shape), shape.count(-1)
    if not numel or not _is_contiguous(bound) or unknown > 1:
        return None
    if unknown:
        known = math.prod(n for n in shape if n != -1)
        if not known or numel % known:
            return None
        shape[shape.index(-1)] = numel // known
    fits = all(n >= 0 for n in shape) and math.prod(shape) == numel
    return _contiguous(shape, bound.dtype) if fits else None


def _slice(call: Call) -> TensorMeta | None:
    bound = call.specs[(0,)]
    dim, step = _argument(call, 1, 0), _argument(call, 4, 1)
    if not -len(bound.shape) <= dim < len(bound.shape) or step < 1:
        return None
    length = bound.shape[dim]
    start, end = _argument(call, 2, None), _argument(call, 3, None)
    first = _clamped(0 if start is None else start, length)
    last = max(first, _clamped(length if end is None else end, length))
    shape, stride = list(bound.shape), list(bound.stride)
    shape[dim] = -(-(last - first) // step)
    stride[dim] *= step
    return _meta(shape, stride, bound.dtype)


def _clamped(place: int, length: int) -> int:
    return min(max(place + length if place < 0 else place, 0), length)


def _transpose(call: Call) -> TensorMeta | None:
    bound = call.specs[(0,)]
    num_dims = len(bound.shape)
    a, b = (0, num_dims - 1) if call.func is aten.t.default else call.args[1:3]
    if num_dims < 2 or (call.func is aten.t.default and num_dims > 2):
        return None
    if not (-num_dims <= a < num_dims and -num_dims <= b < num_dims):
        return None
    shape, stride = list(bound.shape), list(bound.stride)
    shape[a], shape[b] = shape[b], shape[a]
    stride[a], stride[b] = stride[b], stride[a]
    return _meta(shape, stride, bound.dtype)


def _expand(call: Call) -> TensorMeta | None:
    bound, wanted = call.specs[(0,)], list(call.args[1])
    new = len(wanted) - len(bound.shape)
    if new < 0:
        return None
    shape: list[int] = []
    stride: list[int] = []
    for i in range(len(wanted) - 1, -1, -1):
        if i >= new:
            size, step = bound.shape[i - new], bound.stride[i - new]
        else:
            size, step = 1, shape[0] * stride[0] if shape else 1
        target = size if wanted[i] == -1 and i >= new else wanted[i]
        if target < 0 or (size not in (1, target)):
            return None
        shape.insert(0, target)
        stride.insert(0, step if size == target else 0)
    return _meta(shape, stride, bound.dtype)


def _squeeze(call: Call) -> TensorMeta | None:
    bound, given = call.specs[(0,)], call.args[1]
    num_dims = len(bound.shape)
    dims = [given] if isinstance(given, int) else list(given)
    if not all(-num_dims <= d < num_dims for d in dims):
        return None
    gone = {d % num_dims for d in dims}
    kept = [d for d in range(num_dims) if d not in gone or bound.shape[d] != 1]
    return _meta([bound.shape[d] for d in kept], [bound.stride[d] for d in kept], bound.dtype)


def _clone(call: Call) -> TensorMeta | None:
    bound = call.specs[(0,)]
    form = call.kwargs.get("memory_format")
    is_plain = form is torch.contiguous_format or (form is None and _is_contiguous(bound))
    return _contiguous(bound.shape, bound.dtype) if is_plain else None


def _matmul(call: Call) -> TensorMeta | None:
    a, b = call.specs[(0,)], call.specs[(1,)]
    num_dims = 2 if call.func is aten.mm.default else 3
    if len(a.shape) != num_dims or len(b.shape) != num_dims or a.dtype is not b.dtype:
        return None
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return None
    return _contiguous((*a.shape[:-1], b.shape[-1]), a.dtype)


def _pad(call: Call) -> TensorMeta | None:
    bound, pad = call.specs[(0,)], call.args[1]
    if len(pad) % 2 or len(pad) // 2 > len(bound.shape) or not _is_contiguous(bound):
        return None
    shape = list(bound.shape)
    for i in range(0, len(pad), 2):
        shape[-1 - i // 2] += pad[i] + pad[i + 1]
    return _contiguous(shape, bound.dtype) if all(n > 0 for n in shape) else None


def _cat(call: Call) -> TensorMeta | None:
    bounds = list(call.specs.values())
    first, dim = bounds[0], _argument(call, 1, 0)
    num_dims = len(first.shape)
    if not all(_is_contiguous(b) and b.dtype is first.dtype for b in bounds):
        return None
    if not -num_dims <= dim < num_dims or len(bounds) != len(call.args[0]):
        return None
    shapes = [(*b.shape[: dim % num_dims], -1, *b.shape[dim % num_dims + 1 :]) for b in bounds]
    if any(len(b.shape) != num_dims for b in bounds) or any(s != shapes[0] for s in shapes):
        return None
    shape = list(first.shape)
    shape[dim] = total(b.shape[dim] for b in bounds)
    return _contiguous(shape, first.dtype)


def _nll_loss(call: Call) -> tuple[TensorMeta, TensorMeta] | None:
    scores, target = call.specs[(0,)], call.specs[(1,)]
    num_dims = len(scores.shape)
    if num_dims != (2 if call.func is aten.nll_loss_forward.default else 4):
        return None
    if tuple(target.shape) != (scores.shape[0], *scores.shape[2:]):
        return None
    number = _meta((), (), scores.dtype)
    each = _contiguous(target.shape, scores.dtype)
    return (number if call.args[3] else each, number)


def _like_second(call: Call) -> TensorMeta | None:
    scores = call.specs[(1,)]
    return _contiguous(scores.shape, scores.dtype) if _is_contiguous(scores) else None


def _whole_of_part(call: Call) -> TensorMeta | None:
    """The backward of a slice or a select: the shape is an argument."""
    shape = call.args[1]
    return _contiguous(shape, call.specs[(0,)].dtype) if all(n >= 0 for n in shape) else None


_FORMULAS: dict[Any, Formula] = {
    aten._unsafe_view.default: _view,
    aten.bmm.default: _matmul,
    aten.cat.default: _cat,
    aten.clone.default: _clone,
    aten.constant_pad_nd.default: _pad,
    aten.expand.default: _expand,
    aten.mm.default: _matmul,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _like_second,
    aten.nll_loss_forward.default: _nll_loss,
    aten.select_backward.default: _whole_of_part,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _whole_of_part,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.view.default: _view,
}
