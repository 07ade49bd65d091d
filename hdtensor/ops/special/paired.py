"""``x[arange(n), ids]``: row i of the tensor meets element i of the other indices, as in a gather.

Row numbers that count up do not choose: they say that a dim of the tensor and a dim of the other indices go together, so
both may be cut, alike. Whether an index counts up is in its values, which are looked at on every call where the answer
decides: where the dim that it indexes is cut. The values of a plain index are the same on every rank, so all see the same.
Those of an ``HDTensor`` are in shards, so every rank says of its own, and all are asked; only where that makes the
difference between a result and a refusal, which is at the top tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.propagate import row_rule
from hdtensor.ops.registry import accepts_plain, call, events, is_hdtensor
from hdtensor.ops.special.scalars import everywhere
from hdtensor.placements import checks
from hdtensor.placements.layout import owned_boxes


Row = tuple[Placement, ...]

#: Types of indices of which an element says whether, not which.
MASKS = (torch.bool, torch.uint8)

_library = torch.library.Library("hdtensor", "FRAGMENT")
_library.define("paired_index(Tensor x, Tensor?[] indices, int[] pairs, int num_dims) -> Tensor")
_library.define(
    "paired_index_put(Tensor x, Tensor?[] indices, Tensor values, bool accumulate, int[] pairs, int num_dims) -> Tensor"
)


class Pairs(NamedTuple):
    """Which dims of the tensor go with which dims of the indices.

    Attributes:
        dims: Dim of the tensor, dim of the indices' common shape, and so on.
        num_dims: Number of dims of that shape.
    """

    dims: list[int]
    num_dims: int

    def of(self) -> list[tuple[int, int]]:
        """Return (dim of the tensor, dim of the indices) for each pair."""
        return list(zip(self.dims[::2], self.dims[1::2], strict=True))

    def shape(self, x: Sequence[int], others: Sequence[Sequence[int]]) -> list[int]:
        """Return the common shape of the indices, of which ``others`` are those that do not count up."""
        return list(torch.broadcast_shapes(*others, *(self.row(x, d, k) for d, k in self.of())))

    def row(self, x: Sequence[int], dim: int, at: int) -> list[int]:
        """Return the shape of row numbers that count along one dim of the indices."""
        return [x[dim] if k == at else 1 for k in range(self.num_dims)]


# -- on local tensors -------------------------------------------------------------------------------


def _rows(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], pairs: Pairs
) -> list[torch.Tensor | None]:
    """Return the indices with this tensor's own row numbers where they count up."""
    out = list(indices)
    for dim, at in pairs.of():
        out[dim] = torch.arange(x.shape[dim], device=x.device).view(pairs.row(x.shape, dim, at))
    return out


def _paired_index(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], pairs: list[int], num_dims: int
) -> torch.Tensor:
    return torch.ops.aten.index.Tensor(x, _rows(x, indices, Pairs(pairs, num_dims)))


def _paired_index_put(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,
    pairs: list[int],
    num_dims: int,
) -> torch.Tensor:
    rows = _rows(x, indices, Pairs(pairs, num_dims))
    return torch.ops.aten.index_put.default(x, rows, values, accumulate)


_library.impl("paired_index", _paired_index, "CompositeExplicitAutograd")
_library.impl("paired_index_put", _paired_index_put, "CompositeExplicitAutograd")

_INDEX = torch.ops.hdtensor.paired_index.default
_PUT = torch.ops.hdtensor.paired_index_put.default


def index(x: Any, indices: Sequence[Any], pairs: Pairs) -> Any:
    """Return ``x[indices]``."""
    events[0] += (
        1  # the row numbers given are those of the whole tensor, which local ones would not fit
    )
    return call(_INDEX, x, _others(indices, pairs), *pairs)


def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool, pairs: Pairs) -> Any:
    """Return ``x.index_put(indices, values, accumulate)``."""
    events[0] += 1
    return call(_PUT, x, _others(indices, pairs), values, accumulate, *pairs)


