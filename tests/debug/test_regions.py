import re
from collections import defaultdict

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor.debug.regions import fit_sizes, idle_ranks, regions
from hdtensor.errors import SpecError
from hdtensor.placements import HDSpec, owned_boxes
from tests.placements.strategies import cut_tensors, numbered


def owners_by_element(spec, shape, top_sizes):
    """Element number -> the ranks that hold it, ascending."""
    full = numbered(shape)
    held = defaultdict(set)
    for rank in spec.ranks:
        for owned in owned_boxes(spec, shape, top_sizes, rank):
            for element in full[owned.box.slices_from((0,) * len(shape))].flatten().tolist():
                held[element].add(rank)
    return {element: tuple(sorted(ranks)) for element, ranks in held.items()}


@given(cut_tensors(max_size=6))
def test_regions_tile_the_tensor_with_its_true_owners(cut):
    spec, shape, top_sizes = cut
    full = numbered(shape)
    found = {}
    for part in regions(spec, shape, top_sizes):
        for element in full[part.box.slices_from((0,) * len(shape))].flatten().tolist():
            assert element not in found
            found[element] = part.ranks
    assert found == owners_by_element(spec, shape, top_sizes)


@given(cut_tensors(max_size=6))
def test_labels_name_each_owner_once_and_reduce_only_what_is_partial(cut):
    spec, shape, top_sizes = cut
    for part in regions(spec, shape, top_sizes):
        named = []
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", part.label):
            named += range(int(first), int(last or first) + 1)
        assert sorted(named) == list(part.ranks)
        assert spec.has_partial() or "(" not in part.label


@given(cut_tensors(max_size=6), st.data())
def test_the_regions_of_one_subgroup_are_what_its_ranks_hold(cut, data):
    spec, shape, top_sizes = cut
    index = data.draw(st.integers(0, spec.num_subgroups - 1))
    full = numbered(shape)
    found = {}
    for part in regions(spec, shape, top_sizes, subgroup=index):
        for element in full[part.box.slices_from((0,) * len(shape))].flatten().tolist():
            found[element] = set(part.ranks)
    own = set(spec.subgroups[index].ranks)
    everyone = owners_by_element(spec, shape, top_sizes)
    assert found == {e: own & set(ranks) for e, ranks in everyone.items() if own & set(ranks)}


@given(cut_tensors(max_size=6))
def test_idle_ranks_are_those_without_a_box(cut):
    spec, shape, top_sizes = cut
    idle = [rank for rank in spec.ranks if not owned_boxes(spec, shape, top_sizes, rank)]
    assert list(idle_ranks(spec, regions(spec, shape, top_sizes))) == sorted(idle)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("R / 0:R", "0"),
        ("R / 0-3:R", "0-3"),
        ("R / 0,1:R 2,3:R", "0-3"),
        ("R / 5,3:R 4:R", "3-5"),
        ("R / 0,1:P", "sum(0,1)"),
        ("R / 0-3:P(avg)", "avg(0-3)"),
        ("P / 0:R 1:R", "sum(0,1)"),
        ("P(max) / 0,1:R 2:R", "max(0,1; 2)"),
        ("P / 0,1:P 2:R", "sum(sum(0,1); 2)"),
        ("P / 0,1:P(max) 2,3:R", "sum(max(0,1); 2,3)"),
        ("R / 0,1:P 2:R", "sum(0,1), 2"),
        ("R / 0-3(2x2):P,R", "sum(0,1; 2,3)"),
        ("R / 0-3(2x2):R,P", "sum(0,1), sum(2,3)"),
        ("R / 0-3(2x2):P,P", "sum(sum(0,1); sum(2,3))"),
        ("R / 0,1(1x2):P,R", "0,1"),
    ],
)
def test_labels(text, label):
    (part,) = regions(HDSpec.from_text(text), (2, 2))
    assert part.label == label


def test_a_norm_is_called_a_norm():
    class NormPartial(Partial):  # as DTensor's operators make them: the op says sum, but it is none
        norm_type = 2

    spec = HDSpec.from_text("R / 0,1:R").map_bottom(lambda placement: NormPartial())
    assert [part.label for part in regions(spec, ())] == ["norm(0,1)"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, -1), "sizes >= 0"),
        ((4.0,), "hold integers"),
        ("44", "sequence of integers"),
        (4, "sequence"),
    ],
    ids=str,
)
def test_shapes_that_are_none_are_refused(shape, message):
    with pytest.raises(SpecError, match=message):
        regions(HDSpec.from_text("R / 0:R"), shape)


def test_regions_take_a_torch_size():
    spec = HDSpec.from_text("S0 / 0:R 1:R")
    assert regions(spec, torch.zeros(4, 2).shape) == regions(spec, (4, 2))


@given(
    st.lists(st.floats(1, 50), min_size=1, max_size=6),
    st.data(),
    st.sampled_from([0.0, 1.0]),
)
def test_fitted_sizes_only_grow_and_meet_every_need(wanted, data, line):
    spans = st.tuples(st.integers(0, len(wanted) - 1), st.integers(1, 6), st.floats(0, 200))
    needs = [
        (first, min(first + length, len(wanted)), size)
        for first, length, size in data.draw(st.lists(spans, max_size=6))
    ]
    sizes = fit_sizes(wanted, needs, line)
    assert all(size >= want for size, want in zip(sizes, wanted, strict=True))
    for first, last, size in needs:
        assert sum(sizes[first:last]) + line * (last - first - 1) >= size - 1e-6


def test_a_replica_of_replicas_stays_one_list():
    spec = HDSpec.from_text("R / 0-7(2x2x2):R,R,S0")
    assert [part.label for part in regions(spec, (4,))] == ["0,2,4,6", "1,3,5,7"]
    assert isinstance(spec.top, Replicate)
    assert isinstance(spec.subgroups[0].placements[2], Shard)
