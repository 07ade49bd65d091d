"""``implicit_replication``: let plain tensors stand beside ``HDTensor``s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hdtensor.ops.registry import implicit


@torch.compiler.allow_in_graph
def _begin_in_graph() -> None:
    implicit[0] = True


@torch.compiler.allow_in_graph
def _end_in_graph() -> None:
    implicit[0] = False


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors in operators as replicated over the other operands' subgroups.

    They must be the same on every rank; nothing checks that. ``parallelize`` turns it on inside the model's forward,
    where masks, positions and rotary tables are plain.
    """
    if torch.compiler.is_compiling():
        _begin_in_graph()
        yield
        _end_in_graph()
        return
    before = implicit[0]
    implicit[0] = True
    try:
        yield
    finally:
        implicit[0] = before
