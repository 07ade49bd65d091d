"""Who holds what while attention runs: queries stay cut along the sequence, keys and values become whole (or circulate).

==================  ===============  ==============================  ==================================
axis (or top) cuts  queries, output  keys and values                 their gradients, before reduction
==================  ===============  ==============================  ==================================
nothing             whole            whole                           whole
batch or heads      as they are      as the queries                  as the queries
sequence            as they are      whole                           Partial
sequence, ring      as they are      cut: blocks go around the axis  cut: sums go around with the blocks
==================  ===============  ==============================  ==================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor.ops.attention.tiles import Span, held
from hdtensor.ops.bound import BoundSpec, SymbolicBound
from hdtensor.placements import checks
from hdtensor.placements.layout import contiguous_stride, owned_boxes
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


BATCH, HEADS, SEQUENCE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Bound specs of everything in one attention call.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        out: Output.
        lse: Logarithms of the rows' sums, [batch, heads, rows].
        grad_k: Gradient of the keys before it is reduced.
        grad_v: Likewise of the values.
        line: Ranks around which this rank's blocks of keys circulate, itself among them; empty without a ring.
        moves_top: Whether keys or values move between subgroups.
    """

    q: BoundSpec
    k: BoundSpec
    v: BoundSpec
    out: BoundSpec
    lse: BoundSpec
    grad_k: BoundSpec
    grad_v: BoundSpec
    line: tuple[int, ...]
    moves_top: bool


def cuts_sequence(*bounds: BoundSpec) -> bool:
    """Return whether either tier cuts the sequence of one of the operands."""
    return any(
        checks.shard_dim(p) == SEQUENCE
        for bound in bounds
        for p in (bound.spec.top, *(p for g in bound.spec.subgroups for p in g.placements))
    )


def attention_layout(
    q: BoundSpec, k: BoundSpec, v: BoundSpec, is_ring: bool
) -> AttentionLayout | None:
    """Return who holds what; None where the operands' top cuts do not go together.

    Args:
        q: Queries, [batch, heads, rows, size]; on the same subgroups as the others. Of sizes that a compiler has not
            fixed all but the batch's are fixed: numbers say which rows see which keys.
        k: Keys.
        v: Values.
        is_ring: Whether blocks of keys go around an axis that cuts queries and keys.
    """
    q, k, v = (_closed(b) if b.is_symbolic else b for b in (q, k, v))
    is_open = q.is_symbolic or k.is_symbolic or v.is_symbolic
    return _layout(q, k, v, is_ring) if is_open else _known_layout(q, k, v, is_ring)


def _closed(bound: BoundSpec) -> BoundSpec:
    """Return a bound spec whose sizes are fixed, except for the batch's."""
    shape = (bound.shape[BATCH], *map(int, bound.shape[HEADS:]))
    sizes = bound.top_sizes
    if sizes is not None and checks.shard_dim(bound.spec.top) != BATCH:
        sizes = tuple(map(int, sizes))
    return BoundSpec.of(bound.spec, shape, contiguous_stride(shape), bound.dtype, sizes)


def _layout(q: BoundSpec, k: BoundSpec, v: BoundSpec, is_ring: bool) -> AttentionLayout | None:
    top = _top_cuts(q, k, v)
    if top is None:
        return None
    q_top, kv_top, sizes = top
    q_groups, kv_groups, grad_groups, lines = [], [], [], []
    for index, group in enumerate(q.spec.subgroups):
        alike = _Group(group, [b.spec.subgroups[index].placements for b in (q, k, v)], is_ring)
        q_cuts, kv_cuts, ring = alike.cuts(q.block_shape(index), k.block_shape(index))
        pending = [
            Partial() if checks.shard_dim(a) == SEQUENCE and not checks.is_cut(b) else b
            for a, b in zip(q_cuts, kv_cuts, strict=True)
        ]
        q_groups.append(group.with_placements(q_cuts))
        kv_groups.append(group.with_placements(kv_cuts))
        grad_groups.append(group.with_placements(pending))
        lines.append(ring)
    q_spec = HDSpec(q_groups, q_top, q.spec.top_ratio if checks.is_cut(q_top) else None)
    cuts_top = checks.shard_dim(q_top) == SEQUENCE
    kv_ratio = k.spec.top_ratio or q.spec.top_ratio if checks.is_cut(kv_top) else None
    kv_spec = HDSpec(kv_groups, kv_top, kv_ratio)
    grad_top = Partial() if cuts_top else kv_top
    grad_spec = HDSpec(grad_groups, grad_top, kv_ratio if checks.is_cut(grad_top) else None)
    batch, heads, rows, _ = q.shape
    out_shape = (batch, heads, rows, v.shape[-1])
    out_stride = (rows * heads * v.shape[-1], v.shape[-1], heads * v.shape[-1], 1)
    k_sizes = (k.top_sizes or sizes) if checks.is_cut(kv_top) else None
    return AttentionLayout(
        q=_bound(q, q_spec, sizes),
        k=_bound(k, kv_spec, k_sizes),
        v=_bound(v, kv_spec, k_sizes),
        out=BoundSpec.of(q_spec, out_shape, out_stride, q.dtype, sizes),
        lse=BoundSpec.of(q_spec, out_shape[:3], contiguous_stride(out_shape[:3]), q.dtype, sizes),
        grad_k=_bound(k, grad_spec, k_sizes),
        grad_v=_bound(v, grad_spec, k_sizes),
        line=() if q.index is None else _line(q, lines[q.index]),
        moves_top=any(checks.shard_dim(b.spec.top) == SEQUENCE for b in (k, v)),
    )


