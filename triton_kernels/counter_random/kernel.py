"""Triton ``counter_random``: the functions of `reference`, one launch each.

Words, integers, masks and uniform floats are the reference's to the bit: unsigned 64-bit arithmetic
is the same everywhere, and the float operations are the same, in the same order and rounded one by
one, for the launch forbids fused multiply-adds.

Shapes: B elements a program. ``_stride`` strides in elements, of counters or of ``out``.
"""

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference


WEYL = tl.constexpr(reference.WEYL)
MULTIPLY_1 = tl.constexpr(reference.MULTIPLY_1)
MULTIPLY_2 = tl.constexpr(reference.MULTIPLY_2)
RADIANS_24 = tl.constexpr(math.tau * 2.0**-24)
RADIANS_53 = tl.constexpr(math.tau * 2.0**-53)
UNIT_24 = tl.constexpr(2.0**-24)
UNIT_32 = tl.constexpr(2.0**-32)
UNIT_53 = tl.constexpr(2.0**-53)
BELOW_ONE_FP32 = tl.constexpr(reference.largest_below_one(torch.float32))
BELOW_ONE_FP64 = tl.constexpr(reference.largest_below_one(torch.float64))

# What a launch fills `out` with, KIND of the kernel.
BITS = tl.constexpr(0)
UNIFORM = tl.constexpr(1)
NORMAL = tl.constexpr(2)
EXPONENTIAL = tl.constexpr(3)
RANDINT = tl.constexpr(4)
KEEP = tl.constexpr(5)

_BLOCK = 1024
_MAX_DIMS = 4


@triton.jit
def _words(counters, a, b):
    """The word of each counter; see `reference`."""
    # An argument that fits into 32 bits may come as int32.
    a = a.to(tl.int64).to(tl.uint64, bitcast=True)
    b = b.to(tl.int64).to(tl.uint64, bitcast=True)
    x = (counters.to(tl.uint64, bitcast=True) * WEYL + a) ^ b
    x = (x ^ (x >> 30)) * MULTIPLY_1
    x = (x ^ (x >> 27)) * MULTIPLY_2
    return x ^ (x >> 31)


@triton.jit
def _number(bits, FP64: tl.constexpr):
    """The float whose float64 bits an integer argument holds: float arguments come as float32."""
    number = bits.to(tl.int64).to(tl.float64, bitcast=True)
    return number if FP64 else number.to(tl.float32)


@triton.jit
def _open_unit(words, FP64: tl.constexpr):
    """u in (0, 1), of 53 bits in float64 and of 32 rounded to float32."""
    if FP64:
        unit = tl.minimum(((words >> 11).to(tl.float64) + 0.5) * UNIT_53, BELOW_ONE_FP64)
    else:
        unit = tl.minimum(((words >> 32).to(tl.float32) + 0.5) * UNIT_32, BELOW_ONE_FP32)
    return unit


@triton.jit
def _uniform(words, p0, p1, p2, p3, FP64: tl.constexpr):
    """p0 + p1 * u, kept in [p2, p3]; u = 1/2 + words / 2**64 for signed words, cut to fit."""
    words = words.to(tl.int64, bitcast=True)
    if FP64:
        unit = (words >> 11).to(tl.float64) * UNIT_53 + 0.5
    else:
        unit = (words >> 40).to(tl.float32) * UNIT_24 + 0.5
    value = unit * _number(p1, FP64) + _number(p0, FP64)
    return tl.minimum(tl.maximum(value, _number(p2, FP64)), _number(p3, FP64))


@triton.jit
def _normal(words, angle_words, p0, p1, FP64: tl.constexpr):
    """p0 + p1 * sqrt(-2 ln u) * cos(2 pi v)"""
    squared = tl.log(_open_unit(words, FP64)) * -2.0
    if FP64:
        unit_normal = tl.sqrt(squared) * tl.cos((angle_words >> 11).to(tl.float64) * RADIANS_53)
    else:
        angle = (words & 0xFFFFFF).to(tl.float32) * RADIANS_24
        unit_normal = tl.sqrt_rn(squared) * tl.cos(angle)
    return unit_normal * _number(p1, FP64) + _number(p0, FP64)


