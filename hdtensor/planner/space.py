"""``Space``: the ways in which a cluster's devices can hold stages, with what each costs, as arrays.

Devices that nothing tells apart form a pool; a kind is a pool with degrees of TP and CP. All later parts of the
search work on kinds, so that their effort does not grow with the number of devices.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Cluster, Link
from hdtensor.planner.costs import CostModel, LayerSpan, StageGroup
from hdtensor.planner.devices import Device
from hdtensor.planner.workload import Workload


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What plans may look like, and how much is proven of them.

    Attributes:
        tp_degrees: Degrees of tensor parallelism, powers of two; a stage never leaves its node.
        cp_degrees: Degrees of context parallelism.
        mbs: Sizes of micro-batches, in samples.
        max_stages: Stages of a lane.
        min_lanes: Lanes; two or more keep a copy of all weights when a device fails. Stages of all lanes that hold the
            same layers may be in one node.
        max_lanes: Lanes; None for any number.
        equal_lanes: Whether all lanes have the same layers in their stages and equal shares of the batch,
            as frameworks need that know data parallelism only within a stage.
        tight_bound: Whether to take seconds, on a thousand devices minutes, to prove as much of a plan as can be.
    """

    tp_degrees: tuple[int, ...] = (1, 2, 4, 8)
    cp_degrees: tuple[int, ...] = (1,)
    mbs: tuple[int, ...] = (1, 2, 4, 8)
    max_stages: int = 8
    min_lanes: int = 1
    max_lanes: int | None = None
    equal_lanes: bool = False
    tight_bound: bool = False

    def __post_init__(self) -> None:
        for name in ("tp_degrees", "cp_degrees", "mbs"):
            values = getattr(self, name)
            if not values or any(value < 1 for value in values):
                raise PlannerError(f"{name}: needs numbers of 1 or more, got {values!r}.")
        for name in ("tp_degrees", "cp_degrees"):
            odd = [value for value in getattr(self, name) if value & (value - 1)]
            if odd:
                raise PlannerError(
                    f"{name}: {odd[0]} is no power of two; use some of 1, 2, 4, 8, ..."
                )
        most = self.max_lanes if self.max_lanes is not None else self.min_lanes
        if self.max_stages < 1 or not 1 <= self.min_lanes <= most:
            raise PlannerError(
                f"max_stages, min_lanes, max_lanes: need 1 or more, and min_lanes <= max_lanes; got "
                f"{self.max_stages}, {self.min_lanes}, {self.max_lanes}."
            )


