"""What may flow where: demands, the sources that serve them, and the links that this keeps busy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


#: (link, seconds that one byte keeps it busy), for each link that an option uses.
Option = tuple[tuple[int, float], ...]
#: (link, change of its seconds) per byte that is moved.
Net = list[tuple[int, float]]


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

    def least_busy(self, busy: Sequence[float], num_bytes: float) -> int:
        """Return the lightest option, of equally light ones that which is done first."""
        least = min(self.weights)
        light = [i for i, weight in enumerate(self.weights) if weight == least]
        if len(light) == 1:
            return light[0]
        return min(light, key=lambda i: done(self.options[i], busy, num_bytes))


@dataclass(slots=True, eq=False)
class Pool:
    """Spreads of which any may begin a demand's source: the owners of its cells, each leaving its node.

    Attributes:
        spreads: One per owner; the first option uses no relay.
        homes: Node of each owner.
        ranked: The spreads' indices, cheapest first, when prices were last looked at.
        cheapest_nic: Price of the cheapest first option.
        age: Demands that were served since then.
    """

    spreads: tuple[Spread, ...]
    homes: tuple[int, ...]
    ranked: list[int] = field(init=False)
    cheapest_nic: float = field(init=False, default=0.0)
    age: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.ranked = list(range(len(self.spreads)))

    def cheapest(self, home: int, most: int, skipped: int = 0) -> list[int]:
        """Return the cheapest spreads outside a node, ``most`` at most, after some that others take."""
        found = []
        for i in self.ranked[skipped:]:
            if self.homes[i] != home:
                found.append(i)
                if len(found) == most:
                    break
        return found


@dataclass(slots=True, eq=False)
class Demand:
    """Bytes that may come from any of its sources.

    Attributes:
        num_bytes: How many.
        sources: Each a tuple of spreads; those by way of the pool are added once they are used.
        pool: Owners that send from other nodes.
        enter: What follows a spread of the pool.
        home: The node of the needers.
        unlisted: Per needer, the links by which it could get the bytes by itself from an owner of
            the pool that its spread in the first source does not list; only bounds look at them.
        flow: Bytes from each source.
    """

    num_bytes: float
    sources: list[tuple[Spread, ...]]
    pool: Pool | None = None
    enter: Spread | None = None
    home: int = -1
    unlisted: tuple[Option, ...] = ()
    flow: list[float] = field(init=False)
    _by_pool: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.flow = [0.0] * len(self.sources)

    @property
    def num_added(self) -> int:
        """Sources that go by way of the pool."""
        return len(self._by_pool)

    def source(self, index: int) -> int:
        """Return the place among the sources of that by way of a spread of the pool."""
        place = self._by_pool.get(index)
        if place is None:
            assert self.pool is not None
            assert self.enter is not None
            place = self._by_pool[index] = len(self.sources)
            self.sources.append((self.pool.spreads[index], self.enter))
            self.flow.append(0.0)
        return place


def done(option: Option, busy: Sequence[float], num_bytes: float) -> float:
    """Return when the links of an option are done with what they do and some bytes more."""
    return max([busy[link] + c * num_bytes for link, c in option])


def differing(src: Sequence[Spread], dst: Sequence[Spread]) -> tuple[list[Spread], list[Spread]]:
    """Return the spreads that only one of two sources has."""
    return (
        [s for s in src if all(s is not other for other in dst)],
        [s for s in dst if all(s is not other for other in src)],
    )


def net_change(left: Iterable[Option], joined: Iterable[Option]) -> Net:
    """Return what moving from some options to others does to each link."""
    change: dict[int, float] = {}
    for option in left:
        for link, c in option:
            change[link] = change.get(link, 0.0) - c
    for option in joined:
        for link, c in option:
            change[link] = change.get(link, 0.0) + c
    return [(link, c) for link, c in change.items() if c]


def shift(
    demand: Demand,
    ends: tuple[int, int],
    taken: Iterable[tuple[Spread, int]],
    given: Iterable[tuple[Spread, int]],
    step: float,
) -> None:
    """Move bytes of a demand from one source to another, over these options of their spreads."""
    demand.flow[ends[0]] -= step
    demand.flow[ends[1]] += step
    for spread, option in taken:
        spread.flow[option] -= step
    for spread, option in given:
        spread.flow[option] += step
