"""Indexing with tensors: integers give a shape that is known without data, booleans do not."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.ops.propagate import row_rule
from hdtensor.ops.registry import call, deduced, is_hdtensor, special
from hdtensor.ops.special import paired
from hdtensor.ops.special.paired import MASKS, aligned
from hdtensor.ops.special.rows import pointwise
from hdtensor.ops.writes import copy_into, make_in_place_run


aten = torch.ops.aten

Row = tuple[Placement, ...]


@special(aten.index.Tensor, is_local=True)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Deduce as any operator unless a mask chooses, whose count of elements is data, or rows go with other indices."""
    x, indices = args
    if any(i is not None and i.dtype in MASKS for i in indices):
        return None
    found = paired.candidates(x, indices)
    if not found:
        return deduced(func, args, kwargs)
    others: list[Any] = []

    def run(x: Any, indices: Any, kw: Any) -> Any:
        pairs = paired.paired(x, indices, found)
        if pairs is not None:
            return paired.index(x, indices, pairs)
        if not others:  # only now: it may refuse what pairs are not refused
            others.append(deduced(func, (x, indices), {}))
        return others[0](x, indices, kw)

    return run


@special(aten.index_put.default, aten.index_put_.default)
def _assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, indices, values = args[:3]
    found = paired.candidates(x, indices, values)
    return _assign_to_pairs(func, found) if found else _assign_under_mask(func, args)


def _assign_to_pairs(func: Any, found: list[tuple[int, int]]) -> Any:
    """Write beside the rows' own elements where rows go with other indices."""
    others: list[Any] = []

    def run(x: Any, indices: Any, values: Any, *rest: Any) -> Any:
        *given, kw = rest
        pairs = paired.paired(x, indices, found)
        if pairs is None:
            if not others:
                args, kwargs = (x, indices, values, *given), kw or {}
                others.append(make_in_place_run(func) or deduced(func, args, kwargs))
            return others[0](x, indices, values, *rest)
        accumulate = bool(given[0] if given else (kw or {}).get("accumulate", False))
        result = paired.index_put(x, indices, values, accumulate, pairs)
        if not func._schema.is_mutable:
            return result
        copy_into(func, x, result, "self")
        return x

    return run


def _assign_under_mask(func: Any, args: tuple[Any, ...]) -> Any:
    """``x[mask] = number``, with a mask of the tensor's first dims, fills where the mask is true."""
    x, indices, values = args[:3]
    accumulates = len(args) > 3 and args[3]
    if len(indices) != 1 or accumulates or indices[0] is None or values.numel() != 1:
        return None
    if indices[0].dtype != torch.bool or indices[0].shape != x.shape[: indices[0].ndim]:
        return None
    fill = aten.masked_fill_.Tensor if func._schema.is_mutable else aten.masked_fill.Tensor
    missing = x.ndim - indices[0].ndim

    def run(x: Any, indices: Any, values: Any, *rest: Any) -> Any:
        mask = indices[0]
        for _ in range(missing):
            mask = call(aten.unsqueeze.default, mask, -1) if is_hdtensor(mask) else mask[..., None]
        return call(fill, x, mask, values.reshape(()))

    return run


@row_rule(aten.index_put.default)
def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    """Dims that no index names may be cut in all; where values are added up, each rank may add some of them.

    The latter is the gradient of ``table[ids]`` where the ids are cut.
    """
    x, indices, values, accumulates = (*args, False)[:4]
    accumulates = kwargs.get("accumulate", accumulates)
    chosen = [i for i in indices if i is not None]
    num_indices = len(chosen)
    whole: Row = (Replicate(),) * num_indices
    rows: list[Row] = [(Replicate(), Replicate(), *whole, Replicate())]
    rows.append((Partial(), Partial(), *whole, Partial()))
    if any(i.tensor_meta.dtype in MASKS for i in chosen):
        return rows
    shape = torch.broadcast_shapes(*(i.shape for i in chosen))
    named = [k for k, i in enumerate(indices) if i is not None]
    free = [d for d in range(len(x.shape)) if d not in named]
    together = named[-1] - named[0] + 1 == num_indices
    before = named[0] if together else 0
    result = [x.shape[d] for d in free]
    result[before:before] = shape
    for position, dim in enumerate(free):
        at = position if position < before else position + len(shape)
        rows.append((Shard(dim), Shard(dim), *whole, aligned(values, result, at)))
    if accumulates:
        for k in (k for k in range(len(shape)) if shape[k] > 1):
            parts = [aligned(i, shape, k) for i in chosen]
            rows.append((Partial(), Partial(), *parts, aligned(values, result, before + k)))
    return rows


@row_rule(aten.where.self)
def _where(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row] | None:
    """Where one of two pending sums is chosen, so is each of its terms; all else is DTensor's rule."""
    condition, *chosen = args
    if not any(p == Partial() for c in chosen for p in c.placements):
        return None
    terms: Row = (Partial(), Replicate(), Partial(), Partial())
    return [(Replicate(),) * 4, terms, *pointwise(1, [condition, *chosen])]


@row_rule(aten.fill.Tensor, aten.fill_.Tensor)
def _fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    """``x[at] = number`` ends in this: every shard takes the number; what is pending does not."""
    kept = {p for p in args[0].placements if not isinstance(p, Partial)} or {Replicate()}
    return [(p, p, Replicate()) for p in sorted(kept, key=repr)]
