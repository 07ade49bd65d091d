"""Triton ``pack_boxes``: the functions of `reference` for any number of pieces, one launch each.

The host writes a `table` of the parts to copy and sends it in one asynchronous copy; tables are kept,
so that the same call again needs none. Pieces and message are reached by the addresses in it. Each
program looks its first part up by bisection and walks over a few tiles from there.

Where all addresses and strides of a part are multiples of 16 bytes, each thread loads and stores 16 at a
time. Sums of float16 and bfloat16 are float32, rounded once.

Shapes: B words a tile, a power of two. ``_ptr`` pointers, offsets in words.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import table
from .table import FIELDS, Layout, Part


NUM_FIELDS = tl.constexpr(len(FIELDS))
FLAT_ADDRESS = tl.constexpr(FIELDS.index("flat_address"))
KIND = tl.constexpr(FIELDS.index("kind"))
NUM_OUTER = tl.constexpr(FIELDS.index("num_outer"))
OUTER_INDEX = tl.constexpr(FIELDS.index("outer_index"))
SIZES = tl.constexpr(FIELDS.index("size_0"))
STRIDES = tl.constexpr(FIELDS.index("stride_0"))
BITS = tl.constexpr(FIELDS.index("bits_0"))

# ACTION of the kernel.
PACK = tl.constexpr(0)
UNPACK = tl.constexpr(1)
ADD = tl.constexpr(2)

NARROW_WORDS = tl.constexpr(table.NARROW_TILE_WORDS)
COPY_WORDS = tl.constexpr(table.WIDE_COPY_TILE_BYTES // 8)
ADD_BYTES = tl.constexpr(table.WIDE_ADD_TILE_BYTES)

# In the order of `_add_part`. The numbers of a complex dtype are its real and imaginary parts, and
# unsigned sums are signed ones.
_NUMBERS = (
    (torch.float32, torch.complex64),
    (torch.bfloat16,),
    (torch.float16, torch.complex32),
    (torch.float64, torch.complex128),
    (torch.int64,),
    (torch.int32,),
    (torch.int16,),
    (torch.int8, torch.uint8),
)
_NUMBER_OF = {dtype: place for place, dtypes in enumerate(_NUMBERS) for dtype in dtypes}
_NUMBER_BYTES = tuple(dtypes[0].itemsize for dtypes in _NUMBERS)

_NUM_WARPS = 4
_PROGRAMS_PER_PROCESSOR = 32
_MOST_TILES_PER_PROGRAM = 16
_KEPT_TABLES = 32


@triton.jit
def _places(
    fields_ptr, outer_ptr, tile, WORD: tl.constexpr, UNIT: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Pointers to the tile's words in the piece [B] and in the message [B], and their mask [B].

    UNIT words lie together and aligned on both sides.
    """
    size_0 = tl.load(fields_ptr + SIZES)
    size_1 = tl.load(fields_ptr + SIZES + 1)
    size_2 = tl.load(fields_ptr + SIZES + 2)
    bits_0 = tl.load(fields_ptr + BITS)
    bits_1 = tl.load(fields_ptr + BITS + 1)
    bits_2 = tl.load(fields_ptr + BITS + 2)

    # The tile's first index in each level. A part has fewer than 2**31 tiles, and 32-bit divisions
    # are the ones that do not take longer than the copy.
    num_0 = ((size_0 + (1 << bits_0) - 1) >> bits_0).to(tl.uint32)
    num_1 = ((size_1 + (1 << bits_1) - 1) >> bits_1).to(tl.uint32)
    above_0 = tile // num_0
    above_1 = above_0 // num_1
    start_0 = (tile - above_0 * num_0).to(tl.int64) << bits_0
    start_1 = (above_0 - above_1 * num_1).to(tl.int64) << bits_1
    start_2 = above_1.to(tl.int64)
    in_piece_outer = tl.zeros([], dtype=tl.int64)
    in_flat_outer = tl.zeros([], dtype=tl.int64)
    num_outer = tl.load(fields_ptr + NUM_OUTER).to(tl.int32)
    if num_outer > 0:
        num_2 = ((size_2 + (1 << bits_2) - 1) >> bits_2).to(tl.uint32)
        above = above_1 // num_2
        start_2 = (above_1 - above * num_2).to(tl.int64)
        weight = size_0 * size_1 * size_2
        outer_ptr += tl.load(fields_ptr + OUTER_INDEX)
        for _ in range(num_outer):
            size = tl.load(outer_ptr)
            rest = above // size.to(tl.uint32)
            i = (above - rest * size.to(tl.uint32)).to(tl.int64)
            above = rest
            in_piece_outer += i * tl.load(outer_ptr + 1)
            in_flat_outer += i * weight
            weight *= size
            outer_ptr += 2
    start_2 = start_2 << bits_2

    if UNIT == 1:
        stride_0 = tl.load(fields_ptr + STRIDES)
    else:
        stride_0 = 1
    stride_1 = tl.load(fields_ptr + STRIDES + 1)
    stride_2 = tl.load(fields_ptr + STRIDES + 2)
    in_piece = in_piece_outer + start_0 * stride_0 + start_1 * stride_1 + start_2 * stride_2
    in_flat = in_flat_outer + start_0 + size_0 * (start_1 + size_1 * start_2)
    piece_ptr = tl.load(fields_ptr).to(tl.pointer_type(WORD)) + in_piece
    flat_ptr = tl.load(fields_ptr + FLAT_ADDRESS).to(tl.pointer_type(WORD)) + in_flat

    lane = tl.arange(0, BLOCK_B).to(tl.int64)  # [B] all below
    i_0 = lane & ((1 << bits_0) - 1)
    i_1 = (lane >> bits_0) & ((1 << bits_1) - 1)
    i_2 = lane >> (bits_0 + bits_1)
    mask = (i_0 < size_0 - start_0) & (i_1 < size_1 - start_1) & (i_2 < size_2 - start_2)
    piece_ptrs = piece_ptr + (i_0 * stride_0 + i_1 * stride_1 + i_2 * stride_2)
    flat_ptrs = flat_ptr + (i_0 + size_0 * (i_1 + size_1 * i_2))
    # Neither follows from a runtime shift, for the compiler.
    ALIGNED: tl.constexpr = UNIT * WORD.primitive_bitwidth // 8
    piece_ptrs = tl.max_contiguous(tl.multiple_of(piece_ptrs, ALIGNED), UNIT)
    flat_ptrs = tl.max_contiguous(tl.multiple_of(flat_ptrs, ALIGNED), UNIT)
    return piece_ptrs, flat_ptrs, tl.max_constancy(mask, UNIT)


