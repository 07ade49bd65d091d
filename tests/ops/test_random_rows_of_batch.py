"""Random operators on a part of a batch give what the whole batch would have there."""

import pytest
import torch
from torch.nn import functional

import hdtensor as hd
from hdtensor.ops.special.random import rows_of_batch


DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: x.clone().exponential_(2.0),
}
NUM_ROWS = 8


def on_rank_0(x):
    return hd.distribute_tensor(x, "R / 0:R")


def drawn(name, x):
    torch.manual_seed(11)
    return DRAWS[name](x).to_local()


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("shape", [(8,), (8, 3), (24, 5), (16, 2, 3)], ids=str)
def test_parts_draw_what_the_whole_batch_does(name, shape):
    x = torch.ones(shape)
    whole = drawn(name, on_rank_0(x))
    per_row = shape[0] // NUM_ROWS
    parts = []
    for first, num in ((0, 3), (3, 1), (4, 4)):
        with rows_of_batch(first, num):
            part = on_rank_0(x[first * per_row : (first + num) * per_row])
            parts.append(drawn(name, part))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_what_has_no_samples_is_drawn_alike_by_all_parts():
    table = on_rank_0(torch.ones(5, 5))
    weight = torch.nn.Parameter(on_rank_0(torch.ones(6, 5)))
    for name, x in (("dropout", table), ("randn_like", weight)):
        whole = drawn(name, x)
        for first in (0, 3):
            with rows_of_batch(first, 3):
                torch.testing.assert_close(drawn(name, x), whole, rtol=0, atol=0)
        assert not torch.equal(whole, torch.ones_like(whole))
