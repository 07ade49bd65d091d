"""Indexing with tensors: integers give a shape that is known without data, booleans do not."""

from __future__ import annotations

from typing import Any

import torch

from hdtensor.ops.registry import deduced, special


aten = torch.ops.aten


@special(aten.index.Tensor, is_local=True)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Deduce as any operator unless a mask chooses, whose count of elements is data."""
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return None
    return deduced(func, args, kwargs)
