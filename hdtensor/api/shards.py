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
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.special.move import gradient_bound, move
from hdtensor.placements import checks
from hdtensor.placements.layout import local_shape
from hdtensor.placements.normal_form import normalized
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.tensor import HDTensor


class Whole(NamedTuple):
    """What every rank says of the whole tensor; None where the shards shall tell."""

    spec: HDSpec
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    top_sizes: tuple[int, ...] | None

    @classmethod
    def of(cls, spec: HDSpec, shape: Any, stride: Any, top_sizes: Any) -> Whole:
        """Return what a rank says, checked without asking others.

        Raises:
            SpecError: If the shape, strides or extents are none, or do not go together.
        """
        given = {"shape": shape, "stride": stride, "top_sizes": top_sizes}
        shape, stride, top_sizes = (
            None if values is None else checks.int_tuple(name, values)
            for name, values in given.items()
        )
        if shape is not None:
            spec = normalized(spec, len(shape))
        if stride is not None:
            check_stride(shape, stride)
        return cls(spec, shape, stride, top_sizes)

    def bind(self, dtype: torch.dtype, order: tuple[int, ...] | None = None) -> BoundSpec:
        """Return the layout; without strides of its own its dims lie in memory in ``order``."""
        assert self.shape is not None, "the shards have told the shape"
        stride = self.stride
        if stride is None and order is not None and len(order) == len(self.shape):
            stride = dense_stride(self.shape, order)
        return BoundSpec.bind(self.spec, self.shape, stride, dtype, self.top_sizes)

    def __str__(self) -> str:
        given = zip(("shape", "stride", "top_sizes"), self[1:], strict=True)
        return " ".join([str(self.spec), *(f"{name}={v}" for name, v in given if v is not None)])


class LocalShard(NamedTuple):
    """What one rank passes as its shard."""

    local: tuple[int, ...]
    order: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool
    whole: Whole

    @classmethod
    def of(cls, local: Any, whole: Whole) -> LocalShard:
        """Return what a rank passes, checked without asking others.

        Raises:
            SpecError: If the shard is no plain tensor.
        """
        check_plain(local)
        return cls(tuple(local.shape), memory_order(local), local.dtype, local.requires_grad, whole)

    def __str__(self) -> str:
        grad = " requires_grad" if self.requires_grad else ""
        return f"{self.local} {str(self.dtype)[6:]} {self.whole}{grad}"


def agreed_layout(said: Sequence[LocalShard], function: str = "from_local") -> BoundSpec:
    """Return the layout that all ranks' shards make together; its errors are alike on every rank and name ``function``."""
    whole = said[0].whole
    spec = whole.spec
    beyond = [rank for rank in spec.ranks if rank >= len(said)]
    if beyond:
        raise SpecError(f"{spec} names rank {beyond[0]} beyond the world of {len(said)}.")
    dtype, grad = said[spec.ranks[0]][2:4]
    for rank, other in enumerate(said):
        if other.whole != whole or (rank in spec.ranks and other[2:4] != (dtype, grad)):
            listing = "; ".join(f"rank {r}: {o}" for r, o in enumerate(said))
            raise DisagreementError(
                f"{function} was called with unlike specs, dtypes, shapes or requires_grad: {listing}. Pass the same ones "
                f"on every rank."
            )
    shards = {rank: said[rank].local for rank in spec.ranks}
    shape, sizes = whole.shape, whole.top_sizes
    if shape is None:
        spec = normalized(spec, len(shards[spec.ranks[0]]))
        shape, found = infer_shape(spec, shards)
        sizes = found if sizes is None else sizes
    check_shards(spec, shape, sizes, shards)
    orders = {said[rank].order for rank in spec.ranks}
    order = orders.pop() if len(orders) == 1 else None
    return whole._replace(spec=spec, shape=shape, top_sizes=sizes).bind(dtype, order)


def memory_order(local: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims in their order in memory, outermost first; None where elements leave gaps or share memory."""
    stride = local.stride()
    order = tuple(sorted(range(local.ndim), key=lambda d: (-stride[d], d)))
    return order if stride == dense_stride(local.shape, order) else None


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims lie in memory in ``order``, outermost first.

    >>> dense_stride((4, 8, 8), (2, 0, 1))
    (8, 1, 32)
    """
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def check_stride(shape: Sequence[int] | None, stride: Sequence[int]) -> None:
    """Raise unless strides are those of a dense tensor.

    Raises:
        SpecError: Otherwise, or without a shape.
    """
    order = sorted(range(len(stride)), key=lambda d: (-stride[d], d))
    if shape is None or len(shape) != len(stride) or dense_stride(shape, order) != tuple(stride):
        raise SpecError(
            f"stride {tuple(stride)} with shape {None if shape is None else tuple(shape)}: pass both, of one dense "
            f"tensor, or neither."
        )


def check_plain(local: Any) -> None:
    """Raise unless a shard is a plain tensor.

    Raises:
        SpecError: Otherwise.
    """
    if not isinstance(local, torch.Tensor) or isinstance(local, HDTensor | DTensor):
        raise SpecError(f"from_local takes a plain torch.Tensor, got {type(local).__name__}.")


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


def even_shape(spec: HDSpec, local: torch.Tensor) -> tuple[int, ...]:
    """Return the global shape of a tensor of one subgroup whose shards all have the local tensor's shape.

    Raises:
        SpecError: If the shard is no plain tensor, or does not have the dims that are cut.
    """
    check_plain(local)
    shape = list(local.shape)
    (group,) = normalized(spec, local.ndim).subgroups
    for placement, size in zip(group.placements, group.mesh_shape, strict=True):
        dim = checks.shard_dim(placement)
        if dim is not None:
            shape[dim] *= size
    return tuple(shape)


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