@triton.jit
def _exponential(words, p0, p1, FP64: tl.constexpr):
    """p0 * ln u, at least p1."""
    value = tl.log(_open_unit(words, FP64)) * _number(p0, FP64)
    return tl.maximum(value, _number(p1, FP64))


@triton.jit
def _randint(words, p0, p1):
    """p0 + (word * p1 >> 64), where p1 = 0 stands for 2**64."""
    num_values = p1.to(tl.int64).to(tl.uint64, bitcast=True)
    scaled = tl.where(num_values == 0, words, tl.umulhi(words, num_values))
    return scaled.to(tl.int64, bitcast=True) + p0


_ARGUMENTS_OF_ANY_VALUE = ["base", "a", "b", "angle_a", "angle_b", "p0", "p1", "p2", "p3"]


@triton.jit(do_not_specialize=_ARGUMENTS_OF_ANY_VALUE)
def counter_random_kernel(
    out_ptr,
    num_elements,
    base: tl.int64,
    a: tl.int64,
    b: tl.int64,
    angle_a: tl.int64,
    angle_b: tl.int64,
    p0: tl.int64,
    p1: tl.int64,
    p2: tl.int64,
    p3: tl.int64,
    counter_stride_0,
    counter_stride_1,
    counter_stride_2,
    counter_stride_3,
    out_stride_0,
    out_stride_1,
    out_stride_2,
    out_stride_3,
    size_1,
    size_2,
    size_3,
    KIND: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    FP64: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """out[i] = value(base + sum_d i_d * counter_stride_d); dim 0 outermost, dim 3 innermost."""
    index = tl.program_id(0).to(INDEX) * BLOCK_B + tl.arange(0, BLOCK_B)  # [BLOCK_B]
    mask = index < num_elements
    # [BLOCK_B] all below
    counters = tl.zeros([BLOCK_B], dtype=tl.int64) + base
    offsets = tl.zeros([BLOCK_B], dtype=tl.int64)
    outer = index
    if NUM_DIMS > 1:
        i_3 = (outer % size_3).to(tl.int64)
        outer = outer // size_3
        counters += i_3 * counter_stride_3
        offsets += i_3 * out_stride_3
    if NUM_DIMS > 2:
        i_2 = (outer % size_2).to(tl.int64)
        outer = outer // size_2
        counters += i_2 * counter_stride_2
        offsets += i_2 * out_stride_2
    if NUM_DIMS > 3:
        i_1 = (outer % size_1).to(tl.int64)
        outer = outer // size_1
        counters += i_1 * counter_stride_1
        offsets += i_1 * out_stride_1
    # The outermost dim is always dim 0.
    counters += outer.to(tl.int64) * counter_stride_0
    offsets += outer.to(tl.int64) * out_stride_0

    words = _words(counters, a, b)
    if KIND == BITS:
        value = words.to(tl.int64, bitcast=True)
    elif KIND == UNIFORM:
        value = _uniform(words, p0, p1, p2, p3, FP64)
    elif KIND == NORMAL:
        value = _normal(words, _words(counters, angle_a, angle_b), p0, p1, FP64)
    elif KIND == EXPONENTIAL:
        value = _exponential(words, p0, p1, FP64)
    elif KIND == RANDINT:
        value = _randint(words, p0, p1)
    else:
        tl.static_assert(KIND == KEEP)
        value = (words.to(tl.int64, bitcast=True) >> 40) + 2**23 < p0
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


def random_bits(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...]
) -> Tensor:
    """Fill int64 ``out`` with words."""
    return _launch(BITS, out, key, _base(start, global_strides), global_strides)


