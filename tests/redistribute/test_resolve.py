"""Which steps ``resolve`` chooses, row by row of its tables."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor._torch_compat import StridedShard
from hdtensor.errors import SpecError, TopologyError
from hdtensor.placements import Box, HDSpec, Subgroup
from hdtensor.redistribute import resolve
from hdtensor.redistribute.bottom import bottom_steps
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
)
from hdtensor.redistribute.exchange import num_lacking
from hdtensor.redistribute.steps import (
    BatchedSendRecv,
    BatchedSendReduce,
    BottomStep,
    LocalStep,
    SplitAllGather,
    SplitAllReduce,
    SplitReduceScatter,
)


SUM = Partial()


def plan_of(src, dst, shape, **sizes):
    return resolve(HDSpec.from_text(src), HDSpec.from_text(dst), shape, **sizes)


def summary(plan):
    """The steps as text: what each does, and over which ranks it communicates."""
    out = []
    for step in plan.steps:
        kinds = {type(c).__name__ for c in step.collectives}
        ranks = [list(c.ranks) for c in step.collectives]
        where = "" if step.index is None else f"[{step.index}]"
        name = type(step).__name__ + where
        out.append(" ".join([name, *sorted(kinds), *map(str, ranks)]))
    return out


# Fig. 7, the branch "same HSize, same HDim".
@pytest.mark.paper("5.1")
@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("S0 / 0,1:S1 2,3:R", "S0 / 0,1:S1 2,3:R", []),
        ("P / 0,1:S1 2,3:R", "P / 0,1:S1 2,3:R", []),
        ("R / 0,1:P 2,3:R", "R / 0,1:R 2,3:R", ["BottomStep[0] AllReduce [0, 1]"]),
        ("S0 / 0,1:P 2,3:R", "S0 / 0,1:S1 2,3:R", ["BottomStep[0] ReduceScatter [0, 1]"]),
        ("P / 0,1:S1 2,3:R", "P / 0,1:R 2,3:R", ["BottomStep[0] AllGather [0, 1]"]),
        ("S0 / 0,1:S0 2,3:R", "S0 / 0,1:S1 2,3:R", ["BottomStep[0] AllToAll [0, 1]"]),
        ("S0 / 0,1:R 2,3:R", "S0 / 0,1:R 2,3:S1", ["LocalStep"]),
        ("S0 / 0,1:R 2,3:R", "S0 / 0,1:R 2,3:P", ["LocalStep[1]"]),
        (  # each subgroup decides for itself
            "S0 / 0,1:P 2,3:S1",
            "S0 / 0,1:R 2,3:R",
            ["BottomStep[0] AllReduce [0, 1]", "BottomStep[1] AllGather [2, 3]"],
        ),
    ],
)
def test_same_top_is_resolved_inside_the_subgroups(src, dst, steps):
    assert summary(plan_of(src, dst, (8, 4))) == steps


@pytest.mark.paper("Fig. 8")
def test_bottom_collectives_move_these_cells():
    left, right = Box((0, 0), (2, 2)), Box((0, 2), (2, 4))
    whole = Box((0, 0), (2, 4))

    def only(src, dst):
        (step,) = plan_of(f"R / 0,1:{src}", f"R / 0,1:{dst}", (2, 4)).steps
        assert isinstance(step, BottomStep)
        return step.collectives

    assert only("P", "R") == (AllReduce(ranks=(0, 1), cells=(whole,), op=SUM, terms=(0, 1)),)
    assert only("P", "S1") == (ReduceScatter(ranks=(0, 1), cells=((left,), (right,)), op=SUM),)
    assert only("S1", "R") == (AllGather(ranks=(0, 1), cells=((left,), (right,))),)


@pytest.mark.paper("Fig. 9")
def test_split_all_reduce_runs_over_the_holders_of_each_cell():
    (step,) = plan_of("P / 0,1:S1 2:R", "R / 0,1:S1 2:R", (4, 4)).steps

    assert isinstance(step, SplitAllReduce)
    assert step.collectives == (
        AllReduce(ranks=(0, 2), cells=(Box((0, 0), (4, 2)),), op=SUM, terms=(0, 2)),
        AllReduce(ranks=(1, 2), cells=(Box((0, 2), (4, 4)),), op=SUM, terms=(1, 2)),
    )


@pytest.mark.paper("Fig. 9")
def test_split_reduce_scatter_gives_each_owner_its_cells():
    (step,) = plan_of("P / 0,1:S1 2:R", "S0[3:1] / 0,1:S1 2:R", (4, 4)).steps

    assert isinstance(step, SplitReduceScatter)
    assert step.collectives == (
        ReduceScatter(ranks=(0, 2), cells=((Box((0, 0), (3, 2)),), (Box((3, 0), (4, 2)),)), op=SUM),
        ReduceScatter(ranks=(1, 2), cells=((Box((0, 2), (3, 4)),), (Box((3, 2), (4, 4)),)), op=SUM),
    )


@pytest.mark.paper("Fig. 9")
def test_split_all_gather_sends_each_cell_to_those_who_lack_it():
    (step,) = plan_of("S0[3:1] / 0,1:S1 2:R", "R / 0,1:S1 2:R", (4, 4)).steps

    assert isinstance(step, SplitAllGather)
    assert step.collectives == (
        AllGather(ranks=(0, 2), cells=((Box((0, 0), (3, 2)),), (Box((3, 0), (4, 2)),))),
        AllGather(ranks=(1, 2), cells=((Box((0, 2), (3, 4)),), (Box((3, 2), (4, 4)),))),
    )


@pytest.mark.paper("Fig. 9")
def test_cells_are_cut_by_all_subgroups_not_by_a_common_divisor():
    (step,) = plan_of("P / 0-2:S1 3,4:S1", "R / 0-2:S1 3,4:S1", (2, 6)).steps

    assert [(c.ranks, c.cells) for c in step.collectives] == [
        ((0, 3), (Box((0, 0), (2, 2)),)),
        ((1, 3), (Box((0, 2), (2, 3)),)),
        ((1, 4), (Box((0, 3), (2, 4)),)),
        ((2, 4), (Box((0, 4), (2, 6)),)),
    ]


def test_equally_many_holders_pair_off_and_unequally_many_share_one_group():
    (paired,) = plan_of("P / 0,1:R 2,3:R", "R / 0,1:R 2,3:R", (4,)).steps
    (shared,) = plan_of("P / 0,1:R 2:R", "R / 0,1:R 2:R", (4,)).steps

    assert [(c.ranks, c.terms) for c in paired.collectives] == [((0, 2), (0, 2)), ((1, 3), (1, 3))]
    assert [(c.ranks, c.terms) for c in shared.collectives] == [((0, 1, 2), (0, 2))]


# Fig. 7, the branch "same HSize, other HDim, same DG union".
@pytest.mark.paper("5.2")
@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("R / 0,1:S1 2,3:R", "S0 / 0,1:S1 2,3:R", ["LocalStep"]),
        ("R / 0,1:S1 2,3:R", "P / 0,1:S1 2,3:R", ["LocalStep"]),
        ("S0 / 0,1:S1 2,3:R", "P / 0,1:S1 2,3:R", ["LocalStep"]),
        ("R / 0,1:S1 2,3:R", "P(max) / 0,1:S1 2,3:R", []),
        ("P / 0,1:S1 2,3:S1", "R / 0,1:S1 2,3:S1", ["SplitAllReduce AllReduce [0, 2] [1, 3]"]),
        ("P / 0:R 1:R", "P(max) / 0:R 1:R", ["SplitAllReduce AllReduce [0, 1]"]),
        ("S0 / 0:R 1:R", "P(avg) / 0:R 1:R", ["SplitAllGather AllGather [0, 1]"]),
        (
            "P / 0,1:S1 2,3:S1",
            "S0 / 0,1:S1 2,3:S1",
            ["SplitReduceScatter ReduceScatter [0, 2] [1, 3]"],
        ),
        ("S0 / 0,1:S1 2,3:S1", "R / 0,1:S1 2,3:S1", ["SplitAllGather AllGather [0, 2] [1, 3]"]),
    ],
)
def test_other_top_alone_is_one_step(src, dst, steps):
    assert summary(plan_of(src, dst, (8, 4))) == steps


@pytest.mark.paper("Fig. 10")
@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        (  # one subgroup reduce-scatters, the other is as it should be
            "S0 / 0,1:P 2,3:S1",
            "R / 0,1:S1 2,3:S1",
            ["BottomStep[0] ReduceScatter [0, 1]", "SplitAllGather AllGather [0, 2] [1, 3]"],
        ),
        (
            "P / 0,1:P 2,3:P",
            "R / 0,1:R 2,3:R",
            [
                "BottomStep[0] AllReduce [0, 1]",
                "BottomStep[1] AllReduce [2, 3]",
                "SplitAllReduce AllReduce [0, 2] [1, 3]",
            ],
        ),
        (
            "P / 0,1:P 2,3:P",
            "S0 / 0,1:S1 2,3:S1",
            [
                "BottomStep[0] ReduceScatter [0, 1]",
                "BottomStep[1] ReduceScatter [2, 3]",
                "SplitReduceScatter ReduceScatter [0, 2] [1, 3]",
            ],
        ),
        (  # the bottom cuts, so the top first would move twice as much
            "P / 0,1:R 2,3:R",
            "R / 0,1:S0 2,3:S0",
            ["LocalStep[0]", "LocalStep[1]", "SplitAllReduce AllReduce [0, 2] [1, 3]"],
        ),
        (  # the bottom gathers: better after the top, on whole blocks
            "P / 0,1:S1 2,3:S1",
            "S0 / 0,1:R 2,3:R",
            [
                "SplitReduceScatter ReduceScatter [0, 2] [1, 3]",
                "BottomStep[0] AllGather [0, 1]",
                "BottomStep[1] AllGather [2, 3]",
            ],
        ),
    ],
)
def test_other_top_and_bottom_take_the_cheaper_order(src, dst, steps):
    assert summary(plan_of(src, dst, (8, 4))) == steps


def test_a_cut_that_gives_ranks_rows_they_never_held_sends_terms():
    plan = plan_of("P / 0,1:S0 2,3:S0", "S0 / 0,1:S0 2,3:S0", (8, 4))

    (step,) = plan.steps
    assert isinstance(step, BatchedSendReduce)
    assert plan.num_moved == 8 + 16 + 16 + 8  # ranks 1 and 2 hold no term of what they want


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("P(max) / 0,1:S1 2:R", "P(min) / 0,1:S1 2:R"),
        ("S0 / 0,1:S1 2:R", "P(max) / 0,1:S1 2:R"),
    ],
)
def test_what_no_single_step_does_goes_through_replicate(src, dst):
    plan = plan_of(src, dst, (8, 4))

    assert any(step.dst.spec.top == Replicate() for step in plan.steps) or len(plan.steps) == 1
    assert not plan.has_messages


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("S0 / 0,1:S1 2:R", "S1 / 0,1:S1 2:R"),
        ("S0[3:1] / 0,1:S1 2:R", "S0[1:3] / 0,1:S1 2:R"),
        ("S0 / 0,1:S1 2:R", "S0 / 2:R 0,1:S1"),  # another order
        ("R / 0-3(2x2):S0,S1", "R / 0-3(2x2):S1,S0"),  # collectives would gather first
        ("R / 0-3(2x2):S0,S0", "R / 0-3:S1"),  # another mesh
        ("R / 0-3:S0x2", "R / 0-3:S0"),  # fused weights
    ],
)
def test_what_collectives_would_send_twice_is_a_batched_send_receive(src, dst):
    plan = plan_of(src, dst, (8, 8))

    (step,) = plan.steps
    assert isinstance(step, BatchedSendRecv)
    assert plan.num_moved == num_lacking(step.src, step.dst)
    assert plan.rank_sets() == []


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("R / 0,1:R 2:R", "S0[3:1] / 0,1:S1 2:R"),
        ("R / 0-3:R", "S0 / 0,1:S1 2,3:R"),  # also into other subgroups,
        ("R / 0-3:R", "R / 1,2:S1"),  # or fewer ranks
        ("S0 / 0,1:R 2,3:R", "R / 0-3:S0"),  # or where the cuts coincide
        ("R / 0,1:R 2,3:R", "S0 / 2,3:R 0,1:S0"),
    ],
)
def test_what_every_rank_holds_is_cut_without_communication(src, dst):
    plan = plan_of(src, dst, (8, 4))

    assert [type(step) for step in plan.steps] == [LocalStep]
    assert plan.rank_sets() == []


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("R / 0,1:S-1 2:R", "R / 0,1:S1 2:R"),  # a dim counted from the end
        ("R / 0,1(2x1):R,P 2:P", "R / 0,1(2x1):R,S0 2:S1"),  # an axis of one rank does nothing
        ("R / 0,1:R 2:R", "R / 2:R 0,1:R"),  # the order of replicas
        ("P / 0,1:S1 2:R", "P / 2:R 0,1:S1"),  # or of terms
        ("S0 / 0,1:R 2:R", "S0[1:1] / 0,1:R 2:R"),  # a ratio that cuts as the default does
        ("R / 0,1:R", "R / 0,1:P(max)"),  # terms that are all the value
    ],
)
def test_other_words_for_the_same_shards_take_no_step(src, dst):
    assert plan_of(src, dst, (8, 4)).steps == ()


def test_extents_count_not_the_ratio():
    same = plan_of("S0[3:1] / 0:R 1:R", "S0 / 0:R 1:R", (8,), src_top_sizes=(4, 4))
    other = plan_of("S0 / 0:R 1:R", "S0 / 0:R 1:R", (8,), dst_top_sizes=(5, 3))

    assert same.steps == ()
    (step,) = other.steps
    assert [(t.src, t.dst) for t in step.transfers if t.src != t.dst] == [(1, 0)]
    assert other.num_moved == 1


def test_specs_that_do_not_fit_the_shape_raise():
    with pytest.raises(SpecError, match="needs dim 1, but the tensor has"):
        plan_of("S1 / 0:R 1:R", "R / 0:R 1:R", (8,))
    with pytest.raises(SpecError, match="needs dim 2, but the tensor has 1 dims"):
        plan_of("R / 0,1:P", "R / 0,1:S2", (8,))
    with pytest.raises(SpecError, match="add up to 8"):
        plan_of("S0 / 0:R 1:R", "R / 0:R 1:R", (8,), src_top_sizes=(4, 5))


def test_a_plan_is_one_value():
    first = plan_of("P / 0,1:S1 2:R", "R / 0,1:S1 2:R", (4, 4))

    assert plan_of("P / 0,1:S1 2:R", "R / 0,1:S1 2:R", [4, 4]) is first
    assert first.rank_sets() == [(0, 2), (1, 2)]
    assert first.num_moved == 2 * 8 + 2 * 8  # two all-reduces of 8 elements between two ranks


@pytest.mark.parametrize(
    ("have", "want", "kinds"),
    [
        # local cut before anything is sent
        ([Partial(), Replicate()], [Replicate(), Shard(0)], ["LocalStep", "AllReduce"]),
        # reduce-scatter before gather: the gather is smaller then
        ([Partial(), Shard(0)], [Shard(1), Replicate()], ["ReduceScatter", "AllGather"]),
        # an outer cut of the same dim: the inner one goes first and comes back
        ([Shard(0), Shard(0)], [Replicate(), Shard(0)], ["AllGather", "AllGather", "LocalStep"]),
        ([Replicate(), Shard(0)], [Shard(0), Shard(0)], ["AllGather", "LocalStep", "LocalStep"]),
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)], ["AllGather", "AllToAll", "LocalStep"]),
        ([Shard(0), Shard(0)], [Shard(0), Shard(1)], ["AllToAll"]),
        ([Shard(0), Partial()], [Shard(0), Shard(0)], ["ReduceScatter"]),
        # fused weights: the strided cut is no plain one
        ([StridedShard(0, split_factor=2)], [Shard(0)], ["AllGather", "LocalStep"]),
        # mixed reductions nest, the last axis innermost; sum and avg commute
        ([Partial("max"), Partial()], [Replicate(), Replicate()], ["AllReduce", "AllReduce"]),
        (
            [Partial("max"), Partial()],
            [Replicate(), Partial()],
            ["AllReduce", "AllReduce", "LocalStep"],
        ),
        ([Partial("avg"), Partial()], [Replicate(), Partial()], ["AllReduce"]),
        ([Partial(), Partial("max")], [Partial(), Replicate()], ["AllReduce"]),
        (
            [Replicate(), Partial()],
            [Partial("product"), Partial()],
            ["AllReduce", "LocalStep", "LocalStep"],
        ),
    ],
    ids=str,
)
def test_axes_of_a_mesh_change_in_this_order(have, want, kinds):
    mesh = (2, 2) if len(have) == 2 else (4,)
    src, dst = (Subgroup(range(4), p, mesh) for p in (have, want))

    found = [
        type(step.collectives[0] if step.collectives else step).__name__
        for step in bottom_steps(src, dst, (8, 8))
    ]

    assert found == kinds


def test_mixed_reductions_reduce_the_last_axis_first():
    src = HDSpec([Subgroup(range(4), [Partial("max"), Partial()], (2, 2))])
    dst = HDSpec([Subgroup(range(4), None, (2, 2))])

    assert [step.axis for step in resolve(src, dst, (3,)).steps] == [1, 0]


def test_all_to_all_moves_only_crossings():
    (step,) = resolve(
        HDSpec([Subgroup((0, 1), [Shard(0)])]), HDSpec([Subgroup((0, 1), [Shard(1)])]), (3, 3)
    ).steps
    (collective,) = step.collectives

    assert isinstance(collective, AllToAll)
    assert collective.cells == (
        ((Box((0, 0), (2, 2)),), (Box((0, 2), (2, 3)),)),
        ((Box((2, 0), (3, 2)),), (Box((2, 2), (3, 3)),)),
    )
    assert collective.num_moved == 2 + 2


def test_shapes_are_whole_numbers_before_anything_is_kept():
    for shape in ((4.5, 4), (-4, 4), 4, None, "44", (True, 7)):
        with pytest.raises(SpecError, match=r"^shape must"):
            resolve("S0 / 0:R 1:R", "R / 3:R", shape)
    with pytest.raises(SpecError):
        resolve("S0 / 0:R 1:R", "R / 3:R", [4, 4], src_top_sizes=[])
    assert resolve("S0 / 0:R 1:R", "R / 3:R", [4, 4], src_top_sizes=[1, 3]).num_moved == 16
    with pytest.raises(TopologyError, match=r"^topology: must be a Topology"):
        resolve("S0 / 0:R 1:R", "R / 3:R", (4, 4), topology="nodes")
