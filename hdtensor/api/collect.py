"""Bringing values together: ``full_tensor`` and ``item`` answer on every rank of the world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._rank import current_rank, is_played
from hdtensor._torch_compat import new_wrapper
from hdtensor.collectives import observe, operators, p2p
from hdtensor.errors import GroupError, SpecError
from hdtensor.ops.border import gradient_layout
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shard import shard_of
from hdtensor.ops.special.move import gradient_bound
from hdtensor.tensor import HDTensor


def full_tensor(
    tensor: HDTensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Return the whole tensor on every rank, also those that hold no part; differentiable.

    Every rank of the world calls it. Pending reductions are done.

    Args:
        tensor: The tensor.
        grad_placements: For a tensor of one subgroup: the placements of the gradient that comes back. Default: every
            holder's is that of the whole tensor. With ``[Partial()]`` it is the sum of the holders' gradients.

    Raises:
        GroupError: Inside ``as_rank``, where nothing may communicate.
        SpecError: If ``grad_placements`` do not fit the tensor.
    """
    _check(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        gradient = gradient_layout(tensor._spec, grad_placements, is_whole=True)
        return _FullTensor.apply(tensor, gradient, grad_placements is not None)
    return _collect(tensor)


def item(tensor: HDTensor) -> int | float | bool | complex:
    """Return a one-element tensor's value on every rank; every rank of the world calls it.

    Raises:
        RuntimeError: If the tensor has more than one element.
    """
    _check(tensor)
    with torch.no_grad():
        return _collect(tensor).item()


def _check(tensor: Any) -> None:
    if not isinstance(tensor, HDTensor):
        raise SpecError(
            f"expected an HDTensor, got a {type(tensor).__name__}: a plain tensor is whole already."
        )


def _collect(tensor: HDTensor) -> torch.Tensor:
    whole = tensor.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
    with torch.no_grad(), observe.because("full_tensor"), observe.profiled("full_tensor"):
        tensor = tensor.redistribute(whole)
        return _send_outside(tensor)


def _send_outside(tensor: HDTensor) -> torch.Tensor:
    """Return a tensor that is whole on its ranks on all others too."""
    spec = tensor.spec
    local = tensor._local_tensor
    if type(local) is torch.Tensor and local.is_meta:
        return local.new_empty(tensor.shape)
    if not dist.is_initialized() or (is_played() and type(local) is torch.Tensor):
        if not tensor.is_local:
            raise GroupError(
                f"full_tensor communicates; rank {current_rank()} holds no part of {spec}."
            )
        return local.clone()
    outside = [r for r in range(dist.get_world_size()) if r not in spec.ranks]
    source = spec.ranks[0]
    if not outside or not tensor.numel():
        return local.clone() if tensor.is_local else local.new_empty(tensor.shape)
    if type(local) is not torch.Tensor:
        return _send_in_graph(tensor, outside)
    if tensor.is_local:
        local = local.resolve_conj().resolve_neg().contiguous()  # bytes are what is sent
        p2p.exchange(dict.fromkeys(outside, local) if current_rank() == source else {}, {})
        return local.clone()
    local = local.new_empty(tensor.shape)
    p2p.exchange({}, {source: local})
    return local


def _send_in_graph(tensor: HDTensor, outside: list[int]) -> torch.Tensor:
    """Do what ``_send_outside`` does, by the operator that a compiled program keeps."""
    local, shape, source = tensor._local_tensor, tensor.shape, tensor.spec.ranks[0]
    size = tensor.numel()
    if not tensor.is_local:
        return operators.start("send_recv", local, [], [], [source], [size], False).view(shape)
    local = local.resolve_conj().resolve_neg()
    if current_rank() == source:
        flat = local.reshape(1, -1).expand(len(outside), size).reshape(-1)
        operators.start("send_recv", flat, outside, [size] * len(outside), [], [], False)
    return local.clone()


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: HDTensor, gradient: BoundSpec, is_given: bool) -> torch.Tensor:
        ctx.bound, ctx.gradient, ctx.is_given = tensor._spec, gradient, is_given
        return _collect(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[HDTensor, None, None]:
        bound = ctx.gradient
        bound = BoundSpec.bind(bound.spec, bound.shape, None, bound.dtype, bound.top_sizes)
        if not ctx.is_given:
            return new_wrapper(HDTensor, shard_of(grad, bound), bound, False), None, None
        local = grad if bound.index is not None else grad.new_empty(0)
        given = new_wrapper(HDTensor, local, bound, False)
        return given.redistribute(gradient_bound(ctx.bound).spec), None, None
