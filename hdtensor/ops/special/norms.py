"""Vector norms over cut dims: a root follows the reduction, so the reduction is done inside the operator.

Inside a subgroup that is an implicit conversion like any other. Between subgroups it would be hidden communication, so a
norm that takes a root over a dim the top tier cuts is refused; norms without one (0, 1, inf) stay ``Partial``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor.errors import DeductionError
from hdtensor.ops.registry import call, is_hdtensor, special
from hdtensor.ops.special.conversions import convert_inside
from hdtensor.ops.special.means import cut_dims, is_pending


aten = torch.ops.aten


@special(aten.linalg_vector_norm.default)
def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    num_dims = len(bound.shape)
    over = args[2] if len(args) > 2 and args[2] else range(num_dims)
    dims = [d % num_dims for d in over] if num_dims else []
    if not cut_dims(bound) & set(dims) and not is_pending(bound):
        return None

    def run(x: Any, *rest: Any) -> Any:
        *given, kw = rest
        order = float(given[0]) if given else 2.0
        keepdim = given[2] if len(given) > 2 else False
        return _norm(func, x, order, dims, keepdim, (kw or {}).get("dtype"))

    return run


def _norm(func: Any, x: Any, order: float, dims: list[int], keepdim: bool, dtype: Any) -> Any:
    size = call(aten.abs.default, x)
    if dtype is not None:
        size = call(aten._to_copy.default, size, dtype=dtype)
    if math.isinf(order):
        return call(aten.amax.default if order > 0 else aten.amin.default, size, dims, keepdim)
    if order == 0:
        return call(
            aten.sum.dim_IntList, call(aten.ne.Scalar, size, 0), dims, keepdim, dtype=size.dtype
        )
    if order == 1:
        return call(aten.sum.dim_IntList, size, dims, keepdim)
    powered = call(aten.sum.dim_IntList, call(aten.pow.Tensor_Scalar, size, order), dims, keepdim)
    spec = powered._spec.spec
    if isinstance(spec.top, Partial):
        raise DeductionError(
            f"{func}: a norm of order {order} over a dim that the top tier cuts ({x._spec}) needs a sum over "
            f"subgroups before its root. Insert: x = x.redistribute({str(x.spec.replace(top=Replicate()))!r}). For the norm of all gradients "
            f"call hdtensor.clip_grad_norm_ or hdtensor.get_total_norm."
        )
    if spec.has_partial():
        whole = spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)
        powered = convert_inside(func, powered, whole)
    return call(aten.pow.Tensor_Scalar, powered, 1.0 / order)


@special(aten._foreach_norm.Scalar)
def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(tensors: Any, *rest: Any) -> Any:
        *given, kw = rest
        order = given[0] if given else 2
        return [
            torch.ops.aten.linalg_vector_norm.default(x, order, None, False, **_dtype(given, kw))
            for x in tensors
        ]

    assert any(is_hdtensor(t) for t in args[0]), "dispatched without an HDTensor"
    return run


def _dtype(given: list[Any], kw: Any) -> dict[str, Any]:
    dtype = given[1] if len(given) > 1 else (kw or {}).get("dtype")
    return {} if dtype is None else {"dtype": dtype}
