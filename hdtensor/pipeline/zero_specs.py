"""Which part of each parameter's optimizer state a rank keeps (ZeRO-1, App. C). Pure: specs and numbers only.

A parameter has *copies*: in every lane one, or one for each stage that uses it, and inside a stage one for each rank of an
axis that replicates it. Its optimizer state is cut over the copies, and inside a copy as the parameter is, so that what a
rank keeps is within what it holds: gradients come by one SplitReduceScatter, parameters go by one SplitAllGather::

    parameter  R / 0,1:S0 2:R            state  S1[2:1] / 0,1:S0 2:R

         rank 0         rank 2           +-------+---+
        +-------+      +-------+         |   0   | 2 |
        +-------+      |       |         +-------+   |
         rank 1        |       |         |   1   |   |
        +-------+      +-------+         +-------+---+
        +-------+
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import StridedShard
from hdtensor.errors import PlanError
from hdtensor.placements import HDSpec, Subgroup, check_top_sizes, checks, local_shape
from hdtensor.placements.layout import normalize_dim, num_pieces


#: Cuts into parts of at most so many elements are as good as finer ones: parts are dealt to whom most is due.
FINE_ELEMENTS = 1 << 17


class Parameter(NamedTuple):
    """A parameter that an optimizer updates.

    Attributes:
        name: Its first name in the model.
        spec: How it is cut; nothing is pending.
        shape: Its shape.
    """

    name: str
    spec: HDSpec
    shape: tuple[int, ...]


def split_copies(spec: HDSpec) -> HDSpec:
    """Return a spec with a subgroup for every copy of the value, in which no axis replicates.

    Every rank holds the same under both.

    >>> split_copies(HDSpec.from_text("R / 0-3(2x2):R,S0 4,5:R"))
    HDSpec('R / 0,1:S0 2,3:S0 4:R 5:R')
    """
    return HDSpec([copy for group in spec.subgroups for copy in _copies(group)], spec.top)


def _copies(group: Subgroup) -> Iterator[Subgroup]:
    kept = [axis for axis, p in enumerate(group.placements) if checks.is_cut(p)]
    members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in group.ranks:
        at = group.coordinate(rank)
        members[tuple(c for axis, c in enumerate(at) if axis not in kept)].append(rank)
    for ranks in members.values():
        if kept:
            sizes = [group.mesh_shape[axis] for axis in kept]
            yield Subgroup(ranks, [group.placements[axis] for axis in kept], sizes)
        else:
            yield Subgroup(ranks)


def zero_specs(
    parameters: Sequence[Parameter], free_bytes: Mapping[int, int] | None = None
) -> dict[str, HDSpec]:
    """Return the spec of each parameter's optimizer state.

    A copy's share is in proportion to its number of ranks, so that each rank of a parameter keeps as much of it; or to the
    memory that is free on them. Where a cut does not divide evenly, the parts left over go to whom most is due over all
    parameters: no rank keeps more than its shares by more than a few parts.

    =================================================  =====================================================
    parameter                                          how its state is cut
    =================================================  =====================================================
    one copy                                           as the parameter
    with a dim that no copy cuts                       along that dim: ``Shard(d)`` over the copies
    all dims cut by some copy, in pieces that divide   along a cut dim, each piece alike: ``_StridedShard``
    neither                                            one copy keeps all
    a scalar                                           every rank keeps it
    =================================================  =====================================================

    Args:
        parameters: All parameters, the same on every rank.
        free_bytes: Memory in bytes on every rank that holds some; default: all alike.

    Raises:
        PlanError: If a rank's memory is not given, is negative, or all ranks of a parameter have none.

    >>> specs = zero_specs([Parameter("up", HDSpec.from_text("R / 0,1:S0 2:R"), (8, 6))])
    >>> print(specs["up"])
    S1[2:1] / 0,1:S0 2:R
    """
    dealer = _Dealer(free_bytes)
    cuts = [(p, _best_cut(p)) for p in parameters]
    # What one copy keeps alone comes last, the largest first: it evens out what was dealt before.
    cuts.sort(key=lambda pair: (1, -math.prod(pair[0].shape)) if pair[1].num_parts < 2 else (0, 0))
    found = {p.name: dealer.deal(p, cut) for p, cut in cuts}
    return {p.name: found[p.name] for p in parameters}


class _Cut(NamedTuple):
    """A way to cut a parameter's state over its copies.

    Attributes:
        top: The placement; None where every rank keeps all.
        num_parts: In how many equal parts at most.
        part: Extent of a part along the dim.
    """

    top: Placement | None
    num_parts: int
    part: int


def _best_cut(parameter: Parameter) -> _Cut:
    """Return how a parameter is cut: by a free dim, in fine parts, of which each copy gets as many as are due."""
    copies = split_copies(parameter.spec).subgroups
    shape, numel = parameter.shape, math.prod(parameter.shape)
    if not shape or not numel or len(copies) == 1:
        return _Cut(None, 0, 0)
    num_ranks = sum(map(len, copies))

    def preference(cut: _Cut) -> tuple[bool, int, bool, bool]:
        is_uneven = cut.num_parts % num_ranks != 0
        size = max(numel // cut.num_parts, FINE_ELEMENTS)
        return cut.num_parts == 1, size, is_uneven, cut.part > 1

    return min(_cuts(copies, shape), key=preference)


def _cuts(copies: Sequence[Subgroup], shape: Sequence[int]) -> Iterator[_Cut]:
    for dim, length in enumerate(shape):
        # What a copy cuts the dim into; a strided top cut that divides each piece alike stays within.
        pieces = math.lcm(*(_num_pieces(copy, dim, len(shape)) for copy in copies))
        if pieces == 1:
            yield _Cut(Shard(dim), length, 1)
        elif length % pieces == 0:
            yield _Cut(StridedShard(dim, split_factor=pieces), length // pieces, pieces)
        else:
            yield _Cut(Shard(dim), 1, length)


def _num_pieces(copy: Subgroup, dim: int, num_dims: int) -> int:
    pieces = 1
    for placement, size in zip(copy.placements, copy.mesh_shape, strict=True):
        if normalize_dim(placement, num_dims) == dim:
            pieces *= size * num_pieces(placement)
    return pieces


class _Dealer:
    """Deals parts to copies, and keeps what is due to each rank."""

    def __init__(self, free_bytes: Mapping[int, int] | None) -> None:
        self._free = free_bytes
        self._due: defaultdict[int, float] = defaultdict(float)

    def deal(self, parameter: Parameter, cut: _Cut) -> HDSpec:
        spec, shape = split_copies(parameter.spec), parameter.shape
        copies = spec.subgroups
        weights = [self._weight(parameter.name, copy) for copy in copies]
        numel, total = math.prod(shape), sum(weights)
        if not total:
            raise PlanError(
                f"free_bytes: ranks {list(spec.ranks)} hold {parameter.name!r}, and none has memory free."
            )
        result = spec
        if cut.top is not None:
            result = HDSpec(copies, cut.top, self._extents(copies, weights, numel, cut))
        sizes = check_top_sizes(result, shape, None)
        for copy, weight in zip(copies, weights, strict=True):
            for rank in copy.ranks:
                self._due[rank] += numel * weight / total / len(copy)
                self._due[rank] -= math.prod(local_shape(result, shape, sizes, rank))
        return result

    def _weight(self, name: str, copy: Subgroup) -> int:
        if self._free is None:
            return len(copy)
        for rank in copy.ranks:
            if self._free.get(rank, -1) < 0:
                raise PlanError(
                    f"free_bytes: rank {rank} holds a part of {name!r}, but its free memory is "
                    f"{self._free.get(rank, 'not given')}; give bytes >= 0 for every rank."
                )
        # A copy is cut evenly over its ranks: the one with least memory is full first.
        return len(copy) * min(self._free[rank] for rank in copy.ranks)

    def _extents(
        self, copies: Sequence[Subgroup], weights: Sequence[int], numel: int, cut: _Cut
    ) -> list[int]:
        """Return how many parts each copy keeps."""
        total = sum(weights)
        extents = [cut.num_parts * weight // total for weight in weights]
        part = numel / cut.num_parts
        due = [
            sum(self._due[rank] for rank in copy.ranks)
            + part * (cut.num_parts * weight / total - extent)
            for copy, weight, extent in zip(copies, weights, extents, strict=True)
        ]
        allowed = [i for i, weight in enumerate(weights) if weight]
        for _ in range(cut.num_parts - sum(extents)):
            best = max(allowed, key=lambda i: (due[i] / len(copies[i]), -i))
            extents[best] += 1
            due[best] -= part
        return extents


def state_elements(specs: Mapping[str, HDSpec], parameters: Sequence[Parameter]) -> dict[int, int]:
    """Return how many elements of optimizer state each rank keeps, for each value that a parameter's element has."""
    found: defaultdict[int, int] = defaultdict(int)
    for name, _, shape in parameters:
        spec = specs[name]
        sizes = check_top_sizes(spec, shape, None)
        for rank in spec.ranks:
            found[rank] += math.prod(local_shape(spec, shape, sizes, rank))
    return dict(found)


def shares(parameters: Sequence[Parameter]) -> dict[int, float]:
    """Return the elements of each rank's layers, each over the number of ranks that hold it."""
    found: defaultdict[int, float] = defaultdict(float)
    for _, spec, shape in parameters:
        for rank in spec.ranks:
            found[rank] += math.prod(shape) / len(spec.ranks)
    return dict(found)
