import copy
import pickle
import threading

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import StridedShard
from hdtensor.errors import HDTensorError, SpecError
from hdtensor.placements import HDSpec, Subgroup
from tests.placements.strategies import specs


R = Replicate()
any_spec = st.integers(0, 3).flatmap(specs)


@given(any_spec)
def test_equal_parts_give_the_same_object(spec):
    groups = [
        Subgroup(list(g.ranks), list(g.placements), list(g.mesh_shape)) for g in spec.subgroups
    ]
    scaled = None if spec.top_ratio is None else [3 * part for part in spec.top_ratio]
    assert HDSpec(groups, spec.top, scaled) is spec
    assert HDSpec.from_text(spec.text) is spec
    assert spec.replace() is spec
    assert tuple(groups) == spec.subgroups
    assert [hash(g) for g in groups] == [hash(g) for g in spec.subgroups]


@given(any_spec)
def test_copies_and_pickles_are_the_same_object(spec):
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert copy.copy(spec) is spec
    assert copy.deepcopy({"spec": spec})["spec"] is spec
    assert copy.deepcopy(spec.subgroups) == spec.subgroups
    assert pickle.loads(pickle.dumps(spec.subgroups)) == spec.subgroups


@given(any_spec, any_spec)
def test_specs_are_equal_only_if_their_text_is(one, other):
    assert (one == other) == (str(one) == str(other))
    assert len({one, other}) == (1 if one == other else 2)


@given(any_spec)
def test_every_rank_knows_its_subgroup_and_coordinate(spec):
    for index, group in enumerate(spec.subgroups):
        grid = torch.tensor(group.ranks).reshape(group.mesh_shape)
        for rank in group.ranks:
            assert spec.index_of(rank) == index
            assert grid[group.coordinate(rank)] == rank
    assert spec.ranks == tuple(rank for group in spec.subgroups for rank in group.ranks)
    assert spec.index_of(max(spec.ranks) + 1) is None
    assert spec.num_subgroups == spec.hsize == len(spec.subgroups)


@given(any_spec)
def test_partial_is_found_at_both_tiers(spec):
    placements = [spec.top, *(p for g in spec.subgroups for p in g.placements)]
    assert spec.has_partial() == any(isinstance(p, Partial) for p in placements)
    assert not spec.map_bottom(lambda p: R).replace(top=R).has_partial()


def test_threads_that_build_one_spec_get_one_object():
    built = []
    start = threading.Barrier(8)

    def build():
        start.wait()
        built.extend(
            HDSpec([Subgroup((i,)), Subgroup((i + 1,))], Shard(0)) for i in range(900, 940)
        )

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 8 * 40
    assert len({id(spec) for spec in built}) == len({spec.text for spec in built}) == 40


def test_a_strided_shard_is_not_a_shard_and_reductions_differ():
    placements = [R, Shard(0), Shard(1), StridedShard(0, split_factor=1), Partial(), Partial("max")]
    assert len({Subgroup((0, 1), placement) for placement in placements}) == len(placements)
    assert len({HDSpec([Subgroup((0, 1), placement)]) for placement in placements}) == 6


def test_one_subgroup_has_no_top():
    group = Subgroup((0, 1), Shard(0))
    assert HDSpec([group], Shard(1)) is HDSpec([group], Partial()) is HDSpec([group])
    assert HDSpec([group], Shard(0), (7,)).top_ratio is None
    assert HDSpec([group]).hdim == -1


def test_ratios_are_kept_in_lowest_terms():
    groups = [Subgroup((rank,)) for rank in range(3)]
    assert HDSpec(groups, Shard(0), (6, 0, 2)).top_ratio == (3, 0, 1)
    assert HDSpec(groups, Shard(0), (1, 1, 1)) is not HDSpec(groups, Shard(0))


def test_replace_drops_the_ratio_with_the_shard():
    spec = HDSpec.from_text("S0[3:1] / 0,1:S1 2:R")
    assert str(spec.replace(top=R)) == "R / 0,1:S1 2:R"
    assert str(spec.replace(top=Shard(1))) == "S1[3:1] / 0,1:S1 2:R"
    assert str(spec.replace(top_ratio=None)) == "S0 / 0,1:S1 2:R"
    assert str(spec.map_bottom(lambda p: Shard(2))) == "S0[3:1] / 0,1:S2 2:S2"
    with pytest.raises(TypeError, match=r"takes subgroups, top and top_ratio, not \['ratio'\]"):
        spec.replace(ratio=(1, 1))


@pytest.mark.parametrize("name", ["top", "ranks", "subgroups", "anything"])
def test_specs_and_subgroups_are_frozen(name):
    spec = HDSpec.from_text("S0 / 0:R 1:R")
    with pytest.raises(AttributeError, match=rf"frozen; use spec.replace\({name}="):
        setattr(spec, name, None)
    with pytest.raises(AttributeError, match="frozen"):
        setattr(spec.subgroups[0], name, None)


