"""Indexing with tensors: integers give a shape that is known without data, booleans do not."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor.ops.propagate import row_rule
from hdtensor.ops.registry import call, deduced, special


aten = torch.ops.aten


@special(aten.index.Tensor, is_local=True)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Deduce as any operator unless a mask chooses, whose count of elements is data."""
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return None
    return deduced(func, args, kwargs)


@special(aten.index_put.default, aten.index_put_.default)
def _assign_under_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = number``, with a mask of the tensor's own shape, fills where the mask is true."""
    x, indices, values = args[:3]
    accumulates = len(args) > 3 and args[3]
    if len(indices) != 1 or accumulates or indices[0] is None or values.numel() != 1:
        return None
    if indices[0].dtype != torch.bool or indices[0].shape != x.shape:
        return None
    fill = aten.masked_fill_.Tensor if func._schema.is_mutable else aten.masked_fill.Tensor
    return lambda x, indices, values, *rest: call(fill, x, indices[0], values.reshape(()))


@row_rule(aten.fill.Tensor, aten.fill_.Tensor)
def _fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    """``x[at] = number`` ends in this: every shard takes the number; what is pending does not."""
    kept = {p for p in args[0].placements if not isinstance(p, Partial)} or {Replicate()}
    return [(p, p, Replicate()) for p in sorted(kept, key=repr)]
