"""Users' cases B: extents that do not divide."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor import HDSpec, HDTensor, SpecError, Subgroup, distribute_tensor, item
from tests.support.world import run_world


WORLD_SIZE = 4


def cut(full, spec, **options):
    return distribute_tensor(full, spec, src_data_rank=None, **options)


def _check_own_widths(rank):
    # Case 9: widths 2, 3, 4, 5 are no torch.chunk of 14. Case 10: rows 2, 3, 4, 5 gave four global shapes.
    for dim, text in [(1, r"\(2, 14\)"), (0, r"\(14, 2\)")]:
        shape = [2, 2]
        shape[dim] = rank + 2
        with pytest.raises(SpecError, match=text) as caught:
            HDTensor.from_local(torch.ones(shape), f"R / 0-3:S{dim}")
        for r in (0, 1, 3):  # rank 2 happens to have the expected extent
            assert f"rank {r} has" in str(caught.value)
        # One subgroup a rank holds any extents.
        local = torch.full(shape, float(rank))
        x = HDTensor.from_local(local, f"S{dim} / 0:R 1:R 2:R 3:R")
        want = torch.cat(
            [torch.full_like(x.full_tensor().narrow(dim, 0, r + 2), r) for r in range(4)], dim
        )
        assert x.top_sizes == (2, 3, 4, 5)
        assert torch.equal(x.full_tensor(), want)


@pytest.mark.dist(WORLD_SIZE)
def test_cases_9_and_10_shards_that_make_no_tensor():
    run_world(_check_own_widths, WORLD_SIZE)


def _check_column_then_row(rank):
    for width, hidden, batch in itertools.product((5, 8), (2, 5), (1, 3)):
        generator = torch.Generator().manual_seed(width)
        x, up, down = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((batch, width), (hidden, width), (width, hidden))
        )
        want_up, want_down = up.clone().requires_grad_(), down.clone().requires_grad_()
        want = F.linear(F.gelu(F.linear(x, want_up)), want_down)
        want.square().sum().backward()
        for groups in ("0-3:{}", "0-2:{} 3:{}"):

            def spec(placement, groups=groups):
                return f"R / {groups.replace('{}', placement)}"

            a, b = cut(up, spec("S0")).requires_grad_(), cut(down, spec("S1")).requires_grad_()
            got = F.linear(F.gelu(F.linear(cut(x, spec("R")), a)), b)
            assert torch.allclose(got.detach().full_tensor(), want)
            got = got.redistribute(spec("R"))
            got.square().sum().backward()
            assert torch.allclose(a.grad.full_tensor(), want_up.grad)
            assert torch.allclose(b.grad.full_tensor(), want_down.grad)


@pytest.mark.dist(WORLD_SIZE)
def test_case_11_column_then_row_cut_of_any_width():
    run_world(_check_column_then_row, WORLD_SIZE)


def _check_several_axes(rank):
    full = torch.arange(15.0).reshape(5, 3)
    choices = (Shard(0), Shard(1), Replicate(), Partial())
    for mesh, ranks in [((2, 2), (0, 1, 2, 3)), ((1, 3), (3, 0, 1)), ((2, 1), (2, 1))]:
        for src in itertools.product(choices, repeat=2):
            x = cut(full, HDSpec([Subgroup(ranks, src, mesh)]))
            assert torch.equal(x.full_tensor(), full), (mesh, src)
            for dst in itertools.product(choices, repeat=2):
                y = x.redistribute(HDSpec([Subgroup(ranks, dst, mesh)]))
                assert torch.equal(y.full_tensor(), full), (mesh, src, dst)


@pytest.mark.dist(WORLD_SIZE)
def test_case_12_several_axes_on_one_dim():
    run_world(_check_several_axes, WORLD_SIZE)


BATCH_CUTS = [
    ("R / 0-3:S0", None),
    ("S0 / 0,1:R 2:R", (4, 6)),
    ("S0[0:1] / 0:R 1-3:S0", None),
    ("S0 / 0:R 1:R 2:R", (1, 0, 9)),
]


def _check_flatten_and_loss(rank):
    full = torch.randn(10, 8, dtype=torch.float64)
    labels = torch.randint(0, 8, (10,))
    labels[[0, 1, 5]] = -100  # unlike counts in the blocks
    weight = torch.rand(8, dtype=torch.float64) + 0.5
    for spec, sizes in BATCH_CUTS:
        x = cut(full, spec, top_sizes=sizes).requires_grad_()
        flat = x.view(80)
        assert torch.equal(flat.detach().full_tensor(), full.view(80))
        assert (
            torch.equal(flat.view(5, 16).detach().full_tensor(), full.view(5, 16))
            if sizes == (4, 6)
            else True
        )
        y = cut(labels, spec, top_sizes=sizes)
        whole = x.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
        for options in ({}, {"weight": weight}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
            plain = full.clone().requires_grad_()
            want = F.cross_entropy(plain, labels, **options)
            want.backward()
            ours = {k: cut(v, whole) if k == "weight" else v for k, v in options.items()}
            x.grad = None
            loss = F.cross_entropy(x, y, **ours)
            loss.backward()
            assert item(loss) == pytest.approx(want.item(), rel=1e-12), (spec, options)
            assert torch.allclose(x.grad.full_tensor(), plain.grad), (spec, options)


@pytest.mark.dist(WORLD_SIZE)
def test_case_18_flatten_and_cross_entropy_over_an_uneven_batch():
    run_world(_check_flatten_and_loss, WORLD_SIZE)
