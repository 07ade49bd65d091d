"""Functions that every rank calls: they go on everywhere, or raise everywhere.

A rank that raised before the first collective would leave the others waiting in it. So what a rank passes is checked
without communication, then told to all together with the error it met, and only then acted upon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hdtensor._rank import is_played
from hdtensor.collectives import observe
from hdtensor.errors import DisagreementError


T = TypeVar("T")


def communicates() -> bool:
    """Return whether other ranks can be asked: not in one plain process, nor inside ``as_rank``.

    Nor while a program is traced: ranks may do that at different moments.
    """
    return dist.is_initialized() and not is_played() and not torch.compiler.is_compiling()


def attempt(check: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what ``check()`` returns, or the error it raises."""
    try:
        return check(), None
    except Exception as error:
        return None, error


def exchange(function: str, mine: Any, problem: Exception | None) -> list[Any]:
    """Return what every rank passes to a collective function, in rank order.

    Args:
        function: Its name.
        mine: What this rank passes; picklable.
        problem: The error that keeps this rank from going on.

    Raises:
        Exception: ``problem``, if there is one.
        DisagreementError: If other ranks cannot go on, or call another function.
    """
    text = None if problem is None else f"{type(problem).__name__}: {problem}".rstrip(".")
    said: list[Any] = [None] * dist.get_world_size()
    if observe.listeners:
        observe.announce(function, range(len(said)))
    dist.all_gather_object(said, (function, text, mine))
    if problem is not None:
        raise problem
    for rank, (other, text, _) in enumerate(said):
        if other != function or text is not None:
            what = f"calls {other}" if other != function else f"fails with {text}"
            raise DisagreementError(
                f"{function} cannot go on: rank {rank} {what}. Every rank calls the same functions in the same "
                f"order, with the same arguments."
            )
    return [mine for _, _, mine in said]


def require_alike(function: str, said: Sequence[Any], hint: str) -> None:
    """Raise unless all ranks passed the same.

    Raises:
        DisagreementError: On every rank, listing what each passed.
    """
    if any(other != said[0] for other in said):
        listing = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(said))
        raise DisagreementError(f"{function} was called with unlike arguments: {listing}. {hint}")
