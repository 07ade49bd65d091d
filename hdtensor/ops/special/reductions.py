"""Reductions over an empty list of dims: torch means all of them, DTensor none."""

from __future__ import annotations

from typing import Any

import torch

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
