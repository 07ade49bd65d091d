"""Counter-based random numbers in plain torch: the definition, and what every CPU tensor uses.

The random word of an element depends on two integers only, a 64-bit key and the element's linear
index in the *global* tensor (its counter), so a shard holds the same numbers under every plan::

    a, b  = subkeys(key)
    x     = (counter * WEYL + a) ^ b                 modulo 2**64, as all that follows
    x     = (x ^ x >> 30) * MULTIPLY_1               splitmix64's finalizer, logical shifts
    x     = (x ^ x >> 27) * MULTIPLY_2
    word  = x ^ x >> 31

For a fixed key the map from counter to word is one to one. ``b`` is there because two sequences
whose ``a`` differ by a multiple of ``WEYL`` would otherwise be one sequence, shifted.

torch has no logical right shift and no unsigned arithmetic on CPU: words are int64, products wrap,
and a mask follows a shift. Two savings are part of the definition. Values in ``[0, 1)`` are
``1/2 + word / 2**64`` of the signed word, which needs no mask; and what reads no more than the
upper 31 bits leaves the last step out, which does not change them.

Names: ``view`` is the part of ``out`` that one block fills. The arguments of the functions are
described, and checked, in the package's ``__init__``.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor


WEYL = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB

# Words beyond an element's first come from derived keys: the angle of a float64 normal, and the
# two parts of a complex number.
ANGLE_LANE, REAL_LANE, IMAG_LANE = 0, 1, 2

_NUM_WORDS = 1 << 64
_LOW_HALF = (1 << 32) - 1
# 64 Ki words and as many of scratch fill a 1 MiB L2 cache, and one thread's share of a block keeps
# torch from starting threads for crumbs. Other devices only need their scratch memory bounded.
_BLOCK_PER_CPU_THREAD = 1 << 16
_BLOCK_ON_DEVICE = 1 << 24


def signed(word: int) -> int:
    """Return the int64 that has the lower 64 bits of ``word``."""
    return (word + (1 << 63)) % _NUM_WORDS - (1 << 63)


def _finalize(x: int) -> int:
    x = (x ^ x >> 30) * MULTIPLY_1 % _NUM_WORDS
    x = (x ^ x >> 27) * MULTIPLY_2 % _NUM_WORDS
    return x ^ x >> 31


@lru_cache(maxsize=1024)
def subkeys(key: int) -> tuple[int, int]:
    """Return the constants ``(a, b)``, unsigned, that ``key`` puts into the hash."""
    return _finalize((key + WEYL) % _NUM_WORDS), _finalize((key + 2 * WEYL) % _NUM_WORDS)


def derive_key(*words: int) -> int:
    """Return a 64-bit key that depends on every word and on their order.

    Args:
        words: For instance seed, call site and step; each in ``[-2**63, 2**64)``.

    Raises:
        ValueError: If a word does not fit into 64 bits.

    >>> derive_key(7, 1) == derive_key(7, 1)
    True
    >>> len({derive_key(), derive_key(0), derive_key(0, 0), derive_key(0, 1), derive_key(1, 0)})
    5
    """
    key = len(words)
    for word in words:
        if not -(1 << 63) <= word < _NUM_WORDS:
            raise ValueError(
                f"a key is derived from 64-bit integers in [-2**63, 2**64), got {word}. "
                f"Split a longer one into several words."
            )
        key = _finalize(_finalize((key + WEYL) % _NUM_WORDS) ^ word % _NUM_WORDS)
    return key


def merge_dims(
    shape: tuple[int, ...], *strides: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the fewest dims ``(size, one stride of each)`` that walk the same elements in order.

    >>> merge_dims((2, 3, 4), (60, 4, 1), (12, 4, 1))
    [(2, (60, 12)), (12, (1, 1))]
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    for num, *steps in zip(shape, *strides, strict=True):
        if num == 1:
            continue
        if dims and dims[-1][1] == tuple(num * step for step in steps):
            dims[-1] = (dims[-1][0] * num, tuple(steps))
        else:
            dims.append((num, tuple(steps)))
    return dims


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of ``dtype`` are computed in, before one rounding."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def keep_threshold(p_keep: float) -> int:
    """Return the integer t for which ``u < p_keep`` is ``2**24 * u < t``, u of 24 bits."""
    return math.ceil(math.ldexp(p_keep, 24))


def largest_below_one(dtype: torch.dtype) -> float:
    """Return the largest value of ``dtype`` below 1."""
    return 1.0 - torch.finfo(dtype).eps / 2


def smallest_positive(dtype: torch.dtype) -> float:
    """Return the smallest positive value of ``dtype``, a subnormal one."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


