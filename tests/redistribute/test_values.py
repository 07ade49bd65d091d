"""``simulate(resolve(...))`` against cutting a known tensor, for random pairs of layouts."""

import torch
from hypothesis import given, settings
from torch.distributed.tensor import Partial, Replicate

from hdtensor.redistribute import resolve, simulate
from hdtensor.redistribute.exchange import num_lacking
from tests.redistribute.oracle import cut, take, value
from tests.redistribute.strategies import any_pairs, full_tensor, layout_pairs, moved_pairs


def run(src, dst, full):
    plan = resolve(
        src.spec, dst.spec, src.shape, src_top_sizes=src.top_sizes, dst_top_sizes=dst.top_sizes
    )
    return plan, simulate(plan, cut(full, src))


def settled(layout):
    """The layout with Replicate for every Partial."""
    spec = layout.spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)
    if isinstance(spec.top, Partial):
        spec = spec.replace(top=Replicate())
    return layout._replace(spec=spec)


@settings(max_examples=1000)
@given(layout_pairs() | moved_pairs() | any_pairs())
def test_every_pair_keeps_the_value(pair):
    src, dst = pair
    full = full_tensor(src.shape)

    _, got = run(src, dst, full)

    for rank in dst.spec.ranks:
        assert tuple(got[rank].shape) == dst.local_shape(rank)
    torch.testing.assert_close(value(dst, got), full)
    if not dst.spec.has_partial():
        for rank in dst.spec.ranks:
            torch.testing.assert_close(got[rank], take(full, dst, rank))


@settings(max_examples=300)
@given(layout_pairs() | moved_pairs() | any_pairs())
def test_without_partial_no_element_is_sent_that_is_not_lacking(pair):
    src, dst = (settled(layout) for layout in pair)
    plan, got = run(src, dst, full_tensor(src.shape))

    assert plan.num_moved == num_lacking(src, dst)
    for rank in dst.spec.ranks:
        torch.testing.assert_close(
            got[rank], take(full_tensor(src.shape), dst, rank), rtol=0, atol=0
        )
