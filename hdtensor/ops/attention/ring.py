"""Ring attention: blocks of keys and values go around the ranks that share a sequence, two of them on a rank at a time.

A rank computes its rows against the block that it has while the next one arrives. Backward sends the blocks around once
more, each followed by the sum of its gradients, which is home after a full turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hdtensor.collectives import observe, operators, p2p
from hdtensor.ops.attention.kernels import Parts, accumulated, attend, attend_backward, merge
from hdtensor.ops.attention.tiles import Tile


Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank of the ring owns of keys and values.

    Attributes:
        shapes: Shapes of the keys and of the values.
        tiles: Scores of this rank's rows against them.
        columns: Columns of the mask that are theirs, as (first, behind the last).
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    tiles: tuple[Tile, ...]
    columns: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks around which blocks go.

    Attributes:
        line: Global ranks, in order.
        place: This rank's index in it.
        blocks: What each of them owns.
    """

    line: tuple[int, ...]
    place: int
    blocks: tuple[Block, ...]

    def owner(self, step: int) -> int:
        """Return whose block this rank has at a step: index into ``line``."""
        return (self.place - step) % len(self.line)

    def pass_on(
        self, held: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], reverse: bool
    ) -> Callable[[], None]:
        """Start sending to the next rank and receiving from the one before; what is returned waits."""
        after = self.line[(self.place + 1) % len(self.line)]
        before = self.line[self.place - 1]
        if type(held[0]) is not torch.Tensor:
            return _pass_on_in_graph(held, arriving, after, before, reverse)
        sent = [x for x in held if x.numel()]
        received = [x for x in arriving if x.numel()]
        if observe.listeners:
            observe.notify_messages({after: sent}, {before: received}, "bottom")
        return p2p.start({after: sent}, {before: received}, reverse=reverse)


def ring_forward(
    ring: Ring,
    q: torch.Tensor,
    kv: Pair,
    mask: torch.Tensor | None,
    scale: float | None,
) -> Pair:
    """Return outputs and logarithms of sums over all blocks, as ``kernels.attend`` does."""
    num_steps = len(ring.line)
    now: Pair = (kv[0].contiguous(), kv[1].contiguous())
    out, lse = attend(q, *now, (), None, scale)
    for step in range(num_steps):
        block = ring.blocks[ring.owner(step)]
        is_last = step == num_steps - 1
        if not is_last:
            following = _empty(ring.blocks[ring.owner(step + 1)], now)
            wait = ring.pass_on(now, following, reverse=False)
        if block.tiles:
            merge(out, lse, *attend(q, *now, block.tiles, _columns(mask, block), scale))
        if not is_last:
            wait()
            now = following
    return out, lse


def ring_backward(
    ring: Ring,
    grad: torch.Tensor,
    inputs: Parts,
    results: Pair,
    mask: torch.Tensor | None,
    scale: float | None,
) -> Parts:
    """Return the gradients of q and of this rank's own keys and values, in ``kernels.accumulated``'s dtype."""
    q, k, v = inputs
    num_steps = len(ring.line)
    dtype = accumulated(q.dtype)
    now: Pair = (k.contiguous(), v.contiguous())
    sums: Pair = (torch.zeros_like(now[0], dtype=dtype), torch.zeros_like(now[1], dtype=dtype))
    grad_q = torch.zeros_like(q, dtype=dtype)
    sums_arrived: Callable[[], None] = _nothing
    for step in range(num_steps):
        block = ring.blocks[ring.owner(step)]
        behind = ring.blocks[ring.owner(step + 1)]
        is_last = step == num_steps - 1
        if not is_last:
            following = _empty(behind, now)
            wait = ring.pass_on(now, following, reverse=True)
        if block.tiles:
            found = attend_backward(
                grad, (q, *now), results, block.tiles, _columns(mask, block), scale
            )
            grad_q += found[0]
        sums_arrived()
        if block.tiles:
            sums[0].add_(found[1])
            sums[1].add_(found[2])
        if not is_last:
            wait()
            now = following
        held, sums = (
            sums,
            _empty(behind, sums),
        )  # after the last step the sums of the own block come home
        sums_arrived = ring.pass_on(held, sums, reverse=True)
    sums_arrived()
    return grad_q, *sums


def _pass_on_in_graph(
    held: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor],
    after: int,
    before: int,
    reverse: bool,
) -> Callable[[], None]:
    """Send and receive by an operator of the graph, at the place where it waits."""
    sizes = [x.numel() for x in arriving]
    flat = torch.cat([x.reshape(-1) for x in held])
    sends = ([after], [flat.numel()]) if flat.numel() else ([], [])
    recvs = ([before], [sum(sizes)]) if sum(sizes) else ([], [])

    def wait() -> None:
        found = operators.start("send_recv", flat, *sends, *recvs, reverse)
        for x, values in zip(arriving, found.split(sizes), strict=True):
            x.copy_(values.view(x.shape))

    return wait


def _nothing() -> None:
    """Nothing is on its way."""


def _empty(block: Block, like: Pair) -> Pair:
    return like[0].new_empty(block.shapes[0]), like[1].new_empty(block.shapes[1])


def _columns(mask: torch.Tensor | None, block: Block) -> torch.Tensor | None:
    if mask is None or mask.shape[-1] == 1:
        return mask
    return torch.cat([mask[..., a:b] for a, b in block.columns], -1)
