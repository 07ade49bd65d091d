"""Sums of gradients that come in unlike layouts, as of a tensor that is used twice or of two backwards.

Operators move nothing between subgroups, but the engine adds gradients without asking anybody: nothing could be inserted
before. One of the two is brought to the other's layout, as a redistribute in that backward.
"""

from __future__ import annotations

from typing import Any

import torch

from hdtensor._torch_compat import in_backward
from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import call, is_hdtensor
from hdtensor.ops.special.move import gradient_bound


aten = torch.ops.aten


def make_sum(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], refusal: DeductionError
) -> Any | None:
    """Return the function that adds two gradients, the second in place where ``func`` does; None for any other call.

    Args:
        func: The operator.
        args: Its operands, two ``HDTensor``s of one shape.
        kwargs: None are given by the engine.
        refusal: Why operators would not add them; it is raised where the function runs outside of a backward.
    """
    if func not in (aten.add.Tensor, aten.add_.Tensor) or kwargs or not in_backward():
        return None
    if len(args) != 2 or not all(map(is_hdtensor, args)) or args[0].shape != args[1].shape:
        return None
    first, second = args[0]._spec, args[1]._spec
    if first.spec is second.spec and first.top_sizes == second.top_sizes:
        return None  # it is not the layouts that the operator refuses
    target = first if func is aten.add_.Tensor else _common(first, second)
    message = str(refusal)

    def run(a: Any, b: Any, kw: Any) -> Any:
        if not in_backward():
            raise DeductionError(message)
        return call(func, _moved(a, target), _moved(b, target))

    return run


def _common(first: BoundSpec, second: BoundSpec) -> BoundSpec:
    """Return the layout of a sum: the first gradient's that is whole, else the first one's without what is pending."""
    return next((b for b in (first, second) if not b.spec.has_partial()), gradient_bound(first))


def _moved(grad: Any, target: BoundSpec) -> Any:
    if grad._spec.spec is target.spec and grad._spec.top_sizes == target.top_sizes:
        return grad
    move = torch.ops.hdtensor.redistribute.default
    return call(move, grad, target.spec.text, target.top_sizes, True)
