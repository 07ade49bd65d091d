"""Random operators on what follows from weights alone, which has no samples: a mask for a weight, a weight that drops.

A tensor shows nothing of where it comes from, and its dim 0 may be a multiple of a micro-batch's samples by chance. So
operators mark what they make of marked tensors and parameters only. To look at every operator costs: a lane does it in its first
step of each kind, and goes on only if something was drawn there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from hdtensor._torch_compat import pytree
from hdtensor.ops.special.random import is_of_weights, num_weight_draws
from hdtensor.tensor import HDTensor


class WeightDraws:
    """Knows in which kinds of steps something is drawn for weights."""

    def __init__(self) -> None:
        """Begin without knowledge."""
        self._is_needed: dict[Hashable, bool] = {}

    @contextlib.contextmanager
    def watched(self, kind: Hashable) -> Iterator[None]:
        """Have operators mark what follows from weights, in a step of a kind, as far as that is needed."""
        if not self._is_needed.get(kind, True):
            yield
            return
        before = num_weight_draws[0]
        with _marking():
            yield
        self._is_needed[kind] = num_weight_draws[0] > before


@contextlib.contextmanager
def _marking() -> Iterator[None]:
    """Replace the type's dispatch function, so that steps which need no marks pay nothing."""
    dispatch = HDTensor.__torch_dispatch__

    def marked(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = dispatch(func, types, args, kwargs)
        follows = _follows_from_weights(args, kwargs)
        for made in out if isinstance(out, list | tuple) else (out,):
            if isinstance(made, HDTensor) and getattr(made, "is_of_weights", False) != follows:
                made.is_of_weights = follows  # type: ignore[attr-defined]
        return out

    HDTensor.__torch_dispatch__ = staticmethod(marked)
    try:
        yield
    finally:
        HDTensor.__torch_dispatch__ = staticmethod(dispatch)


def _follows_from_weights(args: tuple[Any, ...], kwargs: Any) -> bool:
    found = [
        x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim
    ]
    return bool(found) and all(isinstance(x, HDTensor) and is_of_weights(x) for x in found)
