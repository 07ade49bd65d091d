"""Reductions whose arguments DTensor's rules read otherwise than torch.

An empty list of dims means all of them to torch and none to DTensor; ``logsumexp`` takes ``keepdim`` by position too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.ops.propagate import row_rule
from hdtensor.ops.registry import deduced, special


aten = torch.ops.aten


@special(
    aten.amax.default,
    aten.amin.default,
    aten.count_nonzero.dim_IntList,
    aten.nansum.default,
    aten.std.correction,
    aten.std_mean.correction,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.var_mean.correction,
    is_local=True,
)
def _over_all_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Deduce with the dims spelled out."""
    dims = list(range(args[0].ndim))
    if not dims or len(args) < 2 or args[1] is None or len(args[1]):
        return None
    run = deduced(func, (args[0], dims, *args[2:]), kwargs)
    return lambda x, _, *rest: run(x, dims, *rest)


def _truth(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    """Leave "and" and "or" over cut dims pending; from torch 2.14 on DTensor's rule gathers first.

    A result that is no boolean (torch keeps uint8) would be added up: then only dims that stay may be cut.
    """
    num_dims = len(args[0].shape)
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    rows: list[tuple[Placement, ...]] = [(Replicate(), Replicate())]
    if isinstance(dims, list | tuple) and not dims:
        return rows
    listed = range(num_dims) if dims is None else [dims] if type(dims) is int else dims
    over = {dim % num_dims for dim in listed} if num_dims else set()
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    for dim in range(num_dims):
        if dim not in over:
            gone = 0 if keepdim else sum(other < dim for other in over)
            rows.append((Shard(dim - gone), Shard(dim)))
        elif args[0].tensor_meta.dtype is not torch.uint8:
            rows.append((Partial(op), Shard(dim)))
    return rows


row_rule(aten.any.default, aten.any.dim, aten.any.dims)(functools.partial(_truth, "sum"))
row_rule(aten.all.default, aten.all.dim)(functools.partial(_truth, "product"))


@row_rule(aten.logsumexp.default)
def _logsumexp(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    num_dims = len(args[0].shape)
    over = {dim % num_dims for dim in args[1]} if num_dims else set()
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    rows: list[tuple[Placement, ...]] = [(Replicate(), Replicate())]
    for dim in sorted(set(range(num_dims)) - over):
        gone = 0 if keepdim else sum(other < dim for other in over)
        rows.append((Shard(dim - gone), Shard(dim)))
    return rows
