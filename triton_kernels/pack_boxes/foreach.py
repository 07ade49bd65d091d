"""Packing by torch's own copies, few calls for many pieces: every device but CUDA ones.

====================  ============================================================================
pack, contiguous      ``torch.cat`` of all neighbours of one dtype: a memcpy each, in one call
pack, small strided   made contiguous first, then as above: its second copy stays in the cache
pack, large           a copy to a view of the message, so that nothing is copied twice
unpack, unpack_add    ``torch._foreach_copy_`` and ``torch._foreach_add_`` of all neighbours of
                      one dtype
====================  ============================================================================
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


# Up to here a strided piece is cheaper copied twice than once with views of its own: a copy in the
# cache costs less than the views, a microsecond or two.
_SMALL_BYTES = 1 << 14
# From here on a copy of its own is faster than a share of ``torch.cat``, by some percent.
_LARGE_BYTES = 1 << 20


def pack(pieces: Sequence[Tensor], offsets: Sequence[int], out: Tensor) -> None:
    """Copy each piece to its place in ``out``."""
    for group, segment in _groups(pieces, offsets, out):
        _pack_group(group, segment)


def unpack(flat: Tensor, offsets: Sequence[int], pieces: Sequence[Tensor]) -> None:
    """Copy each piece from its place in ``flat``."""
    _for_each_group(torch._foreach_copy_, pieces, offsets, flat)


def unpack_add(flat: Tensor, offsets: Sequence[int], pieces: Sequence[Tensor]) -> None:
    """Add to each piece what is at its place in ``flat``."""
    _for_each_group(torch._foreach_add_, pieces, offsets, flat)


def _groups(
    pieces: Sequence[Tensor], offsets: Sequence[int], flat: Tensor
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield neighbours of one dtype with their segment of the message in that dtype."""
    placed = [pair for pair in zip(pieces, offsets, strict=True) if pair[0].numel()]
    for dtype, group in itertools.groupby(placed, lambda pair: pair[0].dtype):
        members = list(group)
        last, last_offset = members[-1]
        segment = flat[members[0][1] : last_offset + last.nbytes].view(dtype)
        yield [piece for piece, _ in members], segment


def _pack_group(pieces: Sequence[Tensor], segment: Tensor) -> None:
    start = position = 0
    waiting: list[Tensor] = []
    for piece in pieces:
        if piece.nbytes <= (_LARGE_BYTES if piece.is_contiguous() else _SMALL_BYTES):
            # A view less where the piece is a row already, here and below.
            waiting.append(piece if piece.dim() == 1 else piece.ravel())
            position += piece.numel()
            continue
        _join(waiting, segment[start:position])
        start = position + piece.numel()
        _copy_large(segment[position:start].view(piece.shape), piece)
        waiting, position = [], start
    _join(waiting, segment[start:position])


def _copy_large(out: Tensor, piece: Tensor) -> None:
    whole = _whole_rows(piece)
    if whole is None:
        out.copy_(piece)
    else:
        # A memcpy for each row, which takes a tenth less time than the loop of a strided copy.
        column = piece.storage_offset() - whole.storage_offset()
        torch.narrow_copy(whole, 1, column, piece.shape[1], out=out)


def _whole_rows(piece: Tensor) -> Tensor | None:
    """Return the contiguous rows that a box of columns was cut from, if it is one on a CPU."""
    if piece.device.type != "cpu" or piece.dim() != 2 or piece.is_contiguous():
        return None
    (num_rows, num_columns), (row, step) = piece.shape, piece.stride()
    if step != 1 or row < num_columns:
        return None
    column = piece.storage_offset() % row
    first = piece.storage_offset() - column
    room = piece.untyped_storage().nbytes() // piece.itemsize
    if column + num_columns > row or first + num_rows * row > room:
        return None
    return piece.as_strided((num_rows, row), (row, 1), first)


def _join(rows: list[Tensor], out: Tensor) -> None:
    if len(rows) == 1:
        out.copy_(rows[0])
    elif rows:
        torch.cat(rows, out=out)


def _for_each_group(
    act: Callable[[list[Tensor], list[Tensor]], object],
    pieces: Sequence[Tensor],
    offsets: Sequence[int],
    flat: Tensor,
) -> None:
    for group, segment in _groups(pieces, offsets, flat):
        parts = segment.split_with_sizes([piece.numel() for piece in group])
        shaped = [
            part if piece.dim() == 1 else part.view(piece.shape)
            for piece, part in zip(group, parts, strict=True)
        ]
        act(group, shaped)
