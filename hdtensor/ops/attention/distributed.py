"""Attention of ``HDTensor``s whose sequence is cut: without autograd, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from hdtensor._rank import is_played
from hdtensor._torch_compat import observe_conversion
from hdtensor.collectives import groups, observe, operators
from hdtensor.ops.attention.kernels import attend, attend_backward
from hdtensor.ops.attention.layout import (
    SEQUENCE,
    AttentionLayout,
    attention_layout,
    runs_of,
    spans_of,
)
from hdtensor.ops.attention.ring import Block, Ring, ring_backward, ring_forward
from hdtensor.ops.attention.tiles import (
    Span,
    Tile,
    arranged,
    causal_tiles,
    in_order,
    length_of,
    natural,
    whole_tile,
)
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.generate import empty_beside
from hdtensor.ops.registry import call, events, is_hdtensor, wrap
from hdtensor.ops.special.move import gradient_spec
from hdtensor.placements import checks
from hdtensor.placements.layout import local_shape


@dataclass(frozen=True, slots=True)
class How:
    """How one attention call computes.

    Attributes:
        is_causal: Whether a row sees the keys up to its own position only.
        scale: Factor of the scores, None for 1 / sqrt(size).
        order: Positions of rows and keys, None where row i is at position i.
        is_ring: Whether blocks of keys go around instead of being gathered.
        why: Name of the reason in counts of communication.
    """

    is_causal: bool
    scale: float | None = None
    order: tuple[Span, ...] | None = None
    is_ring: bool = False
    why: str = "attention"


def forward(q: Any, k: Any, v: Any, mask: Any, how: How) -> tuple[Any, Any]:
    """Return output and logarithms of the rows' sums, both cut as the queries.

    Args:
        q: [batch, heads, rows, size]; on the same subgroups as the others, whose top cuts go with it
            (``attention_layout`` is not None).
        k: [batch, key heads, keys, size].
        v: [batch, key heads, keys, any size].
        mask: Plain (the same on every rank) or distributed, broadcast to [batch, heads, rows, keys]; or None.
        how: What is computed, and how.
    """
    events[0] += 1
    layout = _layout(q, k, v, how)
    with observe.because(how.why):
        q, k, v = (_moved(x, b) for x, b in ((q, layout.q), (k, layout.k), (v, layout.v)))
        mask = _local_mask(mask, q)
    if q._spec.index is None:
        nothing = empty_beside(q._local_tensor, q.dtype)
        return wrap(nothing, layout.out), wrap(nothing, layout.lse)
    locals_ = (q._local_tensor, k._local_tensor, v._local_tensor)
    if layout.line:
        with observe.because(how.why):
            out, lse = ring_forward(_ring(layout, how), locals_[0], locals_[1:], mask, how.scale)
    else:
        tiles, order = _tiles(layout, how)
        keys, values = (in_order(x, order, SEQUENCE) for x in locals_[1:])
        out, lse = attend(locals_[0], keys, values, tiles, mask, how.scale)
    return wrap(out.to(q.dtype), layout.out), wrap(lse, _with_dtype(layout.lse, lse.dtype))


def backward(
    grad: Any, inputs: tuple[Any, Any, Any], results: tuple[Any, Any], mask: Any, how: How
) -> tuple[Any, Any, Any]:
    """Return the gradients of q, k and v.

    Those of keys and values are reduced inside subgroups, and between them where ``forward`` moved the keys there; else
    they are left pending at the top tier.

    Args:
        grad: Gradient of the output, cut in any way.
        inputs: q, k, v of ``forward``.
        results: What ``forward`` returned.
        mask: As in ``forward``.
        how: As in ``forward``.
    """
    events[0] += 1
    q, k, v = inputs
    layout = _layout(q, k, v, how)
    with observe.because(f"{how.why} (backward)"):
        grad = _moved(grad, layout.out, reverse=True)
        moved = [
            _moved(x, b, reverse=True)
            for x, b in zip(inputs, (layout.q, layout.k, layout.v), strict=True)
        ]
        mask = _local_mask(mask, moved[0])
        grads = _local_grads(grad, moved, results, mask, layout, how)
        bounds = (layout.q, layout.grad_k, layout.grad_v)
        grad_q, grad_k, grad_v = (
            wrap(x.to(b.dtype), b) for x, b in zip(grads, bounds, strict=True)
        )
        return grad_q, _home(grad_k, k._spec, layout), _home(grad_v, v._spec, layout)


def _local_grads(
    grad: Any,
    moved: Sequence[Any],
    results: tuple[Any, Any],
    mask: torch.Tensor | None,
    layout: AttentionLayout,
    how: How,
) -> Sequence[torch.Tensor]:
    locals_ = tuple(x._local_tensor for x in moved)
    if grad._spec.index is None:
        return locals_
    found = (results[0]._local_tensor, results[1]._local_tensor)
    local_grad = grad._local_tensor
    if layout.line:
        ring = _ring(layout, how)
        return ring_backward(ring, local_grad, locals_, found, mask, how.scale)
    tiles, order = _tiles(layout, how)
    q, k, v = locals_
    inputs = (q, in_order(k, order, SEQUENCE), in_order(v, order, SEQUENCE))
    grad_q, grad_k, grad_v = attend_backward(local_grad, inputs, found, tiles, mask, how.scale)
    return grad_q, arranged(grad_k, order, SEQUENCE), arranged(grad_v, order, SEQUENCE)


def _layout(q: Any, k: Any, v: Any, how: How) -> AttentionLayout:
    layout = attention_layout(q._spec, k._spec, v._spec, how.is_ring)
    assert layout is not None, "callers have asked before"
    if how.is_ring and not is_played():
        local = q._local_tensor
        if type(local) is torch.Tensor:
            groups.ensure_channels()
        else:  # ranks may trace at different moments
            operators.make_groups_in_graph(local, set(), channels=True)
    return layout


def _moved(x: Any, bound: BoundSpec, *, reverse: bool = False) -> Any:
    """Bring an operand to a layout; nothing happens where it has that already."""
    have = x._spec
    if have.spec is bound.spec and have.top_sizes == bound.top_sizes:
        return x
    if have.index is not None and have.spec.top == bound.spec.top:
        ranks = list(have.spec.subgroups[have.index].ranks)
        observe_conversion(
            have.sub(have.index),
            bound.sub(have.index),
            lambda: f"implicit redistribution inside {ranks}: {have} -> {bound}",
        )
    return call(
        torch.ops.hdtensor.redistribute.default, x, bound.spec.text, bound.top_sizes, reverse
    )


def _home(grad: Any, bound: BoundSpec, layout: AttentionLayout) -> Any:
    """Reduce a gradient to where its tensor is, at the top tier only if the tensor was moved there."""
    spec = gradient_spec(bound.spec)
    sizes = bound.top_sizes
    if not layout.moves_top and grad._spec.spec.top != spec.top:
        have = grad._spec.spec
        ratio = have.top_ratio if checks.is_cut(have.top) else None
        spec, sizes = spec.replace(top=have.top, top_ratio=ratio), grad._spec.top_sizes
    return _moved(
        grad, BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, sizes), reverse=True
    )


def _with_dtype(bound: BoundSpec, dtype: torch.dtype) -> BoundSpec:
    return BoundSpec.of(bound.spec, bound.shape, bound.stride, dtype, bound.top_sizes)


# -- which scores --------------------------------------------------------------------------------------------------


def tiles_of(rows: tuple[Span, ...], keys: tuple[Span, ...], how: How) -> tuple[Tile, ...]:
    """Return the scores of some rows against some keys."""
    return causal_tiles(rows, keys) if how.is_causal else whole_tile(rows, keys)


def _orders(layout: AttentionLayout, how: How) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    if how.order is not None:
        return how.order, how.order
    return natural(layout.q.shape[SEQUENCE]), natural(layout.k.shape[SEQUENCE])


def _tiles(layout: AttentionLayout, how: How) -> tuple[tuple[Tile, ...], tuple[Span, ...] | None]:
    """Return the tiles of this rank's rows against all keys, and the order to undo before."""
    q_order, k_order = _orders(layout, how)
    rows = spans_of(layout.q, layout.q.rank, q_order)
    keys = spans_of(layout.k, layout.k.rank, k_order)
    if not how.is_causal or len(keys) == 1:
        return tiles_of(rows, keys, how), None
    # In the sequence's order the keys before a row are one run, and one tile, instead of one for each rank.
    return causal_tiles(rows, natural(length_of(keys))), keys


