"""What of a user's is inside a module that would run as a whole: hooks, and modules that were compiled."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hdtensor._torch_compilers import extend_compile
from hdtensor.api.points import is_own_hook
from hdtensor.api.router_logits import WholeLogits


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks of a user inside a module would see plain tensors, or not be called.

    So would what a user compiled inside of it, which keeps to ``HDTensor``s.
    """
    for inner in module.modules():
        if "_orig_mod" in inner._modules or (inner is not module and _is_compiled(inner)):
            return True
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


def _is_compiled(module: nn.Module) -> bool:
    return module.__dict__.get("_compiled_call_impl") is not None or module in _apart


#: Modules whose compiled functions regions have taken and call with ``HDTensor``s.
_apart: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def keep_out_of_regions(module: nn.Module) -> None:
    """Have no region around a compiled module run as a whole."""
    _apart.add(module)
    _count()


#: How often a module was compiled in place, or given one that torch.compile made, so far.
compiles = [0]


@functools.cache
def count_compiles() -> None:
    """Have torch count them."""
    extend_compile(_count)
    nn.modules.module.register_module_module_registration_hook(_count_compiled)


def _count() -> None:
    compiles[0] += 1


def _count_compiled(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    # Models slice their lists of layers, which registers each: while they are traced, too.
    if not torch.compiler.is_compiling() and module is not None and "_orig_mod" in module._modules:
        _count()
