"""The flat collectives on every dtype, and how many of them a redistribute starts."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from hdtensor.collectives import split
from hdtensor.collectives.groups import ensure_groups, group_of
from hdtensor.debug import count_communication
from hdtensor.errors import RedistributeError
from hdtensor.placements import HDSpec, Subgroup
from hdtensor.redistribute import resolve
from hdtensor.redistribute.execute import convert, execute, execute_many, make_converter
from tests.redistribute.oracle import layout_of
from tests.support.world import run_world


WORLD_SIZE = 3
REALS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMBINE = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


def reduced(terms, op):
    if op == "avg":
        return sum(terms) / len(terms)
    return functools.reduce(COMBINE[op], terms)


def ops_of(dtype):
    if dtype.is_complex:
        return ("sum", "avg", "product")
    return ("sum", "product", "max", "min", *(["avg"] if dtype.is_floating_point else []))


def _check_reductions(rank):
    world = group_of(range(WORLD_SIZE))
    for dtype in (*REALS, *INTEGERS, torch.bool, torch.complex64):
        terms = [(torch.arange(6) % (r + 2)).to(dtype) for r in range(WORLD_SIZE)]
        if dtype.is_complex:
            terms = [term * (1 + 2j) for term in terms]
        for name in ops_of(dtype):
            want, op = reduced(terms, name), Partial(name)
            mine = terms[rank].clone()
            whole = split.all_reduce(mine, op, WORLD_SIZE, world)()
            even = split.reduce_scatter(mine, (2, 2, 2), op, WORLD_SIZE, world)()
            uneven = split.reduce_scatter(mine, (1, 0, 5), op, WORLD_SIZE, world)()
            case = f"{dtype} {name}"
            for got, part in (
                (whole, want),
                (even, want[2 * rank : 2 * rank + 2]),
                (uneven, want.split((1, 0, 5))[rank]),
            ):
                assert got.dtype == dtype, case
                torch.testing.assert_close(got, part, msg=case)
            assert torch.equal(mine, terms[rank]), case


def _check_moves(rank):
    world = group_of(range(WORLD_SIZE))
    dtypes = (*REALS, *INTEGERS, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn)
    for dtype in dtypes:
        full = torch.arange(9).to(torch.float32).to(dtype)
        as_bytes = full.view(torch.uint8)
        for sizes in ((3, 3, 3), (2, 0, 7)):
            gathered = split.all_gather(full.split(sizes)[rank], sizes, world)()
            assert torch.equal(gathered.view(torch.uint8), as_bytes), dtype
        table = torch.tensor([[1, 0, 2], [0, 3, 1], [2, 2, 0]])
        sent, received = table[rank].tolist(), table[:, rank].tolist()
        mine = torch.full((sum(sent),), rank).to(torch.float32).to(dtype)
        got = split.all_to_all(mine, sent, received, world)()
        senders = torch.arange(3).to(torch.float32).to(dtype).tolist()
        want = [value for value, n in zip(senders, received, strict=True) for _ in range(n)]
        assert got.tolist() == want, dtype


@pytest.mark.dist(WORLD_SIZE)
def test_reductions_of_every_dtype():
    run_world(_check_reductions, WORLD_SIZE)


@pytest.mark.dist(WORLD_SIZE)
def test_moves_of_every_dtype_are_exact():
    run_world(_check_moves, WORLD_SIZE)


@pytest.mark.parametrize(
    ("op", "dtype", "text"),
    [
        ("avg", torch.int64, "no exact result"),
        ("avg", torch.bool, "no exact result"),
        ("max", torch.complex64, "have no order"),
        ("sum", torch.float8_e5m2, "Convert to bfloat16"),
    ],
)
def test_reductions_without_a_meaning_are_refused_before_anything_is_sent(op, dtype, text):
    src, dst = HDSpec.from_text(f"P({op}) / 0:R 1:R"), HDSpec.from_text("R / 0:R 1:R")

    with pytest.raises(RedistributeError, match=text):
        execute(resolve(src, dst, (2,)), torch.zeros(2).to(dtype))


def test_a_local_tensor_of_another_shape_is_refused():
    src, dst = HDSpec.from_text("S0 / 0:R 1:R"), HDSpec.from_text("R / 0:R 1:R")

    with pytest.raises(
        RedistributeError, match=r"rank 0 has a local tensor of shape \(4,\).*\(2,\)"
    ):
        execute(resolve(src, dst, (4,)), torch.zeros(4))


def _count(function):
    with count_communication() as count:
        function()
    return len(count)


def _check_counts(rank):
    pairs = [
        ("P / 0,1:S1 2:R", "R / 0,1:S1 2:R"),
        ("P / 0,1:S1 2:R", "S0 / 0,1:S1 2:R"),
        ("S0[3:1] / 0,1:S1 2:R", "R / 0,1:S1 2:R"),
        ("P / 0,1:P 2:R", "S0 / 0,1:S1 2:R"),
        ("R / 0,1:R 2:R", "S0[3:1] / 0,1:S1 2:R"),
    ]
    counts = []
    for src, dst in pairs:
        plan = resolve(HDSpec.from_text(src), HDSpec.from_text(dst), (4, 4))
        ensure_groups(plan.rank_sets())
        local = torch.ones(layout_of(src, (4, 4)).local_shape(rank))
        counts.append(_count(functools.partial(execute, plan, local)))
        expected = sum(rank in collective.ranks for collective in plan.collectives())
        assert counts[-1] == expected, (src, dst)
    return counts


@pytest.mark.dist(WORLD_SIZE)
def test_each_rank_starts_the_collectives_of_the_plan_and_no_other():
    by_rank = run_world(_check_counts, WORLD_SIZE)

    assert by_rank == [[1, 1, 1, 2, 0], [1, 1, 1, 2, 0], [2, 2, 2, 2, 0]]


def _check_fusion(rank):
    src, dst = HDSpec.from_text("P / 0,1:S1 2:R"), HDSpec.from_text("R / 0,1:S1 2:R")
    norms = HDSpec.from_text("P / 0,1:P 2:R"), HDSpec.from_text("R / 0,1:R 2:R")
    plans = [resolve(src, dst, (n, 8)) for n in range(1, 9)]
    plans += [resolve(*norms, (n,)) for n in range(1, 5)]  # bottom step first: another round
    ensure_groups([ranks for plan in plans for ranks in plan.rank_sets()])
    generator = torch.Generator().manual_seed(rank)
    locals_ = [
        torch.randint(9, plan.steps[0].src.local_shape(rank), generator=generator).float()
        if rank < 2 or plan.src is src
        else torch.ones(plan.shape)
        for plan in plans
    ]
    one_by_one = [execute(plan, local) for plan, local in zip(plans, locals_, strict=True)]
    got = []

    counts = [
        _count(lambda: got.extend(execute_many(plans, locals_))),
        _count(lambda: execute_many(plans[:8], locals_[:8], bucket_bytes=4 * 8 * 3)),
        _count(lambda: execute_many(plans[:8], [x.double() for x in locals_[:8]])),
        _count(lambda: execute_many([], [])),
    ]

    for fused, alone in zip(got, one_by_one, strict=True):
        assert torch.equal(fused, alone)
    return counts


@pytest.mark.dist(WORLD_SIZE)
def test_like_collectives_of_many_tensors_share_a_buffer():
    by_rank = run_world(_check_fusion, WORLD_SIZE)

    # Matrices: one all-reduce per group. Vectors: one in the subgroup, one over all three ranks.
    assert [counts[0] for counts in by_rank] == [3, 3, 3]
    # Halves of n rows have 16 n bytes: 1 + 2 + 3, 4 + 5, 6, 7, 8 fill buffers of 96.
    assert [counts[1] for counts in by_rank] == [5, 5, 10]
    assert [counts[2] for counts in by_rank] == [1, 1, 2]
    assert [counts[3] for counts in by_rank] == [0, 0, 0]


def _check_converters(rank):
    line = Subgroup(range(WORLD_SIZE))
    ensure_groups([], [line])
    full = torch.arange(42.0).reshape(7, 6)
    S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
    held = {
        S0: full.split((3, 3, 1))[rank],
        S1: full.split(2, 1)[rank],
        R: full,
        P: full * (rank - 1) + full / 3,
    }
    for src, local in held.items():
        for dst in (S0, S1, R):
            got = make_converter(line, [src], [dst], (7, 6))(local)
            torch.testing.assert_close(got, held[dst], msg=f"{src} -> {dst}")
            assert got.is_contiguous() or src is dst
        whole = functools.partial(convert, local, line.with_placements([src]), [R], (7, 6))
        assert _count(whole) == (src is not R)
    lazy = torch.full((2,), 1 + rank * 1j).conj()
    gathered = make_converter(line, [S0], [R], (6,))(lazy)
    assert gathered.tolist() == [1 + 0j, 1 + 0j, 1 - 1j, 1 - 1j, 1 - 2j, 1 - 2j]
    kept = make_converter(line, [R], [P], (7, 6))(full)
    assert torch.equal(kept, full if rank == 0 else torch.zeros_like(full))


@pytest.mark.dist(WORLD_SIZE)
def test_converters_equal_cutting_the_block():
    run_world(_check_converters, WORLD_SIZE)


def _check_tracing(rank):
    line = Subgroup(range(WORLD_SIZE))
    ensure_groups([], [line])
    names = {}
    for src, dst, shape in [
        (Partial(), Replicate(), (7, 6)),
        (Shard(0), Replicate(), (3 if rank < 2 else 1, 6)),
        (Shard(1), Replicate(), (7, 2)),
        (Partial(), Shard(1), (7, 6)),
    ]:
        converter = make_converter(line, [src], [dst], (7, 6))
        local = torch.randn(shape)
        graph = make_fx(converter, tracing_mode="fake")(local)
        calls = [str(n.target) for n in graph.graph.nodes if "hdtensor" in str(n.target)]
        names[f"{src} -> {dst}"] = calls
        torch.testing.assert_close(graph(local), converter(local))
    dist.barrier()
    return names


@pytest.mark.dist(WORLD_SIZE)
def test_converters_trace_to_operators():
    names = run_world(_check_tracing, WORLD_SIZE)[0]

    assert names == {
        "P(sum) -> R": ["hdtensor.split_all_reduce.default"],
        "S(0) -> R": ["hdtensor.split_all_gather.default"],
        "S(1) -> R": ["hdtensor.split_all_gather.default"],
        "P(sum) -> S(1)": ["hdtensor.split_reduce_scatter.default"],
    }
