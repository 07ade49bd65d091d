"""Point-to-point messages, all issued together.

Messages are issued in one order that all ranks share, sends and receives alike. So they match on
transports that know no tags, and would not deadlock if each were to block until its peer arrives: the
first message that is not yet done has both its ends waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hdtensor.collectives import observe
from hdtensor.collectives.groups import message_channel
from hdtensor.collectives.split import as_bytes
from hdtensor.collectives.wire import is_on_host, wire_device


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
    if observe.listeners:
        observe.notify_messages(sends, recvs, "world")
    start(sends, recvs)()


def start(
    sends: Mapping[int, Tensor | Sequence[Tensor]],
    recvs: Mapping[int, Tensor | Sequence[Tensor]],
    *,
    reverse: bool = False,
    channel: int = 0,
    timeout: timedelta | None = None,
) -> Exchange:
    """Start all messages; what is returned waits for them.

    Args:
        sends: Global rank of the receiver -> contiguous buffers, not to be written before the wait.
        recvs: Global rank of the sender -> contiguous buffers that are overwritten. Several of one pair
            are matched in their order.
        reverse: Whether these are messages of a backward pass, which have their own channel: forward
            and backward messages of one pair may then pass each other.
        channel: As ``message_channel``.
        timeout: How long to wait for each message; default the process group's.

    Raises:
        GroupError: Inside ``as_rank``, or without a default process group.
    """
    if not sends and not recvs:
        return Exchange([], timeout)
    group, tag = message_channel(reverse=reverse, channel=channel)
    me, world = dist.get_rank(), dist.get_world_size()
    messages = [(me, peer, buffer) for peer, buffer in _each(sends) if peer != me]
    messages += [(peer, me, buffer) for peer, buffer in _each(recvs) if peer != me]
    messages.sort(key=lambda message: place(message[0], message[1], world))
    ready = [(src, dst, _on_wire(src, dst, buffer)) for src, dst, buffer in messages]
    works = launch(ready, group, tag)
    is_each = len(works) == len(messages)  # some backends complete a batch as a whole
    issued = []
    for i, ((src, dst, buffer), (_, _, host)) in enumerate(zip(messages, ready, strict=True)):
        source = src if dst == me else None
        mine = works[i : i + 1] if is_each else works
        issued.append(_Issued(source, tuple(mine), buffer, host))
    return Exchange(issued, timeout)


def start_one(
    buffer: Tensor, peer: int, *, is_sent: bool, reverse: bool = False, channel: int = 0
) -> dist.Work:
    """Start one message of host memory, without what several messages need.

    Args:
        buffer: What is sent, or overwritten; contiguous.
        peer: The other rank.
        is_sent: Whether this rank sends it.
        reverse: As for ``start``.
        channel: As ``message_channel``.
    """
    group, tag = message_channel(reverse=reverse, channel=channel)
    flat = [_as_bytes(buffer)]
    return group.send(flat, peer, tag) if is_sent else group.recv(flat, peer, tag)


class _Issued(NamedTuple):
    """A message on its way.

    Attributes:
        source: Rank that it comes from; None for one that is sent.
        works: What to wait for.
        buffer: What is sent or received.
        host: The same memory, or host memory where bytes are staged.
    """

    source: int | None
    works: tuple[dist.Work, ...]
    buffer: Tensor
    host: Tensor


class Exchange:
    """Messages on their way; call it to wait for all that are left."""

    def __init__(self, issued: list[_Issued], timeout: timedelta | None) -> None:
        self._left = issued
        self._timeout = timeout

    def __call__(self) -> None:
        """Wait for all messages."""
        left, self._left = self._left, []
        for message in left:
            self._wait(message)

    def receive(self, source: int) -> None:
        """Wait for the messages from one rank, while others are on their way."""
        arriving = [message for message in self._left if message.source == source]
        self._left = [message for message in self._left if message.source != source]
        for message in arriving:
            self._wait(message)

    def _wait(self, message: _Issued) -> None:
        for work in message.works:
            if self._timeout is None:
                work.wait()
            else:
                work.wait(self._timeout)
        if message.source is not None and message.host is not message.buffer:
            message.buffer.copy_(message.host)


def launch(
    messages: Sequence[tuple[int, int, Tensor]], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Issue this rank's messages, (sender, receiver, buffer), over a group of all ranks, in their order.

    NCCL must be told that they belong together. gloo need not, and its own calls cost a tenth of those
    around them.
    """
    me = dist.get_rank()
    works: list[dist.Work] = []
    operations = []
    for src, dst, buffer in messages:
        flat = _as_bytes(buffer)
        if flat.device.type == "cpu":
            is_sent = src == me
            works.append(group.send([flat], dst, tag) if is_sent else group.recv([flat], src, tag))
        else:
            verb, peer = (dist.isend, dst) if src == me else (dist.irecv, src)
            operations.append(dist.P2POp(verb, flat, peer, group, tag))
    return works + (dist.batch_isend_irecv(operations) if operations else [])


def _on_wire(src: int, dst: int, buffer: Tensor) -> Tensor:
    """Return what is sent or received: the buffer, or host memory in its place."""
    if is_on_host(buffer.device):
        return buffer
    device = wire_device(buffer.device, (src, dst))
    if device == buffer.device:
        return buffer
    return buffer.to(device) if src == dist.get_rank() else torch.empty_like(buffer, device=device)


def _each(buffers: Mapping[int, Tensor | Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
    for peer, value in buffers.items():
        for buffer in (value,) if isinstance(value, Tensor) else value:
            yield peer, buffer


def place(src: int, dst: int, num_ranks: int) -> tuple[int, int]:
    """Return a message's place in the order that all ranks share.

    By distance around the ring of ranks: at each distance every rank sends once and receives once.
    """
    return (dst - src) % num_ranks, src


def _as_bytes(buffer: Tensor) -> Tensor:
    """View a buffer as bytes: backends lack some dtypes, and bytes move exactly."""
    assert buffer.is_contiguous(), f"messages are contiguous, got strides {buffer.stride()}"
    return as_bytes(buffer.view(-1))
