"""Which rank this process plays: the one home of the question, so that any rank's view can be had."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch.distributed as dist


_played: contextvars.ContextVar[int | None] = contextvars.ContextVar("hdtensor_rank", default=None)


def current_rank() -> int:
    """Return the global rank whose view this code takes.

    Inside ``as_rank(r)`` that is ``r``; else the process's rank, or 0 without process groups.
    """
    played = _played.get()
    if played is not None:
        return played
    return dist.get_rank() if dist.is_initialized() else 0


def is_played() -> bool:
    """Return whether ``as_rank`` is active: then nothing may communicate."""
    return _played.get() is not None


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Take another rank's view: deduction, ``is_local`` and local shards are that rank's.

    Operators run on that rank's local tensors; whatever would communicate raises ``GroupError``.

    Args:
        rank: Global rank to play, >= 0.
    """
    token = _played.set(rank)
    try:
        yield
    finally:
        _played.reset(token)
