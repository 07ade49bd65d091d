"""Building an ``HDTensor`` from what ranks hold: ``from_local``, ``from_dtensor``, ``shard_of``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

from hdtensor._rank import current_rank, is_played
from hdtensor._torch_compat import new_wrapper
from hdtensor.collectives import groups
from hdtensor.errors import DisagreementError, SpecError
from hdtensor.ops.bound import BoundSpec, normalized
from hdtensor.placements import checks
from hdtensor.placements.layout import local_shape, owned_boxes
from hdtensor.placements.spec import HDSpec, Subgroup
from hdtensor.redistribute.resolve import resolve
from hdtensor.tensor import HDTensor, as_spec, gradient_bound


def prepare_groups(*specs: HDSpec) -> None:
    """Create the process groups that tensors of these specs need; every rank of the world calls it.

    These are each subgroup's mesh axes, and the group over all subgroups that sums a loss's weights. Without process
    groups (one plain process), or inside ``as_rank``, nothing is created.
    """
    if not dist.is_initialized() or is_played():
        return
    rank_sets: set[tuple[int, ...]] = set()
    for spec in specs:
        if spec.num_subgroups > 1:
            rank_sets |= set(scalar_rank_sets(spec))
    groups.ensure_groups(sorted(rank_sets), [g for spec in specs for g in spec.subgroups])


def scalar_rank_sets(spec: HDSpec) -> tuple[tuple[int, ...], ...]:
    """Return the groups that a top sum of a scalar over the spec's subgroups uses."""
    whole = HDSpec([Subgroup(g.ranks, None, g.mesh_shape) for g in spec.subgroups])
    return tuple(resolve(whole.replace(top=Partial()), whole, ()).rank_sets())


