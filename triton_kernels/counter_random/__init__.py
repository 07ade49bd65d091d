"""Random numbers that are a pure function of (key, global element index).

Every function fills the part of a tensor that one box of the global tensor covers, and gives each
element the value it has in the whole: filling a tensor box by box, on any number of ranks, CPU or
GPU, equals filling it at once. They share these arguments:

=================  ===============================================================================
``out``            tensor to fill, any strides; its shape is the box's
``key``            64-bit integer in ``[-2**63, 2**64)``; another key, another sequence. `derive_key`
                   makes one of seed, call site and step
``start``          global index of the box's first element, one integer per dim
``global_strides`` strides of the global tensor in elements, row-major; the element at box index i
                   has the counter ``sum_d (start[d] + i[d]) * global_strides[d]``
=================  ===============================================================================

Integers, masks and uniform floats are the same bits on every device. Normal and exponential values
may differ by the last bits of the device's ``log`` and ``cos``.

Each function returns ``out``, and raises ``TypeError`` for a dtype it does not fill and
``ValueError`` for an argument out of range. `reference` is the definition in plain torch and serves
all devices but CUDA ones, which run `kernel` (one launch) where Triton is installed.
"""

import functools
import importlib
import importlib.util
import math
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .reference import derive_key


__all__ = [
    "derive_key",
    "fill_exponential_",
    "fill_normal_",
    "fill_randint_",
    "fill_uniform_",
    "keep_mask",
    "permutation",
    "random_bits",
]

_REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEXES = (torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@torch.no_grad()
def random_bits(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...]
) -> Tensor:
    """Fill int64 ``out`` with 64 random bits an element; no two counters have the same.

    >>> random_bits(torch.empty(2, dtype=torch.int64), 7, (3,), (1,))
    tensor([6976670039612569345, 7271646652587401228])
    """
    _check_dtype(out, (torch.int64,))
    _check_box(out, key, start, global_strides)
    return _backend(out).random_bits(out, key, start, global_strides)


@torch.no_grad()
def fill_uniform_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Fill ``out`` with values uniform in ``[low, high)``, of which ``high`` is never one.

    float32 and narrower dtypes take 24 random bits an element, float64 takes 53. The narrower ones
    are float32's values rounded, but for those that would leave the interval. Equal bounds fill
    that value. A complex tensor has both parts in the interval.
    """
    _check_dtype(out, (*_REALS, *_COMPLEXES))
    _check_box(out, key, start, global_strides)
    largest = torch.finfo(out.dtype).max
    if not (-largest <= low <= high <= largest and high - low <= largest):
        raise ValueError(
            f"uniform values of {out.dtype} need finite bounds low <= high with "
            f"high - low <= {largest}, got low={low}, high={high}."
        )
    if low == high:
        return out.fill_(low)
    for part, part_key in _real_parts(out, key):
        _backend(part).fill_uniform_(part, part_key, start, global_strides, low, high)
    return out


@torch.no_grad()
def fill_normal_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Fill ``out`` with normal values, none further than 8.6 ``std`` from ``mean``.

    As with ``torch.Tensor.normal_``, the two parts of a complex tensor have mean ``mean`` and
    standard deviation ``std / sqrt(2)`` each.
    """
    _check_dtype(out, (*_REALS, *_COMPLEXES))
    _check_box(out, key, start, global_strides)
    if not (math.isfinite(mean) and 0.0 <= std < math.inf):
        raise ValueError(
            f"normal values need a finite mean and a finite std >= 0, got mean={mean}, std={std}."
        )
    part_std = std / math.sqrt(2.0) if out.is_complex() else std
    for part, part_key in _real_parts(out, key):
        _backend(part).fill_normal_(part, part_key, start, global_strides, mean, part_std)
    return out


@torch.no_grad()
def fill_exponential_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    rate: float = 1.0,
) -> Tensor:
    """Fill ``out`` with exponential values of mean ``1 / rate``, none of them zero."""
    _check_dtype(out, _REALS)
    _check_box(out, key, start, global_strides)
    if not 0.0 < rate < math.inf:
        raise ValueError(f"exponential values need a finite rate > 0, got rate={rate}.")
    return _backend(out).fill_exponential_(out, key, start, global_strides, rate)


