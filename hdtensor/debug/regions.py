"""``regions``: a tensor cut into boxes of one set of owners each, the base of every picture."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.errors import SpecError
from hdtensor.placements import Box, HDSpec, Subgroup, check_top_sizes, checks, owners


class Region(NamedTuple):
    """A box whose elements all have the same owners.

    Attributes:
        box: Where it lies in the global tensor.
        ranks: Who holds it, ascending.
        label: How the owners make up the value: ``0,1`` both hold it, ``sum(0,1)`` each holds one
            term; ``;`` parts terms that several ranks hold, as in ``sum(0,1; 2)``.
    """

    box: Box
    ranks: tuple[int, ...]
    label: str


class _Holders(NamedTuple):
    """Ranks and their text; ``ranks`` is None where the text is more than a list of ranks."""

    ranks: tuple[int, ...] | None
    text: str


def regions(
    spec: HDSpec,
    shape: Sequence[int],
    top_sizes: Sequence[int] | None = None,
    *,
    subgroup: int | None = None,
) -> tuple[Region, ...]:
    """Return the largest boxes of equal owners; together they tile what the spec's ranks hold.

    Two subgroups that hold the same matrix, one of them in column halves, give two regions::

        +---+---+     +-------+      +-----+-----+
        | 0 | 1 |  =  |   2   |  ->  | 0,2 | 1,2 |
        +---+---+     +-------+      +-----+-----+

    >>> for region in regions(HDSpec.from_text("R / 0,1:S1 2:R"), (2, 4)):
    ...     print(region.box.start, region.box.stop, region.label)
    (0, 0) (2, 2) 0,2
    (0, 2) (2, 4) 1,2

    Args:
        spec: How the tensor is cut.
        shape: Global shape.
        top_sizes: Exact top extents; default as the spec cuts.
        subgroup: Look only at what this subgroup holds; default at all of them.

    Returns:
        Regions sorted by box; none for a tensor without elements.

    Raises:
        SpecError: If the spec or the extents do not fit the shape.
    """
    shape = check_shape(shape)
    pieces_of = owners(spec, shape, check_top_sizes(spec, shape, top_sizes))
    tilings = []  # what each subgroup cuts, box by box
    for group in spec.subgroups if subgroup is None else (spec.subgroups[subgroup],):
        ranks_of: defaultdict[Box, tuple[int, ...]] = defaultdict(tuple)
        for rank in group.ranks:
            for piece in pieces_of[rank]:
                ranks_of[piece.box] += (rank,)
        tilings.append(ranks_of)
    if isinstance(spec.top, Shard):  # blocks have nothing in common
        held = [part for tiling in tilings for part in tiling.items()]
    else:
        held = functools.reduce(_overlay, (list(tiling.items()) for tiling in tilings))
    return tuple(sorted(Region(box, *_holders(spec, ranks)) for box, ranks in held))


def _overlay(
    one: list[tuple[Box, tuple[int, ...]]], other: list[tuple[Box, tuple[int, ...]]]
) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the common parts of two ways to cut the same tensor, with the holders of both."""
    return [
        (common, ranks + others)
        for box, ranks in one
        for second, others in other
        if (common := box.intersect(second)) is not None
    ]


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as plain integers.

    Raises:
        SpecError: If it holds other things or a negative size.
    """
    sizes = checks.int_tuple("shape", shape)
    if any(size < 0 for size in sizes):
        raise SpecError(f"shape must hold sizes >= 0, got {sizes}.")
    return sizes


def idle_ranks(spec: HDSpec, parts: Iterable[Region]) -> tuple[int, ...]:
    """Return the spec's ranks that own no element, ascending."""
    return tuple(sorted(set(spec.ranks) - {rank for part in parts for rank in part.ranks}))


def faces(boxes: Iterable[Box], dim: int) -> list[int]:
    """Return where the boxes begin and end on a dim, ascending."""
    return sorted({x for box in boxes for x in (box.start[dim], box.stop[dim])})


def fit_sizes(
    wanted: Iterable[float], needs: Iterable[tuple[int, int, float]], line: float
) -> list[float]:
    """Return the wanted sizes, enlarged until every need has its room.

    Args:
        wanted: Size of each interval between two neighbouring faces.
        needs: ``(first, last, size)``: intervals ``first`` to ``last - 1``, with the lines between
            them, must offer ``size``.
        line: Thickness of a line between two intervals.
    """
    sizes = list(wanted)
    for first, last, size in sorted(needs, key=lambda need: need[1] - need[0]):
        missing = size - sum(sizes[first:last]) - line * (last - first - 1)
        if missing > 0:
            for index in range(first, last):
                sizes[index] += missing / (last - first)
    return sizes


def _holders(spec: HDSpec, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return the ranks in ascending order, and how they make up the value."""
    by_group: defaultdict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        index = spec.index_of(rank)
        assert index is not None, f"rank {rank} owns a part of {spec} but is outside it"
        by_group[index].append(rank)
    terms = [_bottom(spec.subgroups[index], held, 0) for index, held in sorted(by_group.items())]
    return tuple(sorted(ranks)), _combine(spec.top, terms).text


def _bottom(group: Subgroup, ranks: Sequence[int], axis: int) -> _Holders:
    """Say how ranks of one subgroup, alike on the axes before ``axis``, make up a value."""
    if axis == len(group.mesh_shape):
        (rank,) = ranks
        return _Holders((rank,), str(rank))
    at: defaultdict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        at[group.coordinate(rank)[axis]].append(rank)
    terms = [_bottom(group, held, axis + 1) for _, held in sorted(at.items())]
    return _combine(group.placements[axis], terms)


def _combine(placement: Placement, terms: list[_Holders]) -> _Holders:
    if len(terms) == 1:
        return terms[0]
    plain = [term.ranks for term in terms if term.ranks is not None]
    joined = tuple(sorted(rank for held in plain for rank in held))
    if isinstance(placement, Partial):
        singles = len(plain) == len(terms) == len(joined)
        inner = checks.ranks_text(joined) if singles else "; ".join(term.text for term in terms)
        name = "norm" if hasattr(placement, "norm_type") else placement.reduce_op
        return _Holders(None, f"{name}({inner})")
    if len(plain) == len(terms):
        return _Holders(joined, checks.ranks_text(joined))
    return _Holders(None, ", ".join(term.text for term in terms))
