"""Strided pieces of tensors into flat messages and back: one kernel launch for all peers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from hdtensor.collectives.memory import new_buffer
from hdtensor.collectives.split import COMBINE, as_bytes
from hdtensor.triton_kernels import pack_boxes


#: Messages start at multiples of this in the buffer they share, so that every dtype is aligned.
_ALIGNMENT = 16


def pack(messages: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each message's pieces as flat bytes, without padding.

    Args:
        messages: Pieces of each, by descending element size. One contiguous piece alone is not copied.

    Returns:
        1-D uint8 tensors.
    """
    alone = [is_alone(pieces) for pieces in messages]
    joint, flats = _joint([m for m, is_one in zip(messages, alone, strict=True) if not is_one])
    if flats.whole is not None:
        pack_boxes.pack(joint, flats.whole)
    rest = iter(flats.parts)
    return [
        as_bytes(pieces[0].view(-1)) if is_one else next(rest)
        for pieces, is_one in zip(messages, alone, strict=True)
    ]


def receive_buffers(messages: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return new flat bytes to receive messages of these pieces into, in one allocation."""
    return _joint(messages)[1].parts


def flatten(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return pieces of one dtype as one new flat tensor.

    Args:
        pieces: Views of any strides.
        like: Gives dtype and device where there is no piece.
    """
    if type(like) is not Tensor:  # traced: plain operators only
        return join([piece.reshape(-1) for piece in pieces], like)
    out = new_buffer(like, (sum(piece.numel() for piece in pieces),))
    pack_boxes.pack(pieces, as_bytes(out))
    return out


def join(flats: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return flat tensors as one, by operators that a graph has only where there is something to join."""
    if not flats:
        return like.new_empty(0)
    return flats[0] if len(flats) == 1 else torch.cat(list(flats))


def cut(flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return the parts of a flat tensor, ``join``'s inverse."""
    return (flat,) if len(sizes) == 1 else torch.split(flat, list(sizes))


def unflatten(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Write a flat tensor into pieces of its dtype, ``flatten``'s inverse."""
    if type(flat) is not Tensor:
        parts = cut(flat, [piece.numel() for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part.view(piece.shape))
    else:
        pack_boxes.unpack(as_bytes(flat), pieces)


def unpack(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Write a message into its pieces."""
    pack_boxes.unpack(flat, pieces)


def combine_into(flat: Tensor, pieces: Sequence[Tensor], op: Partial) -> None:
    """Reduce a message's terms into the pieces, in their own dtype: ``piece = op(piece, term)``."""
    if op.reduce_op in ("sum", "avg") and all(piece.dtype != torch.bool for piece in pieces):
        pack_boxes.unpack_add(flat, pieces)
        return
    offset = 0
    for piece in pieces:
        term = flat[offset : offset + piece.nbytes].view(piece.dtype).view(piece.shape)
        combine_piece(piece, term, op)
        offset += piece.nbytes


def combine_piece(piece: Tensor, term: Tensor, op: Partial) -> None:
    """Reduce one term into a piece."""
    name = "sum" if op.reduce_op == "avg" else op.reduce_op
    COMBINE[name](piece, term, out=piece)


def is_alone(pieces: Sequence[Tensor]) -> bool:
    """Return whether a message is one contiguous piece, which needs no buffer."""
    return len(pieces) == 1 and pieces[0].is_contiguous()


class _Flats(NamedTuple):
    """One buffer and its parts, one for each message."""

    whole: Tensor | None
    parts: list[Tensor]


def _joint(messages: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], _Flats]:
    """Return all pieces with what fills the gaps between messages, and a buffer of their size."""
    if not messages:
        return [], _Flats(None, [])
    pieces: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    end = 0
    for message in messages:
        gap = -end % _ALIGNMENT
        if gap:
            pieces.append(message[0].new_zeros(gap, dtype=torch.uint8))
        start = end + gap
        end = start + sum(piece.nbytes for piece in message)
        spans.append((start, end))
        pieces += message
    whole = new_buffer(messages[0][0], (end,), torch.uint8)
    return pieces, _Flats(whole, [whole[start:end] for start, end in spans])
