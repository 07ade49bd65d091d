"""The closed set of redistribute steps: pure data that the simulator and the ranks carry out.

======================  ==========================================================  ================
step                    what it does                                                paper
======================  ==========================================================  ================
``LocalStep``           every rank cuts, embeds or keeps what it already holds      5.1 (I)
``BottomStep``          one collective along a mesh axis, inside one subgroup       5.1 (II), Fig. 8
``SplitAllReduce``      top ``Partial -> Replicate``                                5.2, Fig. 9
``SplitReduceScatter``  top ``Partial -> Shard``                                    5.2, Fig. 9
``SplitAllGather``      top ``Shard -> Replicate``                                  5.2, Fig. 9
``SendRecv``            whole shards go to other ranks, one to one                  5.1 (I)
``BatchedSendRecv``     every rank gets the cells it lacks from ranks that own them 5.3, Fig. 11
``BatchedSendReduce``   so with terms: the receiver reduces them                    beyond
======================  ==========================================================  ================

A step turns one ``Layout`` into the next. Its communication is a tuple of collectives, or of transfers,
on *cells*: boxes that every involved rank holds or wants as a whole. All coordinates of one step are its layouts':
global for the top tier, those of the subgroup's block for the bottom tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch.distributed.tensor import Partial

from hdtensor.placements import Box, HDSpec, OwnedBox, local_shape, owned_boxes
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    Collective,
    Ranks,
    ReduceScatter,
)
from hdtensor.redistribute.transfers import Transfer


class Layout(NamedTuple):
    """A spec applied to a tensor of known extents.

    Attributes:
        spec: How the tensor is cut.
        shape: Its shape.
        top_sizes: Exact extents of the blocks under a top ``Shard``, else None.
    """

    spec: HDSpec
    shape: tuple[int, ...]
    top_sizes: tuple[int, ...] | None

    def boxes(self, rank: int) -> tuple[OwnedBox, ...]:
        """Return what the rank owns; nothing outside every subgroup."""
        return owned_boxes(self.spec, self.shape, self.top_sizes, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's local tensor."""
        return local_shape(self.spec, self.shape, self.top_sizes, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStep:
    """No communication: a rank copies what it holds of its new boxes.

    ::

        Replicate -> Shard          cut       every new element was held
        Shard -> Partial(sum)       embed     the others are ``fill``
        Replicate -> Partial(sum)   keep      only ``keepers`` copy, the others hold ``fill``

    Attributes:
        index: The subgroup whose block the layouts describe; None for the whole tensor.
        src: Layout before.
        dst: Layout after.
        fill: Value of the elements that are not copied; None if there are none.
        keepers: The ranks that copy; None for all.
    """

    index: int | None
    src: Layout
    dst: Layout
    fill: float | None = None
    keepers: Ranks | None = None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BottomStep:
    """One kind of collective along one mesh axis of one subgroup (Sec. 5.1, Fig. 8).

    Attributes:
        index: The subgroup.
        axis: The mesh axis whose placement changes.
        src: Layout of the subgroup's block before, as a spec of one subgroup.
        dst: Layout of the block after.
        collectives: One per line of ranks along the axis.
    """

    index: int
    axis: int
    src: Layout
    dst: Layout
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAllReduce:
    """SplitAR (Sec. 5.2): top ``Partial -> Replicate``, one all-reduce per group of holders."""

    src: Layout
    dst: Layout
    collectives: tuple[AllReduce, ...]
    index: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReduceScatter:
    """SplitRS (Sec. 5.2): top ``Partial -> Shard``, one reduce-scatter per group of holders."""

    src: Layout
    dst: Layout
    collectives: tuple[ReduceScatter, ...]
    index: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAllGather:
    """SplitAG (Sec. 5.2): top ``Shard -> Replicate``, one all-gather per group."""

    src: Layout
    dst: Layout
    collectives: tuple[AllGather, ...]
    index: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRecv:
    """SR (Sec. 5.1 (I)): subgroups move to equally many other ranks, shard by shard.

    Pending reductions stay pending: a shard may be a term.

    Attributes:
        src: Layout before.
        dst: Layout after.
        transfers: Boxes of the shards; one with ``src == dst`` stays where it is.
    """

    src: Layout
    dst: Layout
    transfers: tuple[Transfer, ...]
    index: None = None
    collectives: tuple[()] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedSendRecv:
    """BSR (Sec. 5.3): each rank gets every cell it wants from one of the ranks that own it.

    Attributes:
        src: Layout before; nothing is pending in it, or each term of a top Partial goes its own way.
        dst: Layout after.
        transfers: One for each cell and rank that wants it; ``src == dst`` is a copy (rule i).
        fills: (rank, value) of the ranks that hold a constant of a pending reduction instead.
    """

    src: Layout
    dst: Layout
    transfers: tuple[Transfer, ...]
    fills: tuple[tuple[int, float], ...] = ()
    index: None = None
    collectives: tuple[()] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedSendReduce:
    """Send and reduce: each rank gets all terms of every cell it wants, and reduces them in order.

    Attributes:
        src: Layout before, with ``op`` pending.
        dst: Layout after.
        transfers: For each cell and rank that wants it, one for every term.
        op: The reduction.
        terms: Which term each rank of ``src`` holds: (rank, number) in the order of reduction.
        num_terms: Number of terms.
        fills: As ``BatchedSendRecv.fills``.
    """

    src: Layout
    dst: Layout
    transfers: tuple[Transfer, ...]
    op: Partial
    terms: tuple[tuple[int, int], ...]
    num_terms: int
    fills: tuple[tuple[int, float], ...] = ()
    index: None = None
    collectives: tuple[()] = ()


#: Steps that are messages between pairs of ranks.
PointToPoint: TypeAlias = SendRecv | BatchedSendRecv | BatchedSendReduce

Step: TypeAlias = (
    LocalStep | BottomStep | SplitAllReduce | SplitReduceScatter | SplitAllGather | PointToPoint
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributePlan:
    """How a tensor gets from one layout to another: the same value on every rank.

    Attributes:
        src: Spec before.
        dst: Spec after.
        shape: Global shape.
        src_top_sizes: Exact top extents before.
        dst_top_sizes: Exact top extents after.
        steps: To be carried out in order; empty if every rank keeps its local tensor as it is.
    """

    src: HDSpec
    dst: HDSpec
    shape: tuple[int, ...]
    src_top_sizes: tuple[int, ...] | None
    dst_top_sizes: tuple[int, ...] | None
    steps: tuple[Step, ...]

    def __hash__(self) -> int:
        # The steps follow from the rest, and would cost far more to hash on every look-up.
        return hash((self.src, self.dst, self.shape, self.src_top_sizes, self.dst_top_sizes))

    def collectives(self) -> Iterator[Collective]:
        """Yield the collectives of all steps, in the order in which they start."""
        for step in self.steps:
            yield from step.collectives

    def rank_sets(self) -> list[Ranks]:
        """Return the process groups that carrying out the plan needs, sorted, without repeats."""
        return sorted({collective.ranks for collective in self.collectives()})

    @property
    def has_messages(self) -> bool:
        """Whether some step sends messages between pairs of ranks."""
        return any(isinstance(step, PointToPoint) for step in self.steps)

    @property
    def reductions(self) -> tuple[Partial, ...]:
        """The pending reductions that the plan carries out, without repeats."""
        ops = [c.op for c in self.collectives() if isinstance(c, AllReduce | ReduceScatter)]
        ops += [step.op for step in self.steps if isinstance(step, BatchedSendReduce)]
        return tuple(dict.fromkeys(ops))

    @property
    def num_moved(self) -> int:
        """Elements that all ranks together send."""
        return sum(map(num_moved, self.steps))


def num_moved(step: Step) -> int:
    """Return how many elements all ranks together send in a step."""
    if isinstance(step, PointToPoint):
        return sum(t.box.numel for t in step.transfers if t.src != t.dst)
    return sum(collective.num_moved for collective in step.collectives)


def num_messages(step: Step) -> int:
    """Return how many collectives, or messages between two ranks, a step has."""
    if isinstance(step, PointToPoint):
        return len({(t.src, t.dst) for t in step.transfers if t.src != t.dst})
    return len(step.collectives)


def is_kept_by_all(op: Partial) -> bool:
    """Return whether equal terms reduce to the term, so that every rank may keep a replicated value."""
    return op.reduce_op in ("avg", "max", "min")


def neutral_element(op: Partial) -> float:
    """Return the element that changes no sum, product or p-norm."""
    if getattr(op, "norm_type", 1) < 0:
        return math.inf
    return 1 if op.reduce_op == "product" else 0


def find_cell(owned: Sequence[OwnedBox], cell: Box) -> tuple[slice, ...]:
    """Return where a cell lies in the local tensor of a rank that owns ``owned``."""
    found = [piece for piece in owned if piece.box.contains(cell)]
    assert found, f"cell {cell} is in none of the boxes {owned}"
    box, offset = found[0]
    return cell.slices_from(tuple(b - o for b, o in zip(box.start, offset, strict=True)))
