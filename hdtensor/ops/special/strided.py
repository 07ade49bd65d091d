"""``as_strided`` where it only names again what is there, as average pooling of tensors that lie channels last does.

Such pooling to one position is a mean whose strides are set afterwards, on dims of one element. The gradient is taken through
a flat tensor of zeros, into a strided view of which it is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hdtensor._torch_compat import in_backward
from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import call, deduced, is_hdtensor, special, wrap
from hdtensor.placements.layout import contiguous_stride


aten = torch.ops.aten


@special(aten.as_strided_.default)
def _rename_strides(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave a tensor as it is where size and strides are its own; those of dims of one element mean nothing."""
    x, size, stride, *offset = args
    if list(size) != list(x.shape) or any(offset) or kwargs.get("storage_offset"):
        return None
    if any(n > 1 and a != b for n, a, b in zip(size, stride, x.stride(), strict=True)):
        return None
    return lambda x, *_: x


@special(aten.as_strided.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Regroup all elements in their order as ``view`` does, which can follow a cut."""
    x, size, stride, *offset = args
    if any(offset) or kwargs.get("storage_offset") or not is_hdtensor(x):
        return None
    if not (_is_contiguous(x.shape, x.stride()) and _is_contiguous(size, stride)):
        return None
    if math.prod(size) != x.numel():
        return None
    return lambda x, size, *_: call(aten.view.default, x, list(size))


def _is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    pairs = zip(size, stride, contiguous_stride(size), strict=True)
    return all(n <= 1 or a == b for n, a, b in pairs)


def flat_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In backward, cut flat zeros of as many elements as a gradient has as the gradient, which is copied into them.

    Returns:
        What runs ``new_zeros``, None where that is not what is asked for.
    """
    x, size = args[:2]
    if func is not aten.new_zeros.default or x.ndim < 2 or list(size) != [x.numel()]:
        return None
    run = deduced(func, args, kwargs)

    def run_flat(x: Any, size: Any, kw: Any) -> Any:
        if not in_backward():
            return run(x, size, kw)
        zeros = call(func, x, list(x.shape), **(kw or {}))
        try:
            flat = call(aten.view.default, zeros, list(size))
        except DeductionError:
            return run(x, size, kw)
        own = flat._spec  # a tensor of its own, though data may have moved to make it
        new = BoundSpec.of(own.spec, own.shape, own.stride, own.dtype, own.top_sizes)
        return wrap(flat._local_tensor, new)

    return run_flat
