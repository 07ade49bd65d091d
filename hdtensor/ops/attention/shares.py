"""Shares of a sequence: lengths that every rank's share fits, the order of the rows, and the work of each rank. Pure."""

from __future__ import annotations

import math
from typing import Literal

from torch.distributed.tensor import Replicate

from hdtensor.ops.attention.tiles import Span, causal_tiles, held, natural, zigzag
from hdtensor.placements import checks
from hdtensor.placements.layout import (
    check_top_sizes,
    chunk_sizes,
    owned_boxes,
    ratio_sizes,
)
from hdtensor.placements.spec import HDSpec


_DIM = 1  # of a batch: rows, positions
_SHAPE_ROWS = 1


def unit_of(spec: HDSpec) -> int:
    """Return a number of positions that every subgroup's ranks can share evenly.

    >>> unit_of(HDSpec.from_text("S1[2:1] / 0,1:S1 2:R"))
    2
    """
    parts = [
        math.prod(
            size
            for size, placement in zip(group.mesh_shape, group.placements, strict=True)
            if checks.shard_dim(placement) == _DIM
        )
        for group in spec.subgroups
    ]
    return math.lcm(*parts)


def padded_length(spec: HDSpec, length: int) -> int:
    """Return the least length, not below ``length``, that is a whole number of units."""
    unit = unit_of(spec)
    return -(-length // unit) * unit


def block_sizes(spec: HDSpec, length: int) -> tuple[int, ...] | None:
    """Return the extents of the top tier's blocks of a sequence, in whole units where the length is.

    >>> block_sizes(HDSpec.from_text("S1[2:1] / 0,1:S1 2:R"), 14)
    (8, 6)

    Args:
        spec: Spec of a batch.
        length: Number of positions.

    Returns:
        None where the top tier does not cut sequences.
    """
    if checks.shard_dim(spec.top) != _DIM or spec.num_subgroups == 1:
        return None
    unit = unit_of(spec)
    if length % unit:
        return check_top_sizes(spec, (_SHAPE_ROWS, length), None)
    count = spec.num_subgroups
    units = length // unit
    parts = (
        chunk_sizes(units, count) if spec.top_ratio is None else ratio_sizes(units, spec.top_ratio)
    )
    return tuple(unit * part for part in parts)


def _shared(spec: HDSpec) -> HDSpec:
    """Return how one row of the batch is cut, if every pipeline had it."""
    return spec if checks.shard_dim(spec.top) == _DIM else spec.replace(top=Replicate())


def _runs(spec: HDSpec, length: int, rank: int) -> list[tuple[int, int]]:
    boxes = owned_boxes(_shared(spec), (_SHAPE_ROWS, length), block_sizes(spec, length), rank)
    return [(owned.box.start[_DIM], owned.box.stop[_DIM]) for owned in boxes]


def order_of(
    spec: HDSpec, length: int, order: Literal["contiguous", "zigzag"]
) -> tuple[Span, ...] | None:
    """Return the positions of the rows of a shared sequence; None where row i is at position i.

    Pipelines that share the batch have one order: that of the pipeline that shares sequences among most ranks.

    Args:
        spec: Spec of a batch.
        length: Number of positions.
        order: The plan's.
    """
    if order == "contiguous":
        return None
    is_split = checks.shard_dim(spec.top) == _DIM
    sharing = [spec.ranks] if is_split else [group.ranks for group in spec.subgroups]
    blocks: list[tuple[int, int]] = []
    for ranks in sharing:
        found = sorted({run for rank in ranks for run in _runs(spec, length, rank)})
        blocks = found if len(found) > len(blocks) else blocks
    return zigzag([stop - start for start, stop in blocks])


def attention_work(
    spec: HDSpec, length: int, order: Literal["contiguous", "zigzag"] = "contiguous"
) -> dict[int, int]:
    """Return how many scores of one head each rank computes of one causal sequence.

    >>> spec = HDSpec.from_text("R / 0,1:S1")
    >>> attention_work(spec, 8), attention_work(spec, 8, "zigzag")
    ({0: 10, 1: 26}, {0: 18, 1: 18})

    Args:
        spec: Spec of a batch, dim 1 of which is the sequence: ``ExpandedPlan.inputs``.
        length: Number of positions.
        order: Which part of a sequence a rank takes.
    """
    rows = order_of(spec, length, order) or natural(length)
    return {
        rank: sum(
            tile.num_scores
            for tile in causal_tiles(held(rows, _runs(spec, length, rank)), natural(length))
        )
        for rank in spec.ranks
    }
