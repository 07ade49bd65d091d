"""Stand-ins for a module's parameters: others while it is watched, plain leaves while it runs on plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.gradients import GradientSync
from hdtensor.ops.bound import BoundSpec
from hdtensor.tensor import HDTensor


class Leaf:
    """A parameter's local tensor as a plain autograd leaf of the same storage."""

    __slots__ = ("grad_bound", "parameter", "plain", "slots", "sync")

    def __init__(
        self, parameter: HDTensor, slots: list[tuple[dict[str, Any], str]], sync: GradientSync
    ) -> None:
        self.parameter = parameter
        self.slots = slots
        self.sync = sync
        self.grad_bound: BoundSpec | None = None
        self.plain = self._make()

    def _make(self) -> torch.Tensor:
        plain = self.parameter._local_tensor.detach()
        if self.parameter.requires_grad:
            plain.requires_grad_()
            plain.grad_dtype = (
                self.parameter.grad_dtype
            )  # gradients may add up in a dtype of their own
            plain.register_post_accumulate_grad_hook(self._bring_home)
        return plain

    def accepts(self, bound: BoundSpec | None) -> bool:
        """Whether the gradient comes in the layout that other layouts of the inputs gave."""
        if bound is None:  # none was recorded: right without autograd, or for a frozen parameter
            return not (torch.is_grad_enabled() and self.parameter.requires_grad)
        if self.grad_bound is None:
            self.grad_bound = bound
        return self.grad_bound is bound

    def put(self) -> None:
        """Stand in for the parameter, with its present values and ``requires_grad``."""
        parameter, plain = self.parameter, self.plain
        local = parameter._local_tensor
        if plain.data_ptr() != local.data_ptr() or plain.requires_grad != parameter.requires_grad:
            plain = self.plain = self._make()
        for home, key in self.slots:
            home[key] = plain

    def take(self) -> None:
        """Give the parameter its place back."""
        for home, key in self.slots:
            home[key] = self.parameter

    def _bring_home(self, plain: torch.Tensor) -> None:
        grad, plain.grad = plain.grad, None
        bound, parameter = self.grad_bound, self.parameter
        assert bound is not None, "a gradient comes in a recorded layout"
        new = new_wrapper(HDTensor, grad, bound, False)
        old = parameter.grad
        parameter.grad = new if old is None else old + new
        if bound.spec is not parameter._spec.spec or old is not None:  # else it is home
            self.sync.note(parameter)


Slots = dict[int, list[tuple[dict[str, Any], str]]]


def leaves_of(module: nn.Module, sync: GradientSync) -> list[Leaf]:
    """Return a leaf for each of a module's parameters, in their order."""
    slots = _slots(module)
    return [Leaf(p, slots[id(p)], sync) for p in module.parameters()]  # type: ignore[arg-type]


@contextlib.contextmanager
def put_in(leaves: Sequence[Leaf]) -> Iterator[None]:
    """Have the leaves stand in for the parameters."""
    for leaf in leaves:
        leaf.put()
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.take()


@contextlib.contextmanager
def parameters_as(module: nn.Module, change: Callable[[int, HDTensor], Any]) -> Iterator[None]:
    """Have ``change(i, parameter)`` stand in for each parameter."""
    slots = _slots(module)
    originals: list[Any] = list(module.parameters())
    for i, parameter in enumerate(originals):
        new = change(i, parameter)
        for home, key in slots[id(parameter)]:
            home[key] = new
    try:
        yield
    finally:
        for parameter in originals:
            for home, key in slots[id(parameter)]:
                home[key] = parameter


def _slots(module: nn.Module) -> Slots:
    """Return where each parameter stands, by its id; a tied one stands in several places."""
    slots: Slots = {}
    for inner in module.modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((inner._parameters, key))
    return slots
