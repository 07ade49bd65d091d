"""Autograd nodes at the border of the tensor type: to this rank's local tensor, and to its subgroup's ``DTensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import without_modes
from hdtensor.collectives import groups
from hdtensor.errors import SpecError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import local_graphs, wrap
from hdtensor.ops.special.move import gradient_bound
from hdtensor.placements.checks import is_cut
from hdtensor.placements.forms import meshes_of, spec_from
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


def one_subgroup(spec: HDSpec, placements: Sequence[Placement]) -> Subgroup:
    """Return the only subgroup of a spec with other placements.

    Raises:
        SpecError: If the spec has several subgroups.
    """
    if spec.num_subgroups != 1:
        raise SpecError(
            f"placements {tuple(placements)} go with one subgroup, and {spec} has {spec.num_subgroups}. For this rank's "
            f"subgroup see .to_dtensor(grad_top=...)."
        )
    return spec.subgroups[0].with_placements(placements)


def gradient_layout(
    bound: BoundSpec, placements: Sequence[Placement] | None, *, is_whole: bool = False
) -> BoundSpec:
    """Return the layout of the gradient that comes back for a local or whole tensor.

    Args:
        bound: The tensor's own.
        placements: What a user says of the gradient of a tensor of one subgroup; None: as the tensor, with ``Replicate``
            for ``Partial``.
        is_whole: Whether the plain tensor is the whole one.

    Raises:
        SpecError: If the placements do not fit the tensor, or cut otherwise than the plain tensor: a gradient has the
            shape of what it belongs to.
    """
    if placements is None:
        return gradient_bound(bound)
    spec = bound.spec.replace(subgroups=(one_subgroup(bound.spec, placements),))
    found = BoundSpec.bind(spec, bound.shape, bound.stride, bound.dtype)
    (mine,), (theirs,) = bound.spec.subgroups, found.spec.subgroups
    for own, other in zip(mine.placements, theirs.placements, strict=True):
        own = Replicate() if is_whole else own
        if other != own and (is_cut(other) or is_cut(own)):
            raise SpecError(
                f"grad_placements {theirs.placements} of a {'whole' if is_whole else 'local'} tensor of {bound}: a "
                f"gradient has the shape of its tensor, so that only Replicate() and Partial() may stand for each other."
            )
    return found


class ToLocal(torch.autograd.Function):
    """``HDTensor.to_local``."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, gradient: BoundSpec) -> torch.Tensor:
        ctx.gradient = gradient
        local_graphs[0] += 1
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # An expanded gradient would become the tensor's own, and nothing could be added to it.
        return wrap(grad.contiguous(), ctx.gradient), None


def to_dtensor(tensor: Any, grad_top: Placement | None) -> DTensor | None:
    """Return a tensor's block on this rank's subgroup; None on a rank outside. See ``HDTensor.to_dtensor``."""
    if torch.compiler.is_compiling():
        pending = grad_top.reduce_op if isinstance(grad_top, Partial) else None
        return _to_dtensor_in_graph(tensor, pending)
    if tensor._spec.index is None:
        return None
    return ToDTensor.apply(tensor, Replicate() if grad_top is None else grad_top)


@torch.compiler.allow_in_graph
def _to_dtensor_in_graph(tensor: Any, pending: str | None) -> DTensor | None:
    """Return the block; compilers run it while they trace, and keep what it does to tensors."""
    bound = tensor._spec
    if bound.index is None:
        return None
    with without_modes():  # a mesh reads its ranks, which no program has to see
        groups.mesh_of(bound.spec.subgroups[bound.index])
    return ToDTensor.apply(tensor, Replicate() if pending is None else Partial(pending))


class ToDTensor(torch.autograd.Function):
    """``HDTensor.to_dtensor``."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_top: Placement) -> DTensor:
        bound = tensor._spec
        index = bound.index
        assert index is not None, "to_dtensor is called on local ranks only"
        ctx.bound, ctx.grad_top = bound, grad_top
        local_graphs[0] += 1
        group = bound.spec.subgroups[index]
        return DTensor.from_local(
            tensor._local_tensor,
            groups.mesh_of(group),
            group.placements,
            run_check=False,
            shape=torch.Size(bound.block_shape(index)),
            stride=bound.block_stride(index),
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, None]:
        bound = gradient_bound(ctx.bound)
        index = bound.index
        assert index is not None, "a gradient comes back where the DTensor went out"
        wanted = bound.spec.subgroups[index].placements
        if grad.placements != wanted:
            grad = grad.redistribute(placements=wanted)
        spec = bound.spec
        if not bound.top_sizes:
            spec = spec.replace(top=ctx.grad_top)
        out = BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes)
        return wrap(grad.to_local(), out), None


def wanted_spec(own: HDSpec, spec: Any, placements: Any, hdim: int, top_ratio: Any) -> HDSpec:
    """Return the spec that a redistribute's arguments say of a tensor that is laid out as ``own``.

    Raises:
        SpecError: If they say none.
    """
    if spec is None and placements is None:
        raise SpecError("redistribute takes a spec, or the placements of a tensor of one subgroup.")
    if spec is None and own.num_subgroups == 1:
        return own.replace(subgroups=(one_subgroup(own, placements),))
    if spec is None:
        raise SpecError(
            f"placements go with a DeviceMesh: a tensor of {own.num_subgroups} subgroups has several. Pass a spec."
        )
    for mesh in meshes_of(spec):
        groups.adopt_mesh(mesh)
    return spec_from(spec, placements, hdim, top_ratio)
