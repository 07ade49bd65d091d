"""Kinds of faults that PyTorch's operator database brought to light, each in a few lines beside plain torch.

A function below takes ``place(tensor, spec)``, which distributes on the ranks and returns the tensor itself in the oracle.
"""

import pytest
import torch
import torch.nn.functional as F

import hdtensor
from hdtensor import HDTensor
from tests.support.world import run_world


TWO = "S0[2:1] / 0,1:S1 2:R"


def _draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def fill_of_a_pending_sum(place):
    """``1 - x`` in C++ is ``empty_like(x).fill_(1).sub_(x)``; the fill counted once a rank."""
    x = place(_draw(4, 3), "P / 0,1:P 2:R")
    return [torch.full_like(x, 2.0), x.clone().fill_(3.0), x.clone().zero_()]


def copies_and_bits_of_a_pending_sum(place):
    x = place(_draw(4, 3), "R / 0,1:P")
    return [place(_draw(4, 3), "P / 0,1:P 2:R").clone(), x.view(torch.int32)]


def gradient_through_a_reciprocal_of_a_pending_sum(place):
    y = place(_draw(4).abs().add(1).requires_grad_(), "R / 0,1:P")
    torch.addcdiv(torch.zeros(()), place(torch.ones(4), "R / 0,1:R"), y).sum().backward()
    return [y.grad]


def number_added_in_place_to_a_pending_mean(place):
    """As ``rms_norm`` does."""
    return [place(_draw(5, 4), TWO).mean(0).add_(0.5), place(_draw(5, 4), TWO).amax(0).sub_(0.5)]


def gather_and_scatter_with_a_shorter_index(place):
    """Row i of the index stands for row i of the tensor, also where another rank has that row."""
    x, index = place(_draw(10, 5), "R / 0,1:S0"), place(_index(6, 5), "R / 0,1:S0")
    source = place(_draw(6, 5), "R / 0,1:S0")
    return [x.gather(1, index), x.scatter(1, index, source), x.scatter_add(1, index, source)]


def _index(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) * 3 % 5


def pooling_backward_without_a_batch(place):
    """The second dim of (C, H, W) is no channel."""
    x = place(_draw(8, 4, 3).requires_grad_(), TWO)
    weight = _draw(8, 2, 3)
    (F.adaptive_avg_pool2d(x, (2, 3)) * place(weight, "R / 0,1:R 2:R")).sum().backward()
    return [x.grad]


def sizes_among_the_arguments_of_a_backward(place):
    x = place(_draw(5, 2, 4, 4).requires_grad_(), TWO)
    grown = F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True)
    (F.group_norm(x, 1).square().sum() + grown.square().sum()).backward()
    return [x.grad]


def reductions_over_an_empty_list_of_dims(place):
    x = place(_draw(4, 3), "R / 0,1:S0")
    return [x.sum([], keepdim=True), x.amax([]), x.var([])]


def keepdim_by_position(place):
    return [torch.logsumexp(place(_draw(3, 5), "R / 0,1:S1"), [0], True)]


def solvers_that_broadcast_their_batches(place):
    a = torch.eye(3) * 4 + _draw(4, 3, 3) / 4
    left, right = place(a, "R / 0,1:S0"), place(_draw(3, 2), "R / 0,1:S0")
    return [torch.linalg.solve(left, right), torch.linalg.solve(place(a[0], "R / 0,1:S0"), right)]


def views_of_nothing(place):
    """DTensor's rule loops for ever on a dim of length 0."""
    x = place(_draw(5, 5, 0), TWO)
    return [x.reshape(25, 0), x.reshape(0), (x.reshape(5, 0, 5) + 1).reshape(0, 25)]


def blocks_without_elements(place):
    """One channel, which the second subgroup has."""
    x = place(_draw(3, 1, 4), "S1[2:1] / 0,1:R 2:R")
    return [F.batch_norm(x, None, None, training=True)]


def statistics_that_are_empty_in_evaluation(place):
    x, channel = place(_draw(3, 2, 4), "R / 0,1:S1"), place(torch.ones(2), "R / 0,1:S0")
    outs = torch.ops.aten.native_batch_norm(x, None, None, channel, channel, False, 0.1, 1e-5)
    return list(outs)


def operators_that_write_to_one_operand_and_return_others(place):
    x, mean = place(_draw(6, 2), "R / 0,1:S1"), place(torch.zeros(2), "R / 0,1:S0")
    var = place(torch.ones(2), "R / 0,1:S0")
    out, *_ = torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 1e-5)
    return [out, mean, var]


def conjugates_that_are_only_a_bit_on_the_tensor(place):
    x = place(_draw(4, 3, dtype=torch.complex64), TWO)
    return [x.conj(), x.conj() * 2, torch.view_as_real(x.conj().resolve_conj())]


def out_variants_that_return_lists(place):
    x = place(_draw(4, 3), "R / 0,1:S1")
    outs = [torch.empty_like(x.select(0, i)) for i in range(4)]
    torch.unbind_copy(x, 0, out=outs)
    return outs


def in_place_operators_without_a_rule(place):
    x = place(_draw(4, 4), "R / 0,1:S0")
    return [
        x.clone().tril_(),
        x.clone().cumprod_(1),
        x.clone().scatter_(1, place(_index(3, 4) % 4, "R / 0,1:R"), 7.0),
    ]


def norm_of_a_scalar_over_its_dim(place):
    return [torch.linalg.vector_norm(place(torch.tensor(-2.0), "R / 0,1:R"), 2, 0)]


