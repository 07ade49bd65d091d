"""Autograd nodes at the border of the tensor type: to this rank's local tensor, and to its subgroup's ``DTensor``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hdtensor.collectives import groups
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import wrap
from hdtensor.ops.special.move import gradient_bound


class ToLocal(torch.autograd.Function):
    """``HDTensor.to_local``."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        ctx.bound = tensor._spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return wrap(grad, gradient_bound(ctx.bound))


class ToDTensor(torch.autograd.Function):
    """``HDTensor.to_dtensor``."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_top: Placement) -> DTensor:
        bound = tensor._spec
        index = bound.index
        assert index is not None, "to_dtensor is called on local ranks only"
        ctx.bound, ctx.grad_top = bound, grad_top
        group = bound.spec.subgroups[index]
        return DTensor.from_local(
            tensor._local_tensor,
            groups.mesh_of(group),
            group.placements,
            run_check=False,
            shape=torch.Size(bound.block_shape(index)),
            stride=bound.block_stride(index),
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, None]:
        bound = gradient_bound(ctx.bound)
        index = bound.index
        assert index is not None, "a gradient comes back where the DTensor went out"
        wanted = bound.spec.subgroups[index].placements
        if grad.placements != wanted:
            grad = grad.redistribute(placements=wanted)
        spec = bound.spec
        if not bound.top_sizes:
            spec = spec.replace(top=ctx.grad_top)
        out = BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes)
        return wrap(grad.to_local(), out), None
