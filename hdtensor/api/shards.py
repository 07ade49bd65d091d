"""What ranks pass as their shards of one tensor: the layout that the shards make together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from hdtensor.collectives.split import is_norm
from hdtensor.errors import DisagreementError, RedistributeError, SpecError
from hdtensor.ops.bound import BoundSpec, normalized
from hdtensor.ops.special.move import gradient_bound, move
from hdtensor.placements import checks
from hdtensor.placements.layout import local_shape
from hdtensor.placements.spec import HDSpec, Subgroup
from hdtensor.placements.text import as_spec
from hdtensor.tensor import HDTensor


class LocalShard(NamedTuple):
    """What one rank passes as its shard."""

    local: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    spec: HDSpec
    shape: tuple[int, ...] | None
    top_sizes: tuple[int, ...] | None

    @classmethod
    def of(cls, local: Any, spec: HDSpec | str, shape: Any, top_sizes: Any) -> LocalShard:
        """Return what a rank passes, checked without asking others.

        Raises:
            SpecError: If the shard is no plain tensor, or the spec, shape or extents are none.
        """
        check_plain(local)
        spec, shape = as_spec(spec), _tuple("shape", shape)
        if shape is not None:
            spec = normalized(spec, len(shape))
        sizes = _tuple("top_sizes", top_sizes)
        return cls(tuple(local.shape), local.dtype, local.requires_grad, spec, shape, sizes)

    def __str__(self) -> str:
        sizes = "" if self.top_sizes is None else f" top_sizes={self.top_sizes}"
        shape = "" if self.shape is None else f" shape={self.shape}"
        grad = " requires_grad" if self.requires_grad else ""
        return f"{self.local} {str(self.dtype)[6:]} {self.spec}{shape}{sizes}{grad}"


def agreed_layout(said: Sequence[LocalShard]) -> BoundSpec:
    """Return the layout that all ranks' shards make together; its errors are alike on every rank."""
    spec = said[0].spec
    beyond = [rank for rank in spec.ranks if rank >= len(said)]
    if beyond:
        raise SpecError(f"{spec} names rank {beyond[0]} beyond the world of {len(said)}.")
    dtype, grad = said[spec.ranks[0]][1:3]
    for rank, other in enumerate(said):
        if other[3:] != said[0][3:] or (rank in spec.ranks and other[1:3] != (dtype, grad)):
            listing = "; ".join(f"rank {r}: {o}" for r, o in enumerate(said))
            raise DisagreementError(
                f"from_local was called with unlike specs, dtypes, shapes or requires_grad: {listing}. Pass the same ones "
                f"on every rank."
            )
    shards = {rank: said[rank].local for rank in spec.ranks}
    shape, sizes = said[0].shape, said[0].top_sizes
    if shape is None:
        spec = normalized(spec, len(shards[spec.ranks[0]]))
        shape, found = infer_shape(spec, shards)
        sizes = found if sizes is None else sizes
    check_shards(spec, shape, sizes, shards)
    return BoundSpec.bind(spec, shape, None, dtype, sizes)


def check_plain(local: Any) -> None:
    """Raise unless a shard is a plain tensor.

    Raises:
        SpecError: Otherwise.
    """
    if not isinstance(local, torch.Tensor) or isinstance(local, HDTensor | DTensor):
        raise SpecError(f"from_local takes a plain torch.Tensor, got {type(local).__name__}.")


def _tuple(name: str, values: Any) -> tuple[int, ...] | None:
    return None if values is None else checks.int_tuple(name, values)


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
    dim = checks.shard_dim(spec.top)
    if dim is None:
        return tuple(shape), None
    sizes = tuple(block[dim] for block in blocks)
    shape[dim] = sum(sizes)
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


def term_gradient(grad: HDTensor, bound: BoundSpec) -> torch.Tensor:
    """Return the gradient of this rank's shard, or term, of a tensor.

    Args:
        grad: The tensor's gradient.
        bound: The tensor's layout.

    Raises:
        RedistributeError: On every rank, if a pending reduction of the layout is not linear.
    """
    _check_linear(bound)
    wanted = gradient_bound(bound)
    if grad.spec is not wanted.spec or grad.top_sizes != wanted.top_sizes:
        grad = move(grad, wanted.spec, wanted.top_sizes, reverse=True)
    if bound.index is None or not bound.spec.has_partial():
        return grad._local_tensor
    tiers = _tiers(bound.spec, bound.spec.subgroups[bound.index])
    averaged = [size for p, size in tiers if isinstance(p, Partial) and p.reduce_op == "avg"]
    return grad._local_tensor / math.prod(averaged) if averaged else grad._local_tensor


def _check_linear(bound: BoundSpec) -> None:
    """Raise unless every pending reduction is a sum or an average, also where this rank takes no part."""
    if not bound.spec.has_partial():
        return
    for group in bound.spec.subgroups:
        for p, size in _tiers(bound.spec, group):
            if not isinstance(p, Partial) or size == 1:
                continue
            if p.reduce_op not in ("sum", "avg") or is_norm(p):
                raise RedistributeError(
                    f"autograd through {checks.placement_text(p)} terms of {bound}: which term the result took is not "
                    f"kept. Reduce with Partial('sum'), or build the tensor under torch.no_grad()."
                )


def _tiers(spec: HDSpec, group: Subgroup) -> Iterator[tuple[Placement, int]]:
    """Return the placements of a subgroup, top tier first, each with the number of its parts."""
    yield spec.top, spec.num_subgroups
    yield from zip(group.placements, group.mesh_shape, strict=True)
