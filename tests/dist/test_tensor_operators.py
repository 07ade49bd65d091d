"""Kinds of operator calls that once gave a wrong value without an error, each over many layouts."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate

from hdtensor import DeductionError, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
TWO_DIMS = [
    "R / 0-3:S0",
    "R / 0-3:S1",
    "R / 0-3(2x2):S0,S1",
    "S0[3:1] / 0,1:S1 2:R",
    "S1[1:2] / 0,1:S0 2:S1",
    "S0[0:1] / 0:R 1-3:S0",
    "P / 0,1:S1 2:R",
]


def cut(full, spec):
    return distribute_tensor(full, spec, src_data_rank=None)


def reference(call, full):
    plain = full.clone().requires_grad_()
    out = call(plain)
    out.square().sum().backward()
    return out.detach(), plain.grad


def check(call, full, spec):
    """The value and the gradient of one device, or an error on every rank."""
    want, want_grad = reference(call, full)
    x = cut(full, spec).requires_grad_()
    try:
        got = call(x)
        assert got.shape == want.shape
        assert torch.allclose(got.detach().full_tensor(), want), spec
        whole = got.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
        got.redistribute(whole).square().sum().backward()
    except DeductionError:
        return False
    assert torch.allclose(x.grad.full_tensor(), want_grad), spec
    return True


def _check_negative_dims(rank):
    full = torch.rand(6, 5, dtype=torch.float64) + 0.5
    calls = [
        lambda t, d: t.cumsum(d),
        lambda t, d: t.cumprod(d),
        lambda t, d: t.logcumsumexp(d),
        lambda t, d: t.sort(dim=d, stable=True).values,
        lambda t, d: t.select(d, 1),
        lambda t, d: t.narrow(d, 1, 3),
        lambda t, d: t.softmax(d),
        lambda t, d: t.flip(d),
        lambda t, d: t.unsqueeze(d),
        lambda t, d: torch.stack([t, t], d),
        lambda t, d: t.transpose(d, 0),
        lambda t, d: t.amax(d),
    ]
    num_right = 0
    specs = [TWO_DIMS[i] for i in (1, 3, 4)]
    for call, spec in itertools.product(calls, specs):
        for dim in (0, 1):
            # A dim is the same dim however it is counted: the same outcome too.
            num_dims = max(2, call(full, dim).ndim)
            from_start = check(functools.partial(call, d=dim), full, spec)
            assert from_start == check(functools.partial(call, d=dim - num_dims), full, spec)
            num_right += from_start
    assert num_right > len(calls) * len(specs)


@pytest.mark.dist(WORLD_SIZE)
def test_dims_counted_from_the_end():
    run_world(_check_negative_dims, WORLD_SIZE)


def _check_single_row(rank):
    # The one row lies in one subgroup; the other cannot repeat it.
    wide = torch.randn(2, 3, dtype=torch.float64)
    row = torch.randn(1, 3, dtype=torch.float64)
    for ratio, bottom in itertools.product(("[0:1]", "[1:0]", "[1:2]"), ("R", "S1")):
        x = cut(row, f"S0{ratio} / 0,1:{bottom} 2:R")
        other = cut(wide, f"R / 0,1:{bottom} 2:R")
        for call in (
            lambda a, b: a + b,
            lambda a, b: torch.where(b > 0, a, b),
            lambda a, b: b.masked_fill(a > 0, 1.0),
            lambda a, b: torch.lerp(b, a, 0.5),
            lambda a, b: F.mse_loss(a.expand_as(b), b),
            lambda a, b: b.clone().copy_(a),
            lambda a, b: a.squeeze(0) + b,
            lambda a, b: a.squeeze() + b,
        ):
            with pytest.raises(DeductionError, match="redistribute"):
                call(x, other)
        assert torch.equal((x * 2).full_tensor(), row * 2)
        assert torch.equal((x + cut(row, x.spec)).full_tensor(), row * 2)


@pytest.mark.dist(WORLD_SIZE)
def test_a_single_cut_row_is_not_repeated():
    run_world(_check_single_row, WORLD_SIZE)


def _check_flags(rank):
    full = torch.arange(24.0).reshape(4, 6)
    for spec in (*TWO_DIMS[:3], "R / 0,1:S1 2:S0"):
        for reduce in (
            lambda t: (t >= 0).any(1),
            lambda t: (t >= 0).any(),
            lambda t: (t > 5).any(0),
            lambda t: (t >= 0).all(1),
        ):
            # Two true terms are one, whatever the answer is used for.
            for use in (
                lambda t: t.double(),
                lambda t: t.int() * 2,
                lambda t: t + t.double(),
                lambda t: t.sum(),
                lambda t: torch.where(t, 2.0, 3.0),
                lambda t: ~t,
            ):
                assert torch.equal(use(reduce(cut(full, spec))).full_tensor(), use(reduce(full)))


@pytest.mark.dist(WORLD_SIZE)
def test_any_is_a_flag_and_no_count():
    run_world(_check_flags, WORLD_SIZE)


def _check_embedding(rank):
    ids = torch.randint(0, 7, (4, 6))
    table = torch.randn(7, 5, dtype=torch.float64)
    want, want_grad = reference(lambda t: F.embedding(ids, t), table)
    tables = ["R / 0-3(2x2):S0,R", "R / 0-3(2x2):S1,S0", "R / 0-3(2x2):S0,S0", "R / 0-3(2x2):R,P"]
    places = ["R / 0-3(2x2):S0,R", "R / 0-3(2x2):S0,S1", "R / 0-3(2x2):R,S1", "R / 0-3(2x2):R,R"]
    for at, of in itertools.product(tables, places):
        weight = cut(table, at).requires_grad_()
        got = F.embedding(cut(ids, of), weight)
        assert torch.allclose(got.detach().full_tensor(), want), (at, of)
        got.redistribute("R / 0-3(2x2):R,R").square().sum().backward()
        assert torch.allclose(weight.grad.full_tensor(), want_grad), (at, of)


@pytest.mark.dist(WORLD_SIZE)
def test_embedding_with_table_and_indices_cut_along_one_axis():
    run_world(_check_embedding, WORLD_SIZE)


def _check_vectors(rank):
    v = torch.randn(6, dtype=torch.float64)
    for spec in ("R / 0-3:S0", "S0[2:1] / 0,1:S0 2:R", "R / 0,1:S0 2:R"):
        matrix = cut(
            torch.ones(6, 3, dtype=torch.float64), spec.replace("S0[2:1]", "R").replace("S0", "R")
        )
        for call in (
            lambda t: t.split([6, 0])[0],
            lambda t: t.split([2, 0, 4])[2],
            lambda t: torch.cat([t[:3], t[3:]]),
            lambda t: t.unbind()[1],
            lambda t, m=matrix: (
                t @ (m if type(t) is not torch.Tensor else torch.ones(6, 3).double())
            ),
        ):
            assert check(call, v, spec) or "S0[" in spec


@pytest.mark.dist(WORLD_SIZE)
def test_pieces_of_vectors():
    run_world(_check_vectors, WORLD_SIZE)
