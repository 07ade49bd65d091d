"""``cat`` as eager PyTorch has it: one-dimensional tensors without elements join anything. ``stack`` of scalars."""

from __future__ import annotations

from typing import Any

import torch

from hdtensor.errors import DeductionError
from hdtensor.ops.registry import call, is_hdtensor, special
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


@special(aten.stack.default, is_local=True)
def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Say what to call where torch's own clipping stacks the norms of gradients of unlike subgroups.

    Raises:
        DeductionError: If scalars of unlike subgroups are stacked.
    """
    bounds = [t._spec for t in args[0] if is_hdtensor(t) and not t.ndim]
    places = {tuple((g.ranks, g.mesh_shape) for g in b.spec.subgroups) for b in bounds}
    if len(places) < 2:
        return None
    listing = "; ".join(dict.fromkeys(f"{b.spec} on {sorted(b.spec.ranks)}" for b in bounds))
    raise DeductionError(
        f"{func}: these {len(bounds)} scalars live on unlike subgroups: {listing}. For the norm of gradients call "
        f"hdtensor.clip_grad_norm_ or hdtensor.get_total_norm on every rank; for other scalars redistribute them "
        f"to one spec first."
    )