@lru_cache(maxsize=1024)
def uniform_bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest value of ``dtype`` in ``[low, high)``.

    Raises:
        ValueError: If ``dtype`` has no value in the interval.

    >>> uniform_bounds(0.0, 1.0, torch.bfloat16)
    (0.0, 0.99609375)
    """
    below_high = math.nextafter(high, -math.inf)
    low_spacing, high_spacing = _spacing(low, dtype), _spacing(below_high, dtype)
    lowest = math.ceil(low / low_spacing) * low_spacing
    highest = math.floor(below_high / high_spacing) * high_spacing
    if lowest > highest:
        raise ValueError(
            f"no {dtype} lies in [{low}, {high}). Widen the interval or fill a wider dtype."
        )
    return lowest, highest


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance between the values of ``dtype`` around ``value``."""
    _, exponent = math.frexp(value)
    return max(math.ldexp(torch.finfo(dtype).eps, exponent - 1), smallest_positive(dtype))


def random_bits(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...]
) -> Tensor:
    """Fill int64 ``out`` with words."""

    def fill(view: Tensor, block: _Block) -> None:
        view.copy_(block.words(key))

    return _fill_blocks(out, start, global_strides, fill)


def fill_uniform_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    low: float,
    high: float,
) -> Tensor:
    """Fill ``out`` with ``low + (high - low) * u``, u of 24 or 53 bits."""
    dtype = compute_dtype(out.dtype)
    lowest, highest = uniform_bounds(low, high, out.dtype)

    def fill(view: Tensor, block: _Block) -> None:
        unit = block.buffer("unit", dtype)
        if dtype == torch.float64:
            unit.copy_(block.words(key).bitwise_right_shift_(11)).mul_(2.0**-53)
        else:
            upper = block.words(key, upper_only=True).bitwise_right_shift_(40)
            unit.copy_(block.as_int32(upper)).mul_(2.0**-24)
        # Exact up to u = unit + 1/2; the clamp takes back what the scaling may round up to `high`.
        view.copy_(unit.add_(0.5).mul_(high - low).add_(low).clamp_(lowest, highest))

    return _fill_blocks(out, start, global_strides, fill)


def fill_normal_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    mean: float,
    std: float,
) -> Tensor:
    """Fill ``out`` with ``mean + std * sqrt(-2 ln u) * cos(2 pi v)`` (Box and Muller)."""
    dtype = compute_dtype(out.dtype)
    angle_key = derive_key(key, ANGLE_LANE)

    def fill(view: Tensor, block: _Block) -> None:
        angle = block.buffer("angle", dtype)
        if dtype == torch.float64:
            turns = block.words(angle_key).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
            angle.copy_(turns).mul_(math.tau * 2.0**-53)
            words = block.words(key)
        else:
            words = block.words(key)
            turns = torch.bitwise_and(words, (1 << 24) - 1, out=block.buffer("scratch"))
            angle.copy_(block.as_int32(turns)).mul_(math.tau * 2.0**-24)
        radius = open_unit(words, block.buffer("unit", dtype)).log_().mul_(-2.0).sqrt_()
        view.copy_(radius.mul_(angle.cos_()).mul_(std).add_(mean))

    return _fill_blocks(out, start, global_strides, fill)


def fill_exponential_(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...], rate: float
) -> Tensor:
    """Fill ``out`` with ``-ln(u) / rate``, never zero."""
    dtype = compute_dtype(out.dtype)
    smallest = smallest_positive(out.dtype)

    def fill(view: Tensor, block: _Block) -> None:
        unit = open_unit(block.words(key), block.buffer("unit", dtype))
        view.copy_(unit.log_().mul_(-1.0 / rate).clamp_min_(smallest))

    return _fill_blocks(out, start, global_strides, fill)


def fill_randint_(
    out: Tensor,
    key: int,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    low: int,
    high: int,
) -> Tensor:
    """Fill ``out`` with ``low + (word * (high - low) >> 64)``."""
    num_values = high - low

    def fill(view: Tensor, block: _Block) -> None:
        words = block.words(key)
        # The product of 2**64 values and a word is the word, shifted by what is shifted back.
        if num_values != _NUM_WORDS:
            words = _multiply_high(words, num_values, block.buffer("scratch"))
        view.copy_(words.add_(low))

    return _fill_blocks(out, start, global_strides, fill)


def keep_mask(
    out: Tensor, key: int, start: tuple[int, ...], global_strides: tuple[int, ...], p_keep: float
) -> Tensor:
    """Fill bool ``out`` with ``u < p_keep``, u as in `fill_uniform_` of a float32."""
    threshold = keep_threshold(p_keep)
    if threshold == 0:
        return out.zero_()
    # 2**24 * u is below the threshold exactly where the word is at most this.
    last_kept = signed((threshold << 40) - 1 - (1 << 63))

    def fill(view: Tensor, block: _Block) -> None:
        torch.le(block.words(key, upper_only=True), last_kept, out=view)

    return _fill_blocks(out, start, global_strides, fill)


def open_unit(words: Tensor, unit: Tensor) -> Tensor:
    """Fill float ``unit`` with u in (0, 1) from the upper 32 or 53 bits; overwrites ``words``."""
    num_bits = 53 if unit.dtype == torch.float64 else 32
    upper = words.bitwise_right_shift_(64 - num_bits).bitwise_and_((1 << num_bits) - 1)
    unit.copy_(upper).add_(0.5).mul_(2.0**-num_bits)
    return unit.clamp_max_(largest_below_one(unit.dtype))


