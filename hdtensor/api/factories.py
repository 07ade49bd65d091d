"""Tensors made in place, shard by shard: no rank holds the whole, and nothing is sent."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.local import prepare_groups
from hdtensor.collectives import groups
from hdtensor.collectives.split import check_terms
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shard import as_term
from hdtensor.placements import checks
from hdtensor.placements.forms import SpecLike, also_named, meshes_of, spec_from
from hdtensor.tensor import HDTensor


Size = int | Sequence[int]


@also_named(device_mesh="spec")
def empty(
    size: Size,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> HDTensor:
    """Return a tensor whose values are not set, as ``torch.empty``.

    Args:
        size: Global shape.
        spec: How it is cut, in any form that ``distribute_tensor`` takes; ``device_mesh=`` is the same argument. Every
            rank of the world calls with the same one.
        placements: With a ``DeviceMesh`` only.
        dtype: Element type; default torch's.
        device: Where this rank's shard lies; default the device type that the process group communicates from, or the
            CPU without one.
        requires_grad: Whether autograd records operations on it.

    Raises:
        SpecError: If the spec does not fit the size.
        RedistributeError: If the spec leaves a reduction pending that the dtype does not have.
    """
    return _made(size, spec_of(spec, placements), torch.empty, dtype, device, requires_grad)


@also_named(device_mesh="spec")
def full(
    size: Size,
    fill_value: complex,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> HDTensor:
    """Return a tensor of one value, as ``torch.full``; see ``empty`` for the arguments.

    Where a reduction is pending, its result has the value.
    """

    def fill(shape: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.full(shape, fill_value, **options)

    dtype = torch.full((), fill_value).dtype if dtype is None else dtype
    return _made(size, spec_of(spec, placements), fill, dtype, device, requires_grad)


@also_named(device_mesh="spec")
def zeros(
    size: Size,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> HDTensor:
    """Return a tensor of zeros, as ``torch.zeros``; see ``full``."""
    return _made(size, spec_of(spec, placements), torch.zeros, dtype, device, requires_grad)


@also_named(device_mesh="spec")
def ones(
    size: Size,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> HDTensor:
    """Return a tensor of ones, as ``torch.ones``; see ``full``."""
    return _made(size, spec_of(spec, placements), torch.ones, dtype, device, requires_grad)


@also_named(device_mesh="spec")
def rand(
    size: Size,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> HDTensor:
    """Return values drawn evenly from [0, 1); see ``empty`` for the arguments.

    They depend on the seed and the global index of an element, not on how the tensor is cut; every rank has seeded alike.

    Args:
        size: See ``empty``.
        spec: See ``empty``.
        placements: See ``empty``.
        dtype: See ``empty``.
        device: See ``empty``.
        requires_grad: See ``empty``.
        generator: What the key of the draw is taken from; default torch's generator of the CPU.

    Raises:
        DeductionError: If the spec leaves a reduction pending: the values would be summed.
    """
    made = empty(size, spec, placements, dtype=dtype, device=device)
    return made.uniform_(generator=generator).requires_grad_(requires_grad)  # type: ignore[return-value]


@also_named(device_mesh="spec")
def randn(
    size: Size,
    spec: SpecLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> HDTensor:
    """Return values drawn from the normal distribution of mean 0 and variance 1; see ``rand``."""
    made = empty(size, spec, placements, dtype=dtype, device=device)
    return made.normal_(generator=generator).requires_grad_(requires_grad)  # type: ignore[return-value]


def spec_of(spec: SpecLike | None, placements: Sequence[Placement] | None) -> Any:
    """Return the spec that is said, after a look at the meshes that it names."""
    for mesh in meshes_of(spec):
        groups.adopt_mesh(mesh)
    return spec_from(spec, placements)


def _made(
    size: Size,
    spec: Any,
    make: Callable[..., torch.Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    requires_grad: bool,
) -> HDTensor:
    """Return a tensor of which this rank makes its shard."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    check_terms(spec, dtype)
    shape = checks.int_tuple(
        "size", size if isinstance(size, Sequence) else (operator.index(size),)
    )
    bound = BoundSpec.bind(spec, shape, None, dtype)
    prepare_groups(bound.spec)
    if device is None:
        device = groups.device_type() if dist.is_initialized() else "cpu"
    local = make(bound.local_shape(), dtype=dtype, device=device)
    if bound.index is not None:
        as_term(local, bound)
    return new_wrapper(HDTensor, local, bound, requires_grad)