def _others(indices: Sequence[Any], pairs: Pairs) -> list[Any]:
    paired = pairs.dims[::2]
    return [None if dim in paired else i for dim, i in enumerate(indices)]


# -- which indices count up -------------------------------------------------------------------------


def candidates(x: Any, indices: Sequence[Any], values: Any = None) -> list[tuple[int, int]]:
    """Return the (dim of the tensor, dim of the indices) of which shapes and cuts allow that they go together.

    Values are not looked at, so that the answer holds for every call with operands laid out like this.

    Args:
        x: The tensor.
        indices: One for each dim, or None; trailing ones may be missing.
        values: What ``index_put`` writes.
    """
    given = {dim: i for dim, i in enumerate(indices) if i is not None}
    if any(i.dtype in MASKS for i in given.values()):
        return []
    shape = torch.broadcast_shapes(*(i.shape for i in given.values()))
    before = first_dim(list(given))
    found = []
    for dim, rows in given.items():
        if not _is_readable(rows, len(given)):
            continue
        ahead = len(shape) - rows.ndim
        for own, size in enumerate(rows.shape):
            at = ahead + own
            from_end = before + at - (x.ndim - len(given) + len(shape))
            is_long = size == shape[at] == x.shape[dim]
            if is_long and (
                _cut_of(x, dim, rows)
                or (values is not None and _cut_of(values, values.ndim + from_end, rows))
            ):
                found.append((dim, at))
    return found


def first_dim(named: Sequence[int]) -> int:
    """Return where the indices' dims stand in the result, by the dims of the tensor that are indexed."""
    return named[0] if named[-1] - named[0] + 1 == len(named) else 0


def _is_readable(rows: Any, num_indices: int) -> bool:
    """Whether an index's values can be looked at: neither while tracing nor without data."""
    if is_hdtensor(rows):
        rows = rows._local_tensor
        if num_indices == 1:  # a look-up in a table
            return False
    elif not accepts_plain():
        return False
    return type(rows) is torch.Tensor and not rows.is_meta


def _cut_of(x: Any, dim: int, rows: Any) -> bool:
    """Whether a tensor is cut on a dim: by either tier beside plain row numbers, by the top one beside an HDTensor's."""
    if not is_hdtensor(x) or dim < 0:
        return False
    spec = x._spec.spec
    bottoms = () if is_hdtensor(rows) else (p for g in spec.subgroups for p in g.placements)
    return any(checks.shard_dim(p) == dim for p in (spec.top, *bottoms))


def paired(x: Any, indices: Sequence[Any], found: Sequence[tuple[int, int]]) -> Pairs | None:
    """Return which of the candidates go together, by the indices' values; None if none do.

    All ranks of the world that call it get the same answer.
    """
    others = {dim: i for dim, i in enumerate(indices) if i is not None}
    shape = list(torch.broadcast_shapes(*(i.shape for i in others.values())))
    pairs = Pairs([], len(shape))
    for dim, at in found:
        is_new = dim not in pairs.dims[::2] and at not in pairs.dims[1::2]
        if is_new and _counts_up(indices[dim], at - len(shape), x.shape[dim]):
            pairs.dims.extend((dim, at))
            del others[dim]
    is_same = pairs.shape(x.shape, [i.shape for i in others.values()]) == shape
    return pairs if pairs.dims and is_same else None


def _counts_up(rows: Any, from_end: int, length: int) -> bool:
    """Whether an index is 0, 1, ... along a dim, or as many from the end, and the same along all others."""
    if not is_hdtensor(rows):
        counted = torch.arange(length, dtype=rows.dtype, device=rows.device)
        return _equals(rows, counted, from_end) or _equals(rows, counted - length, from_end)
    bound: BoundSpec = rows._spec
    is_own = not bound.spec.has_partial()
    if is_own and bound.index is not None:
        held = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, bound.rank)
        is_own = all(_counts_up_in(rows._local_tensor, box, from_end) for box in held)
    return everywhere("index (do row numbers count up)", is_own)


