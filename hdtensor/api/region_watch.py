"""What is watched while a region's module runs op by op: gradients' layouts, and computing that is put off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hdtensor._torch_compat import TorchDispatchMode, new_wrapper, saved_tensor_hooks
from hdtensor.api.region_nodes import Layout
from hdtensor.ops.registry import events
from hdtensor.tensor import HDTensor


#: Set while a module is recorded or checked: the regions inside it stay out of the way.
suspended = [False]


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Have all regions stay out of the way."""
    before = suspended[0]
    suspended[0] = True
    try:
        yield
    finally:
        suspended[0] = before


class Watcher:
    """Puts an identity node around a module's inputs, parameters and outputs that notes gradients' layouts."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.num_inputs = 0
        layout.num_watched = 0

    def input(self, x: HDTensor) -> HDTensor:
        """Watch an input; its gradient inside the module only, not that of other uses."""
        self.num_inputs += 1
        return self._watch(x, ("i", self.num_inputs - 1), is_output=False)

    def parameter(self, i: int, x: HDTensor) -> HDTensor:
        """Watch a parameter."""
        watched = self._watch(x, ("p", i), is_output=False)
        if watched is not x:
            self.layout.asked.add(i)
            watched.is_of_weights = True  # type: ignore[attr-defined]
        return watched

    def output(self, k: int, x: HDTensor) -> HDTensor:
        """Watch an output: the module's backward begins there."""
        return self._watch(x, ("o", k), is_output=True)

    def _watch(self, x: HDTensor, slot: Any, *, is_output: bool) -> HDTensor:
        if not (x.requires_grad and torch.is_grad_enabled()) or self.layout.state in (
            "failed",
            "pruned",
        ):
            return x
        self.layout.num_watched += 1
        return _Watch.apply(x, self.layout, slot, is_output)


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: HDTensor, layout: Layout, slot: Any, is_output: bool) -> HDTensor:
        ctx.layout, ctx.slot, ctx.is_output = layout, slot, is_output
        return new_wrapper(HDTensor, x._local_tensor.detach(), x._spec, False)

    @staticmethod
    def backward(ctx: Any, grad: HDTensor) -> tuple[HDTensor, None, None, None]:
        layout = ctx.layout
        if torch.is_grad_enabled():
            layout.state = "failed"  # second derivatives need the history of every operator
        if ctx.is_output:
            layout.start_events, layout.backward_events = events[0], 0
        layout.backward_events = max(layout.backward_events, events[0] - layout.start_events)
        if isinstance(
            grad, HDTensor
        ):  # plain zeros come where a checkpoint is run backward without a gradient
            layout.watched[ctx.slot] = grad._spec
        return grad, None, None, None


class Deferral(TorchDispatchMode):
    """Sees whether a module puts a part of its computing off to backward, as activation checkpointing does.

    That part would find the module's parameters in their places again, not the plain tensors it ran on first. It shows in
    hooks on saved tensors that were not there when the module was called, or in operators on tensors that require grad
    while recording is off.

    Attributes:
        is_seen: Whether it did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_seen = False
        self._hooks = saved_tensor_hooks()
        self._records = torch.is_grad_enabled()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if saved_tensor_hooks() is not self._hooks and saved_tensor_hooks() != self._hooks:
            self.is_seen = True
        if self._records and not torch.is_grad_enabled() and _needs_grad(args):
            self.is_seen = True
        return func(*args, **(kwargs or {}))


class PutOff(Exception):  # noqa: N818 - no error: it ends a run on plain tensors
    """Raised inside a running region where computing is put off to backward, though it was not when the region was learnt."""


#: How the regions that run now were called, innermost last.
begun: list[tuple[Any, bool]] = []


def manner() -> tuple[Any, bool]:
    """Return what activation checkpointing changes around what it puts off."""
    return saved_tensor_hooks(), torch.is_grad_enabled()


def goes_on() -> bool:
    """Return True where the inner module of a running region is called in the same manner.

    Raises:
        PutOff: Otherwise, as where checkpointing was switched on since the region was learnt.
    """
    if begun and manner() != begun[-1]:
        raise PutOff
    return True


def has_plain(values: Iterable[Any]) -> bool:
    """Return whether there is a plain tensor among values."""
    return any(isinstance(v, torch.Tensor) and not isinstance(v, HDTensor) for v in values)


def _needs_grad(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, HDTensor) and x.requires_grad for x in args)


def is_close(plain: Any, result: Any) -> bool:
    """Return whether a plain run's result is the local part of the op-by-op result."""
    if not isinstance(result, HDTensor):
        return plain is None and result is None
    local = result._local_tensor
    if (
        not isinstance(plain, torch.Tensor)
        or plain.shape != local.shape
        or plain.dtype != local.dtype
    ):
        return False
    try:
        torch.testing.assert_close(plain, local, equal_nan=True)
    except AssertionError:
        return False
    return True
