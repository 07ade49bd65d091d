"""Copies and aliases: whatever is pending of a tensor is pending of its copy, also a product or a norm.

DTensor's rules say the same, of all reductions or, from torch 2.14 on, of some.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor.ops.propagate import row_rule


aten = torch.ops.aten


@row_rule(
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.detach_.default,
)
def _copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    return [(p, p) for p in dict.fromkeys((Replicate(), *args[0].placements))]


@row_rule(aten._to_copy.default)
def _convert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    """Keep a reduction pending where it may as well be done after the conversion."""
    old, new = args[0].tensor_meta.dtype, kwargs.get("dtype")
    return [row for row in _copy(args, kwargs) if _commutes(row[0], old, new)]


def _commutes(placement: Placement, old: torch.dtype, new: torch.dtype | None) -> bool:
    if not isinstance(placement, Partial) or new is None or new is old:
        return True
    if new is torch.bool:
        return False
    is_rounded = old.is_floating_point and not new.is_floating_point
    return placement.reduce_op in ("max", "min") or not is_rounded
