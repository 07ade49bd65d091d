"""Building an ``HDTensor`` from what ranks hold: ``from_local`` and ``from_dtensor``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from hdtensor._rank import current_rank, is_played
from hdtensor._torch_compat import new_wrapper, without_modes
from hdtensor.api.agreement import attempt, communicates, exchange
from hdtensor.api.shards import (
    LocalShard,
    Whole,
    agreed_layout,
    check_plain,
    even_shape,
    term_gradient,
)
from hdtensor.collectives import groups, operators
from hdtensor.errors import DisagreementError, SpecError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import local_graphs
from hdtensor.placements.forms import SpecLike, also_named, meshes_of, spec_from
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.placements.text import as_spec
from hdtensor.redistribute.resolve import resolve
from hdtensor.tensor import HDTensor


def prepare_groups(*specs: HDSpec | str, beside: torch.Tensor | None = None) -> None:
    """Create the process groups that tensors of these specs need; every rank of the world calls it.

    These are each subgroup's mesh axes, and the group over all subgroups that sums a loss's weights. Without process
    groups (one plain process), or inside ``as_rank``, nothing is created. Tensors make their own groups; a program that
    was exported and is loaded by other processes has none.

    Args:
        specs: The specs, or their short texts.
        beside: A local tensor; where it is being traced the graph creates the groups.
    """
    if not dist.is_initialized() or is_played():
        return
    rank_sets: set[tuple[int, ...]] = set()
    known = [as_spec(spec) for spec in specs]
    for spec in known:
        if spec.num_subgroups > 1:
            rank_sets |= set(scalar_rank_sets(spec))
    wanted = groups.with_axes(rank_sets, [g for spec in known for g in spec.subgroups])
    if beside is None or not torch.compiler.is_compiling():
        groups.ensure_groups(sorted(wanted))
    else:
        operators.make_groups_in_graph(beside, wanted, channels=False)


def scalar_rank_sets(spec: HDSpec) -> tuple[tuple[int, ...], ...]:
    """Return the groups that a top sum of a scalar over the spec's subgroups uses."""
    whole = HDSpec([Subgroup(g.ranks, None, g.mesh_shape) for g in spec.subgroups])
    return tuple(resolve(whole.replace(top=Partial()), whole, ()).rank_sets())


@torch.compiler.allow_in_graph
@also_named(local_tensor="local", device_mesh="spec", run_check="check")
def from_local(
    local: torch.Tensor,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    top_sizes: Sequence[int] | None = None,
    check: bool = True,
) -> HDTensor:
    """Build a tensor from every rank's shard; differentiable.

    Args:
        local: This rank's shard. Ranks outside every subgroup pass any tensor; nothing of it is used.
        spec: How the whole tensor is cut, in any form that ``distribute_tensor`` takes.
        placements: With a ``DeviceMesh`` only.
        shape: Global shape. Without it the ranks' shards tell, which takes one small collective.
        stride: Global strides in elements, with ``shape``. Default: dims lie in memory in the order of the shards, where
            these agree and the ranks ask one another; else contiguous.
        top_sizes: Exact extents of the blocks along a top ``Shard``'s dim; with ``shape`` only.
        check: Make sure that all ranks' shards fit one global shape, also with ``shape``. Every rank of the world calls
            in that case. ``check=False`` needs ``shape``, but with a ``DeviceMesh`` all shards may have this one's shape,
            as DTensor takes it. What replicas hold is not compared.

    Raises:
        SpecError: On every rank, if the shards do not fit one global shape (cases 9, 10): the message lists each rank's
            shape beside the one expected.
        DisagreementError: On every rank, if ranks pass unlike specs or dtypes.
    """
    is_even = not check and shape is None and (spec is None or isinstance(spec, DeviceMesh))

    def said() -> Whole:
        for mesh in meshes_of(spec):
            groups.adopt_mesh(mesh)
        wanted = spec_from(spec, placements)
        whole = even_shape(wanted, local) if is_even else shape
        return Whole.of(wanted, whole, stride, top_sizes)

    return _from_local(local, said, check, None)


