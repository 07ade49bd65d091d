"""Which rank owns which boxes of a tensor: the single definition of shard boundaries.

Two cuts follow one another. The top tier cuts one dim into *blocks*, one per subgroup; the bottom
tier cuts a block over the mesh axes from left to right, as DTensor does, with ``torch.chunk``'s uneven
chunks. What a rank owns is a tuple of boxes, since a ``_StridedShard`` leaves it several pieces.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.tensor.placement_types import Placement

from hdtensor.errors import SpecError
from hdtensor.placements import checks
from hdtensor.placements.box import Box
from hdtensor.placements.sizes import exact_quotient, extent, is_open, is_symbolic, total
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


class OwnedBox(NamedTuple):
    """One piece of a rank's local tensor.

    Attributes:
        box: Where the piece lies in the global tensor.
        offset: Where it starts in the rank's local tensor.
    """

    box: Box
    offset: tuple[int, ...]

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Index of the piece in the local tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.box.shape, strict=True))


class Segment(NamedTuple):
    """A run of global indices on one dim; a rank's share of a dim is a list of them."""

    start: int
    stop: int


def chunk_sizes(length: int, num_chunks: int) -> tuple[int, ...]:
    """Return ``torch.chunk``'s sizes, with zeros where it gives fewer chunks.

    >>> chunk_sizes(5, 4)
    (2, 2, 1, 0)
    """
    if num_chunks == 1:
        return (length,)
    size = (length + num_chunks - 1) // num_chunks
    if num_chunks == 2:  # nothing to compare: an open length stays open
        return size, length - size
    if length % num_chunks == 0:
        return (size,) * num_chunks
    return tuple(max(0, min(size, length - i * size)) for i in range(num_chunks))


