"""How a cut dim survives a reshaping view, exactly and for uneven blocks.

DTensor's rule refuses uneven sizes (case 18) and loops for ever on zero-size blocks, so reshaping views
are decided here. A cut dim ``d`` goes to an output dim ``k`` when what lies before both is the same
number of elements, and every boundary of the cut falls between two steps of ``k``::

    (6, 4) cut 4:2 on dim 0  ->  (24,)       k = 0, cut 16:8
    (4, 6) cut 3:1 on dim 0  ->  (2, 2, 6)   none: 3 rows are no whole number of 2-row steps
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import StridedShard
from hdtensor.placements import checks
from hdtensor.placements.layout import num_pieces
from hdtensor.placements.sizes import exact_quotient, hint, is_open, same


class CutDim(NamedTuple):
    """Where a cut dim went: the output dim, and the factor its extents are multiplied by."""

    dim: int
    numerator: int
    denominator: int

    def scale(self, size: int) -> int | None:
        """Return an extent on the output dim, None if a boundary falls inside a step."""
        return exact_quotient(size * self.numerator, self.denominator)


def starts(dim: int, src: Sequence[int], dst: Sequence[int]) -> list[CutDim]:
    """Return the dims of a view of shape ``dst`` that start where dim ``dim`` of ``src`` does, outermost first.

    There are several where dims of size 1 stand before the next longer one. If the dim itself is among them, as it was, it
    comes first: where a cut goes depends on no extents then.
    """
    before, inner = math.prod(src[:dim]), math.prod(src[dim + 1 :])
    passed, found = 1, []
    for k, size in enumerate(dst):
        if same(passed, before):
            found.append(CutDim(k, inner, math.prod(dst[k + 1 :])))
        passed *= size
    return sorted(found, key=lambda cut: cut.dim != dim or not _is_kept(cut, dim, src, dst))


def follow(dim: int, src: Sequence[int], dst: Sequence[int]) -> CutDim | None:
    """Return the dim that has the elements of dim ``dim``, None if no dim starts where it does."""
    found = starts(dim, src, dst)
    return next(
        (c for c in found if dst[c.dim] != 1 or src[dim] == 1), found[-1] if found else None
    )


def view_top(
    top: Placement, sizes: Sequence[int], src: Sequence[int], dst: Sequence[int]
) -> tuple[Placement, tuple[int, ...]] | None:
    """Return the top placement and extents after a view, None if it cannot be represented.

    Args:
        top: The ``Shard`` that cuts the input.
        sizes: Its exact extents.
        src: Global input shape.
        dst: Global output shape.
    """
    dim, pieces = top.dim, num_pieces(top)  # type: ignore[attr-defined]
    if pieces > 1:
        return _strided_top(top, sizes, src, dst)
    found = starts(dim, src, dst)
    for cut in found:
        scaled = [cut.scale(size) for size in sizes]
        if None not in scaled:
            return Shard(cut.dim), tuple(size for size in scaled if size is not None)
    merged = None if found else _merge(dim, src, dst)
    if merged is None:
        return None
    placement, pieces = merged
    return placement, tuple(size * pieces for size in sizes)


def _strided_top(
    top: Placement, sizes: Sequence[int], src: Sequence[int], dst: Sequence[int]
) -> tuple[Placement, tuple[int, ...]] | None:
    """(B*S, H) cut as B strided pieces -> (B, S, H) cut on S, or kept where the dim stays."""
    dim, pieces = top.dim, num_pieces(top)  # type: ignore[attr-defined]
    cut = follow(dim, src, dst)
    if cut is not None and _is_kept(cut, dim, src, dst):
        return StridedShard(cut.dim, split_factor=pieces), tuple(sizes)
    outer, inner = math.prod(src[:dim]), math.prod(src[dim + 1 :])
    for k in range(1, len(dst)):
        before = math.prod(dst[:k])
        if hint(before) == hint(outer) * pieces:
            moved = CutDim(k, inner, math.prod(dst[k + 1 :]))
            scaled = [moved.scale(size // (before // outer)) for size in sizes]
            if dst[k] != 1 and not any(size is None for size in scaled):
                return Shard(k), tuple(size for size in scaled if size is not None)
    return None


def view_bottom(
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    src: Sequence[int],
    dst: Sequence[int],
) -> list[Placement | None]:
    """Return each axis's placement after a view of a block; None where the axis must be gathered.

    Args:
        placements: Bottom placements of the input.
        mesh_shape: Mesh axis sizes.
        src: Block shape before.
        dst: Block shape after.
    """
    out: list[Placement | None] = []
    for placement in placements:
        dim = checks.shard_dim(placement)
        if dim is None:
            out.append(placement)
            continue
        parts = math.prod(
            size
            for other, size in zip(placements, mesh_shape, strict=True)
            if checks.shard_dim(other) == dim
        )
        out.append(_follow_shard(placement, dim, parts, src, dst))
    return _gather_together(out, placements)


def _follow_shard(
    placement: Placement, dim: int, parts: int, src: Sequence[int], dst: Sequence[int]
) -> Placement | None:
    cut = follow(dim, src, dst)
    if cut is not None and _is_kept(cut, dim, src, dst):
        if checks.is_strided(placement):
            return StridedShard(cut.dim, split_factor=placement.split_factor)  # type: ignore[attr-defined]
        return Shard(cut.dim)  # the dim is kept whole: any chunking stays
    even = src[dim] % parts == 0
    if checks.is_strided(placement):
        return _unmerge(placement, dim, parts, src, dst) if even else None
    if not even:
        return None
    if cut is not None:
        share = cut.scale(src[dim] // parts)
        return Shard(cut.dim) if share is not None else None
    merged = _merge(dim, src, dst)
    if merged is None or (is_open(merged[1]) and is_open(src[dim])):
        return None  # how many pieces there are would have to be known to join them
    return merged[0]


def _is_kept(cut: CutDim, dim: int, src: Sequence[int], dst: Sequence[int]) -> bool:
    """Whether the dim is as long and as far inside as before."""
    return same(dst[cut.dim], src[dim]) and same(cut.numerator, cut.denominator)


def _merge(dim: int, src: Sequence[int], dst: Sequence[int]) -> tuple[Placement, int] | None:
    """(B, S, H) cut on S -> (B*S, H): every of the B pieces is cut, a strided shard; and their number.

    A placement holds no open size: there it has the one that stands for it (``layout`` knows).
    """
    for k in range(len(dst)):
        before = math.prod(dst[:k])
        for first in range(dim):
            if (
                same(math.prod(src[:first]), before)
                and same(math.prod(src[first : dim + 1]), dst[k])
                and same(math.prod(src[dim + 1 :]), math.prod(dst[k + 1 :]))
            ):
                pieces = math.prod(src[first:dim])
                return StridedShard(k, split_factor=hint(pieces)), pieces
    return None


def _unmerge(
    placement: Placement, dim: int, parts: int, src: Sequence[int], dst: Sequence[int]
) -> Placement | None:
    """(B*S, H) cut as B strided pieces -> (B, S, H) cut on S."""
    pieces = placement.split_factor  # type: ignore[attr-defined]
    before = hint(math.prod(src[:dim]))
    length, inner = hint(src[dim]), hint(math.prod(src[dim + 1 :]))
    if length % (pieces * parts):
        return None
    for k in range(1, len(dst)):
        starts_there = hint(math.prod(dst[:k])) == before * pieces and dst[k] % parts == 0
        if starts_there and length // pieces * inner == hint(math.prod(dst[k:])):
            return Shard(k)
    return None


def _gather_together(
    out: Sequence[Placement | None], placements: Sequence[Placement]
) -> list[Placement | None]:
    """Gather all axes that cut one dim if one must be, or if dims that were apart became one."""
    before = [checks.shard_dim(p) for p in placements]
    after = [None if p is None else checks.shard_dim(p) for p in out]
    bad = {before[i] for i, p in enumerate(out) if p is None}
    for dim in after:
        clash = {before[j] for j, other in enumerate(after) if dim is not None and other == dim}
        if len(clash) > 1:
            bad |= clash
    return [None if before[i] in bad and before[i] is not None else p for i, p in enumerate(out)]
