"""``Level``: lanes for about a number of lanes, as one table; and the strategies that it gives for a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy

import numpy as np

from hdtensor.errors import PlannerError
from hdtensor.planner.assign import LaneLoad, assign_microbatches
from hdtensor.planner.columns import ColumnMaker, Columns
from hdtensor.planner.packing import pack, relax
from hdtensor.planner.place import LaneDraft
from hdtensor.planner.refine import LaneClock
from hdtensor.planner.shapes import Shape
from hdtensor.planner.space import Floats, Ints, Space


#: Relative width at which bisections of a time end.
_CLOSE = 1e-3
#: How many lanes the exact clock ranks, for each that is returned.
_RANKED = 6


class Level:
    """Lanes, with the costs of a step that has at least a number of lanes."""

    def __init__(
        self,
        space: Space,
        shapes: Sequence[Shape],
        num_lanes: int,
        messages: Floats | None = None,
    ) -> None:
        """Make the table.

        Args:
            space: What the search knows.
            shapes: Shapes of lanes.
            num_lanes: Lanes that share optimizer state.
            messages: What ``find_messages`` says, if that is known.
        """
        self.space, self.num_lanes = space, num_lanes
        self.maker = ColumnMaker(space, num_lanes, messages)
        self.clock = LaneClock(space, self.maker)
        self.columns: list[Columns] = self.maker.make(shapes)
        self.starts = np.cumsum([0, *(len(c.kinds) for c in self.columns)])
        pools = len(space.pools)
        self.devices: Ints = np.concatenate(
            [np.zeros((0, pools), dtype=np.int64), *(c.devices for c in self.columns)]
        )

    def __len__(self) -> int:
        return len(self.devices)

    def caps(self, seconds: float) -> Ints:
        """Return how many samples each lane does in a time, at most a batch."""
        if not self.columns:
            return np.zeros(0, dtype=np.int64)
        found = np.concatenate([c.caps(seconds) for c in self.columns])
        caps: Ints = np.minimum(found, self.space.workload.batch)
        return caps

    def draft(self, index: int, num_microbatches: int = 0) -> LaneDraft:
        """Return a lane of the table."""
        at = int(np.searchsorted(self.starts, index, side="right")) - 1
        row, columns = index - int(self.starts[at]), self.columns[at]
        return LaneDraft(
            tuple(columns.kinds[row].tolist()),
            tuple(columns.layers[row].tolist()),
            columns.mbs,
            num_microbatches,
        )

    def single(self, most: int) -> list[LaneDraft]:
        """Return the fastest lanes that do the whole batch alone."""
        batch = self.space.workload.batch
        room = np.array(self.space.devices)
        times = np.concatenate(
            [
                np.where(
                    (c.devices <= room).all(axis=1) & (batch % c.mbs == 0),
                    c.seconds(np.full(len(c.kinds), batch // c.mbs)),
                    np.inf,
                )
                for c in self.columns
            ]
            or [np.zeros(0)]
        )
        order = np.argsort(times, kind="stable")[: most * _RANKED]
        drafts = [self.draft(int(i)) for i in order if np.isfinite(times[i])]
        drafts = [draft._replace(num_microbatches=batch // draft.mbs) for draft in drafts]
        return sorted(drafts, key=self.clock.seconds)[:most]

    def on(self, space: Space) -> Level:
        """Return the same table for other numbers of devices of the same pools."""
        other = copy(self)
        other.space = space
        return other

    def fastest(self, most: int) -> list[LaneDraft]:
        """Return the lanes that do the most samples a second, of those that take no more than there is."""
        room = np.array(self.space.devices)
        rates = np.concatenate(
            [
                np.where((c.devices <= room).all(axis=1), c.mbs / c.per.max(axis=1), 0.0)
                for c in self.columns
            ]
            or [np.zeros(0)]
        )
        best = np.argsort(-rates, kind="stable")[:most]
        return [self.draft(int(i), 1) for i in best if rates[i] > 0]

    def equal(self, most: int) -> list[list[LaneDraft]]:
        """Return the fastest sets of equal lanes, about as many as this level is for or up to twice as many."""
        batch, options = self.space.workload.batch, self.space.options
        room = np.array(self.space.devices)
        found: list[tuple[float, int, int, int]] = []
        start = 0
        for columns in self.columns:
            fit = (
                room // np.maximum(columns.devices, 1) + (columns.devices == 0) * room.sum()
            ).min(axis=1)
            for num_lanes in range(self.num_lanes, 2 * self.num_lanes):
                count = batch // (num_lanes * columns.mbs)
                whole = count * num_lanes * columns.mbs == batch
                able = np.flatnonzero((fit >= num_lanes) & whole)
                if num_lanes > (options.max_lanes or num_lanes) or not len(able):
                    continue
                times = columns.seconds(np.full(len(columns.kinds), float(count)))[able]
                best = np.argsort(times, kind="stable")[: most * _RANKED]
                found += [(float(times[i]), start + int(able[i]), num_lanes, count) for i in best]
            start += len(columns.kinds)
        # The estimate is above the truth where there are few micro-batches: the exact clock ranks the first of them.
        drafts = [
            (self.draft(index, count), number)
            for _, index, number, count in sorted(found)[: most * _RANKED]
        ]
        drafts.sort(key=lambda item: self.clock.seconds(item[0]))
        return [[draft] * number for draft, number in drafts[:most]]

    def relaxed_seconds(self, low: float, high: float, room: Ints) -> float:
        """Return about the least time in which parts of lanes do the batch, ``high`` if that is not enough."""
        devices, batch = self.devices.astype(float), self.space.workload.batch
        while high > low * (1 + _CLOSE):
            middle = (low * high) ** 0.5
            keep, caps = self._keep(middle)
            value, _, _ = relax(caps.astype(float), devices[keep], room.astype(float))
            if value >= batch:
                high = middle
            else:
                low = middle
        return high

    def whole_seconds(self, low: float, high: float, room: Ints) -> float:
        """Return about the least time in which whole lanes do the batch, ``high`` if that is not enough.

        Without a plan yet ``high`` is infinite; 64 times ``low`` is then as good a limit, and halving it ends.
        """
        high = min(high, 64 * low)
        while high > low * (1 + _CLOSE):
            middle = (low * high) ** 0.5
            if int(self.caps(middle)[self.whole(middle, room)].sum()) >= self.space.workload.batch:
                high = middle
            else:
                low = middle
        return high

    def _keep(self, seconds: float) -> tuple[Ints, Ints]:
        """Return the lanes that do something in a time, the best of each take of devices, and their samples."""
        caps = self.caps(seconds)
        some = np.flatnonzero(caps)
        if not len(some):
            return some, caps[:0]
        strides = np.cumprod([1, *(self.devices.max(axis=0)[:-1] + 1)])
        code = self.devices[some] @ strides
        order = np.lexsort((-caps[some], code))
        first = np.ones(len(order), dtype=bool)
        first[1:] = code[order][1:] != code[order][:-1]
        chosen = some[order[first]]
        return chosen, caps[chosen]

    def whole(self, seconds: float, room: Ints) -> list[int]:
        """Return lanes that do the most samples in a time, about the most where devices are many."""
        keep, caps = self._keep(seconds)
        if not len(keep):
            return []
        devices = self.devices[keep]
        _, amounts, _ = relax(caps.astype(float), devices.astype(float), room.astype(float))
        taken = np.floor(amounts + 1e-9).astype(np.int64)
        # What is left for the exact way should be a few lanes, not many and not none.
        taken = np.maximum(taken - 3, 0)
        left = room - taken @ devices
        rest = pack(caps, devices, left.tolist())
        lanes = np.repeat(keep, taken).tolist() + [int(keep[i]) for i in rest]
        return sorted(lanes)


def deal(level: Level, lanes: Sequence[int], seconds: float) -> tuple[LaneDraft, ...] | None:
    """Return lanes of a table with the batch dealt, None if no whole micro-batches make it.

    If the lanes' sizes of micro-batches do not make the batch, some lanes get the smallest size.

    Args:
        level: The table.
        lanes: Numbers of lanes.
        seconds: About what the step takes.
    """
    caps = level.caps(seconds)
    drafts = [level.draft(i, max(1, int(caps[i]) // level.draft(i).mbs)) for i in lanes]
    return deal_among(level.clock, drafts, level.space.workload.batch)


def deal_among(
    clock: LaneClock, lanes: Sequence[LaneDraft], batch: int
) -> tuple[LaneDraft, ...] | None:
    """Return lanes with the batch dealt as evenly in time as can be, None if no whole micro-batches make it.

    Args:
        clock: What says when lanes end.
        lanes: With about the numbers of micro-batches that they will have.
        batch: Samples of a step.
    """
    drafts, smallest = list(lanes), clock.space.prices.mbs[0]
    for number in range(len(drafts) + 1):
        if number:
            old = drafts[-number]
            count = old.num_microbatches * old.mbs // smallest
            drafts[-number] = old._replace(mbs=smallest, num_microbatches=count)
        try:
            counts = assign_microbatches(_loads(clock, drafts), batch)
        except PlannerError:
            continue
        return tuple(d._replace(num_microbatches=n) for d, n in zip(drafts, counts, strict=True))
    return None


def _loads(clock: LaneClock, drafts: Sequence[LaneDraft]) -> list[LaneLoad]:
    """Return what micro-batches do to each lane, about where its number is."""
    loads = []
    for draft in drafts:
        count = draft.num_microbatches
        one, other = (
            clock.seconds(draft._replace(num_microbatches=count + more)) for more in (0, 1)
        )
        loads.append(LaneLoad(other - one, one - count * (other - one), draft.mbs))
    return loads


def describe(space: Space, lanes: Sequence[LaneDraft]) -> str:
    """Return lanes in a few words, equal ones together.

    The form is ``4x [TP4 H20, TP4 H20, TP4 H800] 16x mbs 1``.
    """
    parts = []
    for draft, count in Counter(lanes).items():
        stages = ", ".join(
            f"TP{space.kinds[k].group.tp}"
            + (f"*CP{space.kinds[k].group.cp}" if space.kinds[k].group.cp > 1 else "")
            + f" {space.pools[space.kinds[k].pool].label} {n}L"
            for k, n in zip(draft.kinds, draft.layers, strict=True)
        )
        parts.append(f"{count}x [{stages}] {draft.num_microbatches}x mbs {draft.mbs}")
    return "; ".join(parts)
