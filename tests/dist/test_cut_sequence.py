"""A top cut of a middle dim goes through linear layers: the merged dim is cut in strided pieces."""

import pytest
import torch
import torch.nn.functional as F

import hdtensor as hd
from tests.support.world import run_world


SPECS = [
    ("S1[3:1] / 0,1:R 2:R", "R / 0,1:S0 2:R"),
    ("S1[1:0:2] / 0,1:R 2:R 3:R", "R / 0,1:R 2:R 3:R"),
    ("S1[2:1] / 0,1:S0 2:R", "R / 0,1:R 2:R"),
]


def _check_linear(rank, batch_spec, weight_spec):
    torch.manual_seed(0)
    x, w, v = (torch.randn(*shape, dtype=torch.float64) for shape in [(2, 8, 4), (6, 4), (4, 6)])
    b = torch.randn(6, dtype=torch.float64)
    plain = [t.clone().requires_grad_() for t in (x, w, b, v)]
    batch_spec, weight_spec = hd.HDSpec.from_text(batch_spec), hd.HDSpec.from_text(weight_spec)
    whole = weight_spec.map_bottom(lambda _: hd.Replicate())
    specs = [batch_spec, weight_spec, whole, whole]
    cut = [
        hd.distribute_tensor(t.clone().requires_grad_(), spec, src_data_rank=None)
        for t, spec in zip((x, w, b, v), specs, strict=True)
    ]

    def program(x, w, b, v):
        return F.linear(F.gelu(F.linear(x, w, b)), v) + x

    expected, result = program(*plain), program(*cut)
    assert result.hdim == 1
    torch.testing.assert_close(result.detach().full_tensor(), expected.detach())
    expected.pow(2).mean().backward()
    result.pow(2).mean().backward()
    for t, p in zip(cut, plain, strict=True):
        torch.testing.assert_close(t.grad.full_tensor(), p.grad)


@pytest.mark.dist(4)
@pytest.mark.parametrize(("batch_spec", "weight_spec"), SPECS)
def test_linear_over_a_cut_sequence(batch_spec, weight_spec):
    run_world(_check_linear, 4, batch_spec, weight_spec)


def _check_merged(rank):
    x = torch.arange(48.0).reshape(2, 6, 4)
    spec = hd.HDSpec.from_text("S1[2:1] / 0,1:S2 2:R")
    merged = hd.distribute_tensor(x, spec).reshape(12, 4)
    assert str(merged.spec) == "S0x2[2:1] / 0,1:S1 2:R"
    assert merged.top_sizes == (8, 4)
    torch.testing.assert_close(merged.full_tensor(), x.reshape(12, 4))
    again = hd.distribute_tensor(x.reshape(12, 4), merged.spec)
    torch.testing.assert_close(again.to_local(), merged.to_local())
    assert merged.reshape(2, 6, 4).spec is spec
    plain = merged.redistribute("S0 / 0,1:S1 2:R")
    torch.testing.assert_close(plain.full_tensor(), x.reshape(12, 4))


@pytest.mark.dist(4)
def test_the_merged_dim_is_cut_in_strided_pieces():
    run_world(_check_merged, 4)
