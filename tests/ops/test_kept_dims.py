"""A view that leaves a dim as it is leaves its cut there, whatever its extents."""

import pytest
import torch

import hdtensor as hd


CUT = [
    ((1, 1, 8), "S1 / 0,1:R 2:R", None),
    ((1, 6, 8), "S1 / 0,1:S2 2:R", (6, 0)),
    ((1, 1, 1), "R / 0,1:S1 2:S2", None),
    ((8, 0), "S1 / 0,1:S0 2:R", None),
]


def _cut(shape, spec, top_sizes):
    return hd.distribute_tensor(torch.ones(shape), spec, top_sizes=top_sizes, src_data_rank=None)


@pytest.mark.parametrize(("shape", "spec", "top_sizes"), CUT)
def test_a_view_of_the_same_shape_is_cut_alike(shape, spec, top_sizes):
    with hd.as_rank(0):
        x = _cut(shape, spec, top_sizes)
        for same in (x.view(shape), x.reshape(shape), x.view_as(x)):
            assert same._spec is x._spec


def test_where_a_cut_goes_depends_on_no_extents():
    with hd.as_rank(0):
        for top_sizes in ((4, 2), (6, 0), (0, 6)):
            view = _cut((1, 6, 8), "S1 / 0,1:R 2:R", top_sizes).view(1, 6, 2, 4)
            assert (str(view.spec), view.top_sizes) == ("S1 / 0,1:R 2:R", top_sizes)
        joined = _cut((1, 6, 8), "S1 / 0,1:R 2:R", (6, 0)).view(6, 8)
        assert (str(joined.spec), joined.top_sizes) == ("S0 / 0,1:R 2:R", (6, 0))


@pytest.mark.parametrize(("shape", "spec", "top_sizes"), CUT)
def test_a_compiled_view_is_cut_as_the_eager_one(shape, spec, top_sizes):
    def program(x):
        return x.unsqueeze(0), x.transpose(0, 1)

    with hd.as_rank(0):
        torch._dynamo.reset()
        x = _cut(shape, spec, top_sizes).detach().requires_grad_()
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
        for found, expected in zip(compiled(x), program(x), strict=True):
            assert (found.spec, found.top_sizes) == (expected.spec, expected.top_sizes)
