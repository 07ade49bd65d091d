"""Least makespan over the busiest link: a fluid problem, its near-optimal answer, and a proof of how near.

A *demand* of some bytes is served by *sources*; a source is a tuple of *spreads*, each of which carries
all of the source's bytes over its *options*; an option keeps links busy for some seconds per byte::

    demand                source = (spread, spread)                 option of the second spread
    cell of ranks 0, 8    0: leave node 0 by ..., enter node 3      enter at 24, then 24 -> 25:
    wanted by 24, 25      8: leave node 1 by ..., enter node 3      NIC in of 24, fast out of 24, ...

The makespan is the time of the busiest link. Instead of it, the sum of ``busy ** q`` over the links is
minimized, with q rising from 9 to 129, by moving bytes from a dear option or source to a cheap one, as
traffic is brought to its equilibrium. The prices ``busy ** (q - 1)`` bound the optimum from below (they
are a feasible dual): a demand cannot cost less than its cheapest source, so

    makespan * sum(prices) >= sum(bytes of a demand * price of its cheapest source)

Only +, -, *, / are used, in one order: every rank, on any machine, finds the same numbers bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


#: (link, seconds that one byte keeps it busy), for each link that an option uses.
Option = tuple[tuple[int, float], ...]
Net = list[tuple[int, float]]

#: In turn: squarings that make a price of a link's share of the makespan (6: the 64th power), sweeps
#: at most, and the gap to the bound that ends the search.
_SCHEDULE = ((3, 6, 0.005), (4, 12, 0.01), (5, 24, 0.015), (6, 60, 0.02), (7, 120, 0.02))
#: Powers tried for the last bound.
_MAX_SQUARINGS = 10
#: Sweeps between two looks at the gap.
_SWEEPS_PER_BOUND = 3
#: Sources that each demand tries in a sweep.
_CANDIDATES = 3
#: A price difference below this share is not worth a move.
_ALIKE = 1e-3
_BISECTIONS = 5


@dataclass(slots=True, eq=False)
class Spread:
    """Options that share what flows through; spreads may serve many demands.

    Attributes:
        tags: What each option stands for.
        options: Links of each option.
        flow: Bytes on each option.
        weights: Seconds of all links together that a byte takes on each option.
        best: The cheapest option when prices were last looked at.
        best_cost: Its price per byte.
    """

    tags: tuple[tuple[int, ...], ...]
    options: tuple[Option, ...]
    flow: list[float] = field(init=False)
    weights: list[float] = field(init=False)
    best: int = field(init=False, default=0)
    best_cost: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.flow = [0.0] * len(self.options)
        self.weights = [sum([c for _, c in option]) for option in self.options]

    @property
    def lightest(self) -> int:
        """The first of the options with the least weight."""
        return self.weights.index(min(self.weights))


@dataclass(slots=True, eq=False)
class Demand:
    """Bytes that may come from any of its sources.

    Attributes:
        num_bytes: How many.
        sources: Each a tuple of spreads.
        flow: Bytes from each source.
    """

    num_bytes: float
    sources: tuple[tuple[Spread, ...], ...]
    flow: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.flow = [0.0] * len(self.sources)


class Balance:
    """The state of the search: how busy each link is, and what that costs."""

    def __init__(self, busy: list[float], demands: Sequence[Demand]) -> None:
        """Start with what keeps the links busy already; nothing of the demands flows yet.

        Args:
            busy: Seconds of each link; it is updated.
            demands: What shall flow.
        """
        self.busy = busy
        self.demands = demands
        spreads = (s for demand in demands for source in demand.sources for s in source)
        self.spreads = tuple(dict.fromkeys(spreads))
        self.price = [0.0] * len(busy)
        self.scale = 1.0
        self.squarings = 0
        self.bound = 0.0

    @property
    def makespan(self) -> float:
        """Seconds of the busiest link."""
        return max(self.busy, default=0.0)

    def solve(self) -> None:
        """Let everything flow, with nearly the least makespan; then undo needless detours."""
        self._start()
        for squarings, sweeps, enough in _SCHEDULE:
            self.squarings = squarings
            for sweep in range(sweeps):
                self._reprice()
                if sweep % _SWEEPS_PER_BOUND == 0 and self._is_near(enough):
                    self._straighten()
                    return
                self._sweep()
        for self.squarings in range(_MAX_SQUARINGS):  # the flow stays; other prices may prove more
            self._reprice()
            self._is_near(0.0)
        self._straighten()

    def _is_near(self, enough: float) -> bool:
        """Let the prices prove a bound, and return whether the makespan is near the best bound."""
        total = sum(self.price)
        for spread in self.spreads:
            self._look(spread)
        value = 0.0
        for demand in self.demands:
            costs = [sum([s.best_cost for s in source]) for source in demand.sources]
            value += demand.num_bytes * min(costs)
        if total:
            self.bound = max(self.bound, value / total)
        return self.makespan <= self.bound * (1 + enough)

    def _look(self, spread: Spread) -> int:
        """Find the spread's cheapest option."""
        price = self.price
        costs = [sum([c * price[link] for link, c in option]) for option in spread.options]
        spread.best_cost = min(costs)
        spread.best = costs.index(spread.best_cost)
        return spread.best

    def _start(self) -> None:
        """Give each demand, largest first, to the source that is done first."""
        busy = self.busy
        order = sorted(range(len(self.demands)), key=lambda i: -self.demands[i].num_bytes)
        for i in order:
            demand = self.demands[i]
            best: tuple[float, float] | None = None
            picked: list[tuple[Spread, int]] = []
            at = 0
            for k, source in enumerate(demand.sources):
                picks = [(s, _least_busy(s, busy, demand.num_bytes)) for s in source]
                seconds = [
                    busy[link] + c * demand.num_bytes for s, o in picks for link, c in s.options[o]
                ]
                key = (max(seconds, default=0.0), sum(seconds))
                if best is None or key < best:
                    best, picked, at = key, picks, k
            demand.flow[at] = demand.num_bytes
            for s, o in picked:
                s.flow[o] += demand.num_bytes
                for link, c in s.options[o]:
                    busy[link] += c * demand.num_bytes

    def _reprice(self) -> None:
        """Set the prices from how busy the links are."""
        self.scale = 1 / (self.makespan or 1.0)
        price = self.price
        for link, seconds in enumerate(self.busy):
            price[link] = self._price(seconds)

    def _price(self, seconds: float) -> float:
        share = seconds * self.scale
        for _ in range(self.squarings):
            share *= share
        return share

    def _cost(self, option: Option) -> float:
        price = self.price
        return sum([c * price[link] for link, c in option])

    def _sweep(self) -> None:
        for demand in self.demands:
            if len(demand.sources) > 1:
                self._move_sources(demand)
        for spread in self.spreads:
            if len(spread.options) > 1:
                self._move_options(spread)

    def _move_options(self, spread: Spread) -> None:
        flow, options = spread.flow, spread.options
        used = [i for i, f in enumerate(flow) if f > 0]
        best = self._look(spread)
        for i in used:
            if i != best and self._cost(options[i]) > self._cost(options[best]) * (1 + _ALIKE):
                net = _net((options[i],), (options[best],))
                step = self._step(net, flow[i])
                if step > 0:
                    self._apply(net, step)
                    flow[i] = flow[i] - step if step < flow[i] else 0.0
                    flow[best] += step

    def _move_sources(self, demand: Demand) -> None:
        costs = [sum([s.best_cost for s in source]) for source in demand.sources]
        # Where two sources are cheap and full alike, bytes can leave a third one only for the other.
        cheap = sorted(range(len(costs)), key=costs.__getitem__)[:_CANDIDATES]
        for i, flow in enumerate(demand.flow):
            if flow > 0:
                for best in cheap:
                    if i != best and demand.flow[i] > 0:
                        self._move_source(demand, i, best)

    def _move_source(self, demand: Demand, src: int, dst: int) -> None:
        left, joined = _differing(demand.sources[src], demand.sources[dst])
        taken = [(s, self._dearest(s)) for s in left]
        given = [(s, s.best) for s in joined]
        net = _net([s.options[o] for s, o in taken], [s.options[o] for s, o in given])
        before = sum(self._cost(s.options[o]) for s, o in taken)
        after = sum(self._cost(s.options[o]) for s, o in given)
        if before <= after * (1 + _ALIKE):
            return
        most = min([demand.flow[src], *(s.flow[o] for s, o in taken)])
        step = self._step(net, most)
        if step > 0:
            self._apply(net, step)
            _shift(demand, (src, dst), taken, given, step)

    def _dearest(self, spread: Spread) -> int:
        used = [i for i, f in enumerate(spread.flow) if f > 0]
        return max(used, key=lambda i: self._cost(spread.options[i]), default=0)

    def _step(self, net: Net, most: float) -> float:
        """Return how many bytes to move: until both sides cost the same, or all."""
        busy = self.busy
        high = most
        top = max([busy[link] for link, c in net if c < 0], default=0.0)
        for link, c in net:
            if c > 0:
                high = min(high, (top - busy[link]) / c)
        if high <= 0:  # the cheap side has the busiest link, but fewer of them
            slope = sum(c * c * self.price[link] / busy[link] for link, c in net if busy[link] > 0)
            steepness = max((1 << self.squarings) * slope, 1e-300)
            high = min(most, -sum(c * self.price[link] for link, c in net) / steepness)
        if self._gain(net, high) <= 0:
            return high
        low = 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self._gain(net, middle) <= 0:
                low = middle
            else:
                high = middle
        return low

    def _gain(self, net: Net, step: float) -> float:
        scale, squarings, busy = self.scale, self.squarings, self.busy
        total = 0.0
        for link, c in net:
            share = (busy[link] + c * step) * scale
            for _ in range(squarings):
                share *= share
            total += c * share
        return total

    def _apply(self, net: Iterable[tuple[int, float]], step: float) -> None:
        busy, price = self.busy, self.price
        for link, c in net:
            busy[link] = seconds = max(busy[link] + c * step, 0.0)
            price[link] = self._price(seconds)

    def _straighten(self) -> None:
        """Move bytes to options and sources that use links less, while no link exceeds the makespan."""
        limit = self.makespan
        for demand in self.demands:
            weight = [sum([min(s.weights) for s in source]) for source in demand.sources]
            order = sorted(range(len(weight)), key=lambda i: (weight[i], -demand.flow[i]))
            for place in range(len(order) - 1, 0, -1):
                src = order[place]
                for dst in order[:place]:
                    if demand.flow[src] <= 0:
                        break
                    whole = weight[src] == weight[dst]
                    self._straighten_source(demand, src, dst, limit, whole)
        for spread in self.spreads:
            order = sorted(range(len(spread.weights)), key=spread.weights.__getitem__)
            for place in range(len(order) - 1, 0, -1):
                for dst in order[:place]:
                    self._straighten_option(spread, order[place], dst, limit)

    def _straighten_option(self, spread: Spread, src: int, dst: int, limit: float) -> None:
        if spread.flow[src] > 0 and spread.weights[dst] < spread.weights[src]:
            net = _net((spread.options[src],), (spread.options[dst],))
            step = self._room(net, spread.flow[src], limit)
            self._apply(net, step)
            spread.flow[src] -= step
            spread.flow[dst] += step

    def _straighten_source(
        self, demand: Demand, src: int, dst: int, limit: float, whole: bool
    ) -> None:
        left, joined = _differing(demand.sources[src], demand.sources[dst])
        taken = [(s, max(range(len(s.flow)), key=s.flow.__getitem__)) for s in left]
        given = [(s, s.lightest) for s in joined]
        net = _net([s.options[o] for s, o in taken], [s.options[o] for s, o in given])
        most = min([demand.flow[src], *(s.flow[o] for s, o in taken)])
        step = self._room(net, most, limit)
        if step > 0 and (not whole or step == demand.flow[src]):
            self._apply(net, step)
            _shift(demand, (src, dst), taken, given, step)

    def _room(self, net: Net, most: float, limit: float) -> float:
        for link, c in net:
            if c > 0:
                most = min(most, (limit - self.busy[link]) / c)
        return max(most, 0.0)


