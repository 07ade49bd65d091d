"""Sizes that change at every step: compiled once, or once more where how a dim divides decides."""

import operator

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hdtensor import HDSpec
from hdtensor._rank import as_rank
from hdtensor._torch_compat import abstract_mesh
from hdtensor.errors import SpecError
from hdtensor.ops.bound import BoundSpec, Layout, SymbolicBound, is_like, rebound
from tests.compile.dynamic import BATCH, PROGRAMS, Program, check, step, tensor
from tests.support.world import run_world


def _check(rank: int, name: str, options: dict) -> list[int]:
    return check(PROGRAMS[name], **options)


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "name", ["layer", "attention", "language model", "slices", "dropout", "checkpoint"]
)
def test_marked_dims_compile_once(name):
    assert run_world(_check, 4, name, {}) == [[1] * 4] * 4


@pytest.mark.dist(4)
def test_redistributes_of_each_kind_compile_once():
    assert run_world(_check, 4, "moves", {}) == [[1] * 4] * 4


@pytest.mark.dist(4)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_backends_and_dynamic_true(backend):
    sizes = ((13, 5), (21, 10), (17, 7))  # torch takes dims that start with one length for one
    options = {"backend": backend, "mark": False, "dynamic": True, "sizes": sizes}
    assert run_world(_check, 4, "mlp", options) == [[1] * 3] * 4


@pytest.mark.dist(4)
def test_sizes_become_symbols_when_they_change_first():
    graphs = run_world(_check, 4, "mlp", {"mark": False})
    assert graphs == [[1, 2, 2, 2]] * 4


def _sums(x, y, z):
    """Use operators whose backward knows sizes by other names than their forward."""
    moved = x.cumsum(-1).redistribute("R / 0,1,2,3:S0")
    return (
        moved,
        y.cumsum(-1).redistribute("S1[1:2] / 0,3:R 2:R").cumsum(0),
        z.repeat(2, 1, 1),
    )


def _check_sums(rank: int) -> list[int]:
    program = Program(
        _sums,
        lambda b, s: [
            tensor(b, s, spec="R / 1,0:S0 3:R"),
            tensor(b, s, spec=BATCH),
            tensor(b, s, 4, spec="S1[2:1] / 0,1:R 2:S2"),
        ],
    )
    return check(program, mark=False, dynamic=True, sizes=((13, 6), (21, 10)))


@pytest.mark.dist(4)
def test_sizes_that_nothing_was_done_to_keep_their_names():
    graphs = run_world(_check_sums, 4)
    assert max(counts[-1] for counts in graphs) <= 2


def _chunks(x):
    first, second = x.chunk(2, 1)
    return first.pow(2), second * 2, x.chunk(2, -1)[1]


def _check_chunks(rank: int) -> list[int]:
    program = Program(_chunks, lambda b, s: [tensor(b, s, 8, spec=BATCH)])
    return check(program, mark=False, dynamic=True, sizes=((13, 6), (21, 10), (9, 7)))


@pytest.mark.dist(4)
def test_chunks_of_open_lengths():
    graphs = run_world(_check_chunks, 4)
    assert max(counts[-1] for counts in graphs) <= 2


def _check_first_of_all(rank: int) -> None:
    """Compile before anything ran, so that the compiler meets each mesh first."""
    mlp = PROGRAMS["mlp"]
    operands = mlp.make(13, 6)
    abstract_mesh.cache_clear()
    torch._dynamo.reset()
    compiled = torch.compile(mlp.run, fullgraph=True, backend="aot_eager", dynamic=True)
    seen, eager = step(compiled, operands), step(mlp.run, mlp.make(13, 6))
    for a, b in zip(seen.values, eager.values, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.dist(4)
def test_open_sizes_compile_where_nothing_ran_before():
    run_world(_check_first_of_all, 4)


def _explicit(rank: int, options: dict) -> list[int]:
    extents = {13: (10, 3), 9: (4, 5), 17: (9, 8), 16: (14, 2)}

    def make(batch: int, length: int) -> list:
        x = tensor(batch, length, 8, spec=BATCH, top_sizes=extents[batch])
        return [x, *PROGRAMS["mlp"].make(batch, length)[1:]]

    def run(x, w1, w2):
        loss = PROGRAMS["mlp"].run(x, w1, w2)
        return x.flatten(0, 1) * 2, loss, x.redistribute("R / 0,1:R 2:R")

    return check(Program(run, make), **options)


@pytest.mark.dist(4)
def test_extents_of_a_users_choice_are_sizes_too():
    assert run_world(_explicit, 4, {}) == [[1] * 4] * 4
    assert run_world(_explicit, 4, {"mark": False}) == [[1, 2, 2, 2]] * 4


def _limited(rank: int) -> list[int]:
    mlp = PROGRAMS["mlp"]
    sizes = ((13, 9), (13, 10), (13, 12))
    for dim in (0, -3):
        with pytest.raises(SpecError, match=r"cuts dim .*Leave out min and max"):
            torch._dynamo.mark_dynamic(mlp.make(13, 9)[0], dim, min=9, max=17)
    program = Program(mlp.run, mlp.make, ((0, 1),))
    return check(program, sizes=sizes, limits={"min": 8, "max": 16})


@pytest.mark.dist(4)
def test_limits_of_lengths_that_no_tier_cuts():
    assert run_world(_limited, 4) == [[1] * 3] * 4


@pytest.mark.dist(4)
def test_blocks_of_few_rows_are_no_error_on_their_rank():
    sizes = ((4, 6), (2, 6), (13, 6), (3, 6), (9, 6))
    graphs = run_world(_check, 4, "mlp", {"sizes": sizes})
    assert max(counts[-1] for counts in graphs) <= 3


def _guards(rank: int) -> list[int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")
    counts = []
    other = "S0[1:3] / 0,1:R 2:R"
    for spec, top_sizes in [
        (BATCH, None),
        (BATCH, None),
        (other, None),
        (BATCH, (8, 0)),
        (BATCH, None),
    ]:
        x = tensor(8, 2, spec=spec, top_sizes=top_sizes)
        assert compiled(x)._spec is (x * 2)._spec
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.dist(4)
def test_another_spec_or_cut_is_another_program():
    assert run_world(_guards, 4) == [[1, 1, 2, 3, 3]] * 4


SPEC = HDSpec.from_text("S0[3:1] / 0,1:R 2:R")


def _bound(length: int, top_sizes: tuple[int, ...]) -> BoundSpec:
    return BoundSpec.of(SPEC, (length, 2), (2, 1), torch.float32, top_sizes)


def test_a_program_for_one_size_is_rebound_to_another():
    with as_rank(0):
        traced = _bound(13, (9, 4))
        assert traced.has_own_cut
        assert rebound(traced, (9, 2), (2, 1), None) is _bound(9, (6, 3))
        assert not _bound(13, (10, 3)).has_own_cut
        layout = Layout(SPEC, torch.float32, 0, False, False)
        assert rebound(layout, (13, 2), (2, 1), (10, 3)) is _bound(13, (10, 3))
        assert is_like(traced, _bound(9, (6, 3)))
        assert not is_like(traced, layout)


def test_open_sizes_are_in_no_table():
    size = ShapeEnv().create_unbacked_symint()
    with as_rank(0):
        before = len(BoundSpec._interned)
        bound = BoundSpec.of(SPEC, (size, 2), (2, 1), torch.float32, (size - 1, 1))
        assert isinstance(bound, SymbolicBound)
        assert len(BoundSpec._interned) == before
    with pytest.raises(TypeError, match="symbolic"):
        hash(bound)
    assert operator.is_(bound.local_shape()[1], 2)