def _is_linked(local: torch.Tensor, bound: BoundSpec, needs_grad: bool) -> bool:
    """Whether a tensor of a rank outside was computed from an ``HDTensor``'s, which has a gradient on every rank or on none."""
    is_computed = needs_grad and local.grad_fn is not None
    return is_computed and tuple(local.shape) == (0,) and local.dtype is bound.dtype


def _from_local(
    local: torch.Tensor, said: Callable[[], Whole], check: bool, problem: Exception | None
) -> HDTensor:
    """Build a tensor of which this rank says ``said()``; ``problem`` is an error that all ranks must hear of."""
    members_need_grad = None
    if check and communicates():
        mine, wrong = attempt(lambda: LocalShard.of(local, said()))
        shards = exchange("from_local", mine, problem or wrong)
        bound = agreed_layout(shards)
        members_need_grad = shards[bound.spec.ranks[0]].requires_grad
    elif problem is not None:
        raise problem
    else:
        check_plain(local)
        whole = said()
        bound = _alone(local, whole.spec) if whole.shape is None else whole.bind(local.dtype)
    prepare_groups(bound.spec, beside=local)
    local_graphs[0] += 1
    if bound.index is None:
        grad = local.requires_grad if members_need_grad is None else members_need_grad
        if not _is_linked(local, bound, grad):
            local = local.detach().new_empty(0, dtype=bound.dtype).requires_grad_(grad)
    elif tuple(local.shape) != bound.local_shape():
        raise SpecError(
            f"rank {bound.rank}'s shard of {bound} must have shape {bound.local_shape()}, got "
            f"{tuple(local.shape)}."
        )
    if local.requires_grad and torch.is_grad_enabled():
        return _FromLocal.apply(local, bound)
    return new_wrapper(HDTensor, local.detach(), bound, False)


def _alone(local: torch.Tensor, spec: HDSpec) -> BoundSpec:
    """Return the layout without asking: one rank that holds everything knows the shape."""
    if spec.ranks != (current_rank(),):
        raise SpecError(
            f"from_local needs shape=, the global shape, where it asks no other rank (check=False, as_rank, or no "
            f"process group): a shard of {tuple(local.shape)} does not tell it for {spec}."
        )
    return BoundSpec.bind(spec, local.shape, None, local.dtype)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, bound: BoundSpec) -> HDTensor:
        ctx.bound = bound
        return new_wrapper(HDTensor, local.detach(), bound, False)

    @staticmethod
    def backward(ctx: Any, grad: HDTensor) -> tuple[torch.Tensor, None]:
        return term_gradient(grad, ctx.bound), None


@torch.compiler.allow_in_graph
def from_dtensor(
    dtensor: DTensor | None,
    spec: HDSpec | str | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    top_sizes: Sequence[int] | None = None,
) -> HDTensor:
    """Build a tensor from each subgroup's ``DTensor`` of its block; differentiable.

    Args:
        dtensor: This rank's subgroup's block; None on ranks outside every subgroup.
        spec: How the whole tensor is cut. None: one subgroup, the DTensor's own mesh and placements.
        shape: Global shape; needed with a spec where a rank may be outside, else taken from the blocks, which takes one
            small collective.
        dtype: Element type; only ranks that pass None may need it.
        top_sizes: Exact extents of the blocks along a top ``Shard``'s dim; with ``shape``.

    Raises:
        SpecError: If the DTensor's mesh or placements are not those of this rank's subgroup; in a compiled program if ranks
            of the world are in no subgroup.
    """
    if torch.compiler.is_compiling():
        _refuse_ranks_outside(dtensor, spec)
    if spec is None:
        return _one_subgroup(dtensor)
    local, problem = attempt(lambda: _local_of(dtensor, as_spec(spec), dtype))
    said = functools.partial(_said_of_blocks, spec, shape, top_sizes)
    return _from_local(local, said, True, problem)  # type: ignore[arg-type]


