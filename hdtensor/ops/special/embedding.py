"""Embedding look-ups, with the table cut over the vocabulary too.

DTensor's ``_MaskPartial`` keeps a mask inside the placement; here the look-up masks by itself and its result is an
ordinary ``Partial(sum)``, so that it has a meaning at both tiers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.propagate import row_rule
from hdtensor.ops.registry import call, deduced, is_hdtensor, special
from hdtensor.ops.special.conversions import convert_inside
from hdtensor.placements import checks
from hdtensor.placements.layout import owned_boxes
from hdtensor.placements.spec import HDSpec


aten = torch.ops.aten


@row_rule(aten.embedding.default)
def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    table, indices = args[0], args[1]
    last = len(indices.shape)
    rows: list[tuple[Placement, ...]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(last), Shard(1), Replicate()),
        (Partial(), Shard(0), Replicate()),
        (Partial(), Partial(), Replicate()),
    ]
    rows += [(Shard(d), Replicate(), Shard(d)) for d in range(last)]
    assert len(table.shape) == 2, "an embedding table is a matrix"
    return rows


@row_rule(aten.embedding_dense_backward.default)
def _embedding_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Placement, ...]]:
    last = len(args[1].shape)
    rows: list[tuple[Placement, ...]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(1), Shard(last), Replicate()),
        (Partial(), Partial(), Replicate()),
    ]
    rows += [(Partial(), Shard(d), Shard(d)) for d in range(last)]
    return rows


@special(aten.embedding.default)
def _vocabulary_cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look up only the rows held here, where the table is cut over the vocabulary."""
    table, indices = args[:2]
    if not is_hdtensor(table) or not _cuts_rows(table._spec):
        return None
    spec = _indices_beside(table._spec, indices)
    if spec is not None:

        def gathered(table: Any, indices: Any, *rest: Any) -> Any:
            whole = convert_inside(func, indices, spec)
            return call(func, table, whole, *rest[:-1], **(rest[-1] or {}))

        return gathered
    run = deduced(func, args, kwargs)
    bound = table._spec
    if bound.index is None:
        return run
    held = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, bound.rank)
    runs = sorted({(o.box.start[0], o.box.stop[0], o.offset[0]) for o in held})

    def masked(table: Any, indices: Any, *rest: Any) -> Any:
        plain = indices._local_tensor if is_hdtensor(indices) else indices
        local, inside = _to_local_rows(plain, runs)
        if table._local_tensor.shape[0] == 0:
            return _zeros(run, table, indices, rest)
        out = run(table, _like(indices, local), *rest)
        out._local_tensor.mul_(inside.unsqueeze(-1))
        return out

    return masked


def _cuts_rows(bound: Any) -> bool:
    tops = (bound.spec.top, *(p for g in bound.spec.subgroups for p in g.placements))
    return any(checks.shard_dim(p) == 0 for p in tops)


def _indices_beside(table: BoundSpec, indices: Any) -> HDSpec | None:
    """Return the spec of indices that are whole along each mesh axis that cuts the table; None if they are.

    The mask is computed from the indices as they come, so that no conversion may follow.
    """
    if not is_hdtensor(indices):
        return None
    have = indices._spec.spec
    pairs = zip(have.subgroups, table.spec.subgroups, strict=False)
    groups = tuple(
        group.with_placements(
            p if isinstance(t, Replicate) else Replicate()
            for p, t in zip(group.placements, other.placements, strict=False)
        )
        for group, other in pairs
        if group.mesh_shape == other.mesh_shape
    )
    return have.replace(subgroups=groups) if groups not in ((), have.subgroups) else None


def _to_local_rows(
    indices: torch.Tensor, runs: list[tuple[int, int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return local row numbers (0 where a row is not held) and whether each row is held."""
    local = torch.zeros_like(indices)
    inside = torch.zeros_like(indices, dtype=torch.bool)
    for start, stop, offset in runs:
        held = (indices >= start) & (indices < stop)
        local = torch.where(held, indices - start + offset, local)
        inside |= held
    return local, inside


def _like(indices: Any, local: torch.Tensor) -> Any:
    return type(indices)(local, indices._spec) if is_hdtensor(indices) else local


def _zeros(run: Any, table: Any, indices: Any, rest: tuple[Any, ...]) -> Any:
    """A rank that holds no row adds nothing."""
    one_row = table._local_tensor.new_zeros(1, table._local_tensor.shape[1])
    plain = indices._local_tensor if is_hdtensor(indices) else indices
    return run(type(table)(one_row, table._spec), _like(indices, torch.zeros_like(plain)), *rest)
