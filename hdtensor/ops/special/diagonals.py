"""``diagonal`` and its backward: the dims beside the two that meet may be cut; DTensor gathers them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.ops.propagate import row_rule


aten = torch.ops.aten

Row = tuple[Placement, ...]


def _rows(num_dims: int, dims: list[int]) -> list[tuple[int, int]]:
    """Return (dim of the diagonal, dim of the matrix) for every dim that stays."""
    kept = [d for d in range(num_dims) if d not in [dim % num_dims for dim in dims]]
    return list(enumerate(kept))


def _dims(given: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return ``dim1`` and ``dim2``, which follow ``offset``."""
    return [
        given[i] if len(given) > i else kwargs.get(name, i - 1)
        for i, name in ((1, "dim1"), (2, "dim2"))
    ]


@row_rule(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    pairs = _rows(len(args[0].shape), _dims(args[1:], kwargs))
    return [
        (Replicate(), Replicate()),
        (Partial(), Partial()),
        *((Shard(on_diagonal), Shard(on_matrix)) for on_diagonal, on_matrix in pairs),
    ]


@row_rule(aten.diagonal_backward.default)
def _diagonal_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    pairs = _rows(len(args[1]), _dims(args[2:], kwargs))
    return [
        (Replicate(), Replicate()),
        (Partial(), Partial()),
        *((Shard(on_matrix), Shard(on_diagonal)) for on_diagonal, on_matrix in pairs),
    ]
