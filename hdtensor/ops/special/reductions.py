"""Reductions whose arguments DTensor's rules read otherwise than torch.

An empty list of dims means all of them to torch and none to DTensor; ``logsumexp`` takes ``keepdim`` by position too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
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
