"""The table that tells the kernel what to copy: pure arithmetic on shapes, strides and addresses.

A piece is seen as bytes, its elements being one more dim. Dims that lie in memory as one are merged,
so that most boxes have one or two left, the innermost of which is a contiguous *run*. A piece that is
one run is cut into an aligned body and a head and a tail of a few bytes. Each such *part* is copied in
the widest words that all its addresses, strides and sizes are multiples of, whatever its dtype::

    rows of 8 of 12 bf16 values       shape (R, 8), strides (12, 1)
    in bytes                          shape (R, 8, 2), strides (24, 2, 1)
    merged                            shape (R, 16), strides (24, 1): runs of 16 bytes
    in words of 8 bytes               shape (R, 2), strides (3, 1)

A part is covered by tiles of a fixed number of words. A tile spans powers of two in the innermost
three dims, called levels, level 0 the innermost, so that the kernel takes a lane's indices from its
number by shifts. Dims further out have extent one in a tile; any number of them is allowed.

The table is int64: the end of every part in numbers of tiles, then the fields of every part (see
`FIELDS`), then size and stride of the outer dims of all parts, of each part the innermost first.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


#: Fields of a part in the table. Sizes and strides are in words, addresses in bytes.
FIELDS = (
    "piece_address",
    "flat_address",
    "kind",
    "num_outer",
    "outer_index",
    "size_0",
    "size_1",
    "size_2",
    "stride_0",
    "stride_1",
    "stride_2",
    "bits_0",
    "bits_1",
    "bits_2",
)

WIDE_BYTES = 16
#: Size of a tile, a power of two, by what it holds: words accessed one by one, or 16 bytes at a time.
NARROW_TILE_WORDS = 1 << 10
WIDE_COPY_TILE_BYTES = 1 << 14
WIDE_ADD_TILE_BYTES = 1 << 13

# A shorter run is not cut into head, body and tail.
_CUT_FROM_BYTES = 512
# A dim is cut into the largest tiles of which no more than this share is empty.
_EMPTY_SHARE = 1 / 8
# log2 of a tile's least extent in level 0, if there is as much, and of its usual one where level 0 is
# strided: the other levels then share its cache lines.
_LEAST_BITS = 5
_NUM_LEVELS = 3


class Layout(NamedTuple):
    """What the cut of a piece into parts depends on.

    Attributes:
        sizes: Sizes of the dims.
        strides: Strides of the dims in elements.
        itemsize: Bytes of an element.
        piece_phase: Address of the first element modulo 16.
        flat_phase: Address of its place in the message modulo 16.
        word: Bytes of the numbers that are added; None where bytes are copied.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    piece_phase: int
    flat_phase: int
    word: int | None


class Part(NamedTuple):
    """A part of a piece, relative to the piece.

    Attributes:
        piece_offset: First byte, from the piece's first element.
        flat_offset: First byte, from the piece's place in the message.
        word: Bytes of a word.
        is_wide: Whether words are accessed 16 bytes at a time.
        levels: (size, stride) in words of level 0, 1 and 2.
        bits: log2 of a tile's extent in level 0, 1 and 2.
        outer: (size, stride) in words of the other dims, the innermost first.
        num_tiles: Tiles that cover the part.
    """

    piece_offset: int
    flat_offset: int
    word: int
    is_wide: bool
    levels: tuple[tuple[int, int], ...]
    bits: tuple[int, int, int]
    outer: tuple[tuple[int, int], ...]
    num_tiles: int


