"""Random specs, shapes and pairs of specs for the property tests."""

import itertools
import math

import torch
from hypothesis import Phase, given, settings, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor._torch_compat import StridedShard
from hdtensor.placements import HDSpec, Subgroup
from tests.redistribute.oracle import layout_of


OPS = ("sum", "sum", "avg", "max", "min", "product")
MESHES = {n: [(n,)] + [(a, n // a) for a in range(1, n + 1) if n % a == 0] for n in range(1, 9)}


@st.composite
def shapes(draw):
    extents = st.one_of(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
    return tuple(draw(st.lists(extents, max_size=3)))


def placements(num_dims):
    choices = [st.just(Replicate()), st.sampled_from(OPS).map(Partial)]
    if num_dims:
        dims = st.integers(0, num_dims - 1)
        choices += [dims.map(Shard), dims.map(Shard)]
        choices.append(
            st.builds(lambda d, n: StridedShard(d, split_factor=n), dims, st.integers(2, 3))
        )
        choices.append(st.integers(-num_dims, -1).map(Shard))
    return st.one_of(choices)


@st.composite
def rank_sets(draw, num_ranks):
    """One to three disjoint rank tuples, in order half the time."""
    ranks = list(range(num_ranks))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    sets = []
    for _ in range(draw(st.integers(1, 3))):
        if ranks:
            size = draw(st.integers(1, min(4, len(ranks))))
            sets.append(tuple(ranks[:size]))
            ranks = ranks[size:]
    return sets


@st.composite
def layouts(draw, shape, sets, meshes=None):
    """A random layout of ``shape`` over the given subgroups."""
    groups = []
    for i, ranks in enumerate(sets):
        mesh = meshes[i] if meshes else draw(st.sampled_from(MESHES[len(ranks)]))
        chosen = [draw(placements(len(shape))) for _ in mesh]
        groups.append(Subgroup(ranks, chosen, mesh))
    spec, sizes = draw(tops(shape, groups))
    return layout_of(spec, shape, sizes)


@st.composite
def tops(draw, shape, groups):
    """A spec of the subgroups with a random top, and exact extents or None."""
    if not shape or draw(st.booleans()):
        return HDSpec(groups, draw(placements(0))), None
    dim = draw(st.integers(0, len(shape) - 1))
    pieces = draw(st.sampled_from([n for n in (1, 1, 1, 2, 3) if shape[dim] % n == 0]))
    top = Shard(dim) if pieces == 1 else StridedShard(dim, split_factor=pieces)
    parts = st.lists(st.integers(0, 4), min_size=len(groups), max_size=len(groups)).filter(any)
    spec = HDSpec(groups, top, draw(st.none() | parts))
    if len(groups) == 1 or draw(st.booleans()):
        return spec, None
    length = shape[dim] // pieces
    cuts = sorted(draw(st.integers(0, length)) for _ in groups[1:])
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, length])]
    return spec, tuple(pieces * size for size in sizes)


@st.composite
def layout_pairs(draw, num_ranks=8):
    """Two layouts of one tensor over the same subgroups, whose meshes and order may differ."""
    shape, sets = draw(shapes()), draw(rank_sets(num_ranks))
    same_mesh = draw(st.booleans())
    meshes = [draw(st.sampled_from(MESHES[len(ranks)])) for ranks in sets] if same_mesh else None
    src = draw(layouts(shape, sets, meshes))
    if draw(st.integers(0, 4)) == 0:
        sets = draw(st.permutations(sets))
        meshes = None
    return src, draw(layouts(shape, sets, meshes))


def full_tensor(shape, dtype=torch.float64):
    """A tensor whose elements are small whole numbers, all of which occur."""
    return (torch.arange(math.prod(shape)) % 23 - 11).reshape(shape).to(dtype)


def sample(strategy, num_examples):
    """Return a list of examples, for tests that carry many of them to other processes at once."""
    drawn = []

    @settings(max_examples=num_examples, database=None, phases=[Phase.generate], derandomize=True)
    @given(strategy)
    def collect(example):
        drawn.append(example)

    collect()
    return drawn


@st.composite
def any_pairs(draw, num_ranks=8):
    """Two layouts of one tensor whose subgroups have nothing to do with one another."""
    shape = draw(shapes())
    src = draw(layouts(shape, draw(rank_sets(num_ranks))))
    return src, draw(layouts(shape, draw(rank_sets(num_ranks))))


@st.composite
def moved_pairs(draw, num_ranks=8):
    """Two layouts of one tensor with the same top, in which some subgroups move and others stay."""
    shape, sets = draw(shapes()), draw(rank_sets(num_ranks))
    src = draw(layouts(shape, sets))
    ranks = draw(st.permutations(range(num_ranks)))
    groups, used = [], 0
    for group in src.spec.subgroups:
        taken, used = ranks[used : used + len(group)], used + len(group)
        moved = draw(st.booleans())
        chosen = group.placements
        if draw(st.integers(0, 2)) == 0:
            chosen = [draw(placements(len(shape))) for _ in group.mesh_shape]
        groups.append(Subgroup(taken if moved else group.ranks, chosen, group.mesh_shape))
    if len({rank for group in groups for rank in group.ranks}) < used:
        groups = [Subgroup(range(used))]  # a moved subgroup met one that stays
    if len(groups) < src.spec.num_subgroups:
        return src, layout_of(HDSpec(groups), shape)
    spec = HDSpec(groups, src.spec.top, src.spec.top_ratio)
    return src, layout_of(spec, shape, src.top_sizes if len(groups) > 1 else None)
