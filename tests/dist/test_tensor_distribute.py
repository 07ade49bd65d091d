"""``distribute_tensor``: every call form, layout, dtype and shape; what each rank holds, by plain torch."""

import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor import (
    HDSpec,
    HDTensor,
    RedistributeError,
    SpecError,
    Subgroup,
    distribute_tensor,
)
from tests.placements.strategies import expected_local, expected_top_sizes
from tests.redistribute.strategies import full_tensor, layouts, rank_sets, sample, shapes
from tests.support.world import run_world


WORLD_SIZE = 4
SPEC = "S0[3:1] / 0,1:S1 2:R"


@st.composite
def any_layouts(draw):
    return draw(layouts(draw(shapes()), draw(rank_sets(WORLD_SIZE))))


def _check_layout(rank, layout, source):
    full = full_tensor(layout.shape)
    mine = full if source in (None, rank) else torch.full_like(full, torch.nan)
    kept = mine.clone()
    x = distribute_tensor(mine, layout.spec, top_sizes=layout.top_sizes, src_data_rank=source)
    assert x.shape == full.shape
    assert x.dtype == full.dtype
    assert x.is_local == (rank in layout.spec.ranks)
    assert x.top_sizes == layout.top_sizes
    assert x.hsize == len(layout.spec.subgroups)
    local = x.to_local()
    if not x.is_local:
        assert local.shape == (0,)
    elif isinstance(layout.spec.top, Shard | Replicate) and not layout.spec.has_partial():
        assert torch.equal(local, expected_local(full, layout.spec, rank, layout.top_sizes))
    assert torch.equal(x.full_tensor(), full)
    assert torch.equal(mine.nan_to_num(), kept.nan_to_num())  # the caller's tensor is left alone


def _check_layouts(rank, found):
    for i, layout in enumerate(found):
        _check_layout(rank, layout, (0, None, 2, 3)[i % 4])


@pytest.mark.dist(WORLD_SIZE)
def test_every_rank_holds_what_the_spec_says():
    run_world(_check_layouts, WORLD_SIZE, sample(any_layouts(), 120))


def _check_call_forms(rank):
    full = torch.arange(24.0).reshape(4, 6)
    pair, single = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])
    forms = [
        distribute_tensor(full, HDSpec.from_text(SPEC)),
        distribute_tensor(full, SPEC),
        distribute_tensor(
            full, [(pair, [Shard(1)]), (single, [Replicate()])], hdim=0, top_ratio=(3, 1)
        ),
        distribute_tensor(
            full, [((0, 1), Shard(-1)), ((2,), Replicate())], hdim=0, top_sizes=(3, 1)
        ),
    ]
    for x in forms:
        assert x.hdim == 0
        assert x.top_sizes == (3, 1)
        assert torch.equal(x.full_tensor(), full)
        if x.is_local:
            want = full[:3, 3 * rank : 3 * rank + 3] if rank < 2 else full[3:]
            assert torch.equal(x.to_local(), want)
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    for x, spec in [
        (distribute_tensor(full, grid, [Shard(0), Shard(1)]), "R / 0-3(2x2):S0,S1"),
        (distribute_tensor(full, grid), "R / 0-3(2x2):R,R"),
        (distribute_tensor(full, pair, [Partial()]), "R / 0,1:P"),
    ]:
        assert str(x.spec) == spec
        assert x.hsize == 1
        assert torch.equal(x.full_tensor(), full)


@pytest.mark.dist(WORLD_SIZE)
def test_call_forms():
    run_world(_check_call_forms, WORLD_SIZE)


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.complex64,
    torch.complex128,
]
NO_ARITHMETIC = (torch.float8_e4m3fn, torch.uint16)


def as_bytes(x):
    return (torch.view_as_real(x) if x.is_complex() else x).contiguous().view(-1).view(torch.uint8)


def _check_dtypes(rank):
    for dtype in DTYPES:
        full = torch.randint(0, 2, (5, 3)).to(dtype)
        for source in (0, None, 3):
            for spec in (SPEC, "R / 0-2:S0", "S0[0:1] / 0:S1 2,1:S0"):
                got = distribute_tensor(full, spec, src_data_rank=source).full_tensor()
                assert got.dtype == dtype
                assert torch.equal(as_bytes(got), as_bytes(full)), f"{dtype} {source} {spec}"
        # What cannot be summed says so on every rank, also on those that only wait for the result.
        pending = distribute_tensor(full, "P / 0,1:P 2:R")
        if dtype in NO_ARITHMETIC:
            with pytest.raises(RedistributeError, match="no arithmetic"):
                pending.full_tensor()
        else:
            assert torch.equal(pending.full_tensor(), full)


