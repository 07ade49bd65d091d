"""A switch cut into rounds that fit a budget of memory; pure, and the same on every rank."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hdtensor.elastic.plan_switch import Item, SwitchPlan
from hdtensor.errors import PlanError
from hdtensor.placements.box import Box, cut_box
from hdtensor.redistribute.pour import Route
from hdtensor.redistribute.steps import (
    Layout,
)


class Round(NamedTuple):
    """What travels together.

    Attributes:
        opens: Items whose new local tensors are made before it.
        routes: (item, route): parts that travel, and parts that stay on a rank.
        closes: Items that are complete after it.
    """

    opens: tuple[int, ...]
    routes: tuple[tuple[int, Route], ...]
    closes: tuple[int, ...]


def make_rounds(plan: SwitchPlan, budget_bytes: int, *, with_new: bool) -> tuple[Round, ...]:
    """Cut a switch into rounds, each of which takes at most the budget on every rank.

    A part that is packed takes its bytes at both ends of each hop: the message that is sent and the one
    received; at a relay it lies in a buffer. Routes that take too much alone are cut into parts of whole
    rows.

    Args:
        plan: What moves.
        budget_bytes: Extra memory of one round.
        with_new: Whether new local tensors count too, as where the old ones are freed after each round.

    Raises:
        PlanError: If one tensor alone needs more; the message names it and what it needs.
    """
    maker = _Maker(budget_bytes, with_new)
    for index, item in enumerate(plan.items):
        if is_moved(item):
            maker.add(index, item, plan.routes(index))
    maker.flush(last=True)
    return tuple(maker.rounds)


def is_moved(item: Item) -> bool:
    """Return whether some rank's local tensor changes."""
    src, dst = item.src, item.dst
    return src is not dst and any(
        not is_kept(item, rank) for rank in {*src.spec.ranks, *dst.spec.ranks}
    )


def is_kept(item: Item, rank: int) -> bool:
    """Return whether a rank's local tensor stays as it is."""
    src, dst = item.src, item.dst
    return src.boxes(rank) == dst.boxes(rank) and src.local_shape(rank) == dst.local_shape(rank)


def is_direct(item: Item, box: Box, src: int, dst: int) -> bool:
    """Return whether a part goes as a message of its own, from one local tensor into the other.

    It is large, and contiguous in both: it needs no buffer. What a relay holds is contiguous always.
    """
    if box.numel * item.itemsize < DIRECT_BYTES or not item.is_contiguous:
        return False
    sides = ((item.src, src), (item.dst, dst))
    return all(_is_contiguous(layout, rank, box) for layout, rank in sides)


#: A round starts so many messages of their own on a rank at most: backends keep a list of what is pending.
MAX_MESSAGES = 1024

#: Smaller parts are joined to one message for each pair of ranks.
DIRECT_BYTES = 1 << 18


def _is_contiguous(layout: Layout, rank: int, box: Box) -> bool:
    """Return whether a box is contiguous in a rank's local tensor, or in a buffer of its own."""
    owned = [piece for piece in layout.boxes(rank) if piece.box.contains(box)]
    if not owned:
        return True
    extents = layout.local_shape(rank)
    inner = True  # whether all dims behind are whole
    for size, extent in zip(reversed(box.shape), reversed(extents), strict=True):
        if not inner and size != 1:
            return False
        inner = inner and size == extent
    return True


class _Maker:
    """The rounds so far, and what the current one takes on each rank."""

    def __init__(self, budget: int, with_new: bool) -> None:
        if budget < 1:
            raise PlanError(f"budget_bytes: must be positive, got {budget}.")
        self.budget = budget
        self.with_new = with_new
        self.rounds: list[Round] = []
        self._opens: list[int] = []
        self._routes: list[tuple[int, Route]] = []
        self._open_items: list[int] = []
        self._used: defaultdict[int, int] = defaultdict(int)
        self._num_messages: defaultdict[int, int] = defaultdict(int)

    def add(self, index: int, item: Item, routes: Sequence[Route]) -> None:
        """Add a tensor: whole to the current round, or to a new one, or to several."""
        new = self._new_bytes(item)
        needs: defaultdict[int, int] = defaultdict(int, new)
        for unit in _units(routes):
            for rank, num_bytes in _ends(unit, item):
                needs[rank] += num_bytes
        if not self._fits(needs):
            self.flush(last=True)
        if self._fits(needs):
            self._open(index, needs)
            self._routes += [(index, route) for route in routes]
            self._count(item, routes)
            return
        most = max(new.values(), default=0)
        room = self.budget - most
        if room < _ROOM * item.itemsize:
            raise PlanError(_too_little_text(item, self.budget, most, self.with_new))
        self._open(index, new)
        for unit in _cut(routes, room // (_ROOM * item.itemsize)):
            ends = _ends(unit, item)
            if any(self._used[rank] + num_bytes > self.budget for rank, num_bytes in ends):
                self.flush(last=False)
                self._used.update(new)
            for rank, num_bytes in ends:
                self._used[rank] += num_bytes
            self._routes += [(index, route) for route in unit]

    def flush(self, *, last: bool) -> None:
        """End the current round; ``last`` if its tensors are complete with it."""
        if self._open_items or self._routes:
            closes = tuple(self._open_items) if last else ()
            self.rounds.append(Round(tuple(self._opens), tuple(self._routes), closes))
        self._opens, self._routes = [], []
        self._used.clear()
        self._num_messages.clear()
        if last:
            self._open_items = []

    def _open(self, index: int, needs: Mapping[int, int]) -> None:
        self._opens.append(index)
        self._open_items.append(index)
        for rank, num_bytes in needs.items():
            self._used[rank] += num_bytes

    def _fits(self, needs: Mapping[int, int]) -> bool:
        is_full = max(self._num_messages.values(), default=0) >= MAX_MESSAGES
        return not is_full and all(self._used[r] + n <= self.budget for r, n in needs.items())

    def _count(self, item: Item, routes: Iterable[Route]) -> None:
        """Count the messages of their own."""
        for box, hops in routes:
            for src, dst in itertools.pairwise(hops):
                if is_direct(item, box, src, dst):
                    self._num_messages[src] += 1
                    self._num_messages[dst] += 1

    def _new_bytes(self, item: Item) -> dict[int, int]:
        if not self.with_new:
            return {}
        return {
            rank: math.prod(item.dst.local_shape(rank)) * item.itemsize
            for rank in item.dst.spec.ranks
            if not is_kept(item, rank)
        }


#: A part may lie in so many buffers of one rank: a relay receives, keeps and sends it, to several ranks.
_ROOM = 8


def _units(routes: Iterable[Route]) -> Iterator[list[Route]]:
    """Yield the routes of each box together: they may share hops, which are made once."""
    by_box: dict[Box, list[Route]] = {}
    for route in routes:
        by_box.setdefault(route.box, []).append(route)
    yield from by_box.values()


def _ends(unit: Sequence[Route], item: Item) -> list[tuple[int, int]]:
    """Return what the routes of a box take: buffers at both ends of each hop, and at relays their own."""
    box = unit[0].box
    num_bytes = box.numel * item.itemsize
    taken: defaultdict[int, int] = defaultdict(int)
    for prefix in {hops[: k + 1] for _, hops in unit for k in range(1, len(hops))}:
        src, dst = prefix[-2:]
        if not is_direct(item, box, src, dst):
            taken[src] += num_bytes
            taken[dst] += num_bytes
    for relay in {rank for _, hops in unit for rank in hops[1:-1]}:
        taken[relay] += num_bytes
    return sorted(taken.items())


def _cut(routes: Iterable[Route], most: int) -> Iterator[list[Route]]:
    """Yield the routes of parts of at most ``most`` elements; what stays on a rank takes nothing."""
    for unit in _units(routes):
        kept = [route for route in unit if len(route.hops) == 1]
        moved = [route for route in unit if len(route.hops) > 1]
        if kept:
            yield kept
        if moved:
            for part in cut_box(moved[0].box, most):
                yield [Route(part, hops) for _, hops in moved]


def _too_little_text(item: Item, budget: int, most: int, with_new: bool) -> str:
    least = most + 64 * _ROOM * item.itemsize
    what = (
        f"its largest new shard takes {most} bytes, and messages need some more"
        if with_new
        else "a message needs more"
    )
    text = f"budget_bytes: {budget} is too little for {item.name!r}: {what}. Give at least {least}"
    return (
        f"{text}, or use atomic=True, where the budget is for messages only."
        if with_new
        else f"{text}."
    )
