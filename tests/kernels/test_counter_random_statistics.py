"""Statistics of the counter-based random numbers.

All of them are of fixed keys, so that a test passes always or never; each limit is five or more
standard deviations of what chance gives.
"""

import itertools
import math

import pytest
import torch
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

from tests.support.counter_random import filled, units, words


KEYS = [0, 1, 2, derive_key(7, 3, 1), 2**64 - 1]


def correlation(x, y):
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def chi_square_deviation(counts):
    """How many standard deviations chi-square is from its mean, for equally likely bins."""
    expected = counts.sum().double() / counts.numel()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = counts.numel() - 1
    return float((chi_square - degrees) / math.sqrt(2 * degrees))


def bits_of(values):
    return values[:, None] >> torch.arange(64) & 1


@pytest.mark.parametrize("key", KEYS)
def test_bits_and_bytes_of_sequential_counters_are_even(key):
    sample = words(1 << 16, key)
    ones = bits_of(sample).sum(0).double()
    assert float((ones - 2**15).abs().max()) < 5 * math.sqrt(2**14)
    for byte in range(8):
        counts = torch.bincount(sample >> 8 * byte & 255, minlength=256)
        assert abs(chi_square_deviation(counts)) < 5


@pytest.mark.parametrize("key", KEYS)
def test_pairs_of_neighbours_fill_the_plane(key):
    for lag in (1, 2, 64):
        high = words((1 << 16) + lag, key) >> 58 & 63
        counts = torch.bincount(high[lag:] * 64 + high[:-lag], minlength=4096)
        assert abs(chi_square_deviation(counts)) < 5


@pytest.mark.parametrize("bit", range(0, 50, 7))
def test_one_bit_of_the_counter_flips_half_of_the_word(bit):
    pairs = filled(
        random_bits,
        (4096, 2),
        torch.int64,
        start=(3, 0),
        global_strides=(2 ** (bit + 1), 2**bit),
    )
    flips = bits_of(pairs[:, 0] ^ pairs[:, 1]).sum(0).double()
    assert float((flips - 2048).abs().max()) < 5 * 32


@pytest.mark.parametrize("bit", range(0, 64, 9))
def test_one_bit_of_the_key_flips_half_of_the_word(bit):
    flips = bits_of(words(4096, 77) ^ words(4096, 77 ^ 1 << bit)).sum(0).double()
    assert float((flips - 2048).abs().max()) < 5 * 32


def test_neighbouring_counters_and_keys_do_not_correlate():
    num = 1 << 16
    limit = 5 / math.sqrt(num)
    sample = units(num + 4096, 11)
    for lag in (1, 2, 3, 8, 64, 1000, 4096):
        assert abs(correlation(sample[:num], sample[lag : num + lag])) < limit
    for key in (12, 13, 11 + 2**32, 11 - 2**63):
        assert abs(correlation(sample[:num], units(num, key))) < limit
    per_key = torch.stack([units(2, key) for key in range(4096)])
    assert abs(correlation(per_key[:-1, 0], per_key[1:, 0])) < 5 / math.sqrt(4096)
    assert abs(correlation(per_key[:, 0], per_key[:, 1])) < 5 / math.sqrt(4096)


def test_keys_whose_sequences_would_be_shifted_copies_differ(monkeypatch):
    """With one ``b`` for all keys, ``a + WEYL`` is the sequence of ``a`` from its second word."""
    a, b = reference.subkeys(1)
    later, other = (a + reference.WEYL) % 2**64, reference.subkeys(2)[1]
    monkeypatch.setattr(reference, "subkeys", {1: (a, b), 2: (later, b), 3: (later, other)}.get)
    num = 1 << 14
    shifted = {key: units(num, key)[:-1] for key in (2, 3)}
    sample = units(num, 1)[1:]
    torch.testing.assert_close(shifted[2], sample, rtol=0, atol=0)
    assert abs(correlation(sample, shifted[3])) < 5 / math.sqrt(num)


def kolmogorov_smirnov(values, cdf):
    """sqrt(n) times the largest gap between the sample's distribution and ``cdf``."""
    probabilities = cdf(values.double().sort().values)
    num = values.numel()
    steps = torch.arange(num + 1) / num
    gaps = torch.maximum((steps[1:] - probabilities).abs(), (probabilities - steps[:-1]).abs())
    return math.sqrt(num) * float(gaps.max())


DISTRIBUTIONS = [
    (fill_uniform_, (), lambda x: x),
    (fill_normal_, (), lambda x: torch.special.ndtr(x)),
    (fill_normal_, (3.0, 0.5), lambda x: torch.special.ndtr((x - 3.0) / 0.5)),
    (fill_exponential_, (2.0,), lambda x: -torch.expm1(-2.0 * x)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("fill", "args", "cdf"), DISTRIBUTIONS)
def test_values_have_their_distribution(fill, args, cdf, dtype):
    # 2.3 is exceeded by chance once in 20,000
    for key in KEYS:
        assert kolmogorov_smirnov(filled(fill, (1 << 16,), dtype, *args, key=key), cdf) < 2.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_of_normal_values(dtype):
    num = 1 << 20
    z = filled(fill_normal_, (num,), dtype).double()
    # E[z^k] = 0, 1, 0, 3, with variances 1, 2, 15, 96
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert float((z**power).mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / num))
    tail = float((z.abs() > 4).double().mean())
    assert tail == pytest.approx(6.334e-5, abs=5 * math.sqrt(6.334e-5 / num))


@pytest.mark.parametrize("p_keep", [0.1, 0.5, 0.9])
def test_keep_mask_keeps_its_share_in_every_row_and_column(p_keep):
    mask = filled(keep_mask, (512, 512), torch.bool, p_keep).double()
    limit = 5 * math.sqrt(p_keep * (1 - p_keep) / 512)
    for dim in (0, 1):
        assert float((mask.mean(dim) - p_keep).abs().max()) < limit
    assert float(mask.mean()) == pytest.approx(p_keep, abs=limit / math.sqrt(512))


def test_randint_values_are_equally_likely():
    for num_values in (2, 3, 10, 1000):
        values = filled(fill_randint_, (1 << 16,), torch.int32, 5, 5 + num_values)
        assert abs(chi_square_deviation(torch.bincount(values - 5, minlength=num_values))) < 5


def test_permutations_are_permutations_and_equally_likely():
    torch.testing.assert_close(permutation(3, 1000).sort().values, torch.arange(1000))
    orders = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    seen = torch.tensor([orders[tuple(permutation(key, 4).tolist())] for key in range(4800)])
    assert abs(chi_square_deviation(torch.bincount(seen, minlength=24))) < 5


def test_derived_keys_differ():
    keys = {
        derive_key(seed, site, step)
        for seed in range(10)
        for site in range(10)
        for step in range(10)
    }
    assert len(keys) == 1000
    assert all(0 <= key < 2**64 for key in keys)


def test_parts_of_a_complex_tensor_are_independent():
    uniform = filled(fill_uniform_, (20_000,), torch.complex64)
    assert abs(correlation(uniform.real, uniform.imag)) < 5 / math.sqrt(20_000)
    normal = filled(fill_normal_, (20_000,), torch.complex128, 0.0, 3.0)
    assert float(normal.var()) == pytest.approx(9.0, rel=0.05)
    assert float(normal.real.var()) == pytest.approx(4.5, rel=0.05)
