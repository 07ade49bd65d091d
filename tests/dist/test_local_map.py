"""``local_map``: functions of local tensors, forward and backward, against the same function on whole tensors."""

import pytest
import torch
import torch.nn.functional as F

import hdtensor
from hdtensor import HDTensor, RedistributeError, SpecError, distribute_tensor, local_map
from tests.support.world import run_world


WORLD_SIZE = 4

#: Rows 3:1, the first subgroup's columns or rows cut again; one and two subgroups; rank 3 always outside.
ROWS = ("S0[3:1] / 0,1:S0 2:R", "S0[3:1] / 0,1:R 2:R", "R / 0,1:S0", "R / 0-2:S0", "S0 / 2:R 0:R")


def _whole(spec):
    """The spec with everything replicated on the same subgroups."""
    _head, groups = spec.split(" / ")
    return "R / " + " ".join(g.split(":")[0] + ":R" for g in groups.split())


def _leaf(full, spec):
    return distribute_tensor(full.clone(), spec).requires_grad_()


def _experts(x, w, k):
    """Per row: a non-linear function that no operator rule covers."""
    return torch.stack([F.silu(row @ w).cumsum(0) ** k for row in x]) if len(x) else x @ w


def _check_rows_and_a_replicated_weight(rank):
    torch.manual_seed(0)
    full_x, full_w = torch.randn(8, 6), torch.randn(6, 5)
    plain_x, plain_w = full_x.clone().requires_grad_(), full_w.clone().requires_grad_()
    want = _experts(plain_x, plain_w, 2)
    (want.sin() * want).sum().backward()
    for spec in ROWS:
        x, w = _leaf(full_x, spec), _leaf(full_w, _whole(spec))
        mapped = local_map(_experts, spec, out_shapes=lambda x, w, k: (len(x), w.shape[1]))
        y = mapped(x, w, 2)
        assert y.spec is x.spec
        assert y.top_sizes == x.top_sizes
        assert y.is_local == (rank in x.spec.ranks)
        assert y.requires_grad
        torch.testing.assert_close(y.full_tensor(), want)
        (y.sin() * y).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain_x.grad)
        torch.testing.assert_close(w.grad.full_tensor(), plain_w.grad)
        assert w.grad.spec.has_partial()  # one term on each part, as of a matmul


@pytest.mark.dist(WORLD_SIZE)
def test_a_replicated_argument_gets_terms_of_its_gradient():
    run_world(_check_rows_and_a_replicated_weight, WORLD_SIZE)


def _check_like_an_argument(rank):
    torch.manual_seed(0)
    full = torch.randn(8, 6)
    calls = []

    def double(a, times, *, add):
        calls.append(a)
        return a * times + add, None if times else a, "text"

    for spec in (*ROWS, "R / 0,1:R 2:R", "S1[1:2] / 0,1:S0 2:R"):
        x = _leaf(full, spec)
        calls.clear()
        y, nothing, text = local_map(double, (0, None, None))(x, 2, add=1)
        assert len(calls) == x.is_local
        assert nothing is None
        assert text == ("text" if x.is_local else None)
        assert (y.spec, y.shape, y.top_sizes) == (x.spec, x.shape, x.top_sizes)
        torch.testing.assert_close(y.full_tensor(), full * 2 + 1)
        y.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.full_like(full, 2.0))
        assert not local_map(double, (0, None, None))(x.detach(), 2, add=1)[0].requires_grad
    assert local_map(torch.add, 0)(full, 1).equal(full + 1)


@pytest.mark.dist(WORLD_SIZE)
def test_a_result_may_be_like_an_argument():
    run_world(_check_like_an_argument, WORLD_SIZE)


