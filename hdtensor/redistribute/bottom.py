"""Bottom-tier steps: one subgroup goes from some placements to others (Sec. 5.1, Fig. 8).

The placements are changed one mesh axis at a time, each change a symmetric collective among the ranks
along that axis. Which change comes next is read off a table; the boxes of ``placements.layout`` say
what moves, so uneven chunks, several axes on one dim and strided shards need no case of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from torch.distributed.tensor import Partial, Replicate

from hdtensor.placements import Box, HDSpec, Subgroup
from hdtensor.placements.layout import normalize_dim
from hdtensor.redistribute.cell_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Ranks,
    ReduceScatter,
)
from hdtensor.redistribute.steps import (
    BottomStep,
    Layout,
    LocalStep,
    Step,
    is_kept_by_all,
    neutral_element,
)


def bottom_steps(
    src: Subgroup, dst: Subgroup, block_shape: tuple[int, ...], index: int = 0
) -> tuple[Step, ...]:
    """Return the steps that bring a subgroup's block from ``src`` to ``dst``.

    ::

        while some axis differs, the first row that fits some axis:

        axis has   axis wants  condition                                 step
        Replicate  Shard(b)    exactly b's outer cuts are made           local cut
        Partial    Shard(b)    exactly b's outer cuts are made           reduce-scatter
        Shard(a)   Shard(b)    so, and it is the innermost cut of a      all-to-all
        Shard(a)   other       innermost cut of a, and it must go        all-gather
        Partial    other       no inner axis has another reduction       all-reduce
        Replicate  Partial     no inner axis has another reduction       local keep

    A cut "must go" if it, or a cut of the same dim on an axis before it, is not in ``dst``. An inner
    axis with another reduction is reduced first: mixed reductions nest, the last axis innermost.
    Keeping leaves the value to coordinate 0 of the axis; the other ranks hold neutral elements.

    Args:
        src: Placements before.
        dst: Placements after, on the same ranks; with another mesh shape all goes through Replicate.
        block_shape: Extents of the subgroup's block.
        index: The subgroup's place in its spec.
    """
    if (src.ranks, src.mesh_shape) != (dst.ranks, dst.mesh_shape):
        middle = src.with_placements([Replicate()] * len(src.mesh_shape))
        start = dst.with_placements([Replicate()] * len(dst.mesh_shape))
        return bottom_steps(src, middle, block_shape, index) + bottom_steps(
            start, dst, block_shape, index
        )
    walk = _Walk(src, dst, block_shape, index)
    while walk.advance():
        pass
    return tuple(walk.steps)


class _Cut(NamedTuple):
    """A ``Shard`` or strided shard with its dim counted from the front."""

    dim: int
    pieces: int


#: What an axis does to the data; None stands for ``Replicate``.
_Role: TypeAlias = _Cut | Partial | None

#: Builds the step of a change on an axis between two layouts; None where no data changes.
_Builder: TypeAlias = Callable[[int, Layout, Layout], Step | None]


class _Walk:
    """The placements on their way from ``src`` to ``dst``, and the steps so far."""

    def __init__(self, src: Subgroup, dst: Subgroup, block_shape: tuple[int, ...], index: int):
        self.subgroup = _without_idle_axes(src)
        self.target = _without_idle_axes(dst).placements
        self.shape = block_shape
        self.index = index
        for placement in (*src.placements, *dst.placements):
            normalize_dim(placement, len(block_shape))  # also of an axis of one rank
        self.have = _roles(self.subgroup, len(block_shape))
        self.want = _roles(dst.with_placements(self.target), len(block_shape))
        self.steps: list[Step] = []

    def advance(self) -> bool:
        """Make one change, the first row of the table that fits; return False at the end."""
        axes = range(len(self.have))
        differing = [a for a in axes if not _same(self.have[a], self.want[a])]
        if not differing:
            return False
        ready = [a for a in differing if self._can_cut(a)]
        pending = [a for a in differing if isinstance(self.have[a], Partial)]
        in_the_way = [self._other_partial_inside(a) for a in differing]
        rows = (
            (self._cut, [a for a in ready if self.have[a] is None]),
            (self._reduce_scatter, [a for a in ready if self._can_reduce(a)]),
            (self._all_to_all, [a for a in ready if self._is_innermost(a)]),
            (self._all_gather, [a for a in reversed(axes) if self._must_go(a)]),
            (self._all_reduce, [a for a in in_the_way if a is not None]),
            (self._all_reduce, pending),
            (self._keep, differing),
        )
        build, fitting = next(row for row in rows if row[1])
        self._change(fitting[0], build)
        return True

    def _chain(self, roles: Sequence[_Role], dim: int) -> list[tuple[int, _Cut]]:
        """Return the axes that cut ``dim``, outermost first."""
        return [(a, r) for a, r in enumerate(roles) if isinstance(r, _Cut) and r.dim == dim]

    def _can_cut(self, axis: int) -> bool:
        """Return whether exactly the cuts that ``dst`` has outside this one are made."""
        wanted = self.want[axis]
        if not isinstance(wanted, _Cut):
            return False
        outside = [pair for pair in self._chain(self.want, wanted.dim) if pair[0] < axis]
        return self._chain(self.have, wanted.dim) == outside

    def _is_innermost(self, axis: int) -> bool:
        role = self.have[axis]
        return isinstance(role, _Cut) and self._chain(self.have, role.dim)[-1][0] == axis

    def _must_go(self, axis: int) -> bool:
        """Return whether this is the innermost cut of its dim, and not in ``dst`` as it is."""
        role = self.have[axis]
        if not isinstance(role, _Cut) or not self._is_innermost(axis):
            return False
        chain = self._chain(self.have, role.dim)
        return chain != self._chain(self.want, role.dim)[: len(chain)]

    def _can_reduce(self, axis: int) -> bool:
        return isinstance(self.have[axis], Partial) and self._other_partial_inside(axis) is None

    def _other_partial_inside(self, axis: int) -> int | None:
        """Return the innermost axis after this one whose reduction does not commute with this one's."""
        ops = [role for role in (self.have[axis], self.want[axis]) if isinstance(role, Partial)]
        for a in reversed(range(axis + 1, len(self.have))):
            if any(not _commute(self.have[a], op) for op in ops):
                return a
        return None

    def _change(self, axis: int, build: _Builder) -> None:
        gone = build in (self._all_gather, self._all_reduce)  # these leave Replicate behind
        src = self._layout()
        placements = list(self.subgroup.placements)
        placements[axis] = Replicate() if gone else self.target[axis]
        self.subgroup = self.subgroup.with_placements(placements)
        step = build(axis, src, self._layout())
        self.have[axis] = None if gone else self.want[axis]
        if step is not None:
            self.steps.append(step)

    def _layout(self) -> Layout:
        return Layout(HDSpec((self.subgroup,)), self.shape, None)

    def _cut(self, axis: int, src: Layout, dst: Layout) -> Step:
        return LocalStep(index=self.index, src=src, dst=dst)

    def _keep(self, axis: int, src: Layout, dst: Layout) -> Step | None:
        op = self.want[axis]
        assert isinstance(op, Partial), f"only a Partial is left to make, not {op}"
        if is_kept_by_all(op):
            return None
        group = self.subgroup
        first = tuple(rank for rank in group.ranks if group.coordinate(rank)[axis] == 0)
        return LocalStep(
            index=self.index, src=src, dst=dst, fill=neutral_element(op), keepers=first
        )

    def _all_reduce(self, axis: int, src: Layout, dst: Layout) -> Step:
        op = self.have[axis]
        assert isinstance(op, Partial), f"axis {axis} of {src.spec} is not Partial"
        return self._collective_step(
            axis,
            src,
            dst,
            lambda line: AllReduce(ranks=line, cells=_boxes(src, line[0]), op=op, terms=line),
        )

    def _reduce_scatter(self, axis: int, src: Layout, dst: Layout) -> Step:
        op = self.have[axis]
        assert isinstance(op, Partial), f"axis {axis} of {src.spec} is not Partial"
        return self._collective_step(
            axis,
            src,
            dst,
            lambda line: ReduceScatter(ranks=line, cells=_boxes_each(dst, line), op=op),
        )

    def _all_gather(self, axis: int, src: Layout, dst: Layout) -> Step:
        return self._collective_step(
            axis, src, dst, lambda line: AllGather(ranks=line, cells=_boxes_each(src, line))
        )

    def _all_to_all(self, axis: int, src: Layout, dst: Layout) -> Step:
        return self._collective_step(
            axis, src, dst, lambda line: AllToAll(ranks=line, cells=_crossings(src, dst, line))
        )

    def _collective_step(
        self, axis: int, src: Layout, dst: Layout, build: Callable[[Ranks], Collective]
    ) -> Step:
        built = [build(line) for line in self.subgroup.lines(axis)]
        moving = tuple(collective for collective in built if collective.num_moved)
        return BottomStep(index=self.index, axis=axis, src=src, dst=dst, collectives=moving)


