"""``simulate(resolve(...))`` against cutting a known tensor, for random pairs of layouts."""

import torch
from hypothesis import given, settings

from hdtensor.redistribute import resolve, simulate
from tests.redistribute.oracle import cut, take, value
from tests.redistribute.strategies import full_tensor, layout_pairs


def run(src, dst, full):
    plan = resolve(
        src.spec, dst.spec, src.shape, src_top_sizes=src.top_sizes, dst_top_sizes=dst.top_sizes
    )
    return plan, simulate(plan, cut(full, src))


@settings(max_examples=400)
@given(layout_pairs())
def test_every_pair_over_the_same_subgroups_keeps_the_value(pair):
    src, dst = pair
    full = full_tensor(src.shape)

    _, got = run(src, dst, full)

    for rank in dst.spec.ranks:
        assert tuple(got[rank].shape) == dst.local_shape(rank)
    torch.testing.assert_close(value(dst, got), full)
    if not dst.spec.has_partial():
        for rank in dst.spec.ranks:
            torch.testing.assert_close(got[rank], take(full, dst, rank))
