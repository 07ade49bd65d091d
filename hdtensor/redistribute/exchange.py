"""Point-to-point steps: send-receive, batched send-receive, and send and reduce (Sec. 5.1 (I), 5.3).

They reach where no collective does: other ranks, another number of subgroups, ranks that only give or
only take, meshes that do not fit. Each starts from a *middle* layout on the source's ranks, which the
collectives of ``bottom`` and ``top`` have prepared; for most pairs that is the source itself.

=========================  ==================================================  ====================
middle                     last step                                           who
=========================  ==================================================  ====================
the same top: each         ``SendRecv`` of a subgroup that moves whole;        ``block_exchange``
subgroup decides           bottom steps where the ranks stay; else
                           ``BatchedSendRecv`` of the reduced block
no Partial left            ``BatchedSendRecv``                                 ``value_exchange``
one kind of Partial left   ``BatchedSendReduce``                               ``reduce_exchange``
=========================  ==================================================  ====================

A ``Partial`` in the destination costs nothing: one term is the value, the others are constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.placements import Box, HDSpec, Subgroup, block_shape, default_top_sizes
from hdtensor.placements.box import merge
from hdtensor.redistribute.bottom import bottom_steps
from hdtensor.redistribute.steps import (
    BatchedSendRecv,
    BatchedSendReduce,
    Layout,
    PointToPoint,
    SendRecv,
    is_kept_by_all,
    neutral_element,
    num_moved,
)
from hdtensor.redistribute.topology import Topology
from hdtensor.redistribute.transfers import (
    SendLoad,
    Transfer,
    choose_senders,
    transfer_table,
)


def num_lacking(src: Layout, dst: Layout) -> int:
    """Return how many elements the ranks of ``dst`` want and do not hold: the least that must move."""
    total = 0
    for rank in dst.spec.ranks:
        owned = src.boxes(rank)
        for want, _ in dst.boxes(rank):
            common = [want.intersect(have) for have, _ in owned]
            total += want.numel - sum(box.numel for box in common if box is not None)
    return total


def constants(layout: Layout, *, with_top: bool = True) -> dict[int, float]:
    """Return which ranks hold a constant, not the value, when a value is made ``Partial``.

    The value stays with the first subgroup, and the first rank along an axis. Tiers nest, the last
    axis innermost: the innermost tier on which a rank is not first decides.

    Args:
        layout: What is made.
        with_top: False if the top is pending before already.

    Returns:
        Rank -> neutral element.
    """
    found = {}
    for index, group in enumerate(layout.spec.subgroups):
        top: list[tuple[Placement, int]] = [(layout.spec.top, index)] if with_top else []
        for rank in group.ranks if top or group.has_partial() else ():
            tiers = [*top, *zip(group.placements, group.coordinate(rank), strict=True)]
            for placement, position in tiers:
                if isinstance(placement, Partial) and position and not is_kept_by_all(placement):
                    found[rank] = neutral_element(placement)
    return found


def value_exchange(src: Layout, dst: Layout, topology: Topology) -> BatchedSendRecv:
    """Return the batched send-receive of a tensor of which nothing is pending.

    Args:
        src: Layout before, without Partial.
        dst: Layout after.
        topology: Links between the ranks.
    """
    fills = constants(dst) if dst.spec.has_partial() else {}
    wanted = {rank: _boxes(dst, rank) for rank in dst.spec.ranks if rank not in fills}
    table = transfer_table({rank: _boxes(src, rank) for rank in src.spec.ranks}, wanted)
    transfers = choose_senders(table, topology=topology)
    return BatchedSendRecv(
        src=src, dst=dst, transfers=merged(transfers, src, dst), fills=tuple(fills.items())
    )


def block_middle(start: Layout, end: Layout) -> Layout | None:
    """Return what each subgroup prepares by itself where the top stays; None where it does not stay."""
    src, dst = start.spec, end.spec
    if (src.top, src.num_subgroups, start.top_sizes) != (dst.top, dst.num_subgroups, end.top_sizes):
        return None
    groups = []
    for index, (old, new) in enumerate(zip(src.subgroups, dst.subgroups, strict=True)):
        block = block_shape(src, start.shape, index, start.top_sizes)
        groups.append(_prepared(old, new, block))
    return start._replace(spec=HDSpec(groups, src.top, src.top_ratio))


def block_exchange(middle: Layout, dst: Layout, topology: Topology) -> PointToPoint:
    """Return the step by which each subgroup's block goes to the subgroup in the same place.

    Args:
        middle: What ``block_middle`` returned.
        dst: Layout after, with the same top.
        topology: Links between the ranks.
    """
    fills: dict[int, float] = {}
    transfers: list[Transfer] = []
    all_moved_whole = True
    load = SendLoad()
    keeps = constants(dst, with_top=False)
    for old, new in zip(middle.spec.subgroups, dst.spec.subgroups, strict=True):
        whole = _moved_whole(middle, dst, old, new) if _is_alike(old, new) else None
        if whole is None or not old.has_partial():
            held = {rank: _boxes(middle, rank) for rank in old.ranks}
            mine = {rank: keeps[rank] for rank in new.ranks if rank in keeps}
            wanted = {rank: _boxes(dst, rank) for rank in new.ranks if rank not in mine}
            table = transfer_table(held, wanted)
            batched = choose_senders(table, topology=topology, load=load)
            if whole is None or _num_sent(batched) < _num_sent(whole):
                transfers += batched
                fills |= mine
                all_moved_whole = False
                continue
        transfers += whole
    if all_moved_whole:
        return SendRecv(src=middle, dst=dst, transfers=tuple(transfers))
    return BatchedSendRecv(
        src=middle,
        dst=dst,
        transfers=merged(transfers, middle, dst),
        fills=tuple(fills.items()),
    )


def value_middles(start: Layout) -> Iterator[Layout]:
    """Yield layouts on the source's ranks in which nothing is pending.

    Every Partial becomes Replicate (an all-reduce), or Shard(d) (a reduce-scatter), for each dim.
    """
    if not start.spec.has_partial():
        yield start
        return
    for dim in (None, *range(len(start.shape))):
        with_cut = Replicate() if dim is None else Shard(dim)

        def settle(p: Placement, to: Placement = with_cut) -> Placement:
            return to if isinstance(p, Partial) else p

        spec = start.spec.map_bottom(settle)
        if isinstance(spec.top, Partial):
            spec = spec.replace(top=with_cut)
            yield Layout(spec, start.shape, default_top_sizes(spec, start.shape))
        else:
            yield start._replace(spec=spec)


def reduce_middle(start: Layout) -> Layout | None:
    """Return the layout whose terms ``reduce_exchange`` can send; None if there is none."""
    spec = start.spec
    if isinstance(spec.top, Partial):
        spec = spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)
        return start._replace(spec=spec) if type(spec.top) is Partial else None
    ops = {p for p in spec.subgroups[0].placements if isinstance(p, Partial)}
    if spec.num_subgroups == 1 and len(ops) == 1 and type(next(iter(ops))) is Partial:
        return start
    return None


def reduce_exchange(middle: Layout, dst: Layout, topology: Topology) -> BatchedSendReduce:
    """Return the step that sends every term to every rank that wants a cell, to be reduced there.

    Args:
        middle: What ``reduce_middle`` returned.
        dst: Layout after.
        topology: Links between the ranks.
    """
    op, terms = _terms(middle.spec)
    fills = constants(dst)
    wanted = {rank: _boxes(dst, rank) for rank in dst.spec.ranks if rank not in fills}
    load = SendLoad()
    transfers: list[Transfer] = []
    for line, takers in _replicas(middle.spec, wanted):
        for ranks in terms:
            givers = {rank: _boxes(middle, rank) for rank in ranks if rank in line}
            table = transfer_table(givers, takers)
            chosen = choose_senders(table, topology=topology, load=load)
            transfers += merged(chosen, middle, dst)
    return BatchedSendReduce(
        src=middle,
        dst=dst,
        transfers=tuple(transfers),
        op=op,
        terms=tuple((rank, number) for number, ranks in enumerate(terms) for rank in ranks),
        num_terms=len(terms),
        fills=tuple(fills.items()),
    )


def _replicas(
    spec: HDSpec, wanted: Mapping[int, Sequence[Box]]
) -> Iterator[tuple[frozenset[int], dict[int, Sequence[Box]]]]:
    """Yield the ranks that hold a whole set of terms, each with who takes its terms from there.

    Ranks that replicate a pending value need not have cut it into the same terms, so that a taker must not mix them. One that
    holds a term stays with its own set.
    """
    if isinstance(spec.top, Partial):
        yield frozenset(spec.ranks), dict(wanted)
        return
    (group,) = spec.subgroups
    copies = [axis for axis, p in enumerate(group.placements) if isinstance(p, Replicate)]
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in group.ranks:
        at = group.coordinate(rank)
        lines.setdefault(tuple(at[axis] for axis in copies), []).append(rank)
    sets = [frozenset(lines[at]) for at in sorted(lines)]
    outside = [rank for rank in wanted if rank not in group.ranks]
    turn = {rank: i % len(sets) for i, rank in enumerate(outside)}
    for i, line in enumerate(sets):
        takers = {r: boxes for r, boxes in wanted.items() if r in line or turn.get(r) == i}
        if takers:
            yield line, takers


def merged(transfers: Iterable[Transfer], src: Layout, dst: Layout) -> tuple[Transfer, ...]:
    """Join the cells of each pair of ranks to the largest boxes that one box of each side holds."""
    pairs: dict[tuple[int, int], list[Box]] = {}
    for box, giver, taker in transfers:
        pairs.setdefault((giver, taker), []).append(box)
    out: list[Transfer] = []
    for (giver, taker), boxes in pairs.items():
        if len(boxes) > 1:
            sides = [*src.boxes(giver)], [*dst.boxes(taker)]

            def fits(box: Box, sides: Any = sides) -> bool:
                return all(any(piece.box.contains(box) for piece in side) for side in sides)

            boxes = merge(boxes, fits)
        out += [Transfer(box, giver, taker) for box in boxes]
    return tuple(out)


def _terms(spec: HDSpec) -> tuple[Partial, list[tuple[int, ...]]]:
    """Return the pending reduction and the ranks that hold each of its terms."""
    if isinstance(spec.top, Partial):
        return spec.top, [group.ranks for group in spec.subgroups]
    (group,) = spec.subgroups
    pending = [axis for axis, p in enumerate(group.placements) if isinstance(p, Partial)]
    op = group.placements[pending[0]]
    assert isinstance(op, Partial), f"{spec} has no pending reduction"
    terms: dict[tuple[int, ...], list[int]] = {}
    for rank in group.ranks:
        at = group.coordinate(rank)
        terms.setdefault(tuple(at[axis] for axis in pending), []).append(rank)
    assert len(terms) == math.prod(group.mesh_shape[axis] for axis in pending)
    return op, [tuple(terms[at]) for at in sorted(terms)]


def _prepared(old: Subgroup, new: Subgroup, block: tuple[int, ...]) -> Subgroup:
    """Return what a subgroup does before blocks move: as much as its own ranks do best alone."""
    if _is_alike(old, new):
        return old
    if set(old.ranks) == set(new.ranks):
        if old.has_partial() or new.has_partial():
            return new
        if (old.ranks, old.mesh_shape) != (new.ranks, new.mesh_shape):
            return old
        before, after = (Layout(HDSpec((group,)), block, None) for group in (old, new))
        if sum(map(num_moved, bottom_steps(old, new, block))) <= num_lacking(before, after):
            return new
    return old.with_placements(Replicate() if isinstance(p, Partial) else p for p in old.placements)


def _is_alike(old: Subgroup, new: Subgroup) -> bool:
    return (old.mesh_shape, old.placements) == (new.mesh_shape, new.placements)


def _moved_whole(middle: Layout, dst: Layout, old: Subgroup, new: Subgroup) -> tuple[Transfer, ...]:
    """Return the transfers of whole shards, rank by rank."""
    return tuple(
        Transfer(box, giver, taker)
        for giver, taker in zip(old.ranks, new.ranks, strict=True)
        for box in _boxes(dst, taker)
    )


def _num_sent(transfers: tuple[Transfer, ...]) -> int:
    return sum(t.box.numel for t in transfers if t.src != t.dst)


def _boxes(layout: Layout, rank: int) -> tuple[Box, ...]:
    return tuple(box for box, _ in layout.boxes(rank))
