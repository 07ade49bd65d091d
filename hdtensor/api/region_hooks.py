"""Hooks of a user inside a module that would run as a whole."""

from __future__ import annotations

from collections.abc import Mapping
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
        if inner is module:
            continue
        tables: list[Mapping[int, Any]] = [
            inner._forward_hooks,
            inner._forward_pre_hooks,
            inner._backward_hooks,
            inner._backward_pre_hooks,
        ]
        if any(not _is_known(hook) for table in tables for hook in table.values()):
            return True
    return False


def _is_known(hook: Any) -> bool:
    return is_own_hook(hook) or isinstance(hook, WholeLogits)
