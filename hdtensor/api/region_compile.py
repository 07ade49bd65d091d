"""What a user compiles (``module.compile()``) is put to use where the module runs on plain local tensors.

A compiled module would trace the hooks and the dispatch around it, and be compiled also where a rank holds no part of it.
So a region takes the compiled function off its module, and calls it in place of the module's ``forward``: on plain
tensors, or on ``HDTensor``s where points inside communicate. Everywhere else the module runs as it would without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hdtensor.api import points
from hdtensor.api.region_hooks import hooks_on, keep_out_of_regions
from hdtensor.tensor import HDTensor


#: Where ``nn.Module.compile`` keeps the compiled function, and hooks that a region has around it.
_COMPILED = "_compiled_call_impl"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CompiledForward:
    """A module's ``forward`` on plain tensors: the compiled one, if there is one and it would see nothing else."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Begin with the module's own.

        Args:
            module: The module.
            forward: Its own forward.
        """
        self._module, self._forward = module, forward
        self._compiled: Callable[..., Any] | None = None
        #: Whether the compiled function takes ``HDTensor``s: points inside of the module communicate, which is traced there.
        self.takes_hdtensors = False

    @property
    def is_compiled(self) -> bool:
        """Whether there is a compiled function."""
        return self._compiled is not None

    def adopt(self) -> None:
        """Take what was compiled since the last look off the module."""
        compiled = self._module.__dict__.pop(_COMPILED, None)
        if compiled is not None:
            self._compiled = compiled
            parts = (m for m in self._module.modules() if m is not self._module)
            inside = (hook for m in parts for hook in hooks_on(m))
            is_shared = any(map(_is_shared_here, self._module.parameters()))
            self.takes_hdtensors = is_shared and any(map(points.is_point, inside))
            if self.takes_hdtensors:
                keep_out_of_regions(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.run(*args, **kwargs) if _is_plain() else self._forward(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module where all around it is plain."""
        if self._compiled is None or torch.compiler.is_compiling() or _is_off[0]:
            return self._forward(*args, **kwargs)
        with _bare(self._module, self._forward):
            return self._compiled(*args, **kwargs)


def _is_shared_here(parameter: Any) -> bool:
    """Whether this rank shares a parameter, or a copy of it, with others of its subgroup."""
    if not isinstance(parameter, HDTensor) or not parameter.is_local:
        return False
    return len(parameter.spec.subgroups[parameter._spec.index].ranks) > 1  # type: ignore[index]


#: Whether modules run as they were before they were compiled, for a trial that would compile them anew.
_is_off = [False]


@contextlib.contextmanager
def not_compiled() -> Iterator[None]:
    """Have modules run as they were before they were compiled."""
    before, _is_off[0] = _is_off[0], True
    try:
        yield
    finally:
        _is_off[0] = before


def _is_plain() -> bool:
    """Whether a region runs on plain tensors, for good and without points inside: their collectives are not traced."""
    return bool(points.running) and not (
        points.running[-1].entries or points.running[-1].is_checking
    )


@contextlib.contextmanager
def _bare(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Take from a module what runs around its forward: it runs around this call already."""
    own = module.__dict__
    kept = {name: own[name] for name in (*_HOOKS, "forward") if name in own}
    for name in _HOOKS:
        own[name] = type(own[name])()
    own["forward"] = forward
    try:
        yield
    finally:
        own.update(kept)
