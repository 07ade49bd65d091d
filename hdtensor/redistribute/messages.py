"""Messages of point-to-point steps on this rank: one per peer for all tensors that travel together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.distributed.tensor import Partial

from hdtensor.collectives import observe, operators, p2p
from hdtensor.collectives.pack import (
    combine_into,
    combine_piece,
    cut,
    is_alone,
    join,
    pack,
    receive_buffers,
    unpack,
)
from hdtensor.redistribute.program import Message, RankStep


class Parcel(NamedTuple):
    """One tensor's part of a round of messages.

    Attributes:
        step: What this rank does.
        old: Local tensor before.
        new: Local tensor after; the old one on a rank that keeps it.
    """

    step: RankStep
    old: Tensor
    new: Tensor


class _Arrival(NamedTuple):
    """One parcel's part of one message.

    Attributes:
        parcel: Whose.
        term: Which term of its reduction it brings.
        pieces: Views of the new local tensor.
        flat: The bytes that arrive; None where they arrive in the only piece itself.
        source: Rank that sends it.
    """

    parcel: int
    term: int
    pieces: list[Tensor]
    flat: Tensor | None
    source: int


#: Writes a message into its pieces, or reduces it into them.
_Writer: TypeAlias = Callable[[Tensor, Sequence[Tensor], Partial | None], None]


def start(
    parcels: Sequence[Parcel],
    *,
    reverse: bool = False,
    channel: int = 0,
    timeout: timedelta | None = None,
) -> Callable[[], None]:
    """Send all parcels' messages; the function returned waits and writes what arrived.

    A message holds the pieces of all parcels by descending element size, so that every piece is
    aligned without padding. It is sent from, or received into, the local tensor itself where it is one
    contiguous piece.

    Args:
        parcels: In the same order on every rank.
        reverse: Whether this is part of a backward pass.
        channel: As ``message_channel``.
        timeout: How long to wait for a message; default the process group's.
    """
    if any(type(parcel.old) is not Tensor for parcel in parcels):
        return _start_traced(parcels, reverse)
    by_size = sorted(range(len(parcels)), key=lambda i: -parcels[i].old.element_size())
    sent: dict[int, list[Tensor]] = {}
    received: dict[int, list[tuple[int, Message]]] = {}
    for i in by_size:
        for message in parcels[i].step.sent:
            sent.setdefault(message.peer, []).extend(_views(parcels[i].old, message))
        for message in parcels[i].step.received:
            received.setdefault(message.peer, []).append((i, message))
    buffers, arrivals = _post(parcels, received)
    outgoing = dict(zip(sent, pack(list(sent.values())), strict=True))
    if observe.listeners:
        tiers = {parcel.step.tier for parcel in parcels}
        observe.notify_messages(outgoing, buffers, "top" if "top" in tiers else "bottom", channel)
    with observe.profiled("send_recv"):
        exchange = p2p.start(outgoing, buffers, reverse=reverse, channel=channel, timeout=timeout)

    def finish() -> None:
        # What came is written while other messages are on their way.
        _deliver_first([a for a in arrivals if a.term == 0], _write, exchange)
        exchange()
        _deliver_rest(parcels, arrivals, _write)

    return finish


def _start_traced(parcels: Sequence[Parcel], reverse: bool) -> Callable[[], None]:
    """Put each parcel's messages into the graph that is being traced, as one operator."""
    results = []
    for step, old, _ in parcels:
        flats = [view.reshape(-1) for message in step.sent for view in _views(old, message)]
        result = operators.start(
            "send_recv",
            join(flats, old),
            [message.peer for message in step.sent],
            [message.num_elements for message in step.sent],
            [message.peer for message in step.received],
            [message.num_elements for message in step.received],
            reverse,
        )
        results.append(result)

    def finish() -> None:
        arrivals = []
        for i, (parcel, result) in enumerate(zip(parcels, results, strict=True)):
            sizes = [message.num_elements for message in parcel.step.received]
            for message, flat in zip(parcel.step.received, cut(result, sizes), strict=True):
                views = _views(parcel.new, message)
                arrivals.append(_Arrival(i, message.term, views, flat, message.peer))
        _deliver_first([a for a in arrivals if a.term == 0], _write_traced)
        _deliver_rest(parcels, arrivals, _write_traced)

    return finish