@pytest.mark.dist(WORLD_SIZE)
def test_dtypes():
    run_world(_check_dtypes, WORLD_SIZE)


def _check_strange_inputs(rank):
    wide = torch.arange(48.0).reshape(6, 8)
    z = torch.randn(4, 6, dtype=torch.complex64)
    inputs = [
        wide.t()[:4, :6],
        wide[::2, ::3].expand(3, 3),
        torch.arange(6.0).expand(4, 6),
        z.conj(),
        z.imag,
        z.conj().imag,  # a lazy negation
        torch.tensor(3.5),
        torch.ones(0, 5),
        torch.ones(0),
    ]
    for full in inputs:
        for source in (0, None, 2):
            spec = SPEC if full.ndim == 2 else "R / 0,1:R 2:R"
            x = distribute_tensor(full, spec, src_data_rank=source)
            assert x.is_contiguous()
            assert x.to_local().is_contiguous()
            assert not x.to_local().is_conj()
            assert torch.equal(x.full_tensor(), full.resolve_conj().resolve_neg())


@pytest.mark.dist(WORLD_SIZE)
def test_inputs_that_are_not_plain_and_contiguous():
    run_world(_check_strange_inputs, WORLD_SIZE)


def _check_requires_grad(rank):
    leaf = torch.ones(4, 6, requires_grad=True)
    for source in (0, None):
        x = distribute_tensor(leaf, SPEC, src_data_rank=source)
        assert x.is_leaf
        assert x.requires_grad
        x.sum().backward()
        assert leaf.grad is None  # the new tensor is a leaf of its own
        assert torch.equal(x.grad.full_tensor(), torch.ones(4, 6))
    on_meta = distribute_tensor(torch.ones(4, 6, device="meta"), SPEC)
    assert on_meta.device.type == "meta"
    assert (on_meta * 2).to_local().shape == on_meta.to_local().shape


@pytest.mark.dist(WORLD_SIZE)
def test_requires_grad_and_meta():
    run_world(_check_requires_grad, WORLD_SIZE)


def test_default_cut_is_torch_chunk():
    spec = HDSpec([Subgroup((0,)), Subgroup((1,)), Subgroup((2,))], Shard(0))
    x = distribute_tensor(torch.arange(5.0), spec)
    assert x.top_sizes == expected_top_sizes(spec, (5,)) == (2, 2, 1)
    assert isinstance(x, HDTensor)


def _check_dtensor_forms(rank):
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    full = torch.arange(35.0).reshape(5, 7)
    x = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    assert x.device_mesh is mesh
    assert x.placements == (Shard(0), Shard(1))
    for y in (
        x.redistribute(mesh, [Shard(1), Replicate()]),
        x.redistribute(placements=[Shard(-1), Replicate()]),
        x.redistribute([(mesh, [Shard(1), Replicate()])]),
    ):
        assert y.placements == (Shard(1), Replicate())
        assert torch.equal(y.to_local(), full.chunk(2, 1)[rank // 2])
    two = x.redistribute([((0, 1), [Shard(1)]), ((3,), [Replicate()])], hdim=0, top_ratio=(3, 2))
    assert str(two.spec) == "S0[3:2] / 0,1:S1 3:R"
    assert torch.equal(two.full_tensor(), full)
    for name in ("placements", "device_mesh"):
        with pytest.raises(AttributeError, match=f"2 subgroups has no {name} of its own"):
            getattr(two, name)
    for spec, placements, message in (
        (None, None, "redistribute takes a spec, or the placements"),
        (None, [Shard(0)], "placements go with a DeviceMesh"),
        ("R / 0:R", [Shard(0)], "placements go with a DeviceMesh"),
    ):
        with pytest.raises(SpecError, match=message):
            two.redistribute(spec, placements)


@pytest.mark.dist(WORLD_SIZE)
def test_a_tensor_of_one_subgroup_speaks_as_a_dtensor_does():
    run_world(_check_dtensor_forms, WORLD_SIZE)
