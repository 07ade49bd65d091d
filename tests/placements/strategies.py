"""Random specs and shapes, and what each rank should hold of a tensor by plain torch."""

import itertools
from fractions import Fraction

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hdtensor._torch_compat import StridedShard
from hdtensor.placements import HDSpec, Subgroup


MESHES = ((1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (2, 2, 2))
OPS = ("sum", "avg", "max", "min", "product")


def placements(num_dims, *, partial=True, strided=True):
    """One placement that a tensor of so many dims can have."""
    kinds = [st.just(Replicate())]
    if num_dims:
        kinds.append(st.integers(-num_dims, num_dims - 1).map(Shard))
        if strided:
            kinds.append(
                st.builds(
                    lambda dim, pieces: StridedShard(dim, split_factor=pieces),
                    st.integers(0, num_dims - 1),
                    st.integers(1, 4),
                )
            )
    if partial:
        kinds.append(st.sampled_from(OPS).map(Partial))
    return st.one_of(kinds)


@st.composite
def specs(draw, num_dims, *, partial=True, strided=True, max_subgroups=4):
    """A spec for tensors of so many dims; ranks are shuffled and have gaps."""
    meshes = draw(st.lists(st.sampled_from(MESHES), min_size=1, max_size=max_subgroups))
    sizes = [torch.Size(mesh).numel() for mesh in meshes]
    ranks = iter(draw(st.permutations(range(sum(sizes) + 3))))
    groups = [
        Subgroup(
            tuple(itertools.islice(ranks, size)),
            draw(
                st.tuples(*(placements(num_dims, partial=partial, strided=strided) for _ in mesh))
            ),
            mesh,
        )
        for mesh, size in zip(meshes, sizes, strict=True)
    ]
    tops = [st.just(Replicate())]
    if num_dims:
        tops += [st.integers(0, num_dims - 1).map(Shard)] * 2
    if partial:
        tops.append(st.sampled_from(OPS).map(Partial))
    top = draw(st.one_of(tops))
    ratio = None
    if isinstance(top, Shard):
        parts = st.lists(st.integers(0, 9), min_size=len(groups), max_size=len(groups))
        ratio = draw(st.none() | parts.filter(any))
    return HDSpec(groups, top, ratio)


@st.composite
def specs_and_shapes(draw, *, min_dims=0, max_dims=3, max_size=9, **options):
    """A spec and a shape that it can cut, zero extents among them."""
    num_dims = draw(st.integers(min_dims, max_dims))
    shape = tuple(draw(st.integers(0, max_size)) for _ in range(num_dims))
    return draw(specs(num_dims, **options)), shape


@st.composite
def cut_tensors(draw, **options):
    """A spec, a shape and exact top extents: the spec's own, or any others that add up."""
    spec, shape = draw(specs_and_shapes(**options))
    if not isinstance(spec.top, Shard) or draw(st.booleans()):
        return spec, shape, expected_top_sizes(spec, shape)
    length, num = shape[spec.top.dim], spec.num_subgroups
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=num - 1, max_size=num - 1)))
    return spec, shape, tuple(b - a for a, b in itertools.pairwise([0, *cuts, length]))


def numbered(shape):
    """A tensor whose every element is its own number."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def chunks(tensor, num, dim):
    """``torch.chunk``, filled up with empty chunks."""
    found = list(tensor.chunk(num, dim))
    return found + [tensor.narrow(dim, 0, 0)] * (num - len(found))


def expected_top_sizes(spec, shape):
    """The documented cut: torch.chunk's, or boundaries at floor(length * cumulative / total)."""
    if not isinstance(spec.top, Shard):
        return None
    length = shape[spec.top.dim]
    if spec.top_ratio is None:
        return tuple(len(c) for c in chunks(torch.zeros(length), spec.num_subgroups, 0))
    total = sum(spec.top_ratio)
    parts = [Fraction(sum(spec.top_ratio[:i]), total) for i in range(spec.num_subgroups + 1)]
    cuts = [int(length * part) for part in parts]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def expected_local(full, spec, rank, top_sizes):
    """What a rank of the spec holds of ``full``, cut by plain torch, one axis after the other."""
    index = spec.index_of(rank)
    local = full
    if isinstance(spec.top, Shard):
        local = full.split(list(top_sizes), spec.top.dim)[index]
    group = spec.subgroups[index]
    grid = torch.tensor(group.ranks).reshape(group.mesh_shape)
    (coordinate,) = (grid == rank).nonzero().tolist()
    for placement, size, position in zip(
        group.placements, group.mesh_shape, coordinate, strict=True
    ):
        if isinstance(placement, StridedShard):
            local = placement._split_tensor(local, size, with_padding=False)[0][position]
        elif isinstance(placement, Shard):
            local = chunks(local, size, placement.dim)[position]
    return local


def num_holders(group):
    """How many ranks of a subgroup hold each element of its block."""
    cut = (Shard, StridedShard)
    sizes = zip(group.placements, group.mesh_shape, strict=True)
    return torch.Size([size for placement, size in sizes if not isinstance(placement, cut)]).numel()