def _write_traced(flat: Tensor, pieces: Sequence[Tensor], op: Partial | None) -> None:
    """Write or reduce a message by plain operators."""
    for piece, part in zip(pieces, cut(flat, [piece.numel() for piece in pieces]), strict=True):
        if op is None:
            piece.copy_(part.view(piece.shape))
        else:
            combine_piece(piece, part.view(piece.shape), op)


def _write(flat: Tensor, pieces: Sequence[Tensor], op: Partial | None) -> None:
    """Write or reduce a message."""
    if op is None:
        unpack(flat, pieces)
    else:
        combine_into(flat, pieces, op)


def _post(
    parcels: Sequence[Parcel], received: dict[int, list[tuple[int, Message]]]
) -> tuple[dict[int, Tensor], list[_Arrival]]:
    """Return the buffer to receive from each peer, and what lies in it."""
    buffers: dict[int, Tensor] = {}
    arrivals: list[_Arrival] = []
    flat_peers: dict[int, list[tuple[int, int, list[Tensor]]]] = {}
    for peer, parts in received.items():
        viewed = [(i, message.term, _views(parcels[i].new, message)) for i, message in parts]
        parcel, term, pieces = viewed[0]
        # Only the first term may be received over what is there.
        if len(viewed) == 1 and term == 0 and is_alone(pieces):
            buffers[peer] = pieces[0]
            arrivals.append(_Arrival(parcel, term, pieces, None, peer))
        else:
            flat_peers[peer] = viewed
    everything = [[p for _, _, pieces in parts for p in pieces] for parts in flat_peers.values()]
    for peer, flat in zip(flat_peers, receive_buffers(everything), strict=True):
        buffers[peer] = flat
        start = 0
        for parcel, term, pieces in flat_peers[peer]:
            end = start + sum(piece.nbytes for piece in pieces)
            arrivals.append(_Arrival(parcel, term, pieces, flat[start:end], peer))
            start = end
    return buffers, arrivals


def _deliver_first(
    arrivals: Sequence[_Arrival], write: _Writer, exchange: p2p.Exchange | None = None
) -> None:
    """Write plain messages and first terms."""
    for arrival in arrivals:
        if arrival.flat is not None:
            if exchange is not None:
                exchange.receive(arrival.source)
            write(arrival.flat, arrival.pieces, None)


def _deliver_rest(parcels: Sequence[Parcel], arrivals: Sequence[_Arrival], write: _Writer) -> None:
    """Reduce the other terms."""
    for i, parcel in enumerate(parcels):
        if parcel.step.op is not None:
            _reduce(parcel, [a for a in arrivals if a.parcel == i], write)


def _reduce(parcel: Parcel, arrivals: Sequence[_Arrival], write: _Writer) -> None:
    """Reduce a parcel's terms into its new local tensor, in the order of the terms."""
    step, old, new = parcel
    assert step.op is not None, "only a reduction has terms"
    for term in range(step.num_terms):
        for target, source in step.copies if term == step.own_term else ():
            if term:
                combine_piece(new[target], old[source], step.op)
            else:
                new[target].copy_(old[source])
        for arrival in arrivals:
            if arrival.term == term and term:
                assert arrival.flat is not None, "later terms have a buffer"
                write(arrival.flat, arrival.pieces, step.op)
    if step.op.reduce_op == "avg":
        new.div_(step.num_terms)


def _views(local: Tensor, message: Message) -> list[Tensor]:
    return [local[piece] for piece in message.pieces]
