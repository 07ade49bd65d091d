"""Plain leaves that stand beside those of a lane, for modules that run on plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hdtensor._torch_compat import new_wrapper
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements import HDSpec
from hdtensor.tensor import HDTensor


class PlainLeaf:
    """A leaf's local tensor as a plain leaf of the same memory, whose gradients autograd adds up without our help."""

    __slots__ = ("_bound", "spec", "tensor")

    def __init__(
        self,
        leaf: HDTensor,
        spec: HDSpec,
        note: Callable[[torch.Tensor], None],
        hears: Sequence[bool],
    ) -> None:
        """Make it.

        Args:
            leaf: Of the lane.
            spec: In which its gradients come.
            note: Called with the leaf when a gradient has come.
            hears: Whether it is: one value, asked each time, as most gradients are not the last.
        """
        self.spec = spec
        bound = leaf._spec
        self.tensor = leaf._local_tensor.detach().requires_grad_()
        self.tensor.grad_dtype = leaf.grad_dtype
        self.tensor.register_post_accumulate_grad_hook(lambda _: note(leaf) if hears[0] else None)  # type: ignore[no-untyped-call]
        dtype = leaf.grad_dtype or leaf.dtype
        self._bound = BoundSpec.of(spec, bound.shape, bound.stride, dtype, bound.top_sizes)

    def stands_for(self, leaf: HDTensor) -> bool:
        """Whether it still has the leaf's memory."""
        return self.tensor.data_ptr() == leaf._local_tensor.data_ptr()

    def take(self) -> HDTensor:
        """Return the gradient and forget it."""
        grad, self.tensor.grad = self.tensor.grad, None
        found: HDTensor = new_wrapper(HDTensor, grad, self._bound, False)
        return found
