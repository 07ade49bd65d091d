"""Hooks of a user inside a module that would run as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hdtensor.api.points import is_own_hook
from hdtensor.api.router_logits import WholeLogits


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks of a user inside a module would see plain tensors, or not be called."""
    for inner in module.modules():
        for parameter in inner._parameters.values():
            # GradientSync's own hook is the one.
            if parameter is not None and (
                parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1
            ):
                return True
        if inner is not module and not all(map(_is_known, hooks_on(inner))):
            return True
    return False


def hooks_on(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that run around a module's calls, of forward and of backward."""
    tables: tuple[Mapping[int, Any], ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    for table in tables:
        yield from table.values()


def _is_known(hook: Any) -> bool:
    return is_own_hook(hook) or isinstance(hook, WholeLogits)
