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

Only sums, +, -, *, / are used, in one order: with one version of Python, every rank on any machine finds
the same numbers bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdtensor.redistribute.flows import (
    Demand,
    Net,
    Option,
    Pool,
    Spread,
    differing,
    done,
    net_change,
    shift,
)


#: In turn: squarings that make a price of a link's share of the makespan (6: the 64th power), sweeps
#: at most, and the gap to the bound that ends the search.
_SCHEDULE = ((3, 6, 0.005), (4, 12, 0.01), (5, 24, 0.015), (6, 60, 0.02), (7, 120, 0.02))
#: Moves of a large problem after which the search ends, however large the gap.
_MOST_MOVES = 120_000
#: Sweeps between two looks at the gap.
_SWEEPS_PER_BOUND = 3
#: Gap per demand that ends the search of a large problem.
_LARGE = 1e-5
#: Change of the gap between two looks at it after which a higher power is tried.
_STALLED = 1e-4
#: Powers tried for the last bound.
_MAX_SQUARINGS = 10
#: Steps of the search for better prices in a small problem, where the gap is larger than the second
#: number; each changes a price by up to about the third, later less.
_MOST_PROOFS, _PROVEN, _RATE, _PATIENCE = 400, 0.02, 0.2, 20
#: Sources that each demand tries in a sweep, of those listed and of the pool: where two are cheap and full
#: alike, bytes can leave a third one only for the other.
_CANDIDATES = 3
#: Links whose busy times differ by less than this share are alike; then nothing is worth a move.
_ALIKE = 2e-4
_BISECTIONS = 5


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
        self.pools = tuple({id(d.pool): d.pool for d in demands if d.pool is not None}.values())
        listed = [s for d in demands for source in d.sources for s in source]
        listed += [d.enter for d in demands if d.enter is not None]
        pooled = [s for pool in self.pools for s in pool.spreads]
        self.spreads = tuple(dict.fromkeys(listed + pooled))
        self.price = [0.0] * len(busy)
        self.scale = 1.0
        self.squarings = 0
        self.alike = 1.0
        self.bound = 0.0
        self._proof = self.price
        self._num_moves = 0

    @property
    def makespan(self) -> float:
        """Seconds of the busiest link."""
        return max(self.busy, default=0.0)

    def solve(self) -> None:
        """Let everything flow, with nearly the least makespan; then undo needless detours."""
        self._start()
        if not self._search():
            for self.squarings in range(
                _MAX_SQUARINGS
            ):  # the flow stays; other prices may prove more
                self._reprice()
                self._is_near(0.0)
            self._prove()
            self._reprice()
        self._straighten()

    def _search(self) -> bool:
        """Sweep until the makespan is near the bound; return whether it is."""
        for squarings, sweeps, enough in _SCHEDULE:
            self.squarings = squarings
            self.alike = 1 + _ALIKE * (1 << squarings)
            before = 0.0
            for sweep in range(sweeps):
                self._reprice()
                if sweep % _SWEEPS_PER_BOUND == 0:
                    if self._is_near(max(enough, min(len(self.demands) * _LARGE, _PROVEN))):
                        return True
                    gap = self.makespan / self.bound if self.bound else math.inf
                    if abs(before - gap) < _STALLED:
                        break
                    before = gap
                if self._num_moves > _MOST_MOVES:
                    return False
                self._sweep()
        return False

    def _is_near(self, enough: float) -> bool:
        """Let the prices prove a bound, and return whether the makespan is near the best bound."""
        total = sum(self.price)
        for spread in self.spreads:
            self._look(spread)
        for pool in self.pools:
            self._rank(pool)
        value = sum([demand.num_bytes * self._least_cost(demand) for demand in self.demands])
        if total and value > self.bound * total:
            self.bound = value / total
            self._proof = list(self.price)
        return self.makespan <= self.bound * (1 + enough)

    def _prove(self) -> None:
        """Raise the bound by other prices: dearer where the cheapest ways would overload a link."""
        self.price = list(self._proof)
        for turn in range(_MOST_PROOFS // (1 + len(self.spreads) // 16)):
            total = sum(self.price)
            if self.makespan <= self.bound * (1 + _PROVEN) or not total:
                return
            self.price = [p / total for p in self.price]
            self._is_near(0.0)
            wished = [0.0] * len(self.busy)
            for demand in self.demands:
                for spread in self._cheapest(demand):
                    for link, c in spread.options[spread.best]:
                        wished[link] += c * demand.num_bytes
            rate = _RATE / (1 + turn / _PATIENCE)
            self.price = [
                p * (1 + rate * (min(w / self.bound, 4.0) - 1))
                for p, w in zip(self.price, wished, strict=True)
            ]

    def _cheapest(self, demand: Demand) -> tuple[Spread, ...]:
        places = self._candidates(demand, 1)
        costs = [sum([s.best_cost for s in demand.sources[i]]) for i in places]
        return demand.sources[places[costs.index(min(costs))]]

    def _least_cost(self, demand: Demand) -> float:
        cost = sum([s.best_cost for s in self._cheapest(demand)])
        pool = demand.pool
        if demand.unlisted and pool is not None:
            apart = [pool.cheapest_nic + self._cost(option) for option in demand.unlisted]
            listed = [s.best_cost for s in demand.sources[0]]
            cost = min(cost, sum(map(min, apart, listed)))
        return cost

    def _look(self, spread: Spread) -> int:
        """Find the spread's cheapest option."""
        price = self.price
        costs = [sum([c * price[link] for link, c in option]) for option in spread.options]
        spread.best_cost = min(costs)
        spread.best = costs.index(spread.best_cost)
        return spread.best

    def _rank(self, pool: Pool) -> None:
        spreads = pool.spreads
        pool.ranked = sorted(range(len(spreads)), key=lambda i: spreads[i].best_cost)
        pool.cheapest_nic = min([self._cost(s.options[0]) for s in spreads])
        pool.age = 0

    def _candidates(self, demand: Demand, most: int) -> list[int]:
        """Return the places of the listed sources, and of the cheapest by way of the pool."""
        places = list(range(len(demand.sources) - demand.num_added))
        pool = demand.pool
        if pool is not None:
            # Demands between two looks at the prices take turns among the cheapest quarter.
            turn = pool.age * most % max(len(pool.spreads) // 4, 1)
            places += map(demand.source, pool.cheapest(demand.home, most, turn))
        return places

    def _start(self) -> None:
        """Give each demand, largest first, to the source that is done first."""
        busy = self.busy
        order = sorted(range(len(self.demands)), key=lambda i: -self.demands[i].num_bytes)
        for i in order:
            demand = self.demands[i]
            if demand.pool is not None:
                self._rank_by_done(demand.pool)
            best: tuple[float, float] | None = None
            picked: list[tuple[Spread, int]] = []
            at = 0
            for k in self._candidates(demand, 1):
                picks = [(s, s.least_busy(busy, demand.num_bytes)) for s in demand.sources[k]]
                seconds = [
                    busy[link] + c * demand.num_bytes for s, o in picks for link, c in s.options[o]
                ]
                key = (max(seconds), sum(seconds))
                if best is None or key < best:
                    best, picked, at = key, picks, k
            demand.flow[at] = demand.num_bytes
            for s, o in picked:
                s.flow[o] += demand.num_bytes
                for link, c in s.options[o]:
                    busy[link] += c * demand.num_bytes

    def _rank_by_done(self, pool: Pool) -> None:
        busy, spreads = self.busy, pool.spreads
        pool.ranked.sort(key=lambda i: done(spreads[i].options[0], busy, 0.0))

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
        for pool in self.pools:
            self._refresh(pool)
        for demand in self.demands:
            if demand.pool is not None:
                demand.pool.age += 1
                if demand.pool.age > 4 + len(demand.pool.spreads) // 8:
                    self._refresh(demand.pool)
            if len(demand.sources) > 1 or demand.pool is not None:
                self._move_sources(demand)
        for spread in self.spreads:
            if len(spread.options) > 1:
                self._move_options(spread)

    def _refresh(self, pool: Pool) -> None:
        for spread in pool.spreads:
            self._look(spread)
        self._rank(pool)

    def _move_options(self, spread: Spread) -> None:
        flow, options = spread.flow, spread.options
        used = [i for i, f in enumerate(flow) if f > 0]
        best = self._look(spread)
        for i in used:
            if i != best and self._cost(options[i]) > self._cost(options[best]) * self.alike:
                net = net_change((options[i],), (options[best],))
                step = self._step(net, flow[i])
                if step > 0:
                    self._apply(net, step)
                    flow[i] = flow[i] - step if step < flow[i] else 0.0
                    flow[best] += step

    def _move_sources(self, demand: Demand) -> None:
        places = self._candidates(demand, _CANDIDATES)
        cost = {i: sum([s.best_cost for s in demand.sources[i]]) for i in places}
        listed = len(demand.sources) - demand.num_added
        places.sort(key=cost.__getitem__)
        cheap = [i for i in places if i < listed][:_CANDIDATES]
        cheap += [i for i in places if i >= listed]
        for i, flow in enumerate(demand.flow):
            if flow > 0:
                mine = sum([s.best_cost for s in demand.sources[i]])
                for best in cheap:
                    if mine > cost[best] * self.alike and demand.flow[i] > 0:
                        self._move_source(demand, i, best)

    def _move_source(self, demand: Demand, src: int, dst: int) -> None:
        self._num_moves += 1
        left, joined = differing(demand.sources[src], demand.sources[dst])
        taken = [(s, self._dearest(s)) for s in left]
        given = [(s, s.best) for s in joined]
        net = net_change([s.options[o] for s, o in taken], [s.options[o] for s, o in given])
        before = sum([self._cost(s.options[o]) for s, o in taken])
        after = sum([self._cost(s.options[o]) for s, o in given])
        if before <= after * self.alike:
            return
        most = min([demand.flow[src], *[s.flow[o] for s, o in taken]])
        step = self._step(net, most)
        if step > 0:
            self._apply(net, step)
            shift(demand, (src, dst), taken, given, step)

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
            slope = sum(
                [c * c * self.price[link] / busy[link] for link, c in net if busy[link] > 0]
            )
            steepness = max((1 << self.squarings) * slope, 1e-300)
            high = min(most, -sum([c * self.price[link] for link, c in net]) / steepness)
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
                    self._straighten_source(demand, (src, dst), limit, whole)
        for spread in self.spreads:
            order = sorted(range(len(spread.weights)), key=spread.weights.__getitem__)
            for place in range(len(order) - 1, 0, -1):
                if spread.flow[order[place]] > 0:
                    for dst in order[:place]:
                        self._straighten_option(spread, order[place], dst, limit)

    def _straighten_option(self, spread: Spread, src: int, dst: int, limit: float) -> None:
        if spread.flow[src] > 0 and spread.weights[dst] < spread.weights[src]:
            net = net_change((spread.options[src],), (spread.options[dst],))
            step = self._room(net, spread.flow[src], limit)
            self._apply(net, step)
            spread.flow[src] -= step
            spread.flow[dst] += step

    def _straighten_source(
        self, demand: Demand, ends: tuple[int, int], limit: float, whole: bool
    ) -> None:
        left, joined = differing(demand.sources[ends[0]], demand.sources[ends[1]])
        taken = [(s, max(range(len(s.flow)), key=s.flow.__getitem__)) for s in left]
        given = [(s, s.lightest) for s in joined]
        net = net_change([s.options[o] for s, o in taken], [s.options[o] for s, o in given])
        most = min([demand.flow[ends[0]], *[s.flow[o] for s, o in taken]])
        step = self._room(net, most, limit)
        if step > 0 and (not whole or step == demand.flow[ends[0]]):
            self._apply(net, step)
            shift(demand, ends, taken, given, step)

    def _room(self, net: Net, most: float, limit: float) -> float:
        for link, c in net:
            if c > 0:
                most = min(most, (limit - self.busy[link]) / c)
        return max(most, 0.0)
