"""``implicit_replication``: let plain tensors stand beside ``HDTensor``s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hdtensor.ops.registry import implicit


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors in operators as replicated over the other operands' subgroups.

    They must be the same on every rank; nothing checks that. ``parallelize`` turns it on inside the model's forward,
    where masks, positions and rotary tables are plain.
    """
    before = implicit[0]
    implicit[0] = True
    try:
        yield
    finally:
        implicit[0] = before