def batches_of_matrices(place):
    """The dims before the last two are independent problems; one block has the only matrix of its rank."""
    outs = []
    for spec in ("S0[3:1] / 0,1:S0 2:R", "S0[1:3] / 0,1:S1 2:S2"):
        x = place(_draw(4, 3, 3) + 3 * torch.eye(3), spec)
        symmetric = x @ x.mT
        outs += [torch.linalg.inv(x), torch.linalg.cholesky(symmetric), torch.linalg.det(x)]
        outs += [torch.linalg.svdvals(x), torch.linalg.eigvalsh(symmetric), torch.linalg.qr(x).R]
        outs += [torch.linalg.solve(x, symmetric), torch.linalg.matrix_exp(x / 9)]
        if hasattr(torch.linalg, "polar"):  # from torch 2.14 on
            outs += [*torch.linalg.polar(x), torch.linalg.matrix_sqrth(symmetric)]
        outs += [x.diagonal(dim1=2, dim2=1), torch.diag_embed(x, 1, 0, -1), x.diagonal(1, -2, -1)]
    return outs


def parts_of_a_triangle(place):
    """Each rank's corner lies elsewhere; terms of a sum are cut alike."""
    specs = (TWO, "S1[1:3] / 0,1:S0 2:R", "S1[2:1] / 0,1:S1 2:R", "P / 0,1:S1 2:R", "R / 0,1:P")
    return [
        function(place(_draw(5, 7), spec), diagonal)
        for spec in specs
        for function in (torch.tril, torch.triu)
        for diagonal in (-3, 0, 2)
    ]


def running_statistics_that_are_cut_otherwise(place):
    """Training writes to them, so that a conversion in passing would lose what it writes."""
    outs = []
    for cut in ("S0", "S1", "S2", "R"):
        for mean, var in (("S0", "R"), ("R", "S0"), ("S0", "S0"), ("R", "R")):
            for num in (5, 1):
                x = place(_draw(5, num, 5), f"R / 0,1:{cut} 2:R")
                running = place(torch.zeros(num), f"R / 0,1:{mean} 2:R")
                squared = place(torch.ones(num), f"R / 0,1:{var} 2:R")
                scales = place(_draw(num), f"R / 0,1:{var} 2:R"), place(_draw(num), "R / 0,1:R 2:R")
                made = F.batch_norm(x, running, squared, *scales, training=True)
                outs += [made, running, squared]
    return outs


def operators_without_any_rule(place):
    """Every rank of a subgroup does the whole, and every subgroup the same."""
    x, y = place(_draw(4, 3), "R / 0,1:S0 2:R"), place(_draw(5, 3), "R / 0,1:S1 2:R")
    index = place(torch.tensor([1, 7, 3]), "R / 0,1:S0 2:R")
    return [torch.cdist(x, y), F.pdist(x), torch.block_diag(x, y), x.put(index, x[:3, 0])]


def sums_of_products_of_batches(place):
    a, b = _draw(4, 5, 3), _draw(4, 3, 6)
    outs = []
    for self, batch1, batch2 in (
        ("R / 0,1:R 2:R", "S0[3:1] / 0,1:S1 2:R", "S0[3:1] / 0,1:S1 2:R"),
        ("S0[3:2] / 0,1:R 2:R", "S1[3:2] / 0,1:S2 2:R", "R / 0,1:S1 2:R"),
        ("S1[1:2] / 0,1:R 2:R", "R / 0,1:S0 2:R", "S2[1:2] / 0,1:S0 2:R"),
    ):
        operands = place(_draw(5, 6), self), place(a, batch1), place(b, batch2)
        outs.append(torch.addbmm(*operands, beta=0.5, alpha=2))
    batches = place(a, "R / 0,1:S0 2:R"), place(b, "R / 0,1:S2 2:R")
    for shape in ((1,), (6,), (1, 6), (5, 1)):  # what is added broadcasts
        added = _draw(*shape)
        outs.append(torch.addbmm(place(added, "R / 0,1:S0 2:R"), *batches))
    return outs


FAULTS = [
    batches_of_matrices,
    parts_of_a_triangle,
    running_statistics_that_are_cut_otherwise,
    operators_without_any_rule,
    sums_of_products_of_batches,
    fill_of_a_pending_sum,
    copies_and_bits_of_a_pending_sum,
    gradient_through_a_reciprocal_of_a_pending_sum,
    number_added_in_place_to_a_pending_mean,
    gather_and_scatter_with_a_shorter_index,
    pooling_backward_without_a_batch,
    sizes_among_the_arguments_of_a_backward,
    reductions_over_an_empty_list_of_dims,
    keepdim_by_position,
    solvers_that_broadcast_their_batches,
    views_of_nothing,
    blocks_without_elements,
    statistics_that_are_empty_in_evaluation,
    operators_that_write_to_one_operand_and_return_others,
    conjugates_that_are_only_a_bit_on_the_tensor,
    out_variants_that_return_lists,
    in_place_operators_without_a_rule,
    norm_of_a_scalar_over_its_dim,
]


def _distribute(tensor, spec):
    return hdtensor.distribute_tensor(tensor, spec, src_data_rank=None)


def _check(rank, name):
    fault = globals()[name]
    wanted = fault(lambda tensor, spec: tensor)

    got = fault(_distribute)

    assert all(isinstance(tensor, HDTensor) for tensor in got)
    for number, (g, w) in enumerate(zip([g.full_tensor() for g in got], wanted, strict=True)):
        torch.testing.assert_close(g, w, msg=lambda text, n=number: f"result {n}: {text}")


@pytest.mark.dist(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_equals_one_device(fault):
    run_world(_check, 4, fault.__name__)
