"""Indexing by tensors and choosing by masks, where operands are cut, beside plain torch.

A function below takes ``place(tensor, spec)``, which distributes on the ranks and returns the tensor itself in the oracle.
"""

import pytest
import torch

import hdtensor
from hdtensor import HDTensor
from tests.support.world import run_world


ROWS = "S0[3:1] / 0,1:S0 2:R"


def _draw(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator)


def _ids(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 % 5


def table_by_cut_ids(place):
    table = place(_draw(5, 3).requires_grad_(), "R / 0,1:R 2:R")
    out = table[place(_ids(7, 4), ROWS)]
    (out * place(_draw(7, 4, 3), ROWS)).sum().backward()
    return [out, table.grad]


def table_by_whole_ids_whose_gradient_is_cut(place):
    table = place(_draw(5, 3).requires_grad_(), "R / 0,1:R 2:R")
    out = table[_ids(7, 4)] * place(_draw(7, 4, 3), ROWS)
    out.sum().backward()
    return [out, table.grad]


def table_by_pairs_of_cut_ids_that_broadcast(place):
    table = place(_draw(2, 5, 5).requires_grad_(), "R / 0,1:S0 2:R")
    rows, columns = place(_ids(7, 1), "S0[3:1] / 0,1:R 2:R"), place(_ids(1, 4), "R / 0,1:R 2:R")
    out = table[:, rows, columns]
    out.square().sum().backward()
    return [out, table.grad]


def table_by_ids_around_a_whole_dim(place):
    table = place(_draw(5, 4, 5).requires_grad_(), "R / 0,1:S1 2:R")
    ids = place(_ids(7), "S0[3:1] / 0,1:R 2:R")
    out = table[ids, :, ids]
    out.square().sum().backward()
    return [out, table.grad]


def rows_added_into_a_whole_tensor(place):
    x, ids = place(_draw(5, 3), "R / 0,1:R 2:R"), place(_ids(7), ROWS)
    return [
        x.index_put((ids,), place(_draw(7, 3), ROWS), accumulate=True),
        x.index_put((ids,), place(_draw(3), "R / 0,1:R 2:R"), accumulate=True),
        x.index_put((ids,), place(_draw(1, 3), "R / 0,1:R 2:R"), accumulate=True),
    ]


def number_under_a_mask_of_the_first_dims(place):
    x, mask = place(_draw(7, 4, 3), "S0[3:1] / 0,1:S2 2:R"), place(_ids(7, 4) > 2, ROWS)
    y, row = x.clone(), place(_ids(7) > 2, ROWS)
    y[mask] = 5.0
    y[row] = -1.0
    return [y, x.index_put((mask,), torch.tensor(2.0))]


def choice_among_pending_sums(place):
    bias = place(_draw(1, 2, 4).requires_grad_(), "R / 0,1:S1 2:R")
    mask = place(_ids(1, 1, 4) > 1, "R / 0,1:R 2:R")
    x = place(_draw(7, 2, 4), "S0[3:1] / 0,1:S1 2:R")
    (torch.where(mask, bias, -1.0) * x).sum().backward()
    sums = [place(_draw(7, 4) + k, "P / 0,1:P 2:R") for k in range(2)]
    flags = place(_ids(7, 4) > 1, "R / 0,1:R 2:R")
    return [bias.grad, torch.where(flags, *sums), torch.where(flags, sums[0], 2.0)]


CASES = [
    f for name, f in list(globals().items()) if getattr(f, "__code__", None) and name[0] != "_"
]
CASES = [f for f in CASES if f.__code__.co_varnames[:1] == ("place",)]


def _check(rank, name):
    def place(tensor, spec):
        placed = hdtensor.distribute_tensor(tensor.detach(), spec, src_data_rank=None)
        return placed.requires_grad_(tensor.requires_grad)

    case = globals()[name]
    expected = case(lambda tensor, spec: tensor)
    with hdtensor.implicit_replication():
        got = case(place)
    for number, (tensor, value) in enumerate(zip(got, expected, strict=True)):
        assert isinstance(tensor, HDTensor), number
        torch.testing.assert_close(
            tensor.detach().full_tensor(), value.detach(), msg=lambda m, n=number: f"{n}: {m}"
        )


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_equals_one_device(case):
    run_world(_check, 4, case.__name__)
