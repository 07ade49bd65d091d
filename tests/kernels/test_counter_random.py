"""Counter-based random numbers: the definition, cuts, intervals and errors."""

import doctest
import math

import pytest
import torch
from hdtensor.triton_kernels import counter_random
from hdtensor.triton_kernels.counter_random import (
    derive_key,
    fill_exponential_,
    fill_normal_,
    fill_randint_,
    fill_uniform_,
    keep_mask,
    permutation,
    random_bits,
    reference,
)
from hypothesis import given, strategies as st

from tests.support.counter_random import filled, row_major, words


REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Every function with its dtype and its own arguments.
FILLS = [
    (random_bits, torch.int64, ()),
    *((fill_uniform_, dtype, (-0.3, 0.7)) for dtype in (*REALS, torch.complex64)),
    *((fill_normal_, dtype, (1.0, 2.0)) for dtype in (*REALS, torch.complex128)),
    *((fill_exponential_, dtype, (2.0,)) for dtype in REALS),
    (fill_randint_, torch.uint8, (3, 200)),
    (fill_randint_, torch.int32, (-7, 1_000_000)),
    (fill_randint_, torch.int64, (-(2**63), 2**63)),
    (fill_randint_, torch.int64, (-(2**62), 2**62 + 12345)),
    (keep_mask, torch.bool, (0.9,)),
    (keep_mask, torch.bool, (0.0,)),
    (keep_mask, torch.bool, (1.0,)),
]
each_fill = pytest.mark.parametrize(
    ("fill", "dtype", "args"), FILLS, ids=lambda value: getattr(value, "__name__", str(value))
)

FROZEN_KEYS = [0, 15916886550466581944, 17435768037254582760]
FROZEN_WORDS = [
    [9206327630398885983, -3745685779185679315, -6225869165135906954],
    [-5801334251031844058, -6186162587651977409, 3374832860369006057],
]
FROZEN_PERMUTATION = [0, 1, 2, 5, 3, 4]
FROZEN_UNIFORM = [0.45579731464385986, 0.0358273983001709, 0.2188175916671753]


def python_word(counter, key):
    """The definition of a word in Python's integers."""
    (a, b), size = reference.subkeys(key), 2**64
    x = (counter * reference.WEYL + a) % size ^ b
    x = (x ^ x >> 30) * reference.MULTIPLY_1 % size
    x = (x ^ x >> 27) * reference.MULTIPLY_2 % size
    return x ^ x >> 31


def test_words_of_a_key_never_change():
    """Checkpoints and published losses rest on these numbers."""
    assert [derive_key(), derive_key(0), derive_key(1, -2)] == FROZEN_KEYS
    assert words(3, 0).tolist() == FROZEN_WORDS[0]
    assert words(3, derive_key(1, 2, 3), start=2**40).tolist() == FROZEN_WORDS[1]
    assert permutation(7, 6).tolist() == FROZEN_PERMUTATION
    torch.testing.assert_close(
        filled(fill_uniform_, (3,), torch.float32), torch.tensor(FROZEN_UNIFORM), rtol=0, atol=0
    )


@given(key=st.integers(-(2**63), 2**64 - 1), counter=st.integers(0, 2**63 - 3))
def test_words_equal_python_integers(key, counter):
    expected = [reference.signed(python_word(counter + i, key)) for i in range(3)]
    assert words(3, key, start=counter).tolist() == expected


def test_counters_are_exact_beyond_2_to_the_53():
    near = words(4, 1, start=2**53)
    assert near.unique().numel() == 4
    far = filled(
        random_bits,
        (2, 4),
        torch.int64,
        key=1,
        start=(2**11 - 1, 0),
        global_strides=(2**42, 1),
    )
    torch.testing.assert_close(far[1], near)


@given(
    key=st.integers(0, 2**64 - 1),
    low=st.integers(-(2**63), 2**63 - 1),
    num_values=st.integers(1, 2**64) | st.integers(1, 2**33),
)
def test_randint_equals_python_integers(key, low, num_values):
    high = min(low + num_values, 2**63)
    got = filled(fill_randint_, (5,), torch.int64, low, high, key=key).tolist()
    assert got == [low + (python_word(i, key) * (high - low) >> 64) for i in range(5)]


