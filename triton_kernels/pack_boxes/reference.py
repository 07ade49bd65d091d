"""Packing of boxes in plain torch, one piece after another: the definition.

The bytes of a piece are those of its elements in row-major order of its dims, whatever its strides;
the pieces follow one another without padding::

    pieces    +---+---+      +---+
              | a | b |      | e |        a, b, c, d, e, f elements
              | c | d |      | f |
              +---+---+      +---+

    flat      [ a  b  c  d ][ e  f ]      bytes 0, 1, 2, ...

The arguments are described, and checked, in the package's ``__init__``.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor


def pack(pieces: Sequence[Tensor], out: Tensor) -> Tensor:
    """Copy each piece to its place in ``out``."""
    for piece, place in _placed(out, pieces):
        place.copy_(piece)
    return out


def unpack(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy each piece from its place in ``flat``."""
    for piece, place in _placed(flat, pieces):
        piece.copy_(place)


def unpack_add(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Add to each piece what is at its place in ``flat``."""
    for piece, place in _placed(flat, pieces):
        piece.add_(place)


def _placed(flat: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each piece that is not empty with its part of ``flat``, in its dtype and shape."""
    start = 0
    for piece in pieces:
        stop = start + piece.nbytes
        if piece.numel():
            yield piece, flat[start:stop].view(piece.dtype).view(piece.shape)
        start = stop