def ratio_sizes(length: int, ratio: Sequence[int]) -> tuple[int, ...]:
    """Return block sizes in a proportion: boundaries at ``floor(length * cumulative / total)``.

    >>> ratio_sizes(8, (3, 1))
    (6, 2)
    >>> ratio_sizes(7, (1, 0, 1))
    (3, 0, 4)
    """
    whole = sum(ratio)
    parts = list(itertools.accumulate(ratio))
    bounds = [0, *(length if part == whole else length * part // whole for part in parts)]
    return tuple(extent(a, b) for a, b in itertools.pairwise(bounds))


def default_top_sizes(spec: HDSpec, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return how the spec cuts a tensor of ``shape`` at the top tier.

    Returns:
        Extent of each subgroup's block along the top ``Shard``'s dim; None for other top placements.

    Raises:
        SpecError: If the tensor does not have the dim.
    """
    dim = checks.shard_dim(spec.top)
    if dim is None:
        return None
    _check_dim(dim, shape, spec)
    pieces = num_pieces(spec.top)
    length = exact_quotient(shape[dim], pieces)
    if length is None:
        raise SpecError(
            f"the top {checks.placement_text(spec.top)} of {spec} cuts {pieces} equal pieces, which "
            f"dim {dim} of shape {tuple(shape)} is not."
        )
    if spec.top_ratio is None:
        sizes = chunk_sizes(length, spec.num_subgroups)
    else:
        sizes = ratio_sizes(length, spec.top_ratio)
    return tuple(pieces * size for size in sizes)


def num_pieces(placement: Placement) -> int:
    """Return how many pieces of a dim a placement cuts alike: 1, or a strided shard's number."""
    return placement.split_factor if checks.is_strided(placement) else 1  # type: ignore[attr-defined]


def check_top_sizes(
    spec: HDSpec, shape: Sequence[int], top_sizes: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Return exact top extents: the given ones if they fit, or the spec's own.

    Raises:
        SpecError: If the extents do not add up to the tensor's, or the top is no ``Shard``.
    """
    if top_sizes is None:
        return default_top_sizes(spec, shape)
    sizes = checks.int_tuple("top_sizes", top_sizes)
    dim = checks.shard_dim(spec.top)
    if dim is None:
        if spec.num_subgroups == 1:
            return None
        raise SpecError(f"top_sizes {sizes} needs a top Shard, but the spec is {spec}.")
    _check_dim(dim, shape, spec)
    length, pieces = shape[dim], num_pieces(spec.top)
    is_negative = any(size < 0 for size in sizes)
    if len(sizes) != spec.num_subgroups or is_negative or total(sizes) != length:
        raise SpecError(
            f"top_sizes must be {spec.num_subgroups} extents >= 0 that add up to {length} "
            f"(dim {dim} of shape {tuple(shape)}), got {sizes} (sum {sum(sizes)})."
        )
    if any(size % pieces for size in sizes):
        raise SpecError(f"top_sizes {sizes} must be multiples of the {pieces} pieces of {spec}.")
    return sizes


def block_segments(
    spec: HDSpec, shape: Sequence[int], index: int, top_sizes: Sequence[int] | None
) -> tuple[tuple[Segment, ...], ...]:
    """Return subgroup ``index``'s block, dim by dim, as runs of global indices.

    A top ``Shard`` gives one run. A strided one, as a view gives that merges the cut dim behind another,
    cuts each of its pieces alike: (2, 4) cut 3:1 on dim 1 and seen as (8,) is 0-2 and 4-6 beside 3 and 7.
    """
    segments: list[tuple[Segment, ...]] = [(Segment(0, length),) for length in shape]
    dim = checks.shard_dim(spec.top)
    if dim is None:
        return tuple(segments)
    assert top_sizes is not None, f"pass check_top_sizes's extents for {spec}"
    pieces = num_pieces(spec.top)
    if pieces > 1 and is_open(shape[dim]):  # only its extent is known
        segments[dim] = (Segment(0, top_sizes[index]),)
        return tuple(segments)
    first, size = total(top_sizes[:index]), top_sizes[index]
    if pieces == 1:
        segments[dim] = (Segment(first, total((first, size))),)
        return tuple(segments)
    length, first, size = shape[dim] // pieces, first // pieces, size // pieces
    segments[dim] = tuple(
        Segment(piece * length + first, piece * length + first + size) for piece in range(pieces)
    )
    return tuple(segments)


def block_boxes(
    spec: HDSpec, shape: Sequence[int], index: int, top_sizes: Sequence[int] | None
) -> tuple[Box, ...]:
    """Return the boxes of subgroup ``index``'s block in the global tensor, empty ones too."""
    runs = block_segments(spec, shape, index, top_sizes)
    return tuple(
        Box(tuple(run.start for run in corner), tuple(run.stop for run in corner))
        for corner in itertools.product(*runs)
    )


def block_box(
    spec: HDSpec, shape: Sequence[int], index: int, top_sizes: Sequence[int] | None
) -> Box:
    """Return the one box of subgroup ``index``'s block; a strided top shard has none."""
    (box,) = block_boxes(spec, shape, index, top_sizes)
    return box


def block_shape(
    spec: HDSpec, shape: Sequence[int], index: int, top_sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the shape of subgroup ``index``'s block."""
    out = list(shape)
    dim = checks.shard_dim(spec.top)
    if dim is not None:
        assert top_sizes is not None, f"pass check_top_sizes's extents for {spec}"
        out[dim] = top_sizes[index]
    return tuple(out)


def normalize_dim(placement: Placement, num_dims: int) -> int | None:
    """Return the non-negative dim that a placement cuts, None if it cuts none.

    Raises:
        SpecError: If a tensor of ``num_dims`` dims has no such dim.
    """
    dim = checks.shard_dim(placement)
    if dim is None:
        return None
    if not -num_dims <= dim < num_dims:
        raise SpecError(
            f"{checks.placement_text(placement)} needs dim {dim}, but the tensor has {num_dims} dims."
        )
    return dim % num_dims


def subgroup_segments(
    group: Subgroup, coordinate: Sequence[int], block: Sequence[tuple[Segment, ...]]
) -> tuple[tuple[Segment, ...], ...]:
    """Return what one rank of a subgroup owns, dim by dim, as runs of global indices.

    Args:
        group: The subgroup.
        coordinate: The rank's coordinate on each mesh axis.
        block: The subgroup's block of the global tensor (``block_segments``).

    Raises:
        SpecError: If a placement names a dim that the tensor does not have.
    """
    num_dims = len(block)
    segments = list(block)
    for placement, size, position in zip(
        group.placements, group.mesh_shape, coordinate, strict=True
    ):
        dim = normalize_dim(placement, num_dims)
        if dim is not None:
            segments[dim] = _take(segments[dim], size, position, num_pieces(placement))
    return tuple(segments)


@functools.lru_cache(maxsize=65536)
def owned_boxes(
    spec: HDSpec, shape: tuple[int, ...], top_sizes: tuple[int, ...] | None, rank: int
) -> tuple[OwnedBox, ...]:
    """Return what a rank owns of a tensor, in the order of its local tensor.

    >>> spec = HDSpec.from_text("S0[3:1] / 0,1:S1 2:R")
    >>> [(owned.box.start, owned.box.stop) for owned in owned_boxes(spec, (4, 4), (3, 1), 1)]
    [((0, 2), (3, 4))]

    Args:
        spec: How the tensor is cut.
        shape: Global shape.
        top_sizes: Exact top extents (``check_top_sizes``'s result).
        rank: Global rank; one outside every subgroup owns nothing.

    Returns:
        Non-empty boxes only; a 0-d tensor is one box of one element.
    """
    index = spec.index_of(rank)
    if index is None:
        return ()
    block = block_segments(spec, shape, index, top_sizes)
    group = spec.subgroups[index]
    segments = subgroup_segments(group, group.coordinate(rank), block)
    per_dim = []
    for runs in segments:
        placed, offset = [], 0
        for run in runs:
            if run.stop > run.start:
                placed.append((run.start, run.stop, offset))
            offset += run.stop - run.start
        per_dim.append(placed)
    return tuple(
        OwnedBox(
            Box(tuple(run[0] for run in corner), tuple(run[1] for run in corner)),
            tuple(run[2] for run in corner),
        )
        for corner in itertools.product(*per_dim)
    )


def local_shape(
    spec: HDSpec, shape: tuple[int, ...], top_sizes: tuple[int, ...] | None, rank: int
) -> tuple[int, ...]:
    """Return the shape of a rank's local tensor; ``(0,)`` for a rank outside every subgroup."""
    try:
        return _known_local_shape(spec, shape, top_sizes, rank)
    except TypeError:
        if not is_symbolic(shape):
            raise
        return _local_shape(spec, shape, top_sizes, rank)


def _local_shape(
    spec: HDSpec, shape: tuple[int, ...], top_sizes: tuple[int, ...] | None, rank: int
) -> tuple[int, ...]:
    index = spec.index_of(rank)
    if index is None:
        return (0,)
    group = spec.subgroups[index]
    block = block_segments(spec, shape, index, top_sizes)
    segments = subgroup_segments(group, group.coordinate(rank), block)
    return tuple(total(extent(*run) for run in runs) for runs in segments)


_known_local_shape = functools.lru_cache(maxsize=65536)(_local_shape)


def owners(
    spec: HDSpec, shape: tuple[int, ...], top_sizes: tuple[int, ...] | None
) -> dict[int, tuple[OwnedBox, ...]]:
    """Return ``owned_boxes`` of every rank of the spec, in the order of ``spec.ranks``."""
    return {rank: owned_boxes(spec, shape, top_sizes, rank) for rank in spec.ranks}


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides, as ``torch.empty(shape).stride()``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(shape)


def _take(
    segments: tuple[Segment, ...], num_chunks: int, position: int, pieces: int
) -> tuple[Segment, ...]:
    """Cut the indices of ``segments`` into ``pieces``, each into chunks; keep chunk ``position``."""
    length = total(extent(*run) for run in segments)
    if pieces > 1 and is_open(length):  # a view of open sizes made the pieces, and cut them evenly
        return (Segment(0, length // num_chunks),)
    taken: list[Segment] = []
    start = 0
    for piece in chunk_sizes(length, pieces):
        sizes = chunk_sizes(piece, num_chunks)
        first = total((start, *sizes[:position]))
        taken += _cut(segments, first, total((first, sizes[position])))
        start = total((start, piece))
    return tuple(taken)


def _cut(segments: tuple[Segment, ...], first: int, last: int) -> list[Segment]:
    """Return the runs that hold positions ``[first, last)`` of the joined segments."""
    runs, passed = [], 0
    for run in segments:
        length = extent(*run)
        a, b = max(extent(passed, first), 0), min(extent(passed, last), length)
        if a < b:
            runs.append(Segment(total((run.start, a)), total((run.start, b))))
        passed = total((passed, length))
    return runs


def _check_dim(dim: int, shape: Sequence[int], spec: HDSpec) -> None:
    if dim >= len(shape):
        raise SpecError(
            f"the top Shard({dim}) of {spec} needs dim {dim}, but the tensor has shape "
            f"{tuple(shape)}."
        )
