"""``gather`` and ``scatter``: element i of the index stands for element i of the tensor, whatever their lengths.

A dim may therefore be cut in all operands together only where all have the same length; DTensor cuts the same *share* of
unlike lengths, and pairs element 3 of the index with element 5 of the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.propagate import row_rule
from hdtensor.ops.registry import special
from hdtensor.ops.writes import functional_then_copy


aten = torch.ops.aten

Row = tuple[Placement, ...]


def _free_dims(dim: int, specs: list[DTensorSpec]) -> list[int]:
    num_dims = min(len(s.shape) for s in specs)
    along = dim % max(num_dims, 1)
    return [d for d in range(num_dims) if d != along and len({s.shape[d] for s in specs}) == 1]


def _rows(dim: int, specs: list[DTensorSpec]) -> list[Row]:
    """Everything whole, or one free dim cut in the result and in every operand."""
    everywhere = [Replicate(), *(Shard(d) for d in _free_dims(dim, specs))]
    return [(placement,) * (1 + len(specs)) for placement in everywhere]


@row_rule(aten.gather.default)
def _gather(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    source, dim, index = args[:3]
    along = dim % max(len(index.shape), 1)
    rows = [*_rows(dim, [source, index]), (Partial(), Partial(), Replicate())]
    if len(index.shape):
        rows.append((Shard(along), Replicate(), Shard(along)))
    return rows


@row_rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_reduce.two,
)
def _scatter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    return _rows(args[1], [a for a in (args[0], *args[2:]) if isinstance(a, DTensorSpec)])


@row_rule(aten.scatter_add.default)
def _scatter_add(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    """Terms may be pending, and may lie on several ranks: what they add up to is pending then."""
    into, dim, index, source = args[:4]
    rows = _rows(dim, [into, index, source])
    rows.append((Partial(), Partial(), Replicate(), Partial()))
    if len(index.shape) and index.shape == source.shape:
        along = dim % len(index.shape)
        rows.append((Partial(), Partial(), Shard(along), Shard(along)))
    return rows


@special(
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_.reduce,
    aten.scatter_.value_reduce,
    aten.scatter_add_.default,
    aten.scatter_reduce_.two,
)
def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return functional_then_copy(func)
