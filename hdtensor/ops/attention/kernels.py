"""Attention of local tensors: tile by tile, merged by the logarithm of each row's sum of exponentials.

Shapes: B batch, H query heads, G key heads (H is a multiple of G), S rows, T keys, D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hdtensor.ops.attention.tiles import Tile


aten = torch.ops.aten

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over keys are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[Tile],
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs over some keys, and each row's logarithm of the sum of exponentials.

    Args:
        q: [B, H, S, D].
        k: [B, G, T, D].
        v: [B, G, T, E].
        tiles: Which scores.
        mask: Added to the scores, broadcast to [B, H, S, T]; True for "seen" if boolean.
        scale: Factor of the scores, default 1 / sqrt(D).

    Returns:
        [B, H, S, E] and [B, H, S], in ``accumulated``'s dtype. A row without keys has zeros and minus infinity.
    """
    dtype = accumulated(q.dtype)
    out = _empty_out(q, v.shape[-1], dtype).zero_()
    lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    for tile in tiles if q.shape[0] and q.shape[1] else ():
        rows, keys = slice(*_ends(tile.rows)), slice(*_ends(tile.keys))
        part = _part_of(mask, rows, keys, q.dtype)
        new, new_lse = _forward(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], part, tile.is_causal, scale
        )
        merge(out[:, :, rows], lse[:, :, rows], new, new_lse)
    return out, lse


def merge(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor) -> None:
    """Add the attention over further keys to ``out`` and ``lse``, in place; shapes as ``attend`` returns them."""
    both = torch.logaddexp(lse, new_lse)
    seen = both > -math.inf  # of a row without any key the difference would be no number
    old_weight = torch.where(seen, (lse - both).exp(), 0.0).unsqueeze(-1)
    new_weight = torch.where(seen, (new_lse - both).exp(), 0.0).unsqueeze(-1)
    out.mul_(old_weight).add_(new * new_weight)
    lse.copy_(both)


def attend_backward(
    grad: torch.Tensor,
    inputs: Parts,
    results: tuple[torch.Tensor, torch.Tensor],
    tiles: Sequence[Tile],
    mask: torch.Tensor | None,
    scale: float | None,
) -> Parts:
    """Return the gradients of q, k and v that come from some keys, in ``accumulated``'s dtype.

    Args:
        grad: Gradient of the whole output, [B, H, S, E].
        inputs: q, k, v as in ``attend``.
        results: Output and logarithm of the sum over *all* keys: they say how much these keys count.
        tiles: Which scores.
        mask: As in ``attend``.
        scale: As in ``attend``.
    """
    q, k, v = inputs
    out, lse = results
    dtype = accumulated(q.dtype)
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # a row without keys: its weights are 0 anyway
    grads = tuple(torch.zeros_like(x, dtype=dtype) for x in inputs)
    for tile in tiles if q.shape[0] and q.shape[1] else ():
        rows, keys = slice(*_ends(tile.rows)), slice(*_ends(tile.keys))
        part = _part_of(mask, rows, keys, q.dtype)
        found = _backward(
            grad[:, :, rows],
            (q[:, :, rows], k[:, :, keys], v[:, :, keys]),
            (out[:, :, rows], lse[:, :, rows]),
            part,
            tile.is_causal,
            scale,
        )
        for total, new, taken in zip(grads, found, (rows, keys, keys), strict=True):
            total[:, :, taken] += new
    return grads  # type: ignore[return-value]


def _ends(run: tuple[int, int]) -> tuple[int, int]:
    return run[0], run[0] + run[1]


def _empty_out(q: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory in the order (B, S, H, E): what joins heads again then needs no copy."""
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, rows, heads, width, dtype=dtype).transpose(1, 2)


def _part_of(
    mask: torch.Tensor | None, rows: slice, keys: slice, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a tile's part of the mask, as numbers to add."""
    if mask is None:
        return None
    if mask.ndim > 1 and mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    if mask.shape[-1] != 1:
        mask = mask[..., keys]
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)
    return mask.to(dtype)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _has_kernel(q, v):
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        given = None if mask is None else mask.expand(shape)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=given, scale=scale
        )
        if given is not None:  # the kernel says 0 for a row without keys
            lse = lse.masked_fill((given == -math.inf).all(-1), -math.inf)
        return out, lse
    scores = _scores(q, k, mask, is_causal, scale)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] > -math.inf, (scores - lse[..., None]).exp(), 0.0)
    return _by_group(weights, v.to(weights.dtype)), lse


def _backward(
    grad: torch.Tensor,
    inputs: Parts,
    results: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Any:
    q, k, v = inputs
    out, lse = results
    if _has_kernel(q, v):
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        given = None if mask is None else mask.expand(shape)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=given, scale=scale
        )
    scores = _scores(q, k, mask, is_causal, scale)
    dtype, groups = scores.dtype, k.shape[1]
    weights = torch.where(scores > -math.inf, (scores - lse[..., None]).exp(), 0.0)
    grad, wide_q = grad.to(dtype), q.to(dtype)
    repeats = q.shape[1] // groups
    wide_k, wide_v = (x.to(dtype).repeat_interleave(repeats, 1) for x in (k, v))
    share = (grad * out.to(dtype)).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ wide_v.transpose(-1, -2) - share) * _scale(q, scale)
    grad_k, grad_v = grad_scores.transpose(-1, -2) @ wide_q, weights.transpose(-1, -2) @ grad
    return (
        grad_scores @ wide_k,
        grad_k.unflatten(1, (groups, repeats)).sum(2),
        grad_v.unflatten(1, (groups, repeats)).sum(2),
    )


def _has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch's fused kernel takes these: on CPU, where it also returns what merging needs."""
    return q.device.type == "cpu" and v.shape[-1] == q.shape[-1]


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    dtype = accumulated(q.dtype)
    wide = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.to(dtype) @ wide.transpose(-1, -2) * _scale(q, scale)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _by_group(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