def _shift(
    demand: Demand,
    ends: tuple[int, int],
    taken: Iterable[tuple[Spread, int]],
    given: Iterable[tuple[Spread, int]],
    step: float,
) -> None:
    demand.flow[ends[0]] -= step
    demand.flow[ends[1]] += step
    for spread, option in taken:
        spread.flow[option] -= step
    for spread, option in given:
        spread.flow[option] += step


def _differing(src: Sequence[Spread], dst: Sequence[Spread]) -> tuple[list[Spread], list[Spread]]:
    return (
        [s for s in src if all(s is not other for other in dst)],
        [s for s in dst if all(s is not other for other in src)],
    )


def _net(left: Iterable[Option], joined: Iterable[Option]) -> Net:
    """Return the change of each link's seconds per byte moved from some options to others."""
    change: dict[int, float] = {}
    for option in left:
        for link, c in option:
            change[link] = change.get(link, 0.0) - c
    for option in joined:
        for link, c in option:
            change[link] = change.get(link, 0.0) + c
    return [(link, c) for link, c in change.items() if c]


def _least_busy(spread: Spread, busy: Sequence[float], num_bytes: float) -> int:
    """Return the lightest option, of equally light ones that which is done first."""
    least = min(spread.weights)
    light = [i for i, weight in enumerate(spread.weights) if weight == least]
    if len(light) == 1:
        return light[0]
    return min(
        light,
        key=lambda i: max([busy[link] + c * num_bytes for link, c in spread.options[i]]),
    )