def _ring(layout: AttentionLayout, how: How) -> Ring:
    q_order, k_order = _orders(layout, how)
    rows = spans_of(layout.q, layout.q.rank, q_order)
    blocks = []
    for rank in layout.line:
        keys = spans_of(layout.k, rank, k_order)
        shapes = tuple(
            local_shape(b.spec, tuple(b.shape), b.top_sizes, rank) for b in (layout.k, layout.v)
        )
        columns = tuple(runs_of(layout.k, rank))
        blocks.append(Block(shapes, tiles_of(rows, keys, how), columns))  # type: ignore[arg-type]
    return Ring(layout.line, layout.line.index(layout.q.rank), tuple(blocks))


def num_scores(q: BoundSpec, k: BoundSpec, how: How) -> int:
    """Return how many scores of one head and one row of the batch this rank computes.

    Args:
        q: Queries.
        k: Keys.
        how: What is computed.
    """
    layout = attention_layout(q, k, k, how.is_ring)
    if layout is None or q.index is None:
        return 0
    q_order, k_order = _orders(layout, how)
    rows = spans_of(layout.q, q.rank, q_order)
    return sum(tile.num_scores for tile in tiles_of(rows, k_order, how))


# -- masks ------------------------------------------------------------------------------------------------------------


def _local_mask(mask: Any, q: Any) -> torch.Tensor | None:
    """Return the part of a mask that belongs to this rank's queries, with the columns of all keys."""
    if mask is None:
        return None
    bound = q._spec
    if not is_hdtensor(mask):
        whole = bound.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
        local = mask if bound.index is not None else mask.new_empty(0)
        mask = wrap(local, BoundSpec.of(whole, mask.shape, mask.stride(), mask.dtype, None))
    wanted = mask_bound(mask._spec, bound)
    mask = _moved(mask, wanted)
    return None if bound.index is None else mask._local_tensor


def mask_bound(mask: BoundSpec, q: BoundSpec) -> BoundSpec:
    """Return a mask cut as the queries where it has their dims, and whole where it broadcasts."""
    missing = len(q.shape) - len(mask.shape)

    def cut(placement: Any) -> Any:
        dim = checks.shard_dim(placement)
        if dim is None or dim < missing or mask.shape[dim - missing] == 1:
            return Replicate()
        return _at(placement, dim - missing)

    groups_ = [g.with_placements([cut(p) for p in g.placements]) for g in q.spec.subgroups]
    top = cut(q.spec.top)
    ratio = q.spec.top_ratio if checks.is_cut(top) else None
    spec = q.spec.replace(subgroups=tuple(groups_), top=top, top_ratio=ratio)
    sizes = q.top_sizes if checks.is_cut(top) else None
    return BoundSpec.of(spec, mask.shape, mask.stride, mask.dtype, sizes)


def _at(placement: Any, dim: int) -> Any:
    if checks.is_strided(placement):
        return type(placement)(dim, split_factor=placement.split_factor)
    return Shard(dim)
