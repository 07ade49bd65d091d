"""``squeeze`` takes out dims of length 1 of the whole tensor, not those of which a block happens to hold one row."""

from __future__ import annotations

from typing import Any

import torch

from hdtensor.ops.registry import deduced, special


aten = torch.ops.aten


@special(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = args[0].shape
    given = args[1] if len(args) > 1 else range(len(shape))
    dims = [given] if isinstance(given, int) else list(given)
    single = [d for d in dims if len(shape) and shape[d] == 1]
    if func is not aten.squeeze.default and len(single) == len(dims):
        return None
    run = deduced(aten.squeeze.dims, (args[0], single), {})
    return lambda x, *rest: run(x, single, {})
