"""Many boxes of many tensors to and from one message of bytes, in one launch each way.

A rank that sends parts of its shards to a peer packs them into one buffer, and the peer unpacks
them into its own shards. The functions share these arguments:

==========  ====================================================================================
``pieces``  the boxes: tensors of any rank, strides and dtypes, such as ``shard[3:5, :, 8:]``
``flat``    the message, called ``out`` where it is written: contiguous uint8 of one dim, on the
            device of the pieces, as long as all pieces together. It holds one piece after
            another, each in row-major order, without padding
==========  ====================================================================================

Each piece must lie at a multiple of its itemsize in the message. Pieces in the order of descending
itemsize always do. Pieces that are written must not overlap; equal first elements, expanded dims
and pieces inside of the message are found and refused, other overlaps are not looked for.

`reference` is the definition in plain torch. CUDA tensors run `kernel` (one launch for all pieces)
where Triton is installed, all others `foreach`. All of them give the same bits.

Each function raises ``ValueError`` for a message of another length, a place that is not aligned, another
device, an overlap, or a piece to write whose values are not its memory (a lazy conjugate or negative),
and ``TypeError`` for a dtype that it does not take.
"""

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import foreach


__all__ = ["pack", "unpack", "unpack_add"]

#: What `unpack_add` adds: torch has no sum of booleans, of 8-bit floats or of wide unsigned integers.
_ADDABLE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.complex128,
    torch.complex64,
    torch.complex32,
)


@torch.no_grad()
def pack(pieces: Sequence[Tensor], out: Tensor) -> Tensor:
    """Copy the pieces, one after another, into ``out``; return ``out``.

    Pieces may be expanded, and may be lazy conjugates or negatives: their values are packed.

    >>> columns, row = torch.arange(8, dtype=torch.int16).view(2, 4)[:, 1:3], torch.ones(1).bool()
    >>> pack([columns, row], torch.empty(9, dtype=torch.uint8))
    tensor([1, 0, 2, 0, 5, 0, 6, 0, 1], dtype=torch.uint8)
    """
    pieces = [
        piece.resolve_conj().resolve_neg() if piece.is_conj() or piece.is_neg() else piece
        for piece in pieces
    ]
    offsets = _offsets(pieces, out)
    _backend(out).pack(pieces, offsets, out)
    return out


@torch.no_grad()
def unpack(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy the message into the pieces: what `pack` does, backwards.

    >>> piece = torch.zeros(2, 4, dtype=torch.int16)
    >>> unpack(torch.tensor([1, 0, 2, 0], dtype=torch.uint8), [piece[:, 2]])
    >>> piece
    tensor([[0, 0, 1, 0],
            [0, 0, 2, 0]], dtype=torch.int16)
    """
    offsets = _offsets(pieces, flat)
    _check_writable(pieces)
    _backend(flat).unpack(flat, offsets, pieces)


@torch.no_grad()
def unpack_add(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Add the message to the pieces, as ``piece.add_(message)`` does: terms of a Partial sum.

    Each element is added in the dtype of its piece and rounded once; float16 and bfloat16 sums are
    float32 before that.

    >>> piece = torch.tensor([1, 200], dtype=torch.uint8)
    >>> unpack_add(torch.tensor([2, 100], dtype=torch.uint8), [piece])
    >>> piece
    tensor([ 3, 44], dtype=torch.uint8)
    """
    for piece in pieces:
        if piece.dtype not in _ADDABLE:
            names = ", ".join(str(dtype) for dtype in _ADDABLE)
            raise TypeError(
                f"pieces of {piece.dtype} cannot be added to; unpack_add takes {names}. "
                f"Unpack such a piece into a tensor of its own and combine the two there."
            )
    offsets = _offsets(pieces, flat)
    _check_writable(pieces)
    _backend(flat).unpack_add(flat, offsets, pieces)


def _offsets(pieces: Sequence[Tensor], flat: Tensor) -> list[int]:
    """Return where each piece begins in the message, in bytes, after checking that it fits."""
    if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"the message must be contiguous uint8 of one dim, got {flat.dtype}, "
            f"shape {tuple(flat.shape)} and strides {flat.stride()}."
        )
    sizes = [piece.nbytes for piece in pieces]
    *offsets, num_bytes = itertools.accumulate(sizes, initial=0)
    if num_bytes != flat.numel():
        raise ValueError(
            f"the message has {flat.numel()} bytes, but its {len(sizes)} pieces have {num_bytes}."
        )
    first = flat.data_ptr()
    # torch looks at the offset in the storage where it views bytes as another dtype.
    base = first | int(flat.storage_offset())
    last = first + num_bytes
    for index, (piece, offset, size) in enumerate(zip(pieces, offsets, sizes, strict=True)):
        if piece.device != flat.device:
            raise ValueError(
                f"piece {index} is on {piece.device}, but the message on {flat.device}: "
                f"move one of them."
            )
        if not size:
            continue
        if (base | offset) % piece.itemsize:
            raise ValueError(_alignment_error(index, piece, offset, flat))
        if first <= piece.data_ptr() < last:
            raise ValueError(f"piece {index} lies in the memory of the message: clone it first.")
    return offsets


def _alignment_error(index: int, piece: Tensor, offset: int, flat: Tensor) -> str:
    need = f"piece {index} of {piece.dtype} needs a place aligned to {piece.itemsize} bytes"
    if offset % piece.itemsize:
        return (
            f"{need}, but begins at byte {offset} of the message. "
            f"Give the pieces in the order of descending itemsize."
        )
    return (
        f"{need}, but the message itself begins at address {flat.data_ptr()}, "
        f"byte {flat.storage_offset()} of its storage. Cut it from its buffer at a multiple of 16."
    )


def _check_writable(pieces: Sequence[Tensor]) -> None:
    starts: dict[int, int] = {}
    for index, piece in enumerate(pieces):
        if piece.is_conj() or piece.is_neg():
            raise ValueError(
                f"piece {index} is a lazy conjugate or negative, whose memory is not its values: "
                f"write to its base."
            )
        if not piece.numel():
            continue
        if not piece.is_contiguous() and _overlaps_itself(piece):
            raise ValueError(
                f"each element of piece {index} needs memory of its own, got shape "
                f"{tuple(piece.shape)} and strides {piece.stride()}. Write to an unexpanded tensor."
            )
        other = starts.setdefault(piece.data_ptr(), index)
        if other != index:
            raise ValueError(
                f"pieces {other} and {index} overlap: both begin at the same element. "
                f"Unpack them one by one, in the order that is meant."
            )


def _overlaps_itself(piece: Tensor) -> bool:
    """Whether elements share memory for certain: an expanded dim, or too little room."""
    dims = [(num, step) for num, step in zip(piece.shape, piece.stride(), strict=True) if num > 1]
    room = 1 + sum((num - 1) * step for num, step in dims)
    return room < piece.numel() or any(step == 0 for _, step in dims)


def _backend(flat: Tensor) -> ModuleType:
    return _kernel() if flat.is_cuda and _has_triton() else foreach


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel() -> ModuleType:
    # On demand: Triton takes long to import and may be missing where there is no CUDA device.
    return importlib.import_module(".kernel", __name__)
