"""This rank's shard of a whole plain tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial

from hdtensor.ops.bound import BoundSpec
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