def test_a_subgroup_fills_in_what_is_left_out():
    assert Subgroup(range(4)).mesh_shape == (4,)
    assert Subgroup(range(4)).placements == (R,)
    assert Subgroup(range(4), mesh_shape=(2, 2)).placements == (R, R)
    assert Subgroup((0, 1), Shard(0)) == Subgroup([0, 1], [Shard(0)], [2])
    assert len(Subgroup(torch.tensor([3, 5]))) == 2


@pytest.mark.paper("Sec. 4.2")
@pytest.mark.parametrize(
    ("hdim", "top"), [(0, Shard(0)), (3, Shard(3)), (-1, R), (-2, Partial())], ids=str
)
def test_from_meshes_reads_the_papers_codes(hdim, top):
    spec = HDSpec.from_meshes([((0, 3), [Shard(1)]), ((1,), [R])], hdim=hdim)
    assert (spec.top, spec.hdim, spec.hsize) == (top, hdim, 2)
    assert spec == HDSpec([Subgroup((0, 3), Shard(1)), Subgroup((1,))], top)


def test_from_meshes_passes_ratio_and_reduction_on():
    pairs = [((0,), R), ((1,), R)]
    assert HDSpec.from_meshes(pairs, 0, top_ratio=(2, 1)).top_ratio == (2, 1)
    assert HDSpec.from_meshes(pairs, -2, reduce_op="max").top == Partial("max")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Subgroup(()), "at least one rank, got none"),
        (lambda: Subgroup((0, 1, 0)), r"must not repeat, got \[0\]"),
        (lambda: Subgroup((-1,)), "start at 0, got -1"),
        (lambda: Subgroup((0, 1.0)), "ranks must hold integers, got 1.0"),
        (lambda: Subgroup((True,)), "ranks must hold integers, got True"),
        (lambda: Subgroup("01"), "ranks must be a sequence of integers, got '01'"),
        (lambda: Subgroup(3), "ranks must be a sequence of integers, got 3"),
        (
            lambda: Subgroup((0, 1, 2), mesh_shape=(2, 2)),
            r"\(2, 2\) holds 4 ranks, but 3 were given",
        ),
        (lambda: Subgroup((0, 1), mesh_shape=(2, 0)), "sizes >= 1"),
        (lambda: Subgroup((0, 1), mesh_shape=()), "sizes >= 1"),
        (lambda: Subgroup((0, 1), (R, R)), "1 axes in .* 2 placements"),
        (lambda: Subgroup((0, 1), 5), "placements must be .*, got 5"),
        (lambda: Subgroup((0, 1), ("S0",)), "a placement is Shard.* got 'S0' of type str"),
        (lambda: Subgroup((0, 1), (Placement(),)), "of type Placement"),
        (
            lambda: Subgroup((0, 1), Partial("xor")),
            r"Partial\('xor'\) is not supported; use one of",
        ),
        (lambda: HDSpec([]), "at least one subgroup"),
        (lambda: HDSpec(Subgroup((0,))), "sequence of subgroups"),
        (lambda: HDSpec(None), "sequence of subgroups"),
        (lambda: HDSpec([((0,), R)]), r"use HDSpec.from_meshes"),
        (lambda: HDSpec([Subgroup((0, 1)), Subgroup((1, 2))]), "rank 1 is in subgroup 0 .* and in"),
        (lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], "S0"), "got 'S0' of type str"),
        (lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], Shard(-1)), "needs a dim >= 0"),
        (
            lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], StridedShard(-1, split_factor=2)),
            "needs a dim >= 0",
        ),
        (lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], R, (1, 1)), "needs a top Shard"),
        (lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], Shard(0), (1,)), "2 subgroups, got"),
        (lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], Shard(0), (0, 0)), "not all 0"),
        (lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], Shard(0), (2, -1)), ">= 0"),
        (lambda: HDSpec([Subgroup((0,)), Subgroup((1,))], Shard(0), (0.5, 0.5)), "hold integers"),
        (lambda: HDSpec.from_meshes([((0,), R)], hdim=-3), "hdim code -3 is unknown"),
        (lambda: HDSpec.from_meshes([((0,), R)], hdim="0"), "must be an integer code"),
        (lambda: HDSpec.from_meshes([(0, 1, 2)]), r"pair 0 must be \(mesh, placements\)"),
    ],
)
def test_what_makes_no_spec_is_refused_by_name(build, message):
    with pytest.raises(SpecError, match=message) as error:
        build()
    assert isinstance(error.value, HDTensorError | ValueError)


def test_a_rank_that_is_not_in_the_subgroup_has_no_coordinate():
    with pytest.raises(ValueError, match="not in"):
        Subgroup((0, 1)).coordinate(2)
