"""``implicit_replication``: let plain tensors stand beside ``HDTensor``s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hdtensor.ops.registry import implicit, implicit_in_graph


@torch.compiler.allow_in_graph
def _begin_in_graph() -> None:
    implicit_in_graph[0] = True


@torch.compiler.allow_in_graph
def _end_in_graph() -> None:
    implicit_in_graph[0] = False


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors in operators as replicated over the other operands' subgroups.

    They must be the same on every rank; nothing checks that. ``parallelize`` turns it on inside the model's forward,
    where masks, positions and rotary tables are plain.
    """
    before = implicit[0]
    implicit[0] = True
    # A compiler notes writes to Python's objects and makes them when the graph has run: operators being traced need to know now.
    is_first_in_graph = not before and torch.compiler.is_compiling()
    if is_first_in_graph:
        _begin_in_graph()
    try:
        yield
    finally:
        implicit[0] = before
        if is_first_in_graph:
            _end_in_graph()