def fill_uniform_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    low: float,
    high: float,
) -> Tensor:
    """Fill ``out`` with ``low + (high - low) * u``, u of 24 or 53 bits."""
    bounds = reference.uniform_bounds(low, high, out.dtype)
    parameters = _as_bits(low, high - low, *bounds)
    return _launch(UNIFORM, out, key, _base(start, global_strides), global_strides, parameters)


def fill_normal_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    mean: float,
    std: float,
) -> Tensor:
    """Fill ``out`` with ``mean + std * sqrt(-2 ln u) * cos(2 pi v)`` (Box and Muller)."""
    parameters = _as_bits(mean, std)
    return _launch(NORMAL, out, key, _base(start, global_strides), global_strides, parameters)


def fill_exponential_(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...], rate: float
) -> Tensor:
    """Fill ``out`` with ``-ln(u) / rate``, never zero."""
    parameters = _as_bits(-1.0 / rate, reference.smallest_positive(out.dtype))
    return _launch(EXPONENTIAL, out, key, _base(start, global_strides), global_strides, parameters)


def fill_randint_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    low: int,
    high: int,
) -> Tensor:
    """Fill ``out`` with ``low + (word * (high - low) >> 64)``."""
    parameters = (low, reference.signed(high - low))
    return _launch(RANDINT, out, key, _base(start, global_strides), global_strides, parameters)


def keep_mask(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...], p_keep: float
) -> Tensor:
    """Fill bool ``out`` with ``u < p_keep``, u as in `fill_uniform_` of a float32."""
    parameters = (reference.keep_threshold(p_keep),)
    return _launch(KEEP, out, key, _base(start, global_strides), global_strides, parameters)


def _base(start: tuple[int, ...], global_strides: tuple[int, ...]) -> int:
    return sum(i * stride for i, stride in zip(start, global_strides, strict=True))


def _as_bits(*numbers: float) -> tuple[int, ...]:
    return struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers))


def _launch(
    kind: tl.constexpr,
    out: Tensor,
    key: int,
    base: int,
    counter_strides: tuple[int, ...],
    parameters: tuple[int, ...] = (),
) -> Tensor:
    """Run the kernel over ``out``; more than four dims that do not merge, slice by slice."""
    if out.is_neg():
        raise ValueError("out is a negated view, whose memory is not its values: fill its base.")
    num_elements = out.numel()
    if num_elements == 0:
        return out
    dims = reference.merge_dims(tuple(out.shape), counter_strides, tuple(out.stride()))
    if len(dims) > _MAX_DIMS:
        for i, part in enumerate(out.unbind(0)):
            _launch(kind, part, key, base + i * counter_strides[0], counter_strides[1:], parameters)
        return out
    outer, *inner = dims or [(1, (0, 0))]
    padding = [(1, (0, 0))] * (_MAX_DIMS - 1 - len(inner))
    sizes, strides = zip(outer, *padding, *inner, strict=True)
    words_key = reference.subkeys(key)
    angle_key = reference.subkeys(reference.derive_key(key, reference.ANGLE_LANE))
    with torch.cuda.device_of(out):
        counter_random_kernel[(triton.cdiv(num_elements, _BLOCK),)](
            out,
            num_elements,
            base,
            *map(reference.signed, (*words_key, *angle_key)),
            *parameters,
            *[0] * (4 - len(parameters)),
            *(counter for counter, _ in strides),
            *(step for _, step in strides),
            *sizes[1:],
            KIND=kind.value,
            NUM_DIMS=len(inner) + 1,
            FP64=out.dtype == torch.float64,
            INDEX=tl.int32 if num_elements + _BLOCK < 1 << 31 else tl.int64,
            BLOCK_B=_BLOCK,
            enable_fp_fusion=False,
        )
    # Triton writes behind autograd's back.
    torch.autograd.graph.increment_version(out)
    return out
