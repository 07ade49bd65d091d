"""Who wants to know of communication, and why it happens: the source of ``debug.count_communication``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One collective that this rank started.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "send_recv".
        ranks: The ranks that take part.
        num_bytes: Bytes that this rank puts in.
        why: The operator or verb that needed it.
    """

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    why: str


#: Called with every communication; empty unless somebody watches.
listeners: list[Callable[[Communication], None]] = []

#: Why the next communication happens, innermost last.
_reasons: list[str] = []


@contextlib.contextmanager
def because(why: str) -> Iterator[None]:
    """Name the reason of what is communicated inside."""
    _reasons.append(why)
    try:
        yield
    finally:
        _reasons.pop()


def notify(kind: str, ranks: tuple[int, ...], num_bytes: int) -> None:
    """Tell all listeners of a communication."""
    event = Communication(
        kind=kind,
        ranks=ranks,
        num_bytes=num_bytes,
        why=_reasons[-1] if _reasons else "redistribute",
    )
    for listener in listeners:
        listener(event)
