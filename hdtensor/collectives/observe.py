"""Who wants to know of communication, and why it happens.

``debug.count_communication`` and ``HDTENSOR_DEBUG=1`` listen here. Without a listener an event costs the look at an
empty list, and without a profiler a range costs the question whether there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from hdtensor._torch_compat import is_profiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One collective, or all messages to and from one peer, about to start on this rank.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "send_recv".
        ranks: The ranks that take part; the peer of a send_recv.
        num_bytes: Bytes that this rank puts in.
        why: The operator or verb that needed it.
        tier: "top" between subgroups, "bottom" inside one, "world" where whole tensors come or go (``switch``,
            ``distribute_tensor``, ``full_tensor``).
        dtype: Of the elements; empty where bytes of several travel together.
        sent: Elements for each rank of a collective in group order, or once for all; bytes for the peer; empty where it
            was not told.
        received: Elements from each rank, or once from all; bytes from the peer.
        channel: As ``groups.message_channel``: messages of a channel may pass those of others.
        is_ahead: Whether this rank goes on to other work before it waits for the others.
    """

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    why: str
    tier: str
    dtype: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    channel: int = 0
    is_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function that ranks call together, which this rank is about to carry out.

    Attributes:
        function: Its name.
        ranks: Whom this rank communicates with in it, itself included.
        arguments: What must be the same on all of them, as a text.
        why: The verb that it is part of.
        kind: "call", to tell it from communication.
    """

    function: str
    ranks: tuple[int, ...]
    arguments: str
    why: str = ""
    kind: str = "call"


Listener: TypeAlias = Callable[[Communication | Call], None]

#: Called with every event, before anything is sent; empty unless somebody watches.
listeners: list[Listener] = []

#: Why the next communication happens, innermost last.
_reasons: list[str] = []

#: How many contexts of ``ahead`` are open.
_num_ahead = [0]

_NO_RANGE: AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def because(why: str) -> Iterator[None]:
    """Name the reason of what is communicated inside."""
    _reasons.append(why)
    try:
        yield
    finally:
        _reasons.pop()


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Mark what is communicated inside as started ahead: this rank does other work before it waits for it."""
    _num_ahead[0] += 1
    try:
        yield
    finally:
        _num_ahead[0] -= 1


def profiled(name: str) -> AbstractContextManager[None]:
    """Return a range ``hdtensor::name`` for torch's profiler; nothing where none is running."""
    return record_function(f"hdtensor::{name}") if is_profiled() else _NO_RANGE


def notify(
    kind: str,
    ranks: tuple[int, ...],
    num_bytes: int,
    *,
    tier: str = "top",
    dtype: torch.dtype | None = None,
    sizes: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> None:
    """Tell all listeners of a collective that is about to start.

    Args:
        kind: As ``Communication.kind``.
        ranks: The group.
        num_bytes: What this rank puts in.
        tier: As ``Communication.tier``.
        dtype: Of the elements.
        sizes: Elements (sent, received), as in ``Communication``. Without them it is counted, but not compared with what
            other ranks do.
    """
    sent, received = sizes
    _tell(
        Communication(
            kind=kind,
            ranks=ranks,
            num_bytes=num_bytes,
            why=_reason(),
            tier=tier,
            dtype="" if dtype is None else str(dtype)[6:],
            sent=tuple(sent),
            received=tuple(received),
            is_ahead=_num_ahead[0] > 0,
        )
    )


def notify_messages(
    sends: Mapping[int, Tensor | Sequence[Tensor]],
    recvs: Mapping[int, Tensor | Sequence[Tensor]],
    tier: str,
    channel: int = 0,
) -> None:
    """Tell all listeners of messages that are about to start: one event for each peer."""
    for peer in sorted(sends.keys() | recvs.keys()):
        num_sent, num_received = _num_bytes(sends.get(peer, ())), _num_bytes(recvs.get(peer, ()))
        _tell(
            Communication(
                kind="send_recv",
                ranks=(peer,),
                num_bytes=num_sent,
                why=_reason(),
                tier=tier,
                dtype="",
                sent=(num_sent,),
                received=(num_received,),
                channel=channel,
                is_ahead=_num_ahead[0] > 0,
            )
        )


def announce(function: str, ranks: Sequence[int], arguments: str = "") -> None:
    """Tell all listeners that this rank is about to carry out a function together with others.

    Args:
        function: Its name.
        ranks: Whom this rank communicates with in it. Each of them names this rank in turn.
        arguments: What must be the same on all of them, as a text.
    """
    _tell(Call(function=function, ranks=tuple(ranks), arguments=arguments, why=_reason()))


def reason() -> str:
    """Return the innermost reason that ``because`` named, "" outside of any."""
    return _reasons[-1] if _reasons else ""


def _reason() -> str:
    return reason() or "redistribute"


def _num_bytes(buffers: Tensor | Sequence[Tensor]) -> int:
    return buffers.nbytes if isinstance(buffers, Tensor) else sum(b.nbytes for b in buffers)


def _tell(event: Communication | Call) -> None:
    for listener in tuple(listeners):
        listener(event)
