"""Where a micro-batch leaves one stage for another: the program is cut there, and data goes by messages."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import Replicate, Shard

from hdtensor._torch_compat import new_wrapper
from hdtensor.collectives import observe
from hdtensor.errors import PipelineError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.generate import empty_like_local
from hdtensor.ops.special.move import gradient_spec
from hdtensor.pipeline.runtime.recording import waited
from hdtensor.placements import HDSpec
from hdtensor.placements.layout import contiguous_stride
from hdtensor.redistribute import overlap
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import RedistributePlan
from hdtensor.redistribute.topology import topology_in_use
from hdtensor.tensor import HDTensor


_T = TypeVar("_T")

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


#: Waits for a tensor that is on its way.
Pending = Callable[[], torch.Tensor]

#: Starts sending a gradient, this rank's local tensor of it; what is returned waits.
SendBack = Callable[[torch.Tensor], Callable[[], object]]


class Arrival:
    """A tensor that comes to this rank's stage, a leaf of its graph.

    Attributes:
        leaf: The tensor.
    """

    def __init__(
        self,
        local: torch.Tensor,
        path: Route,
        send_back: SendBack,
        *,
        requires_grad: bool,
        is_plain: bool = False,
    ) -> None:
        """Make the leaf.

        Args:
            local: This rank's local tensor, which nobody else has.
            path: Its way.
            send_back: Starts sending a gradient, this rank's local tensor of it.
            requires_grad: Whether a gradient goes back.
            is_plain: Whether the leaf is the local tensor itself.
        """
        self._gradient, self._send_back = path.gradient.spec, send_back
        self.leaf: torch.Tensor = (
            local.requires_grad_(requires_grad)
            if is_plain
            else new_wrapper(HDTensor, local, path.after, requires_grad)
        )

    def send_gradient(self) -> Callable[[], object]:
        """Start the gradient's way back; zeros where the stage did not use the tensor."""
        grad: Any = self.leaf.grad
        if grad is None:
            grad = torch.zeros_like(self.leaf)
        if not isinstance(grad, HDTensor):
            return self._send_back(grad)
        if grad.spec != self._gradient:
            grad = grad.redistribute(self._gradient)
        return self._send_back(grad._local_tensor)


class Departure:
    """A tensor that leaves this rank's stage; the stage's backward begins with its gradient.

    Attributes:
        tensor: The tensor, with its graph.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        home: BoundSpec,
        sending: Callable[[], object] | None,
        receive: Callable[[], Callable[[], torch.Tensor]] | None,
    ) -> None:
        """Note a tensor that is on its way.

        Args:
            tensor: The tensor.
            home: Its gradient's layout here.
            sending: Waits until it was sent; None where it stays on the rank.
            receive: Starts receiving the gradient; None where it is handed over.
        """
        self.tensor = tensor
        self._home, self._sending, self._receive = home, sending, receive
        self._coming: Callable[[], torch.Tensor] | None = None
        self._local = tensor._local_tensor if isinstance(tensor, HDTensor) else tensor
        self._version = version_of(self._local)

    def hand_over(self, local: torch.Tensor) -> Callable[[], object]:
        """Take the gradient from another stage of this rank."""
        self._coming = lambda: local
        return lambda: None

    def expect_gradient(self) -> None:
        """Start receiving the gradient."""
        if self._coming is None and self._receive is not None:
            self._coming = self._receive()

    def gradient(self) -> torch.Tensor:
        """Wait for the gradient."""
        self.expect_gradient()
        assert self._coming is not None, "schedules put the later stage's backward first"
        local = waiting(self._coming)
        self.wait_sent()
        if not isinstance(self.tensor, HDTensor):
            return local
        found: HDTensor = new_wrapper(HDTensor, local, self._home, False)
        return found

    def wait_sent(self) -> None:
        """Wait until the tensor was sent.

        Raises:
            PipelineError: If it was changed in place on its way.
        """
        if version_of(self._local) != self._version:
            raise PipelineError(CHANGED)
        sending, self._sending = self._sending, None
        if sending is not None:
            waiting(sending)


def version_of(x: torch.Tensor) -> int:
    """Return a number that grows where a tensor is changed in place."""
    return 0 if x.is_inference() else x._version


#: Why what was sent may not change.
CHANGED = (
    "the model changes a tensor in place that it has given to a layer of another stage: the values would be on their way "
    "already. Make a new tensor of it (x = x * 2 instead of x.mul_(2))."
)


def send(x: torch.Tensor, path: Route, channel: int) -> Departure:
    """Send a tensor that this rank holds a part of, or all of as a plain one, to its next stage."""
    local = x._local_tensor if isinstance(x, HDTensor) else x.detach()

    def receive() -> Pending:
        nothing = empty_like_local(x.dtype, local.device)
        return _start(path.back, nothing, reverse=True, channel=channel)

    return Departure(x, path.home, _start(path.there, local, channel=channel), receive)


def receive(x: HDTensor, path: Route, channel: int, coming: Pending, *, is_plain: bool) -> Arrival:
    """Receive a tensor of which this rank holds a part from now on.

    Args:
        x: Its stand-in from before.
        path: Its way.
        channel: Of its messages.
        coming: What receives it.
        is_plain: Whether it comes as a plain tensor.
    """

    def send_back(local: torch.Tensor) -> Pending:
        return _start(path.back, local, reverse=True, channel=channel)

    return Arrival(
        waiting(coming), path, send_back, requires_grad=x.requires_grad, is_plain=is_plain
    )


def waiting(pending: Callable[[], _T]) -> _T:
    """Return what comes, and note how long it took."""
    start = time.perf_counter()
    result = pending()
    waited[0] += time.perf_counter() - start
    return result


def expect(path: Route, device: torch.device, channel: int) -> Pending:
    """Start receiving a tensor."""
    return _start(path.there, empty_like_local(path.after.dtype, device), channel=channel)


def _start(
    plan: RedistributePlan, local: torch.Tensor, *, reverse: bool = False, channel: int
) -> Pending:
    """Start moving a tensor; tell who counts or compares communication why."""
    if not observe.listeners:
        return overlap.start(plan, local, reverse=reverse, channel=channel)
    with observe.because("redistribute (backward)" if reverse else "redistribute"):
        return overlap.start(plan, local, reverse=reverse, channel=channel)


def hand_over(x: HDTensor, path: Route) -> tuple[Departure, Arrival]:
    """Take a tensor from one stage of this rank to the next."""
    departure = Departure(x, path.home, None, None)
    detached: Any = x.detach()
    local = detached.redistribute(path.after.spec)._local_tensor
    return departure, Arrival(local, path, departure.hand_over, requires_grad=x.requires_grad)


def stand_in(x: torch.Tensor, path: Route) -> HDTensor:
    """Return a tensor behind a point on a rank that has no part of it there."""
    local = empty_like_local(x.dtype, x.device)
    found: HDTensor = new_wrapper(HDTensor, local, path.after, x.requires_grad)
    return found
