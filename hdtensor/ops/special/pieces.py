"""Fused projections: a tensor whose equal pieces are each cut alike, such as q, k and v one behind the other.

A strided shard ``S2x3`` cuts each third of dim 2. Taking the three thirds apart is local then, and each is an ordinary
``S2``. In backward their gradients are put together again in the same way; DTensor would gather in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import StridedShard, in_backward
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.generate import empty_beside
from hdtensor.ops.registry import is_hdtensor, special, wrap
from hdtensor.placements import checks
from hdtensor.placements.layout import contiguous_stride
from hdtensor.placements.sizes import hint
from hdtensor.placements.spec import HDSpec


aten = torch.ops.aten


def _pieces(length: int, sizes: Any) -> int | None:
    """Return into how many equal pieces ``split`` takes a dim apart, None for unlike ones."""
    if not isinstance(sizes, list | tuple):
        sizes = hint(sizes)
        length = hint(length)
        return length // sizes if sizes and length % sizes == 0 else None
    return len(sizes) if len(set(sizes)) == 1 and sum(sizes) == length else None


@special(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    is_local=True,
)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    dim %= max(len(bound.shape), 1)
    count = _pieces(bound.shape[dim], args[1]) if bound.shape else None
    if count is None or not _is_cut_alike(bound.spec, dim, count):
        return None

    def whole(placement: Placement) -> Placement:
        return Shard(dim) if checks.shard_dim(placement) == dim else placement

    shape = list(bound.shape)
    shape[dim] //= count
    spec = bound.spec.map_bottom(whole)
    out = BoundSpec.of(spec, shape, bound.stride, bound.dtype, bound.top_sizes)

    def run(x: Any, *_: Any) -> Any:
        local = x._local_tensor
        if out.index is None:
            return [wrap(local.view_as(local), out) for _ in range(count)]
        return (
            [wrap(piece, out) for piece in local.chunk(count, dim)]
            if local.shape[dim]
            else [wrap(local.narrow(dim, 0, 0), out) for _ in range(count)]
        )

    return run


def _is_cut_alike(spec: HDSpec, dim: int, count: int) -> bool:
    """Whether the dim is cut in just so many pieces somewhere, and nowhere in another way."""
    if checks.shard_dim(spec.top) == dim:
        return False
    found = False
    for group in spec.subgroups:
        cuts = [p for p in group.placements if checks.shard_dim(p) == dim]
        if len(cuts) > 1 or any(p != StridedShard(dim, split_factor=count) for p in cuts):
            return False
        found = found or bool(cuts)
    return found


def joined_pieces(tensors: Sequence[Any], dim: int) -> Any:
    """Return the run of a ``cat`` of equal pieces in backward, None where it is an ordinary one.

    Args:
        tensors: Operands of ``cat``.
        dim: Where they are put together.
    """
    if not in_backward() or len(tensors) < 2 or not all(map(is_hdtensor, tensors)):
        return None
    bound = tensors[0]._spec
    dim %= max(len(bound.shape), 1)
    same = (bound.spec, tuple(bound.shape), bound.top_sizes)
    if any((t._spec.spec, tuple(t._spec.shape), t._spec.top_sizes) != same for t in tensors):
        return None
    if checks.shard_dim(bound.spec.top) == dim or not _is_simply_cut(bound.spec, dim):
        return None
    count = len(tensors)

    def strided(placement: Placement) -> Placement:
        return StridedShard(dim, split_factor=count) if placement == Shard(dim) else placement

    shape = list(bound.shape)
    shape[dim] *= count
    spec = bound.spec.map_bottom(strided)
    dtype = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    out = BoundSpec.of(spec, shape, contiguous_stride(shape), dtype, bound.top_sizes)

    def run(tensors: Any, *_: Any) -> Any:
        if out.index is None:
            return wrap(empty_beside(tensors[0]._local_tensor, dtype), out)
        return wrap(torch.cat([t._local_tensor for t in tensors], dim), out)

    return run


def _is_simply_cut(spec: HDSpec, dim: int) -> bool:
    found = False
    for group in spec.subgroups:
        cuts = [p for p in group.placements if checks.shard_dim(p) == dim]
        if len(cuts) > 1 or any(p != Shard(dim) for p in cuts):
            return False
        found = found or bool(cuts)
        if any(not (checks.is_cut(p) or isinstance(p, Replicate)) for p in group.placements):
            return False
    return found