@torch.no_grad()
def fill_randint_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    low: int,
    high: int,
) -> Tensor:
    """Fill ``out`` with integers uniform in ``[low, high)``.

    The probabilities of two values differ by less than ``(high - low) * 2**-64`` of themselves.
    """
    _check_dtype(out, _INTEGERS)
    _check_box(out, key, start, global_strides)
    limits = torch.iinfo(out.dtype)
    if not limits.min <= low < high <= limits.max + 1:
        raise ValueError(
            f"integers of {out.dtype} need {limits.min} <= low < high <= {limits.max + 1}, "
            f"got low={low}, high={high}."
        )
    return _backend(out).fill_randint_(out, key, start, global_strides, low, high)


@torch.no_grad()
def keep_mask(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...], p_keep: float
) -> Tensor:
    """Fill bool ``out`` with True at the elements that dropout keeps.

    An element is kept if its value of ``fill_uniform_`` in float32 is below ``p_keep``: 1 keeps
    all, 0 keeps none.
    """
    _check_dtype(out, (torch.bool,))
    _check_box(out, key, start, global_strides)
    if not 0.0 <= p_keep <= 1.0:
        raise ValueError(f"p_keep is a probability in [0, 1], got {p_keep}.")
    return _backend(out).keep_mask(out, key, start, global_strides, p_keep)


@torch.no_grad()
def permutation(key: int, n: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return a random permutation of ``0 .. n - 1``, int64, the same on every device.

    It is the order of the first n words of ``key``, which are all different.

    >>> permutation(7, 5).sort().values
    tensor([0, 1, 2, 3, 4])
    """
    if n < 0:
        raise ValueError(f"a permutation has n >= 0 elements, got n={n}.")
    words = torch.empty(n, dtype=torch.int64, device=device)
    return random_bits(words, key, (0,), (1,)).argsort()


def _check_dtype(out: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if out.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"out has dtype {out.dtype}; this function fills {names}.")


def _check_box(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...]
) -> None:
    if not -(1 << 63) <= key < 1 << 64:
        raise ValueError(f"key must be in [-2**63, 2**64), got {key}; derive_key makes such a key.")
    if not len(start) == len(global_strides) == out.dim():
        raise ValueError(
            f"start and global_strides need one integer for each of the {out.dim()} dims of out, "
            f"got start={start}, global_strides={global_strides}."
        )
    if any(i < 0 for i in (*start, *global_strides)):
        raise ValueError(
            f"start and global_strides must not be negative, "
            f"got start={start}, global_strides={global_strides}."
        )
    last = sum(
        (i + num - 1) * stride
        for i, num, stride in zip(start, out.shape, global_strides, strict=True)
    )
    if last >= 1 << 63:
        raise ValueError(
            f"the global index of an element must be below 2**63, got {last} for "
            f"start={start}, global_strides={global_strides} and a box of shape {tuple(out.shape)}."
        )
    if any(num > 1 and step == 0 for num, step in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"each element of out needs memory of its own, got an expanded tensor of shape "
            f"{tuple(out.shape)} and strides {out.stride()}. Fill an unexpanded one."
        )


def _real_parts(out: Tensor, key: int) -> list[tuple[Tensor, int]]:
    """Return the real tensors that make up ``out``, with a key for each."""
    if not out.is_complex():
        return [(out, key)]
    real, imag = torch.view_as_real(out).unbind(-1)
    return [
        (real, derive_key(key, reference.REAL_LANE)),
        (imag, derive_key(key, reference.IMAG_LANE)),
    ]


def _backend(out: Tensor) -> ModuleType:
    return _kernel() if out.is_cuda and _has_triton() else reference


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel() -> ModuleType:
    # On demand: Triton takes long to import and may be missing where there is no CUDA device.
    return importlib.import_module(".kernel", __name__)