def shard_of(full: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, as a new contiguous tensor.

    A ``Partial`` tier keeps the value in its first subgroup (rank) and zeros elsewhere for a sum; every holder keeps it
    for the other reductions.
    """
    if bound.index is None:
        return full.new_empty(0)
    owned = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, bound.rank)
    origin = (0,) * full.ndim
    if len(owned) == 1:
        local = full.detach()[owned[0].box.slices_from(origin)].contiguous().clone()
    else:
        local = full.new_empty(bound.local_shape())
        for piece in owned:
            local[piece.local_slices] = full.detach()[piece.box.slices_from(origin)]
    return _as_term(local, bound)


def _as_term(local: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Turn a value into this rank's term of a pending reduction."""
    assert bound.index is not None
    group = bound.spec.subgroups[bound.index]
    tiers = [(bound.spec.top, bound.index)]
    tiers += list(zip(group.placements, group.coordinate(bound.rank), strict=True))
    for placement, position in tiers:
        if isinstance(placement, Partial) and position:
            if placement.reduce_op == "sum":
                local.zero_()
            elif placement.reduce_op == "product":
                local.fill_(1)
    return local


def from_local(
    local: torch.Tensor,
    spec: HDSpec | str,
    *,
    shape: Sequence[int] | None = None,
    top_sizes: Sequence[int] | None = None,
    check: bool = True,
) -> HDTensor:
    """Build a tensor from every rank's shard; differentiable.

    Args:
        local: This rank's shard. Ranks outside every subgroup pass any tensor of the dtype; its values are not used.
        spec: How the whole tensor is cut, or the short text of it.
        shape: Global shape. Without it the ranks' shards tell, which takes one small collective.
        top_sizes: Exact extents of the blocks along a top ``Shard``'s dim; with ``shape`` only.
        check: Make sure that all ranks' shards fit one global shape, also with ``shape``. Every rank of the world calls
            in that case. ``check=False`` needs ``shape``.

    Raises:
        SpecError: On every rank, if the shards do not fit one global shape (cases 9, 10): the message lists each rank's
            shape beside the one expected.
        DisagreementError: On every rank, if ranks pass unlike specs or dtypes.
    """
    spec = normalized(as_spec(spec), _num_dims(local, shape, as_spec(spec)))
    prepare_groups(spec)
    if shape is None or (check and dist.is_initialized() and not is_played()):
        shape, top_sizes = _agree(local, spec, shape, top_sizes, check)
    bound = BoundSpec.bind(spec, shape, None, local.dtype, top_sizes)
    if bound.index is None:
        local = local.new_empty(0)
    elif tuple(local.shape) != bound.local_shape():
        raise SpecError(
            f"rank {bound.rank}'s shard of {bound} must have shape {bound.local_shape()}, got "
            f"{tuple(local.shape)}."
        )
    if local.requires_grad and torch.is_grad_enabled():
        return _FromLocal.apply(local, bound)
    return new_wrapper(HDTensor, local.detach(), bound, False)


def _num_dims(local: torch.Tensor, shape: Sequence[int] | None, spec: HDSpec) -> int:
    if shape is not None:
        return len(shape)
    if spec.index_of(current_rank()) is not None:
        return local.ndim
    dims = [checks.shard_dim(p) for g in spec.subgroups for p in g.placements]
    if any(d is not None and d < 0 for d in dims):
        raise SpecError(f"on ranks outside every subgroup of {spec} negative dims need shape=.")
    return max([d for d in (*dims, checks.shard_dim(spec.top)) if d is not None], default=0) + 1


def _agree(
    local: torch.Tensor, spec: HDSpec, shape: Any, top_sizes: Any, check: bool
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    if not check:
        raise SpecError("from_local(check=False) needs shape=, the global shape.")
    mine = (tuple(local.shape), str(local.dtype), str(spec), _tuple(shape), _tuple(top_sizes))
    if dist.is_initialized() and not is_played():
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
    else:
        said = [mine] * (max(spec.ranks) + 1)
    for rank, other in enumerate(said):
        if other[2:] != mine[2:] or (rank in spec.ranks and other[1] != said[spec.ranks[0]][1]):
            listing = ", ".join(f"rank {r}: {o[2]} {o[1]} shape={o[3]}" for r, o in enumerate(said))
            raise DisagreementError(
                f"from_local was called with unlike specs, dtypes or shapes: {listing}. Pass the same ones "
                f"on every rank."
            )
    shards = {rank: said[rank][0] for rank in spec.ranks if rank < len(said)}
    if len(shards) < len(spec.ranks):
        raise SpecError(f"{spec} names ranks beyond the world of {len(said)}.")
    found, sizes = (
        infer_shape(spec, shards) if shape is None else (_tuple(shape), _tuple(top_sizes))
    )
    assert found is not None
    check_shards(spec, found, sizes, shards)
    return found, sizes


def _tuple(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def infer_shape(
    spec: HDSpec, shards: Mapping[int, tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the global shape and top extents that ranks' shard shapes add up to.

    Args:
        spec: How the tensor is cut.
        shards: Shape of each rank's local tensor.

    Raises:
        SpecError: If the shards do not have the same number of dims.
    """
    if len({len(shape) for shape in shards.values()}) > 1:
        raise SpecError(f"shards have unlike numbers of dims: {_listing(shards)}.")
    blocks = [_block_shape(group, shards) for group in spec.subgroups]
    shape = list(blocks[0])
    if not isinstance(spec.top, Shard) or spec.num_subgroups == 1:
        return tuple(shape), None
    sizes = tuple(block[spec.top.dim] for block in blocks)
    shape[spec.top.dim] = sum(sizes)
    return tuple(shape), sizes


def _block_shape(group: Subgroup, shards: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    first = shards[group.ranks[0]]
    shape = list(first)
    for dim in range(len(shape)):
        axes = [a for a, p in enumerate(group.placements) if checks.shard_dim(p) == dim]
        if axes:
            shape[dim] = sum(
                shards[rank][dim]
                for rank in group.ranks
                if all(c == 0 for a, c in enumerate(group.coordinate(rank)) if a not in axes)
            )
    return tuple(shape)


def check_shards(
    spec: HDSpec,
    shape: tuple[int, ...],
    top_sizes: tuple[int, ...] | None,
    shards: Mapping[int, tuple[int, ...]],
) -> None:
    """Raise unless every rank's shard has the shape that the spec gives it.

    Raises:
        SpecError: Listing every rank's shape beside the expected one.
    """
    sizes = BoundSpec.bind(spec, shape, None, torch.float32, top_sizes).top_sizes
    expected = {rank: local_shape(spec, shape, sizes, rank) for rank in spec.ranks}
    wrong = {r: (shards[r], expected[r]) for r in spec.ranks if shards[r] != expected[r]}
    if wrong:
        listing = "; ".join(f"rank {r} has {a}, expected {b}" for r, (a, b) in wrong.items())
        raise SpecError(
            f"the shards do not make one tensor of shape {shape} cut as {spec}: {listing}. Inside a subgroup cuts "
            f"are torch.chunk's; for other extents make each rank a subgroup and cut with a top Shard."
        )


def _listing(shards: Mapping[int, tuple[int, ...]]) -> str:
    return ", ".join(f"rank {rank}: {shape}" for rank, shape in shards.items())


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, bound: BoundSpec) -> HDTensor:
        ctx.bound = bound
        return new_wrapper(HDTensor, local.view_as(local), bound, False)

    @staticmethod
    def backward(ctx: Any, grad: HDTensor) -> tuple[torch.Tensor, None]:
        wanted = gradient_bound(ctx.bound)
        if grad.spec is not wanted.spec or grad.top_sizes != wanted.top_sizes:
            grad = grad.redistribute(wanted.spec, top_sizes=wanted.top_sizes)
        return grad._local_tensor, None


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
        dtype: Needed on ranks that pass None.
        top_sizes: Exact extents of the blocks along a top ``Shard``'s dim; with ``shape``.

    Raises:
        SpecError: If the DTensor's mesh or placements are not those of this rank's subgroup.
    """
    if spec is None:
        if dtensor is None:
            raise SpecError(
                "from_dtensor(None) needs spec=, shape= and dtype=: nothing here tells them."
            )
        own = HDSpec.from_meshes([(dtensor.device_mesh, dtensor.placements)])
        return from_local(dtensor.to_local(), own, shape=dtensor.shape, check=False)
    spec = as_spec(spec)
    if dtensor is None:
        return from_local(torch.empty(0, dtype=dtype), spec, shape=shape, top_sizes=top_sizes)
    index = spec.index_of(current_rank())
    if index is not None:
        _check_dtensor(dtensor, spec.subgroups[index])
    return from_local(dtensor.to_local(), spec, shape=shape, top_sizes=top_sizes)


def _check_dtensor(dtensor: DTensor, group: Subgroup) -> None:
    ranks = tuple(dtensor.device_mesh.mesh.flatten().tolist())
    if ranks != group.ranks or tuple(dtensor.placements) != group.placements:
        raise SpecError(
            f"the DTensor lies on ranks {list(ranks)} as {dtensor.placements}, this rank's subgroup is "
            f"{group.text()}. Redistribute the DTensor, or give a spec with its layout."
        )
