"""``Leaf``: a parameter's local tensor as a plain autograd leaf, for modules that run on plain tensors."""

from __future__ import annotations

from typing import Any

import torch

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
        new = new_wrapper(HDTensor, grad, self.grad_bound, False)
        parameter = self.parameter
        parameter.grad = new if parameter.grad is None else parameter.grad + new
        self.sync.note(parameter)
