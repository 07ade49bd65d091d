"""What a layout means, on plain tensors: to cut a tensor into shards, and to read its value back."""

import functools

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor.placements import HDSpec, check_top_sizes
from hdtensor.redistribute.steps import (
    Layout,
)


_COMBINE = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


def layout_of(spec, shape, top_sizes=None):
    """Return a layout from a spec or its text."""
    spec = HDSpec.from_text(spec) if isinstance(spec, str) else spec
    return Layout(spec, tuple(shape), check_top_sizes(spec, shape, top_sizes))


def cut(full, layout, generator=None):
    """Cut ``full`` by the layout; under Partial, into random terms that reduce to it."""
    spec = layout.spec
    generator = generator or torch.Generator().manual_seed(0)
    blocks = _terms(full, spec.top, spec.num_subgroups, generator)
    shards = {}
    for group, block in zip(spec.subgroups, blocks, strict=True):
        values = {(): block}
        for placement, size in zip(group.placements, group.mesh_shape, strict=True):
            values = {
                (*at, i): term
                for at, value in values.items()
                for i, term in enumerate(_terms(value, placement, size, generator))
            }
        for rank in group.ranks:
            shards[rank] = take(values[group.coordinate(rank)], layout, rank)
    return shards


def take(full, layout, rank):
    """Return a rank's boxes of a full tensor, placed as its local tensor."""
    local = full.new_empty(layout.local_shape(rank))
    for piece in layout.boxes(rank):
        box_slices = piece.box.slices_from((0,) * full.ndim)
        local[piece.local_slices] = full[box_slices]
    return local


def value(layout, shards):
    """Return the tensor that the shards stand for; every replica must agree, bit for bit."""
    spec = layout.spec
    parts = [_part(layout, group, shards) for group in spec.subgroups]
    values = [part for part, _ in parts]
    if isinstance(spec.top, Partial | Replicate):
        assert all(written.all() for _, written in parts), f"{spec} leaves elements to nobody"
    if isinstance(spec.top, Partial):
        return _combine(values, spec.top)
    out, filled = parts[0]
    for part, written in parts[1:]:
        assert torch.equal(out[filled & written], part[filled & written]), f"{spec} disagrees"
        out, filled = torch.where(written, part, out), filled | written
    assert filled.all(), f"{spec} leaves elements to nobody"
    return out


def _part(layout, group, shards):
    """Return what a subgroup knows of the tensor, and where it knows it."""
    locals_ = {group.coordinate(rank): shards[rank] for rank in group.ranks}
    for axis in reversed(range(len(group.mesh_shape))):
        if isinstance(group.placements[axis], Partial):
            lines = {}
            for at in sorted(locals_):
                lines.setdefault((*at[:axis], 0, *at[axis + 1 :]), []).append(locals_[at])
            reduced = {at: _combine(terms, group.placements[axis]) for at, terms in lines.items()}
            locals_ = {at: reduced[(*at[:axis], 0, *at[axis + 1 :])] for at in locals_}
    out = next(iter(locals_.values())).new_zeros(layout.shape)
    written = torch.zeros(layout.shape, dtype=torch.bool)
    for rank in group.ranks:
        for piece in layout.boxes(rank):
            at = piece.box.slices_from((0,) * out.ndim)
            mine = locals_[group.coordinate(rank)][piece.local_slices]
            known = written[at]
            assert torch.equal(out[at][known], mine[known]), f"replicas disagree in {layout.spec}"
            out[at] = mine
            written[at] = True
    return out, written


def _combine(terms, op):
    norm = getattr(op, "norm_type", None)
    if norm is not None:
        return sum(term**norm for term in terms) ** (1 / norm)
    if op.reduce_op == "avg":
        return sum(terms) / len(terms)
    return functools.reduce(_COMBINE[op.reduce_op], terms)


def _terms(full, placement, num_terms, generator):
    """Return tensors that reduce to ``full``; copies where nothing is pending."""
    if not isinstance(placement, Partial) or num_terms == 1:
        return [full] * num_terms
    if hasattr(placement, "norm_type"):
        return _spread(full, num_terms, torch.zeros_like(full), generator)

    def noise():
        drawn = torch.randint(1, 5, full.shape, generator=generator)
        return drawn.to(full.dtype)

    match placement.reduce_op:
        case "sum" | "avg":
            others = [noise() for _ in range(num_terms - 1)]
            scale = num_terms if placement.reduce_op == "avg" else 1
            return [*others, full * scale - sum(others)]
        case "max":
            return _spread(full, num_terms, full - noise(), generator)
        case "min":
            return _spread(full, num_terms, full + noise(), generator)
        case "product":
            signs = [1 - 2 * (noise() % 2) for _ in range(num_terms - 1)]
            return [*signs, functools.reduce(torch.mul, signs, full)]


def _spread(full, num_terms, filler, generator):
    """Return terms of which one, another for each element, is ``full``'s and the others filler's."""
    chosen = torch.randint(0, num_terms, full.shape, generator=generator)
    return [torch.where(chosen == i, full, filler) for i in range(num_terms)]
