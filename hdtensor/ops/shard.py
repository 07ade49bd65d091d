"""This rank's shard: of a whole plain tensor, and as it was saved."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial

from hdtensor._torch_compat import new_wrapper
from hdtensor.errors import SpecError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import tensor_type
from hdtensor.placements.layout import owned_boxes


def shard_of(full: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, as a new contiguous tensor.

    A ``Partial`` tier keeps the value in its first subgroup (rank) and zeros elsewhere for a sum; every holder keeps it
    for the other reductions.
    """
    if bound.index is None:
        return full.new_empty(0)
    # A lazy conjugate or negation would be sent as the bytes below it.
    full = full.detach().resolve_conj().resolve_neg()
    owned = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, bound.rank)
    origin = (0,) * full.ndim
    if len(owned) == 1:
        local = full[owned[0].box.slices_from(origin)].clone(memory_format=torch.contiguous_format)
    else:
        local = full.new_empty(bound.local_shape())
        for piece in owned:
            local[piece.local_slices] = full[piece.box.slices_from(origin)]
    return as_term(local, bound)


def as_term(local: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Turn a value into this rank's term of a pending reduction."""
    assert bound.index is not None
    group = bound.spec.subgroups[bound.index]
    tiers = [(bound.spec.top, bound.index)]
    tiers += list(zip(group.placements, group.coordinate(bound.rank), strict=True))
    for placement, position in tiers:
        if isinstance(placement, Partial) and position:
            if placement.reduce_op == "sum":
                local.zero_()
            elif placement.reduce_op == "product":
                local.fill_(1)
    return local


def rebuild(
    local: torch.Tensor, bound: BoundSpec, rank: int, requires_grad: bool, is_parameter: bool
) -> Any:
    """Return what a rank saved; another rank may load it only if it holds the same."""
    held = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, bound.rank)
    saved = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, rank)
    is_own = rank == bound.rank or (held == saved and not bound.spec.has_partial())
    if not is_own or bound.local_shape() != tuple(local.shape):
        raise SpecError(
            f"this shard of {bound} was saved by rank {rank} and is not what rank {bound.rank} holds. "
            f"Load the file of this rank."
        )
    if bound.is_copy:  # what it was a view of is not there any more
        bound = bound.with_spec(bound.spec, bound.top_sizes)
    tensor: Any = new_wrapper(tensor_type(), local, bound, requires_grad and not is_parameter)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor
