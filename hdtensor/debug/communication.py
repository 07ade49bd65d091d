"""Counting communication: which collectives this rank started, at which tier, how many bytes, and why."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from hdtensor._torch_compat import in_backward
from hdtensor.collectives import observe
from hdtensor.collectives.observe import Call, Communication
from hdtensor.debug.modules import ModuleTracker


_NO_MODULE = "(no module)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One collective, or all messages to one peer, that this rank started.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "send_recv".
        ranks: The ranks that take part; the receiver of a send_recv.
        num_bytes: Bytes that this rank put in.
        why: The operator or verb that needed it.
        tier: "top" between subgroups, "bottom" inside one, "world" where whole tensors come or go (``switch``,
            ``distribute_tensor``, ``full_tensor``), "compiled" from inside a compiled graph.
        module: Path of the innermost module whose forward, or whose part of backward, needed it; "" for none.
        is_backward: Whether a backward pass needed it.
    """

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    why: str
    tier: str
    module: str
    is_backward: bool


class CommunicationCount:
    """What this rank communicated while it was watched.

    Attributes:
        events: Every collective, in order. A message counts where it is sent.
    """

    def __init__(self, events: Iterable[Counted] = ()) -> None:
        self.events: list[Counted] = list(events)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank put into all collectives."""
        return sum(event.num_bytes for event in self.events)

    @property
    def top(self) -> CommunicationCount:
        """What went between subgroups, gradients' part included."""
        return self._where(lambda event: event.tier == "top")

    @property
    def bottom(self) -> CommunicationCount:
        """What stayed inside one subgroup, gradients' part included."""
        return self._where(lambda event: event.tier == "bottom")

    @property
    def gradients(self) -> CommunicationCount:
        """What brought gradients home at the end of a backward, at both tiers."""
        return self._where(lambda event: event.why == "gradients")

    def by_kind(self) -> dict[str, int]:
        """Return how many collectives of each kind started."""
        return self._by(lambda event: event.kind)

    def by_reason(self) -> dict[str, int]:
        """Return how many collectives each operator or verb needed."""
        return self._by(lambda event: event.why)

    def by_tier(self) -> dict[str, int]:
        """Return how many collectives started at each tier."""
        return self._by(lambda event: event.tier)

    def by_module(self) -> dict[str, int]:
        """Return how many collectives each module needed; ``count_communication(model)`` makes it known."""
        return self._by(lambda event: event.module or _NO_MODULE)

    def __str__(self) -> str:
        has_modules = any(event.module for event in self.events)
        head = ["times", "bytes", "tier", "collective", "ranks", "why"]
        groups: dict[tuple[str, ...], list[Counted]] = {}
        for e in self.events:
            why = f"{e.why} (backward)" if e.is_backward and e.why != "gradients" else e.why
            key = (e.tier, e.kind, str(list(e.ranks)), why)
            groups.setdefault((*key, e.module or _NO_MODULE) if has_modules else key, []).append(e)
        rows = [head + ["module"] * has_modules]
        rows += [
            [str(len(found)), str(sum(e.num_bytes for e in found)), *key]
            for key, found in groups.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_line(row, widths) for row in rows)

    def _where(self, holds: Callable[[Counted], bool]) -> CommunicationCount:
        return CommunicationCount(event for event in self.events if holds(event))

    def _by(self, key: Callable[[Counted], Hashable]) -> dict[str, int]:
        return dict(Counter(str(key(event)) for event in self.events))


def _line(row: list[str], widths: list[int]) -> str:
    numbers = [f"{text:>{width}}" for text, width in zip(row[:2], widths[:2], strict=True)]
    words = [f"{text:<{width}}" for text, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join(numbers + words).rstrip()


@contextlib.contextmanager
def count_communication(model: nn.Module | None = None) -> Iterator[CommunicationCount]:
    """Count the collectives that this rank starts inside, with the tier and the reason of each.

    Implicit conversions inside subgroups are named with their operator, and so is the one communication
    between subgroups that no ``redistribute`` asks for: the effective weight of a loss. What ranks exchange
    to agree on arguments, and to create groups, is not counted.

    >>> with count_communication() as count:
    ...     pass
    >>> len(count)
    0

    Args:
        model: Count by the paths of its modules too, in forward and in backward.
    """
    count = CommunicationCount()
    tracker = None if model is None else ModuleTracker(model)

    def listen(event: Communication | Call) -> None:
        if isinstance(event, Call) or (event.kind == "send_recv" and event.sent == (0,)):
            return
        count.events.append(
            Counted(
                kind=event.kind,
                ranks=event.ranks,
                num_bytes=event.num_bytes,
                why=event.why,
                tier=event.tier,
                module="" if tracker is None else tracker.current(),
                is_backward=in_backward(),
            )
        )

    observe.listeners.append(listen)
    try:
        with contextlib.nullcontext() if tracker is None else tracker:
            yield count
    finally:
        observe.listeners.remove(listen)