@triton.jit
def _copy(
    fields_ptr,
    outer_ptr,
    tile,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ACTION: tl.constexpr,
):
    """flat[n] = piece[i] or piece[i] = flat[n] for the words of a tile."""
    piece_ptrs, flat_ptrs, mask = _places(fields_ptr, outer_ptr, tile, WORD, UNIT, BLOCK_B)
    if ACTION == PACK:
        tl.store(flat_ptrs, tl.load(piece_ptrs, mask=mask), mask=mask)
    else:
        tl.store(piece_ptrs, tl.load(flat_ptrs, mask=mask), mask=mask)


@triton.jit
def _add_numbers(
    fields_ptr, outer_ptr, tile, NUMBER: tl.constexpr, UNIT: tl.constexpr, BLOCK_B: tl.constexpr
):
    """piece[i] += flat[n] for the numbers of a tile."""
    piece_ptrs, flat_ptrs, mask = _places(fields_ptr, outer_ptr, tile, NUMBER, UNIT, BLOCK_B)
    piece = tl.load(piece_ptrs, mask=mask)
    term = tl.load(flat_ptrs, mask=mask)
    if NUMBER.is_floating() and NUMBER.primitive_bitwidth < 32:
        total = (piece.to(tl.float32) + term.to(tl.float32)).to(NUMBER)
    else:
        total = piece + term
    tl.store(piece_ptrs, total, mask=mask)


@triton.jit
def _add(fields_ptr, outer_ptr, tile, is_wide, NUMBER: tl.constexpr):
    """`_add_numbers` with 16 bytes at a time where that can be."""
    BYTES: tl.constexpr = NUMBER.primitive_bitwidth // 8
    if is_wide:
        _add_numbers(fields_ptr, outer_ptr, tile, NUMBER, 16 // BYTES, ADD_BYTES // BYTES)
    else:
        _add_numbers(fields_ptr, outer_ptr, tile, NUMBER, 1, NARROW_WORDS)


@triton.jit
def _copy_part(fields_ptr, outer_ptr, tile, kind, ACTION: tl.constexpr):
    """The kind of a part that is copied is its word in bytes; 16 are two words of 8."""
    if kind == 16:
        _copy(fields_ptr, outer_ptr, tile, tl.int64, 2, COPY_WORDS, ACTION)
    elif kind == 8:
        _copy(fields_ptr, outer_ptr, tile, tl.int64, 1, NARROW_WORDS, ACTION)
    elif kind == 4:
        _copy(fields_ptr, outer_ptr, tile, tl.int32, 1, NARROW_WORDS, ACTION)
    elif kind == 2:
        _copy(fields_ptr, outer_ptr, tile, tl.int16, 1, NARROW_WORDS, ACTION)
    else:
        _copy(fields_ptr, outer_ptr, tile, tl.int8, 1, NARROW_WORDS, ACTION)


@triton.jit
def _add_part(fields_ptr, outer_ptr, tile, kind):
    """The kind of a part that is added is twice the place of its number, plus one if it is wide."""
    is_wide = kind % 2 == 1
    number = kind // 2
    if number == 0:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.float32)
    elif number == 1:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.bfloat16)
    elif number == 2:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.float16)
    elif number == 3:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.float64)
    elif number == 4:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.int64)
    elif number == 5:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.int32)
    elif number == 6:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.int16)
    else:
        _add(fields_ptr, outer_ptr, tile, is_wide, tl.int8)


