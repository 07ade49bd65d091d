"""``cat`` as eager PyTorch has it: one-dimensional tensors without elements join anything."""

from __future__ import annotations

from typing import Any

import torch

from hdtensor.ops.registry import call, special
from hdtensor.ops.special.pieces import joined_pieces


aten = torch.ops.aten


def _is_legacy_empty(tensor: torch.Tensor) -> bool:
    return tensor.shape == (0,)


@special(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave empty 1-D tensors out (an empty KV cache is one); they have no dim that could be cut.

    Beside other 1-D tensors they are like any.
    """
    tensors = args[0]
    run = joined_pieces(tensors, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if run is not None:
        return run
    if all(t.ndim == 1 for t in tensors):
        return None
    kept = [i for i, t in enumerate(tensors) if not _is_legacy_empty(t)]
    if len(kept) in (0, len(tensors)):
        return None
    return lambda tensors, *rest: call(func, [tensors[i] for i in kept], *rest[:-1])
