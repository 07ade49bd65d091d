"""Counting communication: which collectives this rank started, how many bytes, and why."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from hdtensor.collectives import observe
from hdtensor.collectives.observe import Communication


class CommunicationCount:
    """What this rank communicated while it was watched.

    Attributes:
        events: Every collective, in order.
    """

    def __init__(self) -> None:
        self.events: list[Communication] = []

    def __len__(self) -> int:
        return len(self.events)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank put into all collectives."""
        return sum(event.num_bytes for event in self.events)

    def by_kind(self) -> dict[str, int]:
        """Return how many collectives of each kind started."""
        return dict(Counter(event.kind for event in self.events))

    def by_reason(self) -> dict[str, int]:
        """Return how many collectives each operator or verb needed."""
        return dict(Counter(event.why for event in self.events))

    def __str__(self) -> str:
        rows = Counter((e.kind, e.ranks, e.why) for e in self.events)
        sizes: Counter[tuple[str, tuple[int, ...], str]] = Counter()
        for e in self.events:
            sizes[e.kind, e.ranks, e.why] += e.num_bytes
        lines = [f"{'times':>5}  {'bytes':>10}  {'collective':14}  {'ranks':12}  why"]
        for key, times in rows.items():
            kind, ranks, why = key
            lines.append(f"{times:5}  {sizes[key]:10}  {kind:14}  {list(ranks)!s:12}  {why}")
        return "\n".join(lines)


@contextlib.contextmanager
def count_communication() -> Iterator[CommunicationCount]:
    """Count the collectives that this rank starts inside, with the reason of each.

    Implicit conversions inside subgroups are named with their operator, and so is the one communication
    between subgroups that no ``redistribute`` asks for: the effective weight of a loss.

    >>> with count_communication() as count:
    ...     pass
    >>> len(count)
    0
    """
    count = CommunicationCount()
    observe.listeners.append(count.events.append)
    try:
        yield count
    finally:
        observe.listeners.remove(count.events.append)