def _without_idle_axes(subgroup: Subgroup) -> Subgroup:
    """Return the subgroup with Replicate on axes of one rank, where every placement means that."""
    pairs = zip(subgroup.placements, subgroup.mesh_shape, strict=True)
    return subgroup.with_placements(Replicate() if size == 1 else p for p, size in pairs)


def _roles(subgroup: Subgroup, num_dims: int) -> list[_Role]:
    """Return what each axis does."""
    roles: list[_Role] = []
    for placement in subgroup.placements:
        dim = normalize_dim(placement, num_dims)
        if dim is not None:
            roles.append(_Cut(dim, getattr(placement, "split_factor", 1)))
        else:
            roles.append(placement if isinstance(placement, Partial) else None)
    return roles


def _same(a: _Role, b: _Role) -> bool:
    return type(a) is type(b) and a == b


def _commute(inner: _Role, op: Partial) -> bool:
    """Return whether an inner pending reduction may be left while ``op`` is reduced or made."""
    if not isinstance(inner, Partial) or _same(inner, op):
        return True
    return all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in (inner, op))


def _boxes(layout: Layout, rank: int) -> tuple[Box, ...]:
    return tuple(box for box, _ in layout.boxes(rank))


def _boxes_each(layout: Layout, line: Ranks) -> tuple[tuple[Box, ...], ...]:
    return tuple(_boxes(layout, rank) for rank in line)


def _crossings(src: Layout, dst: Layout, line: Ranks) -> tuple[tuple[tuple[Box, ...], ...], ...]:
    """Return what each rank of the line holds of each rank's new boxes."""
    held, wanted = _boxes_each(src, line), _boxes_each(dst, line)
    return tuple(
        tuple(
            tuple(
                common
                for new in theirs
                for old in mine
                if (common := old.intersect(new)) is not None
            )
            for theirs in wanted
        )
        for mine in held
    )
