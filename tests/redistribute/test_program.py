"""What one rank does in a plan, without process groups: local plans run in one process."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Replicate

from hdtensor._rank import as_rank
from hdtensor.errors import GroupError
from hdtensor.placements import HDSpec
from hdtensor.redistribute import resolve, simulate
from hdtensor.redistribute.execute import execute, execute_many
from hdtensor.redistribute.program import compile_plan
from tests.redistribute.oracle import cut, layout_of
from tests.redistribute.strategies import full_tensor, layouts, rank_sets, shapes


@st.composite
def replicated_and_layout(draw):
    shape, sets = draw(shapes()), draw(rank_sets(8))
    dst = draw(layouts(shape, sets))
    groups = [g.with_placements([Replicate()] * len(g.mesh_shape)) for g in dst.spec.subgroups]
    return layout_of(HDSpec(groups), shape), dst


@settings(max_examples=100)
@given(replicated_and_layout())
def test_a_plan_from_replicate_needs_no_communication_on_any_rank(pair):
    src, dst = pair
    plan = resolve(src.spec, dst.spec, src.shape, dst_top_sizes=dst.top_sizes)
    shards = cut(full_tensor(src.shape), src)
    want = simulate(plan, shards)

    assert plan.rank_sets() == []
    for rank in src.spec.ranks:
        with as_rank(rank):
            got = execute(plan, shards[rank])
            (fused,) = execute_many([plan], [shards[rank]])
            (donated,) = execute_many([plan], [shards[rank].clone()], donate=True)
        assert torch.equal(got, want[rank])
        assert torch.equal(donated, want[rank])
        assert torch.equal(fused, want[rank])


def plan_of(src, dst, shape):
    return resolve(HDSpec.from_text(src), HDSpec.from_text(dst), shape)


def test_only_a_plan_without_steps_returns_the_tensor_itself():
    local = torch.ones(4, 4).t()
    nothing = plan_of("R / 0:R", "R / 0:R", (4, 4))
    elsewhere = plan_of("R / 0:R 1,2:R", "R / 0:R 1,2:S0", (4, 4))
    inside = plan_of("R / 0:R 1,2:S0", "R / 0:R 1,2:R", (4, 4))
    with as_rank(0):
        assert execute(nothing, local) is local
        assert execute_many([nothing], [local])[0] is local
        for plan in (elsewhere, inside):
            got = execute(plan, local)
            assert torch.equal(got, local)
            assert got.is_contiguous()
            assert got.data_ptr() != local.data_ptr()


def test_a_rank_outside_takes_no_step():
    plan = plan_of("P / 0:R 1:R", "R / 0:R 1:R", (4,))
    with as_rank(7):
        assert execute(plan, torch.empty(0)).shape == (0,)


def test_communication_is_refused_while_a_rank_is_played():
    plan = plan_of("P / 0:R 1:R", "R / 0:R 1:R", (4,))
    with as_rank(1), pytest.raises(GroupError, match=r"ranks \[0, 1\] inside as_rank.*simulate"):
        execute(plan, torch.ones(4))


def test_programs_are_compiled_once():
    plan = plan_of("P / 0,1:S1 2:R", "R / 0,1:S1 2:R", (4, 4))

    assert compile_plan(plan, 2) is compile_plan(plan, 2)
    assert [len(step.jobs) for _, step in compile_plan(plan, 2).steps] == [2]
    assert [len(step.jobs) for _, step in compile_plan(plan, 0).steps] == [1]


def test_rounds_agree_between_plans_with_and_without_bottom_steps():
    """A top step is in the top's round whatever comes before it, so that it can share a buffer."""
    with_bottom = plan_of("P / 0,1:P 2:R", "R / 0,1:R 2:R", (4,))
    alone = plan_of("P / 0,1:R 2:R", "R / 0,1:R 2:R", (4,))

    rounds = [
        [number for number, _ in compile_plan(plan, 0).steps] for plan in (with_bottom, alone)
    ]
    outside = [number for number, _ in compile_plan(with_bottom, 2).steps]

    assert rounds[0][-1] == rounds[1][-1] == outside[-1]
    assert sorted(rounds[0]) == rounds[0]
