"""``x[arange(n), ids]`` where the rows are cut, beside plain torch: forward, backward and assignment under many layouts.

A function below takes ``place(tensor, spec)``, which distributes on the ranks and returns the tensor itself in the oracle,
and the layout of the tensor that is indexed.
"""

import pytest
import torch

import hdtensor
from hdtensor import HDTensor
from tests.support.world import run_world


LENGTH = 7

#: Of a tensor whose dim 0 has 7 rows: uneven, empty and whole blocks, cut further in either dim or not, ranks outside.
LAYOUTS = [
    "S0[3:1] / 0,1:R 2:R",
    "S0[3:1] / 0,1:S0 2:R",
    "S0[4:3] / 0,1:S1 2,3:S0",
    "S0[1:0] / 0,1:S0 2:R",
    "S0[1:9] / 0,1:S0 2,3:S0",
    "R / 0,1:S0 2:R",
    "R / 0,1:R 2:R",
    "R / 1,2,3:S0",
]


def _draw(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def _ids(*shape, of=5):
    """Numbers in [-of, of)."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 % (2 * of) - of


def _rows_of(layout):
    """Return the layout of an index that is cut as dim 0 of the tensor."""
    return layout.replace(":S1", ":R")


def _with_gradient(x, out):
    weight = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.double).reshape(out.shape)
    (out.square() * weight).sum().backward()
    return [out, x.grad]


def last_token(place, layout):
    x = place(_draw(LENGTH, 5).requires_grad_(), layout)
    return _with_gradient(x, x[torch.arange(LENGTH), _ids(LENGTH)])


def last_token_by_ids_that_are_cut(place, layout):
    x = place(_draw(LENGTH, 5, 3).requires_grad_(), layout)
    ids = place(_ids(LENGTH), _rows_of(layout))
    return _with_gradient(x, x[torch.arange(LENGTH), ids])


def several_of_each_row(place, layout):
    x = place(_draw(LENGTH, 5, 3).requires_grad_(), layout)
    ids = place(_ids(LENGTH, 4), _rows_of(layout))
    return _with_gradient(x, x[torch.arange(LENGTH)[:, None], ids])


def several_of_each_row_with_rows_behind(place, layout):
    x = place(_draw(LENGTH, 5, 3).requires_grad_(), layout)
    return _with_gradient(x, x[torch.arange(LENGTH), _ids(4, 1)])


def around_a_whole_dim(place, layout):
    x = place(_draw(LENGTH, 4, 5).requires_grad_(), layout)
    return _with_gradient(x, x[torch.arange(LENGTH), :, _ids(LENGTH)])


def each_token_of_each_row(place, layout):
    x = place(_draw(LENGTH, 4, 5).requires_grad_(), layout)
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(4)[None]
    return _with_gradient(x, x[rows, columns, _ids(LENGTH, 4)])


def rows_alone_and_from_the_end(place, layout):
    x = place(_draw(LENGTH, 5).requires_grad_(), layout)
    return _with_gradient(x, x[torch.arange(-LENGTH, 0)] + x[torch.arange(LENGTH)])


def chosen_elements_set(place, layout):
    x, values = _draw(LENGTH, 5), place(_draw(LENGTH), _rows_of(layout))
    rows, ids = torch.arange(LENGTH), _ids(LENGTH)
    y, z = place(x, layout), place(x.clone(), layout)
    y[rows, ids] = values
    z[rows, ids] = 3.0
    return [y, z, place(x, layout).index_put((rows, ids), values)]


def repeated_elements_added(place, layout):
    x, values = _draw(LENGTH, 5, 2), _draw(LENGTH, 4, 2)
    rows, ids = torch.arange(LENGTH)[:, None], place(_ids(LENGTH, 4) % 2, _rows_of(layout))
    y = place(x.clone(), layout)
    y.index_put_((rows, ids), place(values, _rows_of(layout)), accumulate=True)
    return [y, place(x, layout).index_put((rows, ids), values, accumulate=True)]


CASES = [
    f for name, f in list(globals().items()) if getattr(f, "__code__", None) and name[0] != "_"
]
CASES = [f for f in CASES if f.__code__.co_varnames[:2] == ("place", "layout")]


def _place(tensor, spec):
    placed = hdtensor.distribute_tensor(tensor.detach(), spec, src_data_rank=None)
    return placed.requires_grad_(tensor.requires_grad)


def _check(rank, name, layouts):
    case = globals()[name]
    for layout in layouts:
        expected = case(lambda tensor, spec: tensor, layout)
        with hdtensor.implicit_replication():
            got = case(_place, layout)
        for number, (tensor, value) in enumerate(zip(got, expected, strict=True)):
            assert isinstance(tensor, HDTensor), number
            torch.testing.assert_close(
                tensor.detach().full_tensor(),
                value.detach(),
                msg=lambda m, n=number, at=layout: f"{n} {at}: {m}",
            )


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_equals_one_device(case):
    run_world(_check, 4, case.__name__, LAYOUTS)


def _rows_in_shards(rank):
    """Row numbers that are distributed themselves, in whatever layout, and such as do not count up."""
    x, ids = _draw(LENGTH, 5), _ids(LENGTH)
    spec = "S0[3:1] / 0,1:S0 2:R"
    cut, rows = _place(x, spec), torch.arange(LENGTH)
    for layout in (spec, "R / 0,1:S0 2:R", "S0[3:1] / 0,1:R 2:S0"):
        out = cut[_place(rows, layout), _place(ids, spec)]
        assert out.spec.hdim == 0
        torch.testing.assert_close(out.full_tensor(), x[rows, ids])
    again = _place(x.clone().requires_grad_(), spec)
    again[_place(rows, spec), _place(ids, spec)].sum().backward()
    expected = x.clone().requires_grad_()
    expected[rows, ids].sum().backward()
    torch.testing.assert_close(again.grad.full_tensor(), expected.grad)
    others = rows.clone()
    others[-1] = 0  # in the last subgroup's block, so that only its rank sees it
    refusals = []
    for index in (others, _place(others, spec), _place(others, "R / 0,1:R 2:R")):
        with hdtensor.implicit_replication(), pytest.raises(hdtensor.DeductionError) as error:
            cut[index, _place(ids, spec)]
        refusals.append(str(error.value))
    with pytest.raises(hdtensor.DeductionError, match="implicit_replication"):
        cut[rows, ids]
    with hdtensor.implicit_replication(), pytest.raises(hdtensor.DeductionError) as error:
        _place(x, "S1[1:2] / 0,1:S0 2:R")[rows, ids]
    return [*refusals, str(error.value)]


@pytest.mark.dist(4)
def test_rows_that_do_not_count_up_are_refused_alike_on_every_rank():
    said = run_world(_rows_in_shards, 4)
    assert said == [said[0]] * 4
    assert all("must be R at the top tier" in text for text in said[0])


def _values_change(rank):
    """The answer is not remembered: the same shapes, other values."""
    x, ids, rows = _draw(LENGTH, 5), _ids(LENGTH), torch.arange(LENGTH)
    bottom = _place(x, "R / 0,1:S0 2:R")
    with hdtensor.implicit_replication():
        for index in (rows, rows.flip(0), rows, rows * 0):
            got = bottom[index, ids]
            assert got.to_local().numel() == (0 if rank == 3 else got.to_local().numel())
            torch.testing.assert_close(got.full_tensor(), x[index, ids])


@pytest.mark.dist(4)
def test_rows_are_looked_at_on_every_call():
    run_world(_values_change, 4)


def _no_communication(rank):
    x = _place(_draw(LENGTH, 5), "S0[4:3] / 0,1:S0 2,3:S0").requires_grad_()
    with hdtensor.implicit_replication(), hdtensor.debug.count_communication() as count:
        x[torch.arange(LENGTH), _ids(LENGTH)].square().sum().backward()
    return count.by_kind(), [tuple(t.shape) for t in (x.grad.to_local(), x.to_local())]


@pytest.mark.dist(4)
def test_rows_that_are_plain_are_taken_and_given_back_without_communication():
    assert run_world(_no_communication, 4) == [({}, [(2, 5)] * 2)] * 3 + [({}, [(1, 5)] * 2)]


def _looks_for_values(rank):
    x = torch.arange(12.0).reshape(6, 2)
    terms = _place(x, "P / 0,1:P 2:R")
    answers = []
    for spec in ("S0[3:1] / 0,1:S1 2:R", "R / 2:R", "S0[0:1] / 0:R 3:R"):
        t = _place(x, spec)
        with hdtensor.debug.count_communication() as count:
            answers.append([v in t for v in (0, 5.0, 11, 12, torch.tensor(3.0))])
        assert len(count) == 5
        assert set(count.by_tier()) == {"world"}
        assert set(count.by_reason()) == {"in (answers on every rank)"}
    answers.append([v in terms for v in (0, 5.0, 11, 12, torch.tensor(3.0))])
    row = _place(torch.tensor([0.0, 3.0]), "R / 0,1:S0 2:R")
    answers.append([row in _place(x, "S0[3:1] / 0,1:S1 2:R"), True in _place(x > 9, "R / 0,1:R")])
    with pytest.raises(TypeError, match="number or a tensor, got a str"):
        assert "3" in terms
    return answers


@pytest.mark.dist(4)
def test_a_value_is_in_a_tensor_on_every_rank_or_on_none():
    found = [True, True, True, False, True]
    assert run_world(_looks_for_values, 4) == [[*[found] * 4, [True, True]]] * 4
