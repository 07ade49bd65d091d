"""Which scores a rank computes: all of them together, each once, and alike many."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hdtensor import HDSpec
from hdtensor.ops.attention.shares import attention_work, block_sizes, order_of, padded_length
from hdtensor.ops.attention.tiles import arranged, causal_tiles, held, in_order, natural, zigzag


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    is_zigzag=st.booleans(),
    cut=st.integers(0, 20),
)
def test_tiles_are_the_causal_scores_each_once(blocks, is_zigzag, cut):
    total = sum(blocks)
    cut = min(cut, total)
    order = zigzag(blocks) if is_zigzag else natural(total)
    positions = torch.cat([torch.arange(s.position, s.position + s.length) for s in order])
    assert sorted(positions.tolist()) == list(range(total))
    seen = torch.zeros(total, total, dtype=torch.int)
    ends = [0, *itertools.accumulate(blocks)]
    for first, last in itertools.pairwise(ends):
        for a, b in ((0, cut), (cut, total)):  # keys in two blocks, as around a ring
            rows, keys = held(order, [(first, last)]), held(order, [(a, b)])
            for tile in causal_tiles(rows, keys):
                (r, m), (k, n) = tile.rows, tile.keys
                part = torch.ones(m, n, dtype=torch.int)
                seen[first + r : first + r + m, a + k : a + k + n] += (
                    part.tril() if tile.is_causal else part
                )
    assert torch.equal(seen, (positions[:, None] >= positions[None, :]).int())


@pytest.mark.parametrize(
    ("text", "work", "balanced"),
    [
        ("R / 0,1:S1", {0: 528, 1: 1552}, {0: 1040, 1: 1040}),
        ("R / 0-3:S1", {0: 136, 1: 392, 2: 648, 3: 904}, {0: 520, 1: 520, 2: 520, 3: 520}),
        ("S1[3:1] / 0:R 1:R", {0: 1176, 1: 904}, {0: 1560, 1: 520}),
        ("S1[2:1:1] / 0,1:S1 2:R 3:R", None, {0: 520, 1: 520, 2: 520, 3: 520}),
    ],
)
def test_zigzag_shares_are_work_in_proportion(text, work, balanced):
    spec = HDSpec.from_text(text)
    plain = attention_work(spec, 64)
    assert work is None or plain == work
    assert sum(plain.values()) == 64 * 65 // 2
    assert attention_work(spec, 64, "zigzag") == balanced


def test_lengths_are_filled_up_to_whole_shares():
    spec = HDSpec.from_text("S1[2:1] / 0,1:S1 2:R")
    assert padded_length(spec, 13) == 14
    assert block_sizes(spec, 14) == (8, 6)
    assert block_sizes(spec, 13) == (8, 5), "a length that is not filled up is cut by the ratio"
    assert block_sizes(HDSpec.from_text("R / 0,1:S1"), 14) is None


def test_what_is_arranged_comes_back():
    order = order_of(HDSpec.from_text("R / 0-2:S1"), 9, "zigzag")
    x = torch.arange(9)
    assert arranged(x, order, 0).tolist() == [0, 1, 8, 2, 3, 7, 4, 5, 6]
    assert torch.equal(in_order(arranged(x, order, 0), order, 0), x)
