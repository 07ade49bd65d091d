"""Gradients of one tensor that come in unlike layouts are added as on one device."""

import itertools

import pytest
import torch

import hdtensor as hd
from hdtensor.errors import DeductionError
from tests.support.world import run_world


WHOLE = "R / 0,1:R 2:R"
ROWS = "S0[2:1] / 0,1:R 2:R"
COLUMNS = "S1[1:3] / 0,1:S0 2:R"
LAYOUTS = [
    WHOLE,
    ROWS,
    COLUMNS,
    "S0[1:2] / 0,1:S1 2:R",
    "R / 0,1:P 2:R",
    "P / 0,1:R 2:R",
    "P / 0,1:P 2:R",
    "S0[2:1] / 0,1:P 2:R",
    "R / 0,1:S1 2:R",
]


class _GradientAs(torch.autograd.Function):
    """The tensor itself; its gradient comes laid out as ``spec``."""

    @staticmethod
    def forward(ctx, x, spec):
        ctx.spec = spec
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.redistribute(ctx.spec), None


def _values(seed):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _loss(x, spec, weight):
    return (_GradientAs.apply(x, spec) * hd.distribute_tensor(weight, WHOLE)).full_tensor().sum()


def _leaf():
    return hd.distribute_tensor(_values(0), WHOLE).detach().requires_grad_()


def _check_all_pairs(rank, pairs):
    first, second = _values(1), _values(2)
    for one, other in pairs:
        leaf = _leaf()  # one tensor, two backwards
        _loss(leaf, one, first).backward()
        before = leaf.grad
        _loss(leaf, other, second).backward()
        assert leaf.grad is before
        torch.testing.assert_close(leaf.grad.full_tensor(), first + second)

        leaf = _leaf()  # one tensor, two uses
        inner = leaf * 2
        inner.retain_grad()
        (_loss(inner, one, first) + _loss(inner, other, second)).backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * (first + second))
        torch.testing.assert_close(inner.grad.full_tensor(), first + second)


@pytest.mark.dist(4)
@pytest.mark.parametrize("start", range(3))
def test_every_pair_of_layouts(start):
    run_world(_check_all_pairs, 4, list(itertools.product(LAYOUTS, LAYOUTS))[start::3])


def _program(x, rows, columns):
    inner = x.tanh()
    return (inner * rows).sum() * 0.5 + (inner * columns).exp().sum() + (x * columns).sum()


def _arguments(cuts):
    plain = [_values(seed) for seed in range(3)]
    whole = [p.clone().requires_grad_() for p in plain]
    cut = [
        hd.distribute_tensor(p, c).detach().requires_grad_()
        for p, c in zip(plain, cuts, strict=True)
    ]
    return cut, whole


def _check_operators(rank, cuts):
    """Layouts as operators make them: a whole tensor meets one that is cut by rows and one that is cut by columns."""
    cut, whole = _arguments(cuts)
    seen = []
    for args in (cut, whole):
        args[0].register_hook(lambda g: g * 2)
        loss = _program(*args)
        loss.backward(retain_graph=True)
        loss.backward()
        (args[0] * args[1]).sum().backward()
        (args[0] * args[2]).sum().backward()
        loss = _program(*args)
        seen.append([a.grad for a in args])
        (grad,) = torch.autograd.grad(loss, args[0], create_graph=True)
        (grad * grad).sum().backward()
    for (a, b), (mine, one) in zip(
        zip(cut, whole, strict=True), zip(*seen, strict=True), strict=True
    ):
        torch.testing.assert_close(mine.full_tensor(), one)
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "cuts", [(WHOLE, ROWS, COLUMNS), (WHOLE, COLUMNS, ROWS)], ids=["rows", "columns"]
)
def test_layouts_that_operators_make(cuts):
    run_world(_check_operators, 4, cuts)


def _check_operators_outside(rank):
    a, b = (hd.distribute_tensor(_values(seed), cut) for seed, cut in enumerate((ROWS, COLUMNS)))
    leaf = _leaf()
    (_loss(leaf, ROWS, _values(1)) + _loss(leaf, COLUMNS, _values(2))).backward()
    for add in (torch.add, torch.Tensor.add_):
        with pytest.raises(DeductionError, match=r"redistribute"):
            add(a, b)


@pytest.mark.dist(4)
def test_programs_still_say_where_data_moves():
    run_world(_check_operators_outside, 4)


def _check_compiled(rank, cuts):
    results = []
    for compiles in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = torch.compile(_program, fullgraph=True, backend="aot_eager") if compiles else _program
        cut, whole = _arguments(cuts)
        for _ in range(2):
            run(*cut).backward()
            (cut[0] * cut[1]).sum().backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles
        results.append([a.grad for a in cut])
        _program(*whole).backward()
        (whole[0] * whole[1]).sum().backward()
    for mine, eager, one in zip(*results, whole, strict=True):
        torch.testing.assert_close(mine.full_tensor(), 2 * one.grad)
        assert mine.spec is eager.spec


@pytest.mark.dist(4)
def test_compiled_programs_add_them_too():
    run_world(_check_compiled, 4, (WHOLE, ROWS, COLUMNS))