def _refuse_ranks_outside(dtensor: DTensor | None, spec: HDSpec | str | None) -> None:
    """Raise on every rank where some have no DTensor while a program is compiled, which asks nobody."""
    if spec is not None:
        ranks = as_spec(spec).ranks
    else:
        ranks = tuple(range(dtensor.device_mesh.size())) if dtensor is not None else ()
    if dist.is_initialized() and len(ranks) < dist.get_world_size():
        raise SpecError(
            "from_dtensor in a compiled program: some ranks of the world have no DTensor. They cannot know whether the "
            "others' needs gradients, and compiled programs do not ask. Call it between compiled functions."
        )


def _said_of_blocks(spec: HDSpec | str, shape: Any, top_sizes: Any) -> Whole:
    return Whole.of(as_spec(spec), shape, None, top_sizes)


def _one_subgroup(dtensor: DTensor | None) -> HDTensor:
    """Take over a DTensor's own mesh and placements; ranks without it hear of them."""
    mine, problem = attempt(lambda: _layout_of(dtensor))
    if communicates() and (mine is None or len(mine[0].ranks) < dist.get_world_size()):
        said = {m for m in exchange("from_dtensor", mine, problem) if m is not None}
        if len(said) > 1:
            listing = "; ".join(
                sorted(f"{spec} shape={shape} {dtype}" for spec, shape, dtype in said)
            )
            raise DisagreementError(
                f"from_dtensor was called with DTensors of several layouts: {listing}. Pass spec=, which joins them."
            )
        mine = next(iter(said), None)
    elif problem is not None:
        raise problem
    if mine is None:
        raise SpecError("from_dtensor(None) on every rank: nothing here tells a shape.")
    spec, shape, dtype = mine
    local = torch.empty(0, dtype=dtype) if dtensor is None else dtensor.to_local()
    return _from_local(local, lambda: Whole.of(spec, shape, None, None), False, None)


def _layout_of(dtensor: DTensor | None) -> tuple[HDSpec, tuple[int, ...], torch.dtype] | None:
    if dtensor is None:
        return None
    if not isinstance(dtensor, DTensor):
        raise SpecError(f"from_dtensor takes a DTensor, got {type(dtensor).__name__}.")
    with without_modes():
        groups.adopt_mesh(dtensor.device_mesh)
        spec = HDSpec.from_meshes([(dtensor.device_mesh, dtensor.placements)])
    return spec, tuple(dtensor.shape), dtensor.dtype


def _local_of(dtensor: DTensor | None, spec: HDSpec, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a DTensor's local tensor, after a look at whether it is what the spec says of this rank."""
    index = spec.index_of(current_rank())
    if dtensor is None:
        if index is not None:
            raise SpecError(
                f"rank {current_rank()} is in {spec.subgroups[index]!r} but passes None."
            )
        return torch.empty(0, dtype=dtype)
    if not isinstance(dtensor, DTensor):
        raise SpecError(f"from_dtensor takes a DTensor, got {type(dtensor).__name__}.")
    if index is not None:
        with without_modes():  # what traces the program must not see how a mesh is read
            _check_dtensor(dtensor, spec.subgroups[index])
            groups.adopt_mesh(dtensor.device_mesh)
    return dtensor.to_local()


def _check_dtensor(dtensor: DTensor, group: Subgroup) -> None:
    ranks = tuple(dtensor.device_mesh.mesh.flatten().tolist())
    if ranks != group.ranks or tuple(dtensor.placements) != group.placements:
        raise SpecError(
            f"the DTensor lies on ranks {list(ranks)} as {dtensor.placements}, this rank's subgroup is "
            f"{group.text()}. Redistribute the DTensor, or give a spec with its layout."
        )
