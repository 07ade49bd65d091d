"""Where a micro-batch leaves one stage for another: the program is cut there, and data goes by messages."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from hdtensor._torch_compat import new_wrapper
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.generate import empty_like_local
from hdtensor.ops.special.move import gradient_spec
from hdtensor.placements import HDSpec
from hdtensor.placements.layout import contiguous_stride
from hdtensor.redistribute.overlap import Moving
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import RedistributePlan
from hdtensor.redistribute.topology import topology_in_use
from hdtensor.tensor import HDTensor


#: Hidden states are (batch, sequence, features).
_HIDDEN_DIMS = 3


class Route(NamedTuple):
    """How one tensor goes from stage to stage, and its gradient back.

    Attributes:
        there: The plan of its values.
        back: The plan of its gradient.
        after: Its layout on the next stage.
        gradient: Its gradient's layout on the next stage.
        home: Its gradient's layout on the stage that it came from.
    """

    there: RedistributePlan
    back: RedistributePlan
    after: BoundSpec
    gradient: BoundSpec
    home: BoundSpec


@functools.lru_cache(maxsize=4096)
def route(before: BoundSpec, spec: HDSpec) -> Route:
    """Return how a tensor of a layout gets another spec."""
    shape = tuple(before.shape)
    there = resolve(before.spec, spec, shape, topology=topology_in_use())
    source, target = gradient_spec(before.spec), gradient_spec(spec)
    back = resolve(target, source, shape, topology=topology_in_use())
    stride = contiguous_stride(shape)

    def bound(of: HDSpec) -> BoundSpec:
        return BoundSpec.of(of, shape, stride, before.dtype, None)

    return Route(there, back, bound(spec), bound(target), bound(source))


@functools.lru_cache(maxsize=4096)
def spec_behind(spec: HDSpec, num_dims: int) -> HDSpec:
    """Return the spec of a tensor behind a point whose spec is meant for hidden states.

    What has less dims than a batch of sequences is whole in the stage.
    """
    if num_dims == _HIDDEN_DIMS:
        return spec
    return spec.map_bottom(
        lambda p: Replicate() if isinstance(p, Shard) and p.dim >= min(num_dims, 2) else p
    )


class Arrival:
    """A tensor that comes to this rank's stage, a leaf of its graph.

    Attributes:
        leaf: The tensor.
    """

    def __init__(self, path: Route, moving: Moving, channel: int, requires_grad: bool) -> None:
        self._path, self._channel = path, channel
        self.leaf: HDTensor = new_wrapper(HDTensor, moving(), path.after, requires_grad)

    def send_gradient(self) -> Moving:
        """Start the gradient's way back; zeros where the stage did not use the tensor."""
        grad: Any = self.leaf.grad
        if grad is None:
            grad = torch.zeros_like(self.leaf)
        if grad.spec != self._path.gradient.spec:
            grad = grad.redistribute(self._path.gradient.spec)
        return Moving(self._path.back, grad._local_tensor, reverse=True, channel=self._channel)


class Departure:
    """A tensor that leaves this rank's stage; the stage's backward begins with its gradient.

    Attributes:
        tensor: The tensor, with its graph.
    """

    def __init__(self, tensor: HDTensor, path: Route, moving: Moving, channel: int) -> None:
        self.tensor = tensor
        self._path, self._channel = path, channel
        self._moving: Moving | None = moving
        self._coming: Moving | None = None

    def expect_gradient(self) -> None:
        """Start receiving the gradient."""
        if self._coming is None:
            nothing = empty_like_local(self.tensor.dtype, self.tensor._local_tensor.device)
            self._coming = Moving(self._path.back, nothing, reverse=True, channel=self._channel)

    def gradient(self) -> HDTensor:
        """Wait for the gradient."""
        self.expect_gradient()
        assert self._coming is not None, "it was just started"
        local = self._coming()
        self.wait_sent()
        return new_wrapper(HDTensor, local, self._path.home, False)

    def wait_sent(self) -> None:
        """Wait until the tensor was sent."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving()


def stand_in(x: HDTensor, path: Route) -> HDTensor:
    """Return a tensor behind a point on a rank that has no part of it there."""
    local = empty_like_local(x.dtype, x._local_tensor.device)
    return new_wrapper(HDTensor, local, path.after, x.requires_grad)