@pytest.mark.parametrize("p_keep", [0.0, 1e-9, 0.3, 0.5, 0.9, 1 - 1e-9, 1.0])
def test_keep_mask_compares_the_float32_uniform(p_keep):
    uniform = filled(fill_uniform_, (4096,), torch.float32).double()
    mask = filled(keep_mask, (4096,), torch.bool, p_keep)
    torch.testing.assert_close(mask, uniform < p_keep)


@pytest.mark.parametrize("fill", [fill_uniform_, fill_normal_])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_float32_rounded(fill, dtype):
    wide = filled(fill, (4096,), torch.float32, 0.0, 8.0).to(dtype)
    narrow = filled(fill, (4096,), dtype, 0.0, 8.0)
    differs = wide != narrow
    assert bool((wide[differs] == 8.0).all())  # rounded up to the open end
    assert bool((narrow[differs] < 8.0).all())


def test_doctests_of_the_package():
    results = [doctest.testmod(module) for module in (counter_random, reference)]
    assert [result.failed for result in results] == [0, 0]
    assert sum(result.attempted for result in results) >= 6


@st.composite
def boxes(draw):
    """A global shape and a box in it: start and stop."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    cuts = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(shape), tuple(low for low, _ in cuts), tuple(high for _, high in cuts)


@each_fill
@given(box=boxes(), key=st.integers(0, 2**64 - 1), limit=st.integers(1, 9))
def test_a_box_equals_the_cut_from_the_full_tensor(fill, dtype, args, box, key, limit):
    shape, start, stop = box
    full = filled(fill, shape, dtype, *args, key=key)
    with pytest.MonkeyPatch.context() as patch:
        # so that small tensors are cut into blocks too
        patch.setattr(reference, "_BLOCK_PER_CPU_THREAD", limit)
        box_shape = tuple(high - low for low, high in zip(start, stop, strict=True))
        local = filled(
            fill, box_shape, dtype, *args, key=key, start=start, global_strides=row_major(shape)
        )
    expected = full[tuple(map(slice, start, stop))]
    torch.testing.assert_close(local, expected, rtol=0, atol=0)


@each_fill
def test_a_view_is_filled_and_nothing_around_it(fill, dtype, args):
    memory = torch.zeros(8, 9, dtype=dtype)
    fill(memory[1:7:2, 2:8].t(), 5, (4, 1), (3, 1), *args)
    expected = torch.zeros(8, 9, dtype=dtype)
    box = filled(fill, (6, 3), dtype, *args, start=(4, 1), global_strides=(3, 1))
    expected[1:7:2, 2:8] = box.t()
    torch.testing.assert_close(memory, expected, rtol=0, atol=0)


@each_fill
def test_a_tensor_of_many_blocks_equals_its_pieces(fill, dtype, args):
    """Odd pieces, for log and cos must not depend on where in memory a value lies."""
    num = 2 * reference._BLOCK_PER_CPU_THREAD + 17
    whole = filled(fill, (num,), dtype, *args)
    pieces = [
        filled(fill, (len(part),), dtype, *args, start=(int(part[0]),), global_strides=(1,))
        for part in torch.arange(num).split(50_001)
    ]
    torch.testing.assert_close(whole, torch.cat(pieces), rtol=0, atol=0)


def test_zero_dims_and_zero_extents():
    assert filled(random_bits, (), torch.int64).item() == words(1, 5).item()
    assert filled(fill_normal_, (3, 0), torch.float32).shape == (3, 0)
    assert permutation(1, 0).tolist() == []


def test_a_parameter_is_filled_in_place():
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    version = parameter._version
    fill_normal_(parameter, 5, (0, 0), (4, 1))
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter._version > version
    torch.testing.assert_close(parameter.detach(), filled(fill_normal_, (3, 4), torch.float32))


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 1.0),
        (1.0, 2.0),
        (-2.0, -1.0),
        (0.1, 0.11),
        (-1e-6, 1e-6),
        (-3e4, 3e4),
        (1000.0, 1004.0),
    ],
)
def test_uniform_stays_below_high_after_rounding(dtype, low, high):
    values = filled(fill_uniform_, (1 << 16,), dtype, low, high).double()
    assert low <= float(values.min())
    assert float(values.max()) < high
    # and reaches both ends as far as 2**16 values and the dtype's spacing let it
    spacing = torch.finfo(dtype).eps * max(abs(low), abs(high)) + 2.0**-24
    assert float(values.min()) - low < 1e-3 * (high - low) + spacing
    assert high - float(values.max()) < 1e-3 * (high - low) + spacing


def test_uniform_where_every_second_value_would_round_up_to_high():
    values = filled(fill_uniform_, (1000,), torch.float32, 2.0**23, 2.0**23 + 1)
    assert values.unique().tolist() == [2.0**23]


def test_equal_bounds_and_zero_std_fill_a_constant():
    assert filled(fill_uniform_, (4,), torch.float32, 0.25, 0.25).tolist() == [0.25] * 4
    assert filled(fill_normal_, (4,), torch.float32, 0.25, 0.0).tolist() == [0.25] * 4


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_logarithms_are_of_values_inside_the_unit_interval(dtype):
    """The extreme words, -1 and 0, give finite normals and positive exponentials."""
    extreme = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    compute = reference.compute_dtype(dtype)
    unit = reference.open_unit(extreme, torch.empty(4, dtype=compute))
    assert bool(((unit > 0) & (unit < 1)).all())
    values = filled(fill_exponential_, (1 << 16,), dtype, 1e4)
    assert float(values.min()) > 0
    assert bool(filled(fill_normal_, (1 << 16,), dtype).isfinite().all())


@given(
    dtype=st.sampled_from(REALS),
    low=st.floats(-1e4, 1e4),
    width=st.floats(1e-3, 1e4),
)
def test_uniform_bounds_are_the_dtype_values_next_to_the_interval(dtype, low, width):
    high = low + width
    candidates = torch.tensor([low, high], dtype=torch.float64).to(dtype)
    infinity = torch.full_like(candidates, torch.inf)
    around = torch.cat(
        [torch.nextafter(candidates, -infinity), candidates, torch.nextafter(candidates, infinity)]
    ).double()
    inside = around[(around >= low) & (around < high)]
    if inside.numel() == 0:
        with pytest.raises(ValueError, match="Widen the interval"):
            reference.uniform_bounds(low, high, dtype)
    else:
        bounds = (float(inside.min()), float(inside.max()))
        assert reference.uniform_bounds(low, high, dtype) == bounds


@pytest.mark.parametrize(
    ("message", "fill", "dtype", "args"),
    [
        ("bounds low <= high", fill_uniform_, torch.float32, (1.0, 0.0)),
        ("bounds low <= high", fill_uniform_, torch.float32, (0.0, math.inf)),
        ("bounds low <= high", fill_uniform_, torch.float32, (math.nan, 1.0)),
        ("bounds low <= high", fill_uniform_, torch.float16, (0.0, 1e5)),
        ("high - low <=", fill_uniform_, torch.float32, (-3e38, 3e38)),
        ("no torch.bfloat16 lies in", fill_uniform_, torch.bfloat16, (1.001, 1.002)),
        ("std >= 0", fill_normal_, torch.float32, (0.0, -1.0)),
        ("finite mean", fill_normal_, torch.float32, (math.nan, 1.0)),
        ("rate > 0", fill_exponential_, torch.float32, (0.0,)),
        ("low < high", fill_randint_, torch.int64, (3, 3)),
        ("0 <= low < high <= 256", fill_randint_, torch.uint8, (0, 257)),
        ("probability", keep_mask, torch.bool, (1.5,)),
        ("probability", keep_mask, torch.bool, (math.nan,)),
    ],
)
def test_arguments_out_of_range_are_refused(message, fill, dtype, args):
    with pytest.raises(ValueError, match=message):
        filled(fill, (2,), dtype, *args)


@pytest.mark.parametrize(
    ("message", "box"),
    [
        ("derive_key", {"key": 2**64}),
        ("each of the 1 dims", {"start": (0, 0)}),
        ("each of the 1 dims", {"global_strides": ()}),
        ("not be negative", {"start": (-1,)}),
        (r"below 2\*\*63", {"start": (2**62,), "global_strides": (2,)}),
    ],
)
def test_bad_boxes_are_refused(message, box):
    with pytest.raises(ValueError, match=message):
        filled(random_bits, (2,), torch.int64, **box)


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="expanded"):
        keep_mask(torch.zeros(1, dtype=torch.bool).expand(3), 5, (0,), (1,), 0.5)
    with pytest.raises(TypeError, match=r"torch.int32; this function fills torch.int64"):
        filled(random_bits, (2,), torch.int32)
    with pytest.raises(ValueError, match="n >= 0"):
        permutation(0, -1)
    with pytest.raises(ValueError, match="several words"):
        derive_key(2**64)
