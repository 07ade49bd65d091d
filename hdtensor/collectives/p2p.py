"""Point-to-point messages: at most one per ordered pair of ranks, all issued together."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from hdtensor.collectives.groups import group_of
from hdtensor.collectives.split import as_bytes


def exchange(sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
    """Send and receive one buffer per peer over the default group; return when all are complete.

    A rank that names itself copies. Both sides must agree on which messages exist and on their sizes.

    Args:
        sends: Global rank of the receiver -> contiguous buffer.
        recvs: Global rank of the sender -> contiguous buffer that is overwritten.

    Raises:
        GroupError: Inside ``as_rank``, or without a default process group.
    """
    if not sends and not recvs:
        return
    world = group_of(range(dist.get_world_size() if dist.is_initialized() else 1))
    me = dist.get_rank()
    if me in sends:
        recvs[me].copy_(sends[me])
    # Receives first and peers in order: any backend can then match the messages of a pair.
    operations = [
        dist.P2POp(dist.irecv, _as_bytes(recvs[peer]), peer, world)
        for peer in sorted(recvs)
        if peer != me
    ]
    operations += [
        dist.P2POp(dist.isend, _as_bytes(sends[peer]), peer, world)
        for peer in sorted(sends)
        if peer != me
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _as_bytes(buffer: Tensor) -> Tensor:
    """View a buffer as bytes: backends lack some dtypes, and bytes move exactly."""
    assert buffer.is_contiguous(), f"messages are contiguous, got strides {buffer.stride()}"
    return as_bytes(buffer.view(-1))