def _check_pending_results(rank):
    torch.manual_seed(0)
    full_x, full_w = torch.randn(8, 6), torch.randn(6, 5)
    for x_spec, w_spec, y_spec in (
        ("S1[2:1] / 0,1:S1 2:R", "S0[2:1] / 0,1:S0 2:R", "P / 0,1:P 2:R"),
        ("R / 0,1:S1", "R / 0,1:S0", "R / 0,1:P"),
        ("S0 / 0,1:S1 2:R", "R / 0,1:S0 2:R", "S0 / 0,1:P 2:R"),
    ):
        x, w = _leaf(full_x, x_spec), _leaf(full_w, w_spec)
        y = local_map(torch.mm, y_spec, out_shapes=lambda x, w: (8, 5))(x, w)
        plain_x, plain_w = full_x.clone().requires_grad_(), full_w.clone().requires_grad_()
        want = plain_x @ plain_w
        torch.testing.assert_close(y.full_tensor(), want)
        y.redistribute(_whole(y_spec)).pow(2).sum().backward()
        want.pow(2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain_x.grad)
        torch.testing.assert_close(w.grad.full_tensor(), plain_w.grad)


@pytest.mark.dist(WORLD_SIZE)
def test_a_result_may_be_pending():
    run_world(_check_pending_results, WORLD_SIZE)


def _kept(x, y):
    found = (x > 0).all(1).nonzero()[:, 0]
    return x[found], found, y.sum(0)


def _check_shapes_from_data(rank):
    torch.manual_seed(1)
    full = torch.rand(12, 2) - 0.3
    plain = full.clone().requires_grad_()
    want = plain[(plain > 0).all(1)]
    spec, index = "S0[3:0:2] / 0:R 1:R 2:R", "S0 / 0:R 1:R 2:R"
    x = _leaf(full, spec)
    for _ in range(2):
        rows, found, total = local_map(_kept, (index, index, "P / 0:R 1:R 2:R"))(x, x)
    torch.testing.assert_close(rows.full_tensor(), want)
    assert rows.dtype == torch.float32
    assert found.dtype == torch.int64
    assert rows.requires_grad
    assert not found.requires_grad
    assert found.shape == (len(want),)
    assert sum(rows.top_sizes) == len(want)
    torch.testing.assert_close(total.full_tensor(), full.sum(0))
    (rows.pow(3).sum() + total.redistribute("R / 0:R 1:R 2:R").sum()).backward()
    (want.pow(3).sum() + plain.sum()).backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.dist(WORLD_SIZE)
def test_results_whose_shape_depends_on_data_tell_it():
    run_world(_check_shapes_from_data, WORLD_SIZE)


def _check_unused_and_detached(rank):
    x, w = _leaf(torch.ones(4, 2), "S0[3:1] / 0:R 1:R"), _leaf(torch.ones(2), "R / 0:R 1:R")
    y, z = local_map(lambda x, w: (x * 2, w.detach() * x.detach()), (0, 0))(x, w)
    assert z.requires_grad  # alike on every rank, whatever the function does
    (y.sum() + z.sum()).backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((4, 2), 2.0))
    torch.testing.assert_close(w.grad.full_tensor(), torch.zeros(2))


@pytest.mark.dist(WORLD_SIZE)
def test_an_argument_without_influence_has_a_zero_gradient_on_every_rank():
    run_world(_check_unused_and_detached, WORLD_SIZE)


def _check_placed_inputs(rank):
    full = torch.arange(24.0).reshape(8, 3)
    x = _leaf(full, "S0[3:1] / 0,1:S0 2:R")
    whole = "R / 0,1:S1 2:R"
    with pytest.raises(
        SpecError, match=r"argument 0 of local_map .* in_specs wants 'R / 0,1:S1 2:R'"
    ):
        local_map(lambda a: a.cumsum(0), 0, [whole])(x)
    y = local_map(lambda a: a.cumsum(0), 0, [whole], redistribute_inputs=True)(x)
    assert y.spec is hdtensor.HDSpec(y.spec.subgroups)
    assert str(y.spec) == whole
    torch.testing.assert_close(y.full_tensor(), full.cumsum(0))
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.arange(8.0, 0, -1)[:, None].expand(8, 3))


@pytest.mark.dist(WORLD_SIZE)
def test_inputs_are_refused_or_brought_to_their_specs():
    run_world(_check_placed_inputs, WORLD_SIZE)


def _raises(message, function, *args):
    with pytest.raises(SpecError, match=message):
        function(*args)