def merge_dims(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (size, stride) of the fewest dims with the same elements in the same order.

    >>> merge_dims((2, 3, 1, 4), (24, 4, 7, 1))
    [(2, 24), (12, 1)]
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


@functools.lru_cache(maxsize=1 << 14)
def parts_of(layout: Layout) -> tuple[Part, ...]:
    """Cut a piece into parts.

    >>> row = Layout((1000,), (1,), 2, piece_phase=2, flat_phase=2, word=None)
    >>> [(p.piece_offset, p.word, p.is_wide, p.levels[0]) for p in parts_of(row)]
    [(0, 2, False, (7, 1)), (14, 8, True, (248, 1)), (1998, 2, False, (1, 1))]
    """
    item = layout.itemsize
    strides = (*(stride * item for stride in layout.strides), 1)
    dims = merge_dims((*layout.sizes, item), strides) or [(1, 1)]
    num_bytes, step = dims[0]
    if len(dims) > 1 or step != 1 or num_bytes < _CUT_FROM_BYTES:
        return (_part(layout, dims, 0),)
    # Where the two sides are shifted, only narrower words are aligned on both.
    word = math.gcd(layout.piece_phase - layout.flat_phase, WIDE_BYTES)
    head = -layout.piece_phase % word
    body = head + (num_bytes - head) // word * word
    cuts = sorted({0, head, body, num_bytes})
    return tuple(_part(layout, [(b - a, 1)], a) for a, b in itertools.pairwise(cuts))


def _part(layout: Layout, dims: Sequence[tuple[int, int]], start: int) -> Part:
    """Return the part of these dims, in bytes and outermost first, ``start`` bytes into the piece."""
    *outer_dims, (run, step) = dims
    aligned = math.gcd(
        WIDE_BYTES,
        run if step == 1 else 1,
        layout.piece_phase + start,
        layout.flat_phase + start,
        *(stride for _, stride in outer_dims),
    )
    is_wide = aligned == WIDE_BYTES
    word = layout.word or min(aligned, 8)
    in_words = [(size, stride // word) for size, stride in reversed(outer_dims)]
    if run > word or not in_words:
        in_words.insert(0, (run // word, step))
    num_missing = max(0, _NUM_LEVELS - len(in_words))
    levels = (*in_words[:_NUM_LEVELS], *[(1, 0)] * num_missing)
    outer = tuple(in_words[_NUM_LEVELS:])
    if not is_wide:
        tile_words = NARROW_TILE_WORDS
    elif layout.word is None:
        tile_words = WIDE_COPY_TILE_BYTES // word
    else:
        tile_words = WIDE_ADD_TILE_BYTES // word
    bits = _tile_shape(levels, tile_words.bit_length() - 1)
    num_tiles = math.prod(size for size, _ in outer) * math.prod(
        -(-size >> num_bits) for (size, _), num_bits in zip(levels, bits, strict=True)
    )
    return Part(start, start, word, is_wide, levels, bits, outer, num_tiles)


def _tile_shape(levels: Sequence[tuple[int, int]], num_bits: int) -> tuple[int, int, int]:
    """Return log2 of a tile's extent in each level."""
    (size_0, stride_0), (size_1, _), (size_2, _) = levels
    others = _covering_bits(size_1) + _covering_bits(size_2)
    most = num_bits if stride_0 == 1 else max(_LEAST_BITS, num_bits - others)
    bits_0 = _fitting_bits(size_0, most, _LEAST_BITS) if others else num_bits
    # Lanes that nothing else can use go to the last level with more than one index.
    bits_1 = _fitting_bits(size_1, num_bits - bits_0, 0) if size_2 > 1 else num_bits - bits_0
    return bits_0, bits_1, num_bits - bits_0 - bits_1


def _covering_bits(size: int) -> int:
    return (size - 1).bit_length()


def _fitting_bits(size: int, most: int, least: int) -> int:
    """Return log2 of the largest extent that divides a dim with few empty lanes.

    >>> [_fitting_bits(size, 11, 5) for size in (1, 2, 3, 24, 416, 1120, 10**6)]
    [0, 1, 2, 5, 6, 8, 11]
    """
    most = min(most, _covering_bits(size))
    for num_bits in range(most, min(least, most), -1):
        covered = -(-size >> num_bits) << num_bits
        if covered - size <= covered * _EMPTY_SHARE:
            return num_bits
    return min(least, most)


def build(parts: Iterable[tuple[int, int, int, Part]]) -> tuple[list[int], int, int]:
    """Return the table with its numbers of parts and tiles.

    Args:
        parts: For each part the address of its piece, of the piece's place in the message, the kind
            (what the kernel does with it) and the part.
    """
    ends: list[int] = []
    fields: list[int] = []
    outer: list[int] = []
    num_tiles = 0
    for piece_address, flat_address, kind, part in parts:
        num_tiles += part.num_tiles
        ends.append(num_tiles)
        sizes, strides = zip(*part.levels, strict=True)
        fields += (
            piece_address + part.piece_offset,
            flat_address + part.flat_offset,
            kind,
            len(part.outer),
            len(outer),
            *sizes,
            *strides,
            *part.bits,
        )
        outer += itertools.chain.from_iterable(part.outer)
    return [*ends, *fields, *outer], len(ends), num_tiles