class Pool(NamedTuple):
    """Nodes whose devices nothing tells apart.

    Attributes:
        device: Their device.
        inside: The link inside of a node.
        zone: Their zone.
        nodes: Numbers of the nodes in the cluster.
        ranks: The ranks of each node that may be used.
    """

    device: Device
    inside: Link
    zone: str
    nodes: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return sum(len(ranks) for ranks in self.ranks)

    def room(self, size: int) -> int:
        """Return how many groups of a size fit, when a group stays in its node."""
        return sum(len(ranks) // size for ranks in self.ranks)

    @property
    def label(self) -> str:
        """A name for reports."""
        return f"{self.device.name}@{self.zone}" if self.zone else self.device.name


class Kind(NamedTuple):
    """A way in which devices of a pool hold a stage.

    Attributes:
        pool: Number of the pool.
        group: The stage's devices.
    """

    pool: int
    group: StageGroup

    @property
    def size(self) -> int:
        """How many devices it takes."""
        return self.group.tp * self.group.cp


def find_pools(cluster: Cluster, ranks: Iterable[int] | None = None) -> tuple[Pool, ...]:
    """Return the pools of a cluster, those with the fastest devices last.

    Args:
        cluster: The devices.
        ranks: Those that may be used; default all.
    """
    allowed = None if ranks is None else set(ranks)
    found: defaultdict[tuple[object, ...], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for number, node in enumerate(cluster.nodes):
        mine = cluster.ranks_of(number)
        kept = tuple(mine) if allowed is None else tuple(r for r in mine if r in allowed)
        if kept:
            found[node.device, node.inside, node.zone, node.uplink].append((number, kept))
    pools = []
    for members in found.values():
        node = cluster.nodes[members[0][0]]
        numbers, kept_ranks = zip(*members, strict=True)
        pools.append(Pool(node.device, node.inside, node.zone, numbers, kept_ranks))
    return tuple(pools)


def can_deal(batch: int, sizes: Sequence[int], min_lanes: int, max_lanes: int) -> bool:
    """Return whether a batch is whole micro-batches of lanes that each have one size of them.

    >>> can_deal(33, (4,), 1, 8), can_deal(33, (4, 5), 1, 1), can_deal(33, (4, 5), 1, 2)
    (False, False, True)

    Args:
        batch: Samples.
        sizes: Sizes of micro-batches, in samples.
        min_lanes: Lanes, each with one micro-batch or more.
        max_lanes: Lanes at most.
    """
    if min_lanes > max_lanes:
        return False
    usable = sorted(size for size in set(sizes) if size <= batch)
    if any(batch % size == 0 and batch // size >= min_lanes for size in usable):
        return True
    some = itertools.combinations(usable, min(max_lanes, len(usable)))
    return any(_most_parts(batch, each) >= min_lanes for each in some)


def _has_equal(batch: int, sizes: Sequence[int], min_lanes: int, max_lanes: int) -> bool:
    """Return whether some number of equal lanes divides a batch in whole micro-batches of a size."""
    return any(
        batch % (lanes * size) == 0 for lanes in range(min_lanes, max_lanes + 1) for size in sizes
    )


def _most_parts(batch: int, sizes: Sequence[int]) -> float:
    """Return the most micro-batches of some sizes that make up a batch, minus infinity if none do."""
    most = np.full(batch + 1, -np.inf)
    most[0] = 0.0
    for size in sizes:
        # Best with k more parts of this size, for all k at once: rows are numbers of parts, columns what is left.
        rows = -(-most.size // size)
        table = np.pad(most, (0, rows * size - most.size), constant_values=-np.inf)
        count = np.arange(rows)[:, None]
        table = np.maximum.accumulate(table.reshape(rows, size) - count, axis=0) + count
        most = table.reshape(-1)[: most.size]
    return float(most[batch])


def find_kinds(pools: Sequence[Pool], options: SearchOptions) -> tuple[Kind, ...]:
    """Return every way of holding a stage that some node has room for, the largest groups of a pool first."""
    kinds = []
    for index, pool in enumerate(pools):
        degrees = [(tp, cp) for tp in options.tp_degrees for cp in options.cp_degrees]
        for tp, cp in sorted(degrees, key=lambda d: (-d[0] * d[1], -d[0])):
            if pool.room(tp * cp):
                kinds.append(Kind(index, StageGroup(pool.device, pool.inside, tp, cp)))
    return tuple(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What each kind of stage costs, all arrays of shape (kinds, sizes of micro-batches).

    Costs of layers add up, and bytes grow by the same number with each layer, so two of each say all. What a
    cost model does not know, or memory never holds, is infinite.

    Attributes:
        mbs: The sizes of micro-batches.
        layer: Seconds of forward and backward of a layer.
        layer_forward: Seconds of its forward.
        first: Seconds of the embedding, forward and backward.
        last: Seconds of the head, forward and backward.
        first_forward: Seconds of the embedding's forward.
        last_forward: Seconds of the head's forward.
        fixed: Bytes (none, per layer, first, last) that no other lane shares and no micro-batch multiplies.
        shared: Bytes of optimizer state (none, per layer, first, last), before ZeRO divides them.
        held: Bytes (none, per layer, first, last) for each micro-batch in flight.
        room: Bytes of a device of each kind, of shape (kinds, 1).
    """

    mbs: tuple[int, ...]
    layer: Floats
    layer_forward: Floats
    first: Floats
    last: Floats
    first_forward: Floats
    last_forward: Floats
    fixed: Floats
    shared: Floats
    held: Floats
    room: Floats


def find_prices(kinds: Sequence[Kind], costs: CostModel, mbs: Sequence[int]) -> Prices:
    """Return what each kind costs with each size of micro-batch."""
    seconds = np.full((6, len(kinds), len(mbs)), np.inf)
    nbytes = np.full((3, 4, len(kinds), len(mbs)), np.inf)
    for k, kind in enumerate(kinds):
        for m, size in enumerate(mbs):
            try:
                units = [costs.seconds(u, kind.group, size) for u in ("layer", "embedding", "head")]
                spans = [
                    costs.memory(kind.group, span, size)
                    for span in (
                        LayerSpan(1),
                        LayerSpan(2),
                        LayerSpan(1, is_first=True),
                        LayerSpan(1, is_last=True),
                    )
                ]
            except PlannerError:
                continue  # this kind has no numbers: it stays infinite
            seconds[:3, k, m] = [unit.forward + unit.backward for unit in units]
            seconds[3:, k, m] = [unit.forward for unit in units]
            parts = np.array(
                [[s.parameters + s.gradients + s.buffers, s.optimizer, s.activation] for s in spans]
            )
            one, two, first, last = parts
            nbytes[:, :, k, m] = np.stack([2 * one - two, two - one, first - one, last - one], 1)
    return Prices(
        mbs=tuple(mbs),
        layer=seconds[0],
        first=seconds[1],
        last=seconds[2],
        layer_forward=seconds[3],
        first_forward=seconds[4],
        last_forward=seconds[5],
        fixed=nbytes[0],
        shared=nbytes[1],
        held=nbytes[2],
        room=np.array([[kind.group.device.memory_bytes] for kind in kinds], dtype=float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that the search knows.

    Attributes:
        cluster: The devices and links.
        workload: The step.
        costs: Seconds and bytes.
        num_layers: Decoder layers.
        options: What plans may look like.
        pools: Devices that nothing tells apart.
        kinds: Ways of holding a stage.
        prices: What they cost.
    """

    cluster: Cluster
    workload: Workload
    costs: CostModel
    num_layers: int
    options: SearchOptions
    pools: tuple[Pool, ...]
    kinds: tuple[Kind, ...]
    prices: Prices

    @property
    def devices(self) -> tuple[int, ...]:
        """How many devices each pool has."""
        return tuple(pool.num_devices for pool in self.pools)


def make_space(
    cluster: Cluster,
    costs: CostModel,
    workload: Workload,
    num_layers: int,
    options: SearchOptions | None = None,
    *,
    ranks: Iterable[int] | None = None,
) -> Space:
    """Return what the search works on.

    Args:
        cluster: The devices and links.
        costs: Seconds and bytes.
        workload: The step.
        num_layers: Decoder layers.
        options: What plans may look like.
        ranks: Those that may be used; default all.

    Raises:
        PlannerError: If no rank is left, the batch cannot be dealt, or the cost model knows none of the stages.
    """
    options = options or SearchOptions()
    pools = find_pools(cluster, ranks)
    if not pools:
        raise PlannerError("ranks: none of them is in the cluster, so there is nothing to plan on.")
    kinds = find_kinds(pools, options)
    if not kinds:
        raise PlannerError(_too_wide(pools, options))
    sizes = [size for size in options.mbs if size <= workload.batch]
    _check_lanes(workload.batch, options, sum(pool.num_devices for pool in pools))
    prices = find_prices(kinds, costs, sizes)
    if not np.isfinite(prices.layer).any():
        raise PlannerError(
            f"tp_degrees, mbs: the costs know none of TP {options.tp_degrees} with {sizes or options.mbs} samples on "
            f"these devices within a batch of {workload.batch}."
        )
    return Space(
        cluster=cluster,
        workload=workload,
        costs=costs,
        num_layers=num_layers,
        options=options,
        pools=pools,
        kinds=kinds,
        prices=prices,
    )


def _too_wide(pools: Sequence[Pool], options: SearchOptions) -> str:
    """Return the message for stages that no node has room for."""
    most = max(len(ranks) for pool in pools for ranks in pool.ranks)
    cp = min(options.cp_degrees)
    is_cp = cp > 1
    what = f"{min(options.tp_degrees)}{f' x CP {cp}' if is_cp else ''}"
    return (
        f"tp_degrees: a stage stays in its node, and the largest node has {most} device{'' if most == 1 else 's'}, got TP "
        f"{what}. Allow{' tp x cp' if is_cp else ''} up to {1 << (most.bit_length() - 1)}; lanes go over several nodes by "
        f"stages."
    )


def _check_lanes(batch: int, options: SearchOptions, num_devices: int) -> None:
    """Refuse a batch that cannot be dealt to lanes.

    Raises:
        PlannerError: If so; it says what to change.
    """
    most = min(num_devices, options.max_lanes or num_devices)
    sizes = [size for size in options.mbs if size <= batch]
    if options.min_lanes > min(most, batch):
        raise PlannerError(
            f"min_lanes: {most} devices and {batch} samples make at most {min(most, batch)} lanes, got "
            f"{options.min_lanes}. Ask for fewer."
        )
    if not can_deal(batch, sizes, options.min_lanes, most):
        raise PlannerError(
            f"mbs: {batch} samples cannot be dealt to {options.min_lanes} to {most} lanes in micro-batches of "
            f"{', '.join(map(str, options.mbs))}, one size in each lane; allow a size that divides the batch (1 always "
            f"does), other numbers of lanes, or change the batch."
        )
    if options.equal_lanes and not _has_equal(batch, sizes, options.min_lanes, most):
        raise PlannerError(
            f"batch: {batch} samples are not the same whole number of micro-batches of "
            f"{', '.join(map(str, options.mbs))} for each of {options.min_lanes} to {most} equal lanes; give a multiple of a "
            f"number of lanes and a size, other sizes (mbs), or other numbers of lanes."
        )
