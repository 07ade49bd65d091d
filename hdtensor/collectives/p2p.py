"""Point-to-point messages, all issued together.

Messages are issued in one order that all ranks share, sends and receives alike. So they match on
transports that know no tags, and would not deadlock if each were to block until its peer arrives: the
first message that is not yet done has both its ends waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from hdtensor.collectives.groups import device_type, message_channel
from hdtensor.collectives.split import as_bytes


def exchange(sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
    """Send and receive one buffer per peer; return when all are complete.

    A rank that names itself copies. Both sides must agree on which messages exist and on their sizes.

    Args:
        sends: Global rank of the receiver -> contiguous buffer.
        recvs: Global rank of the sender -> contiguous buffer that is overwritten.

    Raises:
        GroupError: Inside ``as_rank``, or without a default process group.
    """
    for rank in sends.keys() & recvs.keys():
        if rank == dist.get_rank():
            recvs[rank].copy_(sends[rank])
    start(sends, recvs)()


def start(
    sends: Mapping[int, Tensor | Sequence[Tensor]],
    recvs: Mapping[int, Tensor | Sequence[Tensor]],
    *,
    reverse: bool = False,
    timeout: timedelta | None = None,
) -> Callable[[], None]:
    """Start all messages; the function returned waits for them.

    Args:
        sends: Global rank of the receiver -> contiguous buffers, not to be written before the wait.
        recvs: Global rank of the sender -> contiguous buffers that are overwritten. Several of one pair
            are matched in their order.
        reverse: Whether these are messages of a backward pass, which have their own channel: forward
            and backward messages of one pair may then pass each other.
        timeout: How long to wait for each message; default the process group's.

    Raises:
        GroupError: Inside ``as_rank``, or without a default process group.
    """
    if not sends and not recvs:
        return _nothing
    group, tag = message_channel(reverse=reverse)
    me, world = dist.get_rank(), dist.get_world_size()
    messages = [(me, peer, buffer) for peer, buffer in _each(sends) if peer != me]
    messages += [(peer, me, buffer) for peer, buffer in _each(recvs) if peer != me]
    messages.sort(key=lambda message: place(message[0], message[1], world))
    works = launch(messages, group, tag)

    def wait() -> None:
        for work in works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)

    return wait


def launch(
    messages: Sequence[tuple[int, int, Tensor]], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Issue this rank's messages, (sender, receiver, buffer), over a group of all ranks, in their order.

    NCCL must be told that they belong together. gloo need not, and its own calls cost a tenth of those
    around them.
    """
    me = dist.get_rank()
    if device_type() == "cpu":
        return [
            group.send([_as_bytes(buffer)], dst, tag)
            if src == me
            else group.recv([_as_bytes(buffer)], src, tag)
            for src, dst, buffer in messages
        ]
    operations = [
        dist.P2POp(dist.isend, _as_bytes(buffer), dst, group, tag)
        if src == me
        else dist.P2POp(dist.irecv, _as_bytes(buffer), src, group, tag)
        for src, dst, buffer in messages
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _each(buffers: Mapping[int, Tensor | Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
    for peer, value in buffers.items():
        for buffer in (value,) if isinstance(value, Tensor) else value:
            yield peer, buffer


def place(src: int, dst: int, num_ranks: int) -> tuple[int, int]:
    """Return a message's place in the order that all ranks share.

    By distance around the ring of ranks: at each distance every rank sends once and receives once.
    """
    return (dst - src) % num_ranks, src


def _nothing() -> None:
    """Wait for no message."""


def _as_bytes(buffer: Tensor) -> Tensor:
    """View a buffer as bytes: backends lack some dtypes, and bytes move exactly."""
    assert buffer.is_contiguous(), f"messages are contiguous, got strides {buffer.stride()}"
    return as_bytes(buffer.view(-1))
