"""``Columns``: shapes of lanes with layers, and what each takes, thousands at once.

The seconds of a lane with M micro-batches are estimated by what its schedule takes with many of them. For a stage s with
w stages behind it, f and b its forward and backward of a micro-batch, a = f + b, and m a message::

    up_s   = sum_{r<s} (a_r + 2 m_r)    before the first forward, and behind the last backward
    down_s = sum_{r>s} (a_r + 2 m_r)    from a forward of s to the backward of the same micro-batch
    T >= up_s + M a_s + max(0, down_s - w f_s) + max(0, down_s - w b_s)         (1F1B: w forwards ahead)
    T >= M (a_s + a_{s+1} + 2 m_s) / 2 + ...        two micro-batches go round between neighbours

The first backward of s starts after its first forward and ``down_s``, in which s does w forwards; the last one starts after
its last forward and ``down_s``, in which s does w backwards. Synchronization and optimizer come behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hdtensor.planner.decompose import slowest_link
from hdtensor.planner.lane_times import LaneTimes
from hdtensor.planner.memory import held_microbatches
from hdtensor.planner.shapes import Shape, shapes_by_length
from hdtensor.planner.space import Floats, Ints, Space
from hdtensor.planner.tails import usual_tails


#: Halvings of the interval in which the time of a shape lies.
_HALVINGS = 13
#: What no lane does within any time that is asked about; it keeps numbers within integers.
_MOST_MICROBATCHES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Lanes of equal length and size of micro-batch, with their layers.

    Attributes:
        kinds: Numbers of kinds, of shape (lanes, stages).
        layers: Decoder layers, of shape (lanes, stages).
        mbs: Samples of a micro-batch.
        devices: What each lane takes of each pool, of shape (lanes, pools).
        per: Seconds that each micro-batch adds, for each constraint, of shape (lanes, constraints).
        beside: Seconds beside, likewise.
    """

    kinds: Ints
    layers: Ints
    mbs: int
    devices: Ints
    per: Floats
    beside: Floats

    def caps(self, seconds: float) -> Ints:
        """Return how many samples each lane does in a time."""
        counts = np.floor((seconds - self.beside) / self.per * (1 + 1e-12)).min(axis=1)
        samples: Ints = np.clip(counts, 0, _MOST_MICROBATCHES).astype(np.int64) * self.mbs
        return samples

    def seconds(self, num_microbatches: Floats) -> Floats:
        """Return what each lane takes for a number of micro-batches."""
        found: Floats = (num_microbatches[:, None] * self.per + self.beside).max(axis=1)
        return found


def find_messages(space: Space) -> Floats:
    """Return the seconds of messages there and back, of shape (kinds, kinds, sizes of micro-batches)."""
    num = len(space.kinds)
    found = np.zeros((num, num, len(space.prices.mbs)))
    known = np.isfinite(space.prices.layer)
    for a, one in enumerate(space.kinds):
        for b, other in enumerate(space.kinds):
            first, second = space.pools[one.pool], space.pools[other.pool]
            nodes = (first.nodes[0], second.nodes[-1])
            if one.pool == other.pool and one.size + other.size <= len(first.ranks[0]):
                nodes = (first.nodes[0], first.nodes[0])
            users = {nodes[0]: one.size, nodes[1]: other.size}
            link = slowest_link(space.cluster, nodes[:1], nodes[1:], users)
            for m, size in enumerate(space.prices.mbs):
                if known[a, m] and known[b, m]:
                    there = space.costs.message(one.group, other.group, link, size)
                    found[a, b, m] = there + space.costs.message(other.group, one.group, link, size)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loads:
    """What layers do to each stage of each lane, all of shape (lanes, stages).

    Attributes:
        layer: Seconds of a layer, forward and backward.
        beside: Seconds of embedding and head.
        fill: Part of a stage's seconds that a micro-batch spends in it before later stages have it.
        round: Part that it spends there before and after later stages have it.
        message: Seconds of messages to the next stage and back; 0 for the last.
        tail_layer: Seconds after the passes for a layer.
        tail_beside: Seconds after the passes beside.
        max_layers: What memory holds.
        ahead: 1 if a stage does as many forwards ahead as there are stages behind it, 0 if it may do more.
    """

    layer: Floats
    beside: Floats
    fill: Floats
    round: Floats
    message: Floats
    tail_layer: Floats
    tail_beside: Floats
    max_layers: Ints
    ahead: float


class ColumnMaker:
    """Makes columns of shapes, for a number of lanes."""

    def __init__(self, space: Space, num_lanes: int, messages: Floats | None = None) -> None:
        """Ask the cost model for all that depends on the number of lanes.

        Args:
            space: What the search knows.
            num_lanes: Lanes that share optimizer state and synchronize gradients; more is no harm.
            messages: What ``find_messages`` says, if that is known: it does not depend on the lanes.
        """
        self.space = space
        self._sharers = num_lanes if space.workload.zero else 1
        self._tails = usual_tails(space, num_lanes)
        self._messages = find_messages(space) if messages is None else messages

    def make(self, shapes: Sequence[Shape]) -> list[Columns]:
        """Return the columns of shapes with every size of micro-batch, without those that memory forbids."""
        columns = []
        for kinds in shapes_by_length(shapes).values():
            for m in range(len(self.space.prices.mbs)):
                made = self._make(kinds, m)
                if len(made.kinds):
                    columns.append(made)
        return columns

    def _make(self, kinds: Ints, m: int) -> Columns:
        space, prices = self.space, self.space.prices
        kinds = kinds[np.isfinite(prices.layer[kinds, m]).all(axis=1)]
        loads = self._loads(kinds, m)
        able = (loads.max_layers >= 1).all(axis=1) & (
            loads.max_layers.sum(axis=1) >= space.num_layers
        )
        if not able.all():
            kinds = kinds[able]
            loads = self._loads(kinds, m)
        layers = split_layers(loads, space.num_layers)
        per, beside = constraints(loads, layers)
        devices = np.zeros((len(kinds), len(space.pools)), dtype=np.int64)
        for k, kind in enumerate(space.kinds):
            devices[:, kind.pool] += (kinds == k).sum(axis=1) * kind.size
        return Columns(
            kinds=kinds, layers=layers, mbs=prices.mbs[m], devices=devices, per=per, beside=beside
        )

    def _loads(self, kinds: Ints, m: int) -> _Loads:
        prices = self.space.prices
        layer, forward = prices.layer[kinds, m], prices.layer_forward[kinds, m]
        beside, beside_forward = np.zeros(kinds.shape), np.zeros(kinds.shape)
        beside[:, 0] += prices.first[kinds[:, 0], m]
        beside[:, -1] += prices.last[kinds[:, -1], m]
        beside_forward[:, 0] += prices.first_forward[kinds[:, 0], m]
        beside_forward[:, -1] += prices.last_forward[kinds[:, -1], m]
        message = np.zeros(kinds.shape)
        message[:, :-1] = self._messages[kinds[:, :-1], kinds[:, 1:], m]
        tail_beside = self._tails.of(kinds, np.zeros_like(kinds))
        kept = drain_part(self.space.workload.schedule)
        return _Loads(
            layer=layer,
            beside=beside,
            fill=forward / layer,
            round=(forward + kept * (layer - forward)) / layer,
            message=message,
            tail_layer=self._tails.per_layer[kinds],
            tail_beside=tail_beside,
            max_layers=self.max_layers(kinds, m),
            ahead=float(self.space.workload.schedule.lower() != "gpipe"),
        )

    def lane_times(self, kinds: Sequence[int], layers: Sequence[int], m: int) -> LaneTimes:
        """Return what the stages and messages of one lane take, with sizes of micro-batches by their number."""
        prices, k, n = self.space.prices, np.array(kinds), np.array(layers)
        forward, work = prices.layer_forward[k, m] * n, prices.layer[k, m] * n
        forward[0] += prices.first_forward[k[0], m]
        work[0] += prices.first[k[0], m]
        forward[-1] += prices.last_forward[k[-1], m]
        work[-1] += prices.last[k[-1], m]
        message = tuple((self._messages[k[:-1], k[1:], m] / 2).tolist())
        return LaneTimes(
            tuple(forward.tolist()), tuple((work - forward).tolist()), message, message
        )

    def least_seconds(
        self, kinds: Sequence[int], layers: Ints, m: int, num_microbatches: int
    ) -> Floats:
        """Return what a lane takes at least, tails included, for each of many ways to split its layers, of shape (ways,).

        Args:
            kinds: Of the lane's stages.
            layers: Of shape (ways, stages).
            m: Number of the size of micro-batches.
            num_microbatches: How many the lane does.
        """
        loads = self._loads(np.array([kinds]), m)
        ends = _least_ends(loads, layers, num_microbatches, self.space.workload.schedule)
        found: Floats = ends.max(axis=1)
        return found

    def tail_seconds(self, kinds: Sequence[int], layers: Sequence[int]) -> list[float]:
        """Return what comes after the passes of each stage of one lane."""
        tails = self._tails.of(np.array([kinds]), np.array([layers]))[0]
        found: list[float] = tails.tolist()
        return found

    def max_layers(self, kinds: Ints, m: int) -> Ints:
        """Return how many layers fit each stage with its micro-batches in flight, of shape (lanes, stages)."""
        prices, workload = self.space.prices, self.space.workload
        length = kinds.shape[1]
        batches = max(1, workload.batch // prices.mbs[m])
        held = np.array(held_microbatches(workload.schedule, length, batches))
        nbytes = (prices.fixed[:, :, m] + prices.shared[:, :, m] / self._sharers)[
            :, kinds
        ] + prices.held[:, :, m][:, kinds] * held
        none = nbytes[0]
        none[:, 0] += nbytes[2][:, 0]
        none[:, -1] += nbytes[3][:, -1]
        free = prices.room[:, 0][kinds] - none
        most = np.clip(np.floor(free / nbytes[1] + 1e-9), 0, self.space.num_layers)
        counts: Ints = most.astype(np.int64)
        return counts


def drain_part(schedule: str) -> float:
    """Return the part of a backward for which the stage before it waits: half, where backwards are cut in two."""
    return 0.5 if schedule.lower().startswith("zb") else 1.0


def constraints(loads: _Loads, layers: Ints) -> tuple[Floats, Floats]:
    """Return seconds for each micro-batch and beside, of each constraint, of shape (lanes, constraints)."""
    work = loads.layer * layers + loads.beside
    tails = loads.tail_layer * layers + loads.tail_beside
    fill = _before(work * loads.fill + loads.message / 2)
    both = _before(work * loads.round + loads.message)
    down = _before((work + np.roll(loads.message, 1, axis=1) * _inner(work))[:, ::-1])[:, ::-1]
    ahead = np.arange(work.shape[1] - 1, -1, -1) * loads.ahead
    wait = np.maximum(down - ahead * work * loads.fill, 0)
    wait = loads.ahead * (wait + np.maximum(down - ahead * work * (1 - loads.fill), 0))
    beside = np.maximum(both + tails[:, :1], fill + tails) + wait
    pairs = (work[:, :-1] + work[:, 1:] + loads.message[:, :-1]) / 2
    return np.concatenate([work, pairs], 1), np.concatenate([beside, beside[:, :-1]], 1)


def _least_ends(loads: _Loads, layers: Ints, num_microbatches: int, schedule: str) -> Floats:
    """Return what lanes take at least by each of their stages, of shape (lanes, stages), for any number of micro-batches.

    A stage does all its passes after the forwards before it, and then has its own tail. Unless backwards are cut in two,
    backwards before it and the first stage's tail follow; and with 1F1B and w stages behind, from w + 2 micro-batches on, the
    first and the last of them pass through these while the stage waits.
    """
    work = loads.layer * layers + loads.beside
    tails = loads.tail_layer * layers + loads.tail_beside
    passes = num_microbatches * work
    least = _before(work * loads.fill + loads.message / 2) + passes + tails
    if drain_part(schedule) < 1:
        return least
    around = _before(work + loads.message) + tails[:, :1]
    least = np.maximum(least, around + passes)
    if schedule.lower() == "1f1b":
        behind = np.arange(work.shape[1] - 1, -1, -1)
        down = np.cumsum(work[:, ::-1], axis=1)[:, ::-1] - work
        down += np.cumsum(np.broadcast_to(loads.message, work.shape)[:, ::-1], axis=1)[:, ::-1]
        turns = around + 2 * down + passes - behind * work
        least = np.where(num_microbatches >= behind + 2, np.maximum(least, turns), least)
    return least


def _before(values: Floats) -> Floats:
    """Return, for each stage, the sum over the stages before it."""
    return np.cumsum(values, axis=1) - values


def _inner(work: Floats) -> Floats:
    """Return 1 for each stage that has one before it, 0 for the first."""
    inner = np.ones(work.shape)
    inner[:, 0] = 0.0
    return inner


def split_layers(loads: _Loads, num_layers: int) -> Ints:
    """Return how many layers each stage gets, so that the slowest stage is as fast as can be.

    What ``assign_layers`` does for one lane, for thousands: bisects the seconds of the slowest stage; for a time, each stage
    takes all layers that it can do. What is then too much goes back from the slowest stage of each lane.

    Args:
        loads: Of shape (lanes, stages); memory has room for all layers.
        num_layers: Decoder layers.
    """
    high = (loads.layer * num_layers + loads.beside).max(axis=1)
    low = np.zeros(len(high))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = _take(loads, middle).sum(axis=1) >= num_layers
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    layers = _take(loads, high)
    surplus = layers.sum(axis=1) - num_layers
    rows = np.flatnonzero(surplus > 0)
    while len(rows):
        cost = layers[rows] * loads.layer[rows] + loads.beside[rows]
        cost[layers[rows] == 1] = -1.0
        layers[rows, cost.argmax(axis=1)] -= 1
        surplus[rows] -= 1
        rows = rows[surplus[rows] > 0]
    return layers


def _take(loads: _Loads, seconds: Floats) -> Ints:
    """Return the most layers of each stage with which its micro-batch takes no longer than a time."""
    most = np.floor((seconds[:, None] - loads.beside) / loads.layer + 1e-9)
    return np.clip(most, 1, loads.max_layers).astype(np.int64)
