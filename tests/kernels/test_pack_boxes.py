"""Packing of boxes: the definition, torch's own copies, and errors."""

import dataclasses
import doctest
import math

import pytest
import torch
from hdtensor.triton_kernels import pack_boxes
from hdtensor.triton_kernels.pack_boxes import (
    foreach,
    pack,
    reference,
    table,
    unpack,
    unpack_add,
)
from hypothesis import given, strategies as st


DTYPES = [
    torch.complex128,
    torch.complex64,
    torch.float64,
    torch.int64,
    torch.float32,
    torch.int32,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.bool,
]
ADDABLE = [dtype for dtype in DTYPES if dtype.itemsize > 1 or dtype in (torch.uint8, torch.int8)]


@dataclasses.dataclass(frozen=True)
class Box:
    """A view of a tensor of its own.

    Attributes:
        shape: Shape of that tensor.
        cut: (start, stop, step) of each of its dims.
        order: Order of the view's dims.
        expanded: Sizes of expanded dims before those.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    cut: tuple[tuple[int, int, int], ...] = ()
    order: tuple[int, ...] = ()
    expanded: tuple[int, ...] = ()

    def of(self, whole):
        view = whole[tuple(slice(*cut) for cut in self.cut)].permute(self.order)
        return view.expand((*self.expanded, *view.shape))


@st.composite
def box_lists(draw, dtypes, can_expand=False):
    return sorted(
        draw(st.lists(boxes(dtypes, can_expand), max_size=6)), key=lambda box: -box.dtype.itemsize
    )


@st.composite
def boxes(draw, dtypes, can_expand):
    rank = draw(st.integers(0, 6))
    largest = (1, 3000, 60, 15, 8, 5, 4)[rank]
    shape = tuple(draw(st.lists(st.integers(0, largest), min_size=rank, max_size=rank)))
    cut = []
    for size in shape:
        start = draw(st.just(0) | st.integers(0, size))
        stop = draw(st.just(size) | st.integers(start, size))
        cut.append((start, stop, draw(st.sampled_from([1, 1, 1, 2, 3]))))
    order = tuple(draw(st.just(list(range(rank))) | st.permutations(range(rank))))
    expanded = tuple(draw(st.lists(st.integers(0, 3), max_size=2))) if can_expand else ()
    return Box(draw(st.sampled_from(dtypes)), shape, tuple(cut), order, expanded)


def random_tensor(dtype, shape, generator, device="cpu"):
    """Finite numbers of unlike exponents; integers of any bits."""
    if dtype.is_complex:
        parts = random_tensor(dtype.to_real(), (*shape, 2), generator)
        return torch.view_as_complex(parts).to(device)
    if dtype.is_floating_point:
        exponents = torch.randint(-6, 6, shape, generator=generator)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.ldexp(numbers, exponents).to(dtype).to(device)
    num_bytes = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype == torch.bool else 256
    numbers = torch.randint(0, limit, (num_bytes,), generator=generator, dtype=torch.uint8)
    return numbers.view(dtype).view(shape).to(device)


def invalid(like):
    """NaN, or as wrong a number as there is."""
    memory = torch.full((like.numel() * like.itemsize,), 255, dtype=torch.uint8)
    if like.dtype == torch.bool:
        memory.fill_(1)
    return memory.view(like.dtype).view(like.shape).to(like.device)


def bits(tensor):
    row = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return row.copy_(tensor.reshape(-1)).view(torch.uint8)


def same_bits(got, expected):
    torch.testing.assert_close(bits(got), bits(expected), rtol=0, atol=0)


def check_pack(act, boxes, device="cpu"):
    """Compare ``act(pieces, out)`` with the bytes of the contiguous pieces, one after another."""
    generator = torch.Generator().manual_seed(0)
    wholes = [random_tensor(box.dtype, box.shape, generator, device) for box in boxes]
    pieces = [box.of(whole) for box, whole in zip(boxes, wholes, strict=True)]
    expected = torch.cat([torch.empty(0, dtype=torch.uint8), *map(bits, pieces)])
    out = torch.full_like(expected, 255, device=device)
    act(pieces, out)
    same_bits(out, expected)


def check_unpack(act, define, boxes, device="cpu"):
    """Compare ``act(flat, pieces)`` with ``define``, and see that nothing else is written."""
    generator = torch.Generator().manual_seed(0)
    terms = [
        random_tensor(box.dtype, box.of(torch.empty(box.shape)).shape, generator) for box in boxes
    ]
    flat = torch.cat([torch.empty(0, dtype=torch.uint8), *map(bits, terms)])
    adds = "add" in define.__name__
    wholes = [random_tensor(box.dtype, box.shape, generator) for box in boxes]
    wholes = wholes if adds else list(map(invalid, wholes))
    expected = [whole.clone() for whole in wholes]
    define(flat, [box.of(whole) for box, whole in zip(boxes, expected, strict=True)])
    got = [whole.to(device, copy=True) for whole in wholes]
    act(flat.to(device), [box.of(whole) for box, whole in zip(boxes, got, strict=True)])
    for one, other in zip(got, expected, strict=True):
        same_bits(one, other)


@given(boxes=box_lists(DTYPES, can_expand=True))
@pytest.mark.parametrize("act", [pack, reference.pack])
def test_pack_joins_the_bytes_of_the_pieces(act, boxes):
    check_pack(act, boxes)


@given(boxes=box_lists(DTYPES, can_expand=True))
def test_large_pieces_are_packed_by_copies_of_their_own(boxes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreach, "_SMALL_BYTES", 0)
        patch.setattr(foreach, "_LARGE_BYTES", 64)
        check_pack(pack, boxes)


@given(boxes=box_lists(DTYPES))
def test_unpack_equals_the_definition_and_writes_nothing_else(boxes):
    check_unpack(unpack, reference.unpack, boxes)


@given(boxes=box_lists(DTYPES))
@pytest.mark.parametrize("act", [unpack, reference.unpack])
def test_unpack_undoes_pack(act, boxes):
    generator = torch.Generator().manual_seed(0)
    pieces = [box.of(random_tensor(box.dtype, box.shape, generator)) for box in boxes]
    flat = pack(pieces, torch.empty(sum(piece.nbytes for piece in pieces), dtype=torch.uint8))
    empty = [invalid(piece) for piece in pieces]
    act(flat, empty)
    for got, expected in zip(empty, pieces, strict=True):
        same_bits(got, expected)


@given(boxes=box_lists(ADDABLE))
def test_unpack_add_equals_the_definition_to_the_bit(boxes):
    check_unpack(unpack_add, reference.unpack_add, boxes)


def test_the_definition_adds():
    pieces = [torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:, 1], torch.tensor([1], dtype=torch.int16)]
    terms = [torch.tensor([10.0, 20.0]), torch.tensor([5], dtype=torch.int16)]
    reference.unpack_add(torch.cat([bits(term) for term in terms]), pieces)
    assert [piece.tolist() for piece in pieces] == [[12.0, 24.0], [6]]


def test_boxes_of_one_tensor_meet_without_touching():
    whole = torch.arange(60.0).view(3, 4, 5)
    views = (slice(0, 1), slice(None), slice(0, 2)), (slice(0, 1), slice(None), slice(2, 5))
    flat = pack([whole[view] for view in views], torch.empty(80, dtype=torch.uint8))
    copy = torch.full_like(whole, torch.nan)
    unpack(flat, [copy[view] for view in views])
    torch.testing.assert_close(copy[0], whole[0])
    assert bool(copy[1:].isnan().all())


def test_large_strided_pieces_between_small_ones():
    large = torch.randn(200, 300)
    pieces = [torch.ones(3), large[:, :150], torch.zeros(2, 2).t(), large[:, 150:], torch.ones(1)]
    assert min(pieces[1].nbytes, pieces[3].nbytes) > foreach._SMALL_BYTES
    check_flat = torch.full((sum(piece.nbytes for piece in pieces),), 255, dtype=torch.uint8)
    same_bits(pack(pieces, check_flat), torch.cat([bits(piece) for piece in pieces]))


@pytest.mark.parametrize(
    ("start", "row", "has_whole_rows"),
    [(0, 8, True), (2, 8, True), (8, 8, True), (3, 8, False), (0, 11, False), (0, 4, False)],
)
def test_boxes_of_columns_are_cut_from_whole_rows_where_there_are_any(start, row, has_whole_rows):
    # 5 rows of 8: the box begins in one of them, and may reach into the next or leave no room.
    piece = torch.arange(40.0).as_strided((4, 6), (row, 1), start)
    assert (foreach._whole_rows(piece) is not None) == has_whole_rows
    out = torch.full((4, 6), torch.nan)
    foreach._copy_large(out, piece)
    torch.testing.assert_close(out, piece.clone(memory_format=torch.contiguous_format))


def test_lazy_conjugates_and_negatives_are_packed_resolved():
    z = torch.randn(5, dtype=torch.complex64)
    pieces = [z.conj(), z.conj().imag]
    assert pieces[0].is_conj()
    assert pieces[1].is_neg()
    out = pack(pieces, torch.empty(60, dtype=torch.uint8))
    same_bits(out, torch.cat([bits(z.conj().resolve_conj()), bits(-z.imag)]))


@pytest.mark.parametrize("act", [unpack, unpack_add])
def test_lazy_conjugates_and_negatives_are_not_written_to(act):
    z = torch.zeros(5, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"piece 0 is a lazy conjugate .* write to its base"):
        act(torch.zeros(40, dtype=torch.uint8), [z.conj()])
    with pytest.raises(ValueError, match="piece 0 is a lazy conjugate or negative"):
        act(torch.zeros(20, dtype=torch.uint8), [z.conj().imag])


def test_bfloat16_sums_are_rounded_once():
    a = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    a = a[a.isfinite()]
    b = a.flip(0) * 0.37
    got = a.clone()
    unpack_add(bits(b), [got])
    same_bits(got, (a.float() + b.float()).to(torch.bfloat16))
    same_bits(got, a.clone().add_(b))


def test_parameters_are_written_and_their_version_counts():
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    version = parameter._version
    unpack(bits(torch.ones(2, 2)), [parameter[:, :2]])
    unpack_add(bits(torch.ones(8)), [parameter])
    torch.testing.assert_close(parameter.detach(), torch.tensor([[2.0, 2.0, 1.0, 1.0]] * 2))
    assert parameter._version == version + 2
    out = pack([parameter], torch.empty(32, dtype=torch.uint8))
    assert not out.requires_grad


def test_nothing_is_packed_into_nothing():
    out = torch.empty(0, dtype=torch.uint8)
    assert pack([], out) is out
    unpack(out, [torch.empty(0, 3), torch.empty(2, 0)[:, 0:0]])
    unpack_add(out, [])


def test_an_empty_piece_needs_no_aligned_place():
    pieces = [torch.ones(3, dtype=torch.uint8), torch.empty(0, 2), torch.ones(1, dtype=torch.int8)]
    out = torch.zeros(4, dtype=torch.uint8)
    assert pack(pieces, out).tolist() == [1, 1, 1, 1]
    assert reference.pack(pieces, torch.zeros_like(out)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "flat",
    [torch.zeros(4), torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)[::2]],
)
def test_a_message_is_contiguous_bytes(flat):
    for call in (lambda: pack([torch.zeros(4)], flat), lambda: unpack(flat, [torch.zeros(4)])):
        with pytest.raises(ValueError, match="the message must be contiguous uint8 of one dim"):
            call()


def test_a_message_has_the_bytes_of_its_pieces():
    with pytest.raises(ValueError, match="has 15 bytes, but its 2 pieces have 16"):
        pack([torch.zeros(2), torch.zeros(2)], torch.zeros(15, dtype=torch.uint8))


def test_places_are_aligned():
    pieces = [torch.zeros(3, dtype=torch.uint8), torch.zeros(2)]
    with pytest.raises(
        ValueError, match=r"piece 1 of torch.float32 .* begins at byte 3 .* descending itemsize"
    ):
        pack(pieces, torch.zeros(11, dtype=torch.uint8))
    buffer = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"piece 0 .* aligned to 4 bytes, but the message itself"):
        unpack(buffer[2:10], [torch.zeros(2)])
    unpack(buffer[4:12], [torch.zeros(2)])


def test_pieces_are_on_the_device_of_the_message():
    with pytest.raises(ValueError, match="piece 1 is on meta, but the message on cpu"):
        pack([torch.zeros(1), torch.zeros(1, device="meta")], torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize("act", [unpack, unpack_add])
def test_overlapping_pieces_are_not_written_to(act):
    flat = torch.zeros(16, dtype=torch.uint8)
    x = torch.zeros(6)
    with pytest.raises(ValueError, match=r"each element of piece 0 .* strides \(0,\)"):
        act(flat, [x[:1].expand(4)])
    with pytest.raises(ValueError, match=r"each element of piece 0 .* strides \(1, 1\)"):
        act(flat, [x.as_strided((2, 2), (1, 1))])
    with pytest.raises(ValueError, match="pieces 0 and 1 overlap"):
        act(flat, [x[:2], x[:2]])


def test_pieces_lie_outside_of_the_message():
    buffer = torch.zeros(32, dtype=torch.uint8)
    piece = buffer[8:16].view(torch.float32)
    with pytest.raises(ValueError, match="piece 0 lies in the memory of the message"):
        pack([piece], buffer[8:16])
    with pytest.raises(ValueError, match="piece 0 lies in the memory of the message"):
        unpack(buffer[8:16], [piece])
    pack([piece], buffer[16:24])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]
)
def test_what_has_no_sum_is_not_added(dtype):
    piece = torch.zeros(8, dtype=torch.uint8).view(dtype)
    flat = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TypeError, match=f"pieces of {dtype} cannot be added to"):
        unpack_add(flat, [piece])
    unpack(flat, [piece])


@given(
    dims=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=5),
)
def test_merged_dims_have_the_same_elements_in_the_same_order(dims):
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    merged = table.merge_dims(sizes, strides)
    memory = torch.arange(1000)
    expected = memory.as_strided(sizes, strides).flatten()
    got = memory.as_strided([size for size, _ in merged], [stride for _, stride in merged])
    assert got.flatten().tolist() == expected.tolist()
    assert all(size > 1 for size, _ in merged)


@given(
    shape=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    phases=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    gap=st.integers(0, 40),
    step=st.sampled_from([1, 1, 2, 7]),
)
def test_parts_cover_a_piece_in_aligned_words(shape, dtype, phases, gap, step):
    item = dtype.itemsize
    row = shape[-1] * step + gap
    strides = [row * math.prod(shape[dim + 1 : -1]) for dim in range(len(shape) - 1)] + [step]
    piece_phase, flat_phase = (phase * item % 16 for phase in phases)
    layout = table.Layout(tuple(shape), tuple(strides), item, piece_phase, flat_phase, None)
    position = 0
    for part in table.parts_of(layout):
        assert part.flat_offset == position
        sizes = [size for size, _ in (*part.levels, *part.outer)]
        position += math.prod(sizes) * part.word
        access = 16 if part.is_wide else part.word
        assert (piece_phase + part.piece_offset) % access == 0
        assert (flat_phase + part.flat_offset) % access == 0
        if part.is_wide:
            assert part.levels[0][0] * part.word % 16 == 0
            assert 2 ** part.bits[0] * part.word % 16 == 0
            assert all(
                stride * part.word % 16 == 0 for _, stride in (*part.levels[1:], *part.outer)
            )
        tiles = [-(-size // 2**n) for size, n in zip(sizes, (*part.bits, 0, 0), strict=False)]
        assert part.num_tiles == math.prod(tiles)
    assert position == math.prod(shape) * item


def test_boxes_of_a_model_are_copied_in_full_tiles_of_wide_words():
    # Columns of a Llama's output and down projections, rows of its gate: bf16, hidden 6656.
    for shape, row in (((6656, 1664), 3328), ((6656, 4480), 8960), ((4480, 6656), 6656)):
        layout = table.Layout(shape, (row, 1), 2, 0, 0, None)
        (part,) = table.parts_of(layout)
        covered = part.num_tiles * table.WIDE_COPY_TILE_BYTES
        assert part.is_wide
        assert math.prod(shape) * 2 >= 0.87 * covered


@pytest.mark.parametrize("module", [pack_boxes, table])
def test_examples_in_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
