"""An all-reduce of two gloo ranks, cut into chunks that overlap with their packing and unpacking.

Where terms are kept, each rank sends the other its own, which are as many bytes as a ring sends: a chunk
is sent from and received into the tensors themselves where it is contiguous. Both ranks get the same
bits, since two terms commute. Where terms may be overwritten, each chunk is an all-reduce in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial

from hdtensor.collectives.split import C10D_OPS, COMBINE, NATIVE, as_bytes, is_norm
from hdtensor.collectives.wire import is_host_only


#: Smaller reductions are a ring's: its latency is as good.
MIN_BYTES = 1 << 16

#: The same where several tensors may share a buffer: one collective for many saves more than their packing costs.
MIN_BYTES_OF_MANY = 1 << 20

#: Elements of a chunk are at most so many bytes, and so many chunks are on their way.
CHUNK_BYTES = 4 << 20
_DEPTH = 8


def is_pair(dtype: torch.dtype, op: Partial, num_bytes: int, *, is_shared: bool) -> bool:
    """Return whether two ranks reduce so many bytes chunk by chunk, where others may share a buffer with them or not."""
    is_plain = dtype in NATIVE and not is_norm(op)
    least = MIN_BYTES_OF_MANY if is_shared else MIN_BYTES
    return is_plain and num_bytes >= least and is_host_only()


class PairReduction:
    """The reduction of chunks between this rank and one peer."""

    def __init__(
        self,
        chunks: Sequence[tuple[Tensor, Tensor]],
        op: Partial,
        group: dist.ProcessGroup,
        *,
        donate: bool,
    ) -> None:
        """Start reducing.

        Args:
            chunks: This rank's terms and where their results go, of any strides; the peer's have the same
                shapes.
            op: The reduction; an average divides by two.
            group: Two ranks.
            donate: Whether terms may be overwritten; the same on both ranks.
        """
        self.donate = donate
        self._name = "sum" if op.reduce_op == "avg" else op.reduce_op
        self.chunks = chunks
        self.op = op
        self.group = group
        self._posted: list[tuple[Tensor, tuple[Any, ...]]] = []
        self._spare: dict[tuple[int, int], Tensor] = {}
        self._num_done = 0
        for _ in chunks[:_DEPTH]:
            self._post()

    def advance(self) -> bool:
        """Wait for the next chunk, reduce it and start another; return False where none is left."""
        if self._num_done == len(self.chunks):
            return False
        term, result = self.chunks[self._num_done]
        received, works = self._posted[self._num_done]
        self._posted[self._num_done] = (received, ())
        for work in works:
            work.wait()
        if not self.donate:
            COMBINE[self._name](received, term, out=result)
        elif received is not result:
            result.copy_(received)
        if self.op.reduce_op == "avg":
            result.div_(2)
        self._num_done += 1
        if len(self._posted) < len(self.chunks):
            self._post()
        return True

    def _post(self) -> None:
        term, result = self.chunks[len(self._posted)]
        received = result if result.is_contiguous() else self._buffer(1, result)
        works: tuple[Any, ...]
        if self.donate:
            if received.data_ptr() != term.data_ptr():
                received.copy_(term)
            works = (self.group.allreduce([received], C10D_OPS[self._name]),)
        else:
            peer = 1 - self.group.rank()
            sent = term if term.is_contiguous() else self._buffer(0, term).copy_(term)
            works = (
                self.group.recv([as_bytes(received.view(-1))], peer, 0),
                self.group.send([as_bytes(sent.view(-1))], peer, 0),
            )
        self._posted.append((received, works))

    def _buffer(self, side: int, chunk: Tensor) -> Tensor:
        """Return a contiguous buffer for a chunk; one that is done with, if it is large enough."""
        key = side, len(self._posted) % _DEPTH
        old = self._spare.get(key)
        if old is None or old.numel() < chunk.numel():
            old = self._spare[key] = chunk.new_empty(chunk.numel())
        return old[: chunk.numel()].view(chunk.shape)


def finish_all(reductions: Sequence[PairReduction]) -> None:
    """End several reductions, in turns, so that none waits for another's peer."""
    left = list(reductions)
    while left:
        left = [reduction for reduction in left if reduction.advance()]
