"""``distribute_tensor``: cut a whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hdtensor._rank import as_rank, current_rank, is_played
from hdtensor._torch_compat import current_mesh, new_wrapper
from hdtensor.api.agreement import attempt, communicates, exchange, require_alike
from hdtensor.api.local import prepare_groups
from hdtensor.collectives import groups, observe, p2p
from hdtensor.collectives.split import check_terms
from hdtensor.errors import SpecError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shard import shard_of
from hdtensor.ops.special.move import move
from hdtensor.placements.forms import SpecLike, also_named, meshes_of, spec_from
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.tensor import HDTensor


@torch.compiler.allow_in_graph
@also_named(device_mesh="spec")
def distribute_tensor(
    tensor: torch.Tensor,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    hdim: int = -1,
    top_ratio: Sequence[int] | None = None,
    top_sizes: Sequence[int] | None = None,
    src_data_rank: int | None = 0,
) -> HDTensor:
    """Cut a whole tensor; every rank of the world calls it with the same spec and a tensor of the same shape.

    Four ways to say how::

        distribute_tensor(t, spec)                                      # an HDSpec
        distribute_tensor(t, "S0[3:1] / 0,1:S1 2:R")                    # its short text
        distribute_tensor(t, [(mesh_a, [Shard(1)]), (mesh_b, [Replicate()])], hdim=0)   # the paper's unions
        distribute_tensor(t, mesh, [Shard(0)])                          # DTensor's call: one subgroup

    Args:
        tensor: The whole tensor. A leaf; the result requires grad where it does. On the ``meta`` device the shards are
            made there too. An ``HDTensor`` that is cut like this already is returned itself.
        spec: See above; ``device_mesh=`` is the same argument. Default: the mesh of the ``with`` block around the call.
        placements: With a ``DeviceMesh`` only; default ``Replicate()`` on every axis, as DTensor.
        hdim: HDim code of a list of pairs: d for ``Shard(d)``, -1 replicate, -2 partial.
        top_ratio: Proportions of a top ``Shard``, with a list of pairs.
        top_sizes: Exact extents of the blocks along a top ``Shard``'s dim; default: by the ratio.
        src_data_rank: Global rank whose values count; they are sent to the holders. With a ``DeviceMesh`` the position
            in the mesh, as DTensor has it. None: every rank cuts its own tensor, which must be the same everywhere;
            nothing is sent.

    Raises:
        SpecError: If the spec does not fit the tensor.
        RedistributeError: If the spec leaves a reduction pending that the dtype does not have, such as an average of
            integers.
        DisagreementError: On every rank, if ranks pass unlike shapes, dtypes or specs, or one of them fails (not with
            ``src_data_rank=None``, which asks nobody).
    """
    mesh = spec if spec is not None else current_mesh()
    if isinstance(mesh, DeviceMesh) and type(src_data_rank) is int:
        ranks = mesh.mesh.flatten().tolist()
        src_data_rank = ranks[src_data_rank] if 0 <= src_data_rank < len(ranks) else -1
    options: dict[str, Any] = {"hdim": hdim, "top_ratio": top_ratio, "top_sizes": top_sizes}
    if src_data_rank is None or not communicates():
        bound = _bind(tensor, spec, placements, **options)
    else:
        found, problem = attempt(lambda: _bind(tensor, spec, placements, **options))
        bound = _agreed(tensor, found, src_data_rank, problem)
    if isinstance(tensor, HDTensor):
        return tensor
    prepare_groups(bound.spec, beside=tensor)
    if torch.compiler.is_compiling() and src_data_rank is not None and not is_played():
        return _scatter_in_graph(tensor.detach(), bound, src_data_rank)
    if src_data_rank is None or tensor.is_meta or not communicates():
        local = shard_of(tensor, bound)
    else:
        with observe.because("distribute_tensor"), observe.profiled("distribute_tensor"):
            local = scatter(tensor, bound, src_data_rank)
    return new_wrapper(HDTensor, local, bound, tensor.requires_grad)


def _bind(
    tensor: torch.Tensor, spec: Any, placements: Any, *, hdim: int, top_ratio: Any, top_sizes: Any
) -> BoundSpec:
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(f"distribute_tensor takes a torch.Tensor, got {type(tensor).__name__}.")
    if isinstance(tensor, DTensor):
        raise SpecError(
            f"the tensor is a DTensor of shape {tuple(tensor.shape)}; use HDTensor.from_dtensor."
        )
    if not (tensor.is_leaf or isinstance(tensor, HDTensor)):
        raise SpecError(
            "distribute_tensor takes a leaf tensor; use HDTensor.from_local inside a graph."
        )
    wanted = spec_from(spec, placements, hdim, top_ratio)
    for mesh in meshes_of(spec):
        groups.adopt_mesh(mesh)
    check_terms(wanted, tensor.dtype)
    if not isinstance(tensor, HDTensor):
        return BoundSpec.bind(wanted, tensor.shape, None, tensor.dtype, top_sizes)
    own = tensor._spec
    bound = BoundSpec.bind(wanted, own.shape, own.stride, own.dtype, top_sizes)
    if bound.spec is not own.spec or bound.top_sizes != own.top_sizes:
        raise SpecError(
            f"the tensor is distributed already, not as {bound} ({tensor!r}); use tensor.redistribute(spec)."
        )
    return bound


def scatter(tensor: torch.Tensor, bound: BoundSpec, source: int) -> torch.Tensor:
    """Return this rank's shard of a tensor that one rank has whole; every rank of the world calls it.

    Args:
        tensor: The whole tensor on the source; elsewhere its device counts.
        bound: How it is cut.
        source: The global rank.
    """
    rank = current_rank()
    if rank == source:
        sends = {}
        for holder in bound.spec.ranks:
            if holder != source:
                shard = shard_of(tensor, _as_seen_by(bound, holder))
                if shard.numel():
                    sends[holder] = shard
        p2p.exchange(sends, {})
        return shard_of(tensor, bound)
    local = tensor.detach().new_empty(bound.local_shape())
    p2p.exchange({}, {source: local} if bound.index is not None and local.numel() else {})
    return local


def _scatter_in_graph(tensor: torch.Tensor, bound: BoundSpec, source: int) -> HDTensor:
    """Do what ``scatter`` does, by operators that a compiled program keeps."""
    home = BoundSpec.bind(HDSpec([Subgroup((source,))]), tensor.shape, None, tensor.dtype)
    local = tensor.contiguous() if home.index is not None else tensor.new_empty(0)
    return move(new_wrapper(HDTensor, local, home, False), bound.spec, bound.top_sizes)


def _as_seen_by(bound: BoundSpec, rank: int) -> BoundSpec:
    with as_rank(rank):
        return BoundSpec.of(bound.spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes)


def _agreed(
    tensor: torch.Tensor, bound: BoundSpec | None, source: int, problem: Exception | None
) -> BoundSpec:
    """Raise on every rank if one rank's call differs: a message of another length would abort processes."""
    mine = None
    if bound is not None:
        grad = " requires_grad" if tensor.requires_grad else ""
        where = " meta" if tensor.is_meta else ""
        mine = f"{bound!r}{grad}{where} src_data_rank={source!r}"
    said = exchange("distribute_tensor", mine, problem)
    require_alike(
        "distribute_tensor",
        said,
        "Pass the same shape, dtype, spec and requires_grad on every rank.",
    )
    if type(source) is not int or not 0 <= source < len(said):
        raise SpecError(f"src_data_rank {source!r} is no rank of the world of {len(said)}.")
    assert bound is not None, "without a problem there is a result"
    return bound