def _counts_up_in(local: torch.Tensor, owned: Any, from_end: int) -> bool:
    part = local
    for d, (start, size) in enumerate(zip(owned.offset, owned.box.shape, strict=True)):
        part = part.narrow(d, start, size)
    start, stop = owned.box.start[from_end], owned.box.stop[from_end]
    counted = torch.arange(start, stop, dtype=local.dtype, device=local.device)
    return _equals(part, counted, from_end)


def _equals(rows: torch.Tensor, counted: torch.Tensor, from_end: int) -> bool:
    shape = [1] * -from_end
    shape[0] = len(counted)
    return torch.equal(rows, counted.view(shape).expand(rows.shape))


# -- rules ------------------------------------------------------------------------------------------


@row_rule(_INDEX)
def _index_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    """Pairs cut together, dims that no index names, dims of the other indices, or terms of a sum."""
    x, indices, dims, num_dims = args
    others, shape, before, free = _geometry(x, indices, Pairs(dims, num_dims))
    whole: Row = (Replicate(),) * len(others)
    rows: list[Row] = [(Replicate(), Replicate(), *whole), (Partial(), Partial(), *whole)]
    partner = {at: dim for dim, at in Pairs(dims, num_dims).of()}
    for at in (k for k in range(num_dims) if shape[k] > 1 or k in partner):
        own = Shard(partner[at]) if at in partner else Replicate()
        rows.append((Shard(before + at), own, *(aligned(i, shape, at) for i in others)))
    rows += [(Shard(to), Shard(dim), *whole) for dim, to in free]
    return rows


@row_rule(_PUT)
def _index_put_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    """As above; where values are added up, each rank may add those of some elements of the other indices."""
    x, indices, values, accumulates, dims, num_dims = args
    others, shape, before, free = _geometry(x, indices, Pairs(dims, num_dims))
    whole: Row = (Replicate(),) * len(others)
    rows: list[Row] = [(Replicate(), Replicate(), *whole, Replicate())]
    rows.append((Partial(), Partial(), *whole, Partial()))
    partner = {at: dim for dim, at in Pairs(dims, num_dims).of()}
    result = [x.shape[dim] for dim, _ in free]
    result[before:before] = shape
    for at in range(num_dims):
        parts = [aligned(i, shape, at) for i in others]
        own = Shard(partner[at]) if at in partner else Partial()
        if at in partner or (accumulates and shape[at] > 1):
            rows.append((own, own, *parts, aligned(values, result, before + at)))
    for dim, to in free:
        rows.append((Shard(dim), Shard(dim), *whole, aligned(values, result, to)))
    return rows


def _geometry(
    x: DTensorSpec, indices: Sequence[DTensorSpec | None], pairs: Pairs
) -> tuple[list[DTensorSpec], list[int], int, list[tuple[int, int]]]:
    """Return the other indices, the common shape, where it stands in the result, and each free dim with its place there."""
    paired_dims = pairs.dims[::2]
    named = sorted({*paired_dims, *(d for d, i in enumerate(indices) if i is not None)})
    others = [i for i in indices if i is not None]
    shape = pairs.shape(x.shape, [i.shape for i in others])
    before = first_dim(named)
    free = [dim for dim in range(len(x.shape)) if dim not in named]
    places = [k if k < before else k + len(shape) for k in range(len(free))]
    return others, shape, before, list(zip(free, places, strict=True))


def aligned(operand: DTensorSpec, shape: Sequence[int], dim: int) -> Placement:
    """Return the cut of an operand that broadcasts to ``shape``, where that is cut on ``dim``."""
    own = dim - len(shape) + len(operand.shape)
    is_there = own >= 0 and operand.shape[own] == shape[dim]
    return Shard(own) if is_there else Replicate()