def _multiply_high(words: Tensor, factor: int, scratch: Tensor) -> Tensor:
    """Return the upper 64 bits of the 128-bit product, all unsigned; overwrites both tensors.

    With ``words = h * 2**32 + l`` and ``factor = H * 2**32 + L``::

        t = h * L + (l * L >> 32)
        product >> 64 = h * H + (t >> 32) + (l * H + t % 2**32 >> 32)
    """
    high_factor, low_factor = factor >> 32, factor & _LOW_HALF
    low = torch.bitwise_and(words, _LOW_HALF, out=scratch)
    high = _upper_half_(words)
    if high_factor == 0:
        # The common case needs no more memory: only the middle term is left.
        return _upper_half_(high.mul_(low_factor).add_(_upper_half_(low.mul_(low_factor))))
    middle = _upper_half_(low * low_factor).add_(high * low_factor)
    carry = _upper_half_(low.mul_(high_factor).add_(middle & _LOW_HALF))
    return high.mul_(high_factor).add_(_upper_half_(middle)).add_(carry)


def _upper_half_(x: Tensor) -> Tensor:
    return x.bitwise_right_shift_(32).bitwise_and_(_LOW_HALF)


def _xor_shift_(x: Tensor, num_bits: int, scratch: Tensor) -> Tensor:
    torch.bitwise_right_shift(x, num_bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << 64 - num_bits) - 1))


class _Block:
    """Some elements of ``out``: their words, and memory to work in.

    All blocks of a tensor share their buffers: memory that is allocated anew for each goes back to
    the system in between, and its page faults take longer than the arithmetic.

    Attributes:
        table: Int64 ``(counter - base) * WEYL`` of the elements.
        base: Counter of the first element.
        buffers: By name, as large as the largest block.
    """

    __slots__ = ("base", "buffers", "table")

    def __init__(self, table: Tensor, base: int, buffers: dict[str, Tensor]) -> None:
        self.table = table
        self.base = base
        self.buffers = buffers

    def buffer(self, name: str, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the buffer of that name, which always has the same dtype."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty_like(self.table, dtype=dtype)
        whole = self.buffers[name]
        return whole if whole.shape == self.table.shape else whole[: self.table.shape[0]]

    def words(self, key: int, *, upper_only: bool = False) -> Tensor:
        """Return the words in the buffer "words"; overwrites "scratch".

        Args:
            key: The key.
            upper_only: Whether no more than the upper 31 bits are read.
        """
        a, b = subkeys(key)
        scratch = self.buffer("scratch")
        x = torch.add(self.table, signed(self.base * WEYL + a), out=self.buffer("words"))
        x.bitwise_xor_(signed(b))
        _xor_shift_(x, 30, scratch).mul_(signed(MULTIPLY_1))
        _xor_shift_(x, 27, scratch).mul_(signed(MULTIPLY_2))
        return x if upper_only else _xor_shift_(x, 31, scratch)

    def as_int32(self, small: Tensor) -> Tensor:
        """Return ``small`` as int32: to float32, int64 takes twice as long as by way of it."""
        return self.buffer("small", torch.int32).copy_(small)


def _fill_blocks(
    out: Tensor,
    start: tuple[int, ...],
    global_strides: tuple[int, ...],
    fill: Callable[[Tensor, _Block], None],
) -> Tensor:
    """Call ``fill`` for each block of ``out``."""
    on_cpu = out.device.type == "cpu"
    limit = _BLOCK_PER_CPU_THREAD * torch.get_num_threads() if on_cpu else _BLOCK_ON_DEVICE
    base = sum(i * stride for i, stride in zip(start, global_strides, strict=True))
    table: Tensor | None = None
    buffers: dict[str, Tensor] = {}
    for view, block_base in _blocks(out, base, global_strides, limit):
        if table is None:
            # The first block is the largest, and all of them are cut alike behind their dim 0.
            strides = global_strides[out.dim() - view.dim() :]
            table = _weyl_table(view.shape, strides, out.device)
        part = table if view.shape == table.shape else table[: view.shape[0]]
        fill(view, _Block(part, block_base, buffers))
    return out


def _blocks(
    view: Tensor, base: int, strides: tuple[int, ...], limit: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield blocks of at most ``limit`` elements, each with the counter of its first element."""
    if view.numel() <= limit:
        yield view, base
        return
    rows_per_block = limit // view[0].numel()
    if rows_per_block == 0:
        for i, row in enumerate(view.unbind(0)):
            yield from _blocks(row, base + i * strides[0], strides[1:], limit)
    else:
        for i, rows in enumerate(view.split(rows_per_block)):
            yield rows, base + i * rows_per_block * strides[0]


def _weyl_table(shape: torch.Size, strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 ``sum_d(i_d * strides[d]) * WEYL`` for each index i of ``shape``."""
    table = torch.zeros((), dtype=torch.int64, device=device)
    for num, (stride,) in reversed(merge_dims(tuple(shape), strides)):
        steps = torch.arange(num, device=device).mul_(signed(stride * WEYL))
        table = steps.view(-1, *[1] * table.dim()) + table if table.dim() else steps
    return table.view(shape)
