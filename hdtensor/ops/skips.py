"""Gradients of parameters that a rank has no part of: empty, and made only when somebody looks at them.

A rank that skips a whole module does nothing for its parameters in backward. A counter beside each parameter says how many
backwards passed the module; it has a gradient if the counter has grown since the gradient was cleared.
"""

from __future__ import annotations

from typing import Any

from hdtensor._torch_compat import new_wrapper
from hdtensor.ops.bound import BoundSpec


def count_skips(parameter: Any, skips: list[int], *, trains: bool) -> None:
    """Have a counter say from now on when the empty gradient of a parameter is due; one that is due stays so.

    Args:
        parameter: An ``HDTensor`` that this rank has no part of.
        skips: One number, which grows with every backward that the parameter has a gradient of.
        trains: Whether the next one gives it a gradient.
    """
    if not trains:
        stop_counting(parameter)
        return
    before = getattr(parameter, "_skips", None)
    if before is not skips:
        is_due = before is not None and before[0] != parameter._seen_skips
        parameter._skips, parameter._seen_skips = skips, skips[0] - is_due


def stop_counting(parameter: Any) -> None:
    """Have no counter say any more that a parameter's gradient is due; keep the one that is."""
    if hasattr(parameter, "_skips"):
        due = parameter.grad
        del parameter._skips
        parameter.grad = due


def due_gradient(parameter: Any) -> Any:
    """Return the empty gradient of a parameter if it is due, the same one as long as the layout is; else None."""
    skips = getattr(parameter, "_skips", None)
    if skips is None or skips[0] == parameter._seen_skips:
        return None
    made = getattr(parameter, "_made_grad", None)
    bound = parameter._spec
    if made is None or made._spec.spec is not bound.spec or made._spec.dtype is not bound.dtype:
        gradient = BoundSpec.bind(bound.spec, bound.shape, None, bound.dtype, bound.top_sizes)
        made = new_wrapper(type(parameter), parameter._local_tensor.detach(), gradient, False)
        parameter._made_grad = made
    return made