def _check_refusals(rank):
    x, w = _leaf(torch.ones(4, 2), "S0 / 0:R 1:R"), _leaf(torch.ones(2), "R / 0:R 1:R")
    other = distribute_tensor(torch.ones(2), "R / 0,2:R")
    _raises("does not lie on the subgroups", local_map(torch.mul, 0), x, other)
    _raises("does not lie on the subgroups", local_map(torch.neg, "S0 / 0:R 2:R"), x)
    _raises("positional argument 1 of 1", local_map(torch.neg, 1), x)
    _raises("2 entries for 1 positional", local_map(torch.neg, 0, ["R / 0:R", None]), x)
    _raises("in a list", local_map, torch.neg, 0, "R / 0:R")
    _raises("has 1 entries for 2 results", local_map(torch.neg, (0, 0), out_shapes=[(1,)]), x)
    _raises("neither whole nor terms", local_map(lambda x, w: (x * w, w), (0, 1)), x, w)
    for wrong in (1.5, {"y": 0}):
        _raises("out_specs is for one result a spec", local_map, torch.neg, wrong)
    for wrong in (3, {"x": "R / 0:R"}):
        _raises("in a list", local_map, torch.neg, 0, wrong)
    _raises("out_dtypes must hold", local_map(torch.neg, 0, out_dtypes="float32"), x)
    for args, named in (((x, [w]), {}), ((x, {"w": w}), {}), (([x],), {}), ((x,), {"w": (1, w)})):
        mapped = local_map(lambda *args, **named: args[0], "S0 / 0:R 1:R")
        with pytest.raises(SpecError, match="as positional arguments only"):
            mapped(*args, **named)
    factor = torch.ones(2, requires_grad=True)
    _raises("plain tensor of shape .2,. that needs a gradient", local_map(torch.mul, 0), x, factor)
    with torch.no_grad():
        assert not local_map(torch.mul, 0)(x, factor).requires_grad
    given = local_map(lambda x, w: (x * w, w), (0, 1), in_grad_specs=[None, "P / 0:R 1:R"])
    given(x, w)[0].sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), torch.full((2,), 4.0))
    if x.is_local:
        _raises("declared is", local_map(lambda a: a[:1], 0), x)
        _raises("declared is", local_map(lambda a: a.int(), 0), x)
        _raises("returned 1 results", local_map(lambda a: (a,), (0, 0)), x)
        for wrong in (None, x.to_local().detach(), {0: 1, 1: 2}):  # a tensor's rows are no results
            name = type(wrong).__name__
            _raises(f"returned {name}, .* a tuple of 2", local_map(lambda a, r=wrong: r, (0, 0)), x)
    whole = local_map(lambda a: a.int(), 0, out_dtypes=torch.int32)(x)
    assert whole.dtype == torch.int32
    assert not whole.requires_grad

    def fails(a):
        raise ValueError("one rank fails")

    with pytest.raises((ValueError, hdtensor.DisagreementError), match="one rank fails"):
        local_map(fails if rank == 1 else torch.neg, "S0 / 0:R 1:R")(x)


@pytest.mark.dist(WORLD_SIZE)
def test_what_does_not_fit_is_refused():
    run_world(_check_refusals, WORLD_SIZE)


def _check_maxima(rank):
    for spec in ("P(max) / 0:R 1:R", "R / 0,1:P(max)", "R / 0,1:P(min)", "P(product) / 0:R 1,2:R"):
        terms = _leaf(torch.ones(4, 2), _whole(spec))
        made = local_map(torch.neg, spec, out_shapes=lambda t: (4, 2))(terms)
        loss = made.redistribute(_whole(spec)).sum()
        with pytest.raises(RedistributeError, match="which term the result took is not kept"):
            loss.backward()
        local = torch.ones(4, 2, requires_grad=True)
        made = HDTensor.from_local(local, spec, shape=(4, 2))
        loss = made.redistribute(_whole(spec)).sum()
        with pytest.raises(RedistributeError, match="which term the result took is not kept"):
            loss.backward()


@pytest.mark.dist(WORLD_SIZE)
def test_no_gradient_goes_through_a_pending_maximum():
    run_world(_check_maxima, WORLD_SIZE)