@triton.jit(do_not_specialize=["num_parts", "num_tiles", "tiles_per_program"])
def pack_boxes_kernel(
    table_ptr,
    num_parts: tl.int64,
    num_tiles: tl.int64,
    tiles_per_program: tl.int64,
    ACTION: tl.constexpr,
):
    """Do ACTION for ``tiles_per_program`` neighbouring tiles of all parts."""
    first = tl.program_id(0).to(tl.int64) * tiles_per_program
    # The part whose end is the first one above.
    part = tl.zeros([], dtype=tl.int64)
    most = num_parts - 1
    while part < most:
        middle = (part + most) // 2
        is_before = tl.load(table_ptr + middle) <= first
        part = tl.where(is_before, middle + 1, part)
        most = tl.where(is_before, most, middle)
    outer_ptr = table_ptr + num_parts * (NUM_FIELDS + 1)
    for index in range(first, tl.minimum(first + tiles_per_program, num_tiles)):
        # Every part has a tile.
        part += (tl.load(table_ptr + part) <= index).to(tl.int64)
        begin = tl.load(table_ptr + part - 1, mask=part > 0, other=0)
        fields_ptr = table_ptr + num_parts + part * NUM_FIELDS
        tile = (index - begin).to(tl.uint32)
        kind = tl.load(fields_ptr + KIND)
        if ACTION == ADD:
            _add_part(fields_ptr, outer_ptr, tile, kind)
        else:
            _copy_part(fields_ptr, outer_ptr, tile, kind, ACTION)


def pack(pieces: Sequence[Tensor], offsets: Sequence[int], out: Tensor) -> None:
    """Copy each piece to its place in ``out``."""
    _launch(PACK, pieces, offsets, out)
    # Triton writes behind autograd's back, here and below.
    torch.autograd.graph.increment_version(out)


def unpack(flat: Tensor, offsets: Sequence[int], pieces: Sequence[Tensor]) -> None:
    """Copy each piece from its place in ``flat``."""
    _launch(UNPACK, pieces, offsets, flat)
    torch.autograd.graph.increment_version(pieces)


def unpack_add(flat: Tensor, offsets: Sequence[int], pieces: Sequence[Tensor]) -> None:
    """Add to each piece what is at its place in ``flat``."""
    _launch(ADD, pieces, offsets, flat)
    torch.autograd.graph.increment_version(pieces)


# What the table needs to know of a piece, hashable: address, offset, shape, strides, dtype.
_Piece = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def _launch(
    action: tl.constexpr, pieces: Sequence[Tensor], offsets: Sequence[int], flat: Tensor
) -> None:
    if flat.numel() == 0:
        return
    layouts = tuple(
        (piece.data_ptr(), offset, piece.shape, piece.stride(), piece.dtype)
        for piece, offset in zip(pieces, offsets, strict=True)
        if piece.numel()
    )
    with torch.cuda.device_of(flat):
        adds = action.value == ADD.value
        rows, num_parts, num_tiles = _table(
            layouts, flat.data_ptr(), flat.device, _stream(flat), adds
        )
        tiles_per_program = _tiles_per_program(num_tiles, flat.device)
        pack_boxes_kernel[(triton.cdiv(num_tiles, tiles_per_program),)](
            rows,
            num_parts,
            num_tiles,
            tiles_per_program,
            ACTION=action.value,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def _stream(flat: Tensor) -> int:
    """Return the stream that orders the table's arrival before the launch; 0 off a GPU.

    Raises:
        RuntimeError: If a CUDA graph is being captured: a replay would not find the table.
    """
    if not flat.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "pack and unpack cannot be captured in a CUDA graph, whose replays would read their "
            "table from freed memory. Call them outside of the capture."
        )
    return torch.cuda.current_stream(flat.device).cuda_stream


@functools.lru_cache(maxsize=_KEPT_TABLES)
def _table(
    pieces: tuple[_Piece, ...], flat_address: int, device: torch.device, stream: int, adds: bool
) -> tuple[Tensor, int, int]:
    """Return the table on the device with its numbers of parts and tiles.

    It depends on nothing but the arguments, so that a kept one is right for whatever lies at the
    same addresses later. ``stream`` keeps streams from using one another's table too early.
    """
    rows, num_parts, num_tiles = table.build(_parts(pieces, flat_address, adds))
    on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True), num_parts, num_tiles


def _parts(
    pieces: tuple[_Piece, ...], flat_address: int, adds: bool
) -> Iterator[tuple[int, int, int, Part]]:
    for address, offset, sizes, strides, dtype in pieces:
        place = flat_address + offset
        number = _NUMBER_OF[dtype] if adds else None
        word = None if number is None else _NUMBER_BYTES[number]
        layout = Layout(sizes, strides, dtype.itemsize, address % 16, place % 16, word)
        for part in table.parts_of(layout):
            if number is not None:
                kind = 2 * number + part.is_wide
            else:
                kind = table.WIDE_BYTES if part.is_wide else part.word
            yield address, place, kind, part


def _tiles_per_program(num_tiles: int, device: torch.device) -> int:
    """Return how many: few enough that the last programs end together, many to search seldom."""
    share = num_tiles // (_PROGRAMS_PER_PROCESSOR * _num_processors(device))
    return min(max(share, 1), _MOST_TILES_PER_PROGRAM)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