_known_layout = functools.lru_cache(maxsize=4096)(_layout)


def _bound(like: BoundSpec, spec: HDSpec, sizes: tuple[int, ...] | None) -> BoundSpec:
    return BoundSpec.of(spec, like.shape, contiguous_stride(like.shape), like.dtype, sizes)


def _top_cuts(
    q: BoundSpec, k: BoundSpec, v: BoundSpec
) -> tuple[Placement, Placement, tuple[int, ...] | None] | None:
    """Return the top placements of queries and of keys, and the queries' extents."""
    tops = [b.spec.top for b in (q, k, v)]
    if any(isinstance(top, Partial) for top in tops):
        return None
    dims = [checks.shard_dim(top) for top in tops]
    if SEQUENCE in dims:
        if set(dims) - {SEQUENCE, None}:
            return None
        return tops[0], Replicate(), q.top_sizes
    cut = [(b, top) for b, top in zip((q, k, v), tops, strict=True) if checks.is_cut(top)]
    if not cut:
        return Replicate(), Replicate(), None
    first, top = cut[0]
    same = all(other == top for _, other in cut) and (len(cut) == 3 or dims[0] in (BATCH, None))
    if not same or (len(cut) < 3 and checks.shard_dim(top) != BATCH):
        return None
    return top, top, first.top_sizes


@dataclass(slots=True)
class _Group:
    """One subgroup: its mesh, and the placements of queries, keys and values there."""

    group: Subgroup
    placements: Sequence[tuple[Placement, ...]]
    is_ring: bool

    def cuts(
        self, q_block: Sequence[int], k_block: Sequence[int]
    ) -> tuple[list[Placement], list[Placement], int | None]:
        """Return the placements of queries and of keys on each axis, and the axis of the ring."""
        q_cuts: list[Placement] = []
        kv_cuts: list[Placement] = []
        ring = None
        for axis, size in enumerate(self.group.mesh_shape):
            have = [p[axis] for p in self.placements]
            dims = [checks.shard_dim(p) for p in have]
            if dims[0] == SEQUENCE:
                goes_around = (
                    self.is_ring and ring is None and size > 1 and have[0] == have[1] == have[2]
                )
                q_cuts.append(have[0])
                kv_cuts.append(have[0] if goes_around else Replicate())
                ring = axis if goes_around else ring
                continue
            wanted = next((p for p in have if checks.shard_dim(p) in (BATCH, HEADS)), None)
            usable = wanted is not None and self._divides(wanted, q_cuts, size, q_block, k_block)
            both = Shard(wanted.dim) if usable else Replicate()  # type: ignore[union-attr]
            q_cuts.append(both)
            kv_cuts.append(both)
        return q_cuts, kv_cuts, ring

    def _divides(
        self,
        wanted: Placement,
        before: Sequence[Placement],
        size: int,
        q_block: Sequence[int],
        k_block: Sequence[int],
    ) -> bool:
        """Whether query and key heads pair rightly on every rank; any cut of the batch does."""
        if checks.is_strided(wanted) or wanted in before:
            return False
        if checks.shard_dim(wanted) == BATCH:
            return True
        return q_block[HEADS] % size == 0 and k_block[HEADS] % size == 0


def _line(q: BoundSpec, axis: int | None) -> tuple[int, ...]:
    if axis is None or q.index is None:
        return ()
    lines = q.spec.subgroups[q.index].lines(axis)
    return next(line for line in lines if q.rank in line)


def _known(bound: BoundSpec) -> BoundSpec:
    """Return a bound spec with the same rows of the sequence. Only the batch's size may be open, and any will do."""
    return bound.hinted() if isinstance(bound, SymbolicBound) else bound


def runs_of(bound: BoundSpec, rank: int) -> list[tuple[int, int]]:
    """Return which rows of the sequence a rank holds, as (first, behind the last), in local order."""
    bound = _known(bound)
    found = {
        (owned.offset[SEQUENCE], owned.box.start[SEQUENCE], owned.box.stop[SEQUENCE])
        for owned in owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, rank)
    }
    return [(start, stop) for _, start, stop in sorted(found)]


def spans_of(bound: BoundSpec, rank: int, order: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return where in the sequence the rows of a rank are.

    Args:
        bound: Queries, keys or values of an ``AttentionLayout``.
        rank: Whose rows.
        order: Positions of the global tensor's rows.
    """
    return _known_spans(_known(bound), rank, order)


@functools.lru_cache(maxsize=4096)
def _known_spans(bound: BoundSpec, rank: int, order: tuple[Span, ...]) -> tuple[Span, ...]:
    return held(order, runs_of(bound, rank))
