"""Reading values: ``item``, ``bool`` and ``equal`` answer only where the whole value is."""

from __future__ import annotations

from typing import Any

import torch

from hdtensor.errors import DeductionError, NonLocalError
from hdtensor.ops.registry import is_hdtensor, special


aten = torch.ops.aten


@special(aten._local_scalar_dense.default)
def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    if bound.index is None:
        ranks = [list(g.ranks) for g in bound.spec.subgroups]

        def refuse(x: Any, kw: Any) -> Any:
            raise NonLocalError(
                f"rank {bound.rank} holds no part of {bound}; ranks {ranks} do. Every rank may call "
                f"hdtensor.item(t) or t.full_tensor() together."
            )

        return refuse
    if bound.spec.has_partial():

        def pending(x: Any, kw: Any) -> Any:
            raise DeductionError(
                f"reading a value whose reduction is pending: {bound}. Every rank may call hdtensor.item(t) "
                f"together, or redistribute it to Replicate() first."
            )

        return pending
    return lambda x, kw: x._local_tensor.item()


@special(aten.equal.default, aten.allclose.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    listing = "; ".join(str(a._spec) for a in args[:2] if is_hdtensor(a))

    def refuse(*args_and_kwargs: Any) -> Any:
        raise DeductionError(
            f"{func} of distributed tensors would answer for this rank's shards only ({listing}). Compare "
            f"a.full_tensor() with b.full_tensor(), which every rank calls."
        )

    return refuse


@special(aten.is_same_size.default, is_local=True)
def _is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare global shapes, which every rank knows."""
    return lambda a, b, kw: a.shape == b.shape


@special(aten._has_same_storage_numel.default, is_local=True)
def _has_same_storage_numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare global sizes: what a tensor of forward derivatives is laid out like."""
    return lambda a, b, kw: a.numel() == b.numel()


@special(aten.is_pinned.default, is_local=True)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask about this rank's memory."""
    return lambda x, *rest: x._local_tensor.is_pinned()
