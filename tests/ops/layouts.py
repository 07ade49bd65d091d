"""How the samples of the operator tests are cut: one subgroup, or two unlike ones beside a rank outside.

A layout gives the spec of each tensor of a sample: ``layout(tensor, first, draw)``, where ``first`` is the sample's first
floating tensor with dims, and ``draw`` a seeded generator.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hdtensor import HDSpec, Partial, Replicate, Shard, Subgroup
from hdtensor.collectives import groups


Layout = Callable[[torch.Tensor, torch.Tensor | None, random.Random], HDSpec]

R = Replicate()

#: Top extents are cut 2:1, which is uneven for every length, and leaves length 1 to the second subgroup.
RATIO = (2, 1)


def _one(bottom: Any) -> HDSpec:
    return HDSpec([Subgroup((0, 1), bottom)])


def _two(top: Any, bottom: Any) -> HDSpec:
    ratio = RATIO if isinstance(top, Shard) else None
    return HDSpec([Subgroup((0, 1), bottom), Subgroup((2,), R)], top, ratio)


def _whole(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    return HDSpec([Subgroup((0,), R)])


def _one_s0(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    cut = tensor.ndim > 0 and tensor.is_floating_point()
    return _one(Shard(0) if cut else R)


def _one_any(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    dim = draw.randrange(-1, tensor.ndim)
    return _one(R if dim < 0 else Shard(dim))


def _one_partial(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    return _one(Partial() if tensor.is_floating_point() else R)


def _two_s0(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    if first is None or not tensor.ndim or tensor.shape[0] != first.shape[0]:
        return _two(R, R)
    return _two(Shard(0), Shard(1) if tensor.ndim > 1 and tensor.is_floating_point() else R)


def _two_any(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    """Cut a drawn dim of ``first``, and of the others the dim that broadcasts with it."""
    if first is None:
        return _two(R, R)
    dim = random.Random(str(tuple(first.shape))).randrange(first.ndim)
    return _two_dim(dim, tensor, first, draw)


def _two_dim(
    dim: int, tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random
) -> HDSpec:
    if first is None:
        return _two(R, R)
    own = tensor.ndim + dim - first.ndim
    if own < 0 < dim and tensor.shape == first.shape[dim : dim + 1]:  # one number a channel
        own = 0
    bottom = draw.randrange(-1, tensor.ndim)
    placement = R if bottom < 0 or not tensor.is_floating_point() else Shard(bottom)
    if own < 0 or tensor.shape[own] != first.shape[dim]:
        return _two(R, placement)
    return _two(Shard(own), placement)


def _two_r(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    cut = tensor.ndim > 0 and tensor.is_floating_point()
    return _two(R, Shard(tensor.ndim - 1) if cut else R)


def _two_partial(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    return _two(Partial() if tensor.is_floating_point() else R, R)


def _one_mesh(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    """Two mesh axes, which may cut one dim twice."""
    dims = [draw.randrange(-1, tensor.ndim) for _ in range(2)]
    placements = [R if dim < 0 else Shard(dim) for dim in dims]
    return HDSpec([Subgroup(range(4), placements, (2, 2))])


def _two_three(tensor: torch.Tensor, first: torch.Tensor | None, draw: random.Random) -> HDSpec:
    """Three ranks beside one: most lengths divide by neither."""
    spec = _two_any(tensor, first, draw)
    bottom = spec.subgroups[0].placements
    return HDSpec([Subgroup(range(3), bottom), Subgroup((3,), R)], spec.top, spec.top_ratio)


LAYOUTS: dict[str, Layout] = {
    "whole": _whole,
    "one S0": _one_s0,
    "one any": _one_any,
    "one mesh": _one_mesh,
    "one P": _one_partial,
    "two S0": _two_s0,
    "two E0": functools.partial(_two_dim, 0),
    "two S1": functools.partial(_two_dim, 1),
    "two S2": functools.partial(_two_dim, 2),
    "two any": _two_any,
    "two three": _two_three,
    "two R": _two_r,
    "two P": _two_partial,
}

DTENSOR = "dtensor "


def layout_of(name: str) -> Layout:
    """Return a layout; ``dtensor one S0`` is ``one S0`` for plain DTensors."""
    return LAYOUTS[name.removeprefix(DTENSOR)]


def applies(name: str, first: torch.Tensor | None) -> bool:
    """Return whether a sample has the dim that a layout cuts."""
    if name not in ("two E0", "two S1", "two S2"):
        return True
    return first is not None and first.ndim > int(name[-1])


def really_cuts(spec: HDSpec, tensor: torch.Tensor) -> bool:
    """Return whether two subgroups, or two ranks of the only one, hold unlike parts of the tensor."""
    placement = spec.top if spec.num_subgroups > 1 else spec.subgroups[0].placements[0]
    return isinstance(placement, Shard) and tensor.shape[placement.dim] > 1


def dtensor_mesh_and_placements(spec: HDSpec) -> tuple[DeviceMesh, tuple[Any, ...]]:
    """Return what ``torch.distributed.tensor.distribute_tensor`` takes for a spec of one subgroup."""
    (group,) = spec.subgroups
    return _mesh(group), group.placements


@functools.cache
def _mesh(group: Subgroup) -> DeviceMesh:
    groups.ensure_groups((), [group])
    return groups.mesh_of(group)
