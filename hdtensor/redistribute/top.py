"""Top-tier steps: only the top placement changes, each subgroup keeps its bottom (Sec. 5.2, Fig. 9).

Subgroups may cut their blocks in unlike ways, so no collective over whole shards exists. The tensor is
split into cells, the finest-grained slices; each cell has *holders* in every subgroup, and a collective
runs over one holder of each. Cells with the same group share one collective::

    0,1: S1        2: R          cells          groups
    +---+---+    +-------+    +---+---+
    |   |   |    |       |    |   |   |     left  half   (0, 2)
    | 0 | 1 |    |   2   |    | a | b |     right half   (1, 2)
    |   |   |    |       |    |   |   |
    +---+---+    +-------+    +---+---+
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.placements import Box, block_boxes
from hdtensor.placements.box import Grid
from hdtensor.placements.checks import shard_dim
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    Ranks,
    ReduceScatter,
)
from hdtensor.redistribute.steps import (
    Layout,
    LocalStep,
    SplitAllGather,
    SplitAllReduce,
    SplitReduceScatter,
    Step,
    is_kept_by_all,
    neutral_element,
)


#: Cell -> for each subgroup, the ranks that own the cell, in the subgroup's order.
Holders = dict[Box, tuple[Ranks, ...]]


def top_steps(src: Layout, dst: Layout) -> tuple[Step, ...] | None:
    """Return the step for a change of the top placement alone, or None where one step cannot do it.

    =============  ===========  =================================================  ==================
    src top        dst top      condition on every rank                            step
    =============  ===========  =================================================  ==================
    Partial        Replicate    no bottom Partial                                  SplitAllReduce
    Partial        Shard        no bottom Partial, dst boxes within src boxes      SplitReduceScatter
    Shard          Replicate    no bottom Partial, src boxes within dst boxes      SplitAllGather
    Replicate      Shard        dst boxes within src boxes                         local cut
    Replicate      Partial      no bottom Partial                                  local keep
    Shard          Partial(+)   no bottom Partial, what dst takes of the           local embed
                                own block is within src boxes
    =============  ===========  =================================================  ==================

    Partial(+) is a sum or product. All else takes several steps; ``resolve`` finds them.

    Args:
        src: Layout before.
        dst: Layout after, with the same subgroups.
    """
    assert src.spec.subgroups == dst.spec.subgroups, f"{src.spec} and {dst.spec} differ below"
    bottom_partial = any(group.has_partial() for group in src.spec.subgroups)
    match _kind(src), _kind(dst):
        case Replicate(), Shard():
            return (LocalStep(index=None, src=src, dst=dst),) if is_within(dst, src) else None
        case _ if bottom_partial:
            return None
        case Partial(), Replicate():
            return (split_all_reduce(src, dst),)
        case Partial(), Shard() if is_within(dst, src):
            return (split_reduce_scatter(src, dst),)
        case Shard(), Replicate() if is_within(src, dst):
            return (split_all_gather(src, dst),)
        case Replicate(), Partial() as op:
            return keep(src, dst, op, src.spec.subgroups[0].ranks)
        case Shard(), Partial() as op:
            return embed(src, dst, op)
    return None


def is_within(inner: Layout, outer: Layout) -> bool:
    """Return whether on every rank each box of ``inner`` lies in a box of ``outer``.

    A box that is covered by several boxes together counts too.
    """
    return all(
        _covers(outer, rank, [box for box, _ in inner.boxes(rank)]) for rank in inner.spec.ranks
    )


def keep(src: Layout, dst: Layout, op: Partial, first: Ranks) -> tuple[Step, ...]:
    """Return the step ``Replicate -> Partial``: sum and product keep the value on ``first`` only.

    An average, maximum or minimum of equal terms is the term: then every rank keeps its own.
    """
    if is_kept_by_all(op):
        return ()
    fill = neutral_element(op)
    return (LocalStep(index=None, src=src, dst=dst, fill=fill, keepers=first),)


def embed(src: Layout, dst: Layout, op: Partial) -> tuple[Step, ...] | None:
    """Return the step ``Shard -> Partial``: the own block among neutral elements."""
    if op.reduce_op not in ("sum", "product"):
        return None
    for index, group in enumerate(src.spec.subgroups):
        block = block_boxes(src.spec, src.shape, index, src.top_sizes)
        for rank in group.ranks:
            wanted = [box.intersect(piece) for box, _ in dst.boxes(rank) for piece in block]
            if not _covers(src, rank, [box for box in wanted if box is not None]):
                return None
    return (LocalStep(index=None, src=src, dst=dst, fill=neutral_element(op)),)


def split_all_reduce(src: Layout, dst: Layout) -> SplitAllReduce:
    """Return SplitAR: for each cell, the holders of all subgroups paired off into groups.

    Where every subgroup has equally many holders, each group takes one of each. Else the holders are
    dealt to ``gcd`` many groups, in which each subgroup's first holder alone contributes.
    """
    op = src.spec.top
    assert isinstance(op, Partial), f"SplitAllReduce starts from a top Partial, not {src.spec}"
    found: defaultdict[tuple[Ranks, Ranks], list[Box]] = defaultdict(list)
    for cell, by_group in holders(src).items():
        num_groups = math.gcd(*map(len, by_group))
        for i in range(num_groups):
            shares = [_share(ranks, i, num_groups) for ranks in by_group]
            members = tuple(sorted(rank for share in shares for rank in share))
            terms = tuple(sorted(share[0] for share in shares))
            found[members, terms].append(cell)
    return SplitAllReduce(
        src=src,
        dst=dst,
        collectives=tuple(
            AllReduce(ranks=members, cells=tuple(boxes), op=op, terms=terms)
            for (members, terms), boxes in sorted(found.items())
        ),
    )


def split_reduce_scatter(src: Layout, dst: Layout) -> SplitReduceScatter:
    """Return SplitRS: each new owner of a cell reduces it with one holder of every other subgroup."""
    op = src.spec.top
    assert isinstance(op, Partial), f"SplitReduceScatter starts from a top Partial, not {src.spec}"
    found: defaultdict[Ranks, defaultdict[int, list[Box]]] = defaultdict(lambda: defaultdict(list))
    refined = _cells_of(src, dst)
    old, new = holders(src, refined), holders(dst, refined)
    for cell, by_group in new.items():
        (index,) = [i for i, ranks in enumerate(by_group) if ranks]
        for i, owner in enumerate(by_group[index]):
            others = [ranks[i % len(ranks)] for j, ranks in enumerate(old[cell]) if j != index]
            found[tuple(sorted([owner, *others]))][owner].append(cell)
    return SplitReduceScatter(
        src=src,
        dst=dst,
        collectives=tuple(
            ReduceScatter(ranks=members, cells=_per_rank(members, parts), op=op)
            for members, parts in sorted(found.items())
        ),
    )


def split_all_gather(src: Layout, dst: Layout) -> SplitAllGather:
    """Return SplitAG: every rank that lacks a cell gets it from one of its holders.

    The lacking ranks of a subgroup are dealt to the holders in turn; a holder and its receivers form
    a group.
    """
    found: defaultdict[Ranks, defaultdict[int, list[Box]]] = defaultdict(lambda: defaultdict(list))
    refined = _cells_of(src, dst)
    old, new = holders(src, refined), holders(dst, refined)
    for cell, by_group in old.items():
        (owners,) = [ranks for ranks in by_group if ranks]
        receivers: defaultdict[int, list[int]] = defaultdict(list)
        for ranks in new[cell]:
            for i, rank in enumerate(r for r in ranks if r not in owners):
                receivers[owners[i % len(owners)]].append(rank)
        for owner, lacking in receivers.items():
            found[tuple(sorted([owner, *lacking]))][owner].append(cell)
    return SplitAllGather(
        src=src,
        dst=dst,
        collectives=tuple(
            AllGather(ranks=members, cells=_per_rank(members, parts))
            for members, parts in sorted(found.items())
        ),
    )


def holders(layout: Layout, refined: Grid | None = None) -> Holders:
    """Return who owns each cell, subgroup by subgroup.

    Args:
        layout: Who owns what.
        refined: The cells; default those that the layout's own boxes cut.
    """
    refined = _cells_of(layout) if refined is None else refined
    found: list[list[list[int]]] = [[[] for _ in layout.spec.subgroups] for _ in refined.cells]
    for index, group in enumerate(layout.spec.subgroups):
        for rank in group.ranks:
            for box, _ in layout.boxes(rank):
                for number in refined.numbers(box):
                    found[number][index].append(rank)
    return {cell: tuple(map(tuple, by)) for cell, by in zip(refined.cells, found, strict=True)}


def _cells_of(*layouts: Layout) -> Grid:
    return Grid(
        box for layout in layouts for rank in layout.spec.ranks for box, _ in layout.boxes(rank)
    )


def _covers(layout: Layout, rank: int, boxes: Sequence[Box]) -> bool:
    """Return whether the rank's boxes, which are disjoint, cover all of ``boxes``."""
    owned = [box for box, _ in layout.boxes(rank)]
    for wanted in boxes:
        common = [box.intersect(wanted) for box in owned]
        if sum(box.numel for box in common if box is not None) != wanted.numel:
            return False
    return True


def _kind(layout: Layout) -> Placement:
    """Return the top placement; a strided shard counts as a shard, since conditions look at boxes."""
    dim = shard_dim(layout.spec.top)
    return layout.spec.top if dim is None else Shard(dim)


def _share(ranks: Ranks, i: int, num_groups: int) -> Ranks:
    size = len(ranks) // num_groups
    return ranks[i * size : (i + 1) * size]


def _per_rank(members: Ranks, parts: dict[int, list[Box]]) -> tuple[tuple[Box, ...], ...]:
    return tuple(tuple(parts.get(rank, ())) for rank in members)
