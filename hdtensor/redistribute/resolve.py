"""``resolve``: from (source, target) to steps. It chooses; the steps are built in ``bottom`` and ``top``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from torch.distributed.tensor import Partial, Replicate

from hdtensor.errors import RedistributeError
from hdtensor.placements import HDSpec, Subgroup, block_shape, check_top_sizes
from hdtensor.placements.checks import is_cut, ranks_text, shard_dim
from hdtensor.placements.layout import normalize_dim
from hdtensor.placements.text import as_spec
from hdtensor.redistribute.bottom import bottom_steps
from hdtensor.redistribute.steps import Layout, LocalStep, RedistributePlan, Step
from hdtensor.redistribute.top import is_within, top_steps


Steps: TypeAlias = tuple[Step, ...]

#: The ways from (T, B) to (T', B'), each a list of the layouts between as ``top:bottoms``.
#:
#: T and T' are the tops of source and target, B and B' their bottoms, R is Replicate. r(B) is B with
#: every Partial reduced; n(B) is r(B) without the cuts of the dims that T or T' cut, which makes room for
#: a cut at the top. A layout differs from the next in one tier. Routes with a step that does not exist
#: are left out; the rest compare by elements sent, then by number of collectives, then by place. The
#: last one always exists.
ROUTES = (
    "T':B",  # the top is a local cut that a pending reduction does not mind
    "T:r(B') T':r(B')",  # bottom, then top: the paper's way (Sec. 5.2 (II), Fig. 10)
    "T:r(B) T':r(B)",  # top, then bottom
    "T:n(B') T':n(B')",
    "T:n(B) T':n(B)",
    "T:r(B) R:r(B) R:r(B') T':r(B')",  # two top steps, for Shard -> Shard and Partial -> Partial
    "T:r(B) R:r(B) R:n(B') T':n(B')",
    "T:n(B) R:n(B) T':n(B)",
    "T:R R:R T':R",  # through everything on every rank
)


def resolve(
    src: HDSpec | str,
    dst: HDSpec | str,
    shape: Sequence[int],
    *,
    src_top_sizes: Sequence[int] | None = None,
    dst_top_sizes: Sequence[int] | None = None,
) -> RedistributePlan:
    """Return how a tensor of ``shape`` gets from ``src`` to ``dst``.

    Pure, deterministic and cached: every rank, the simulator and ``explain`` work from one plan.

    ==================================================  ==========================================
    situation, first match wins                         plan
    ==================================================  ==========================================
    the same layout                                     no step
    no Partial, every rank holds all it wants           one local cut
    same top, same ranks in every subgroup              bottom steps, in the subgroups that differ
    same ranks in every subgroup, only the top differs  one top step, if ``top_steps`` has one
    same ranks in every subgroup                        the cheapest of ``ROUTES``
    anything else                                       RedistributeError
    ==================================================  ==========================================

    Subgroups may come in another order: under a top Shard they are gathered first.

    Args:
        src: Spec before, or its short text.
        dst: Spec after, or its short text.
        shape: Global shape.
        src_top_sizes: Exact extents of the blocks before; default the spec's own.
        dst_top_sizes: Exact extents of the blocks after; default the spec's own.

    Raises:
        RedistributeError: If the subgroups of the two specs do not have the same ranks.
        SpecError: If a spec does not fit the shape, or extents do not add up.
    """
    src, dst, shape = as_spec(src), as_spec(dst), tuple(shape)
    return _resolve(
        src,
        dst,
        shape,
        check_top_sizes(src, shape, src_top_sizes),
        check_top_sizes(dst, shape, dst_top_sizes),
    )


@functools.lru_cache(maxsize=16384)
def _resolve(
    src: HDSpec,
    dst: HDSpec,
    shape: tuple[int, ...],
    src_top_sizes: tuple[int, ...] | None,
    dst_top_sizes: tuple[int, ...] | None,
) -> RedistributePlan:
    steps = _steps(Layout(src, shape, src_top_sizes), Layout(dst, shape, dst_top_sizes))
    return RedistributePlan(
        src=src,
        dst=dst,
        shape=shape,
        src_top_sizes=src_top_sizes,
        dst_top_sizes=dst_top_sizes,
        steps=steps,
    )


def _steps(start: Layout, end: Layout) -> Steps:
    steps = _direct(start, end)
    if steps is not None:
        return steps
    before, aligned = _align(start, end)
    steps = _direct(aligned, end)
    return before + (_cheapest_route(aligned, end) if steps is None else steps)


def _direct(start: Layout, end: Layout) -> Steps | None:
    """Return the steps of the table's first four rows, or None."""
    if start == end:
        return ()
    steps = _cut_to(start, end)
    if steps is None and _same_ranks(start, end):
        steps = _connect(start, end)
    return steps


def _cut_to(start: Layout, end: Layout) -> Steps | None:
    """Return one local cut, or nothing where not even that is needed; None where data must move."""
    if start.spec.has_partial() or end.spec.has_partial() or not is_within(end, start):
        return None
    ranks = {*start.spec.ranks, *end.spec.ranks}
    if all(_same_local(start, end, rank) for rank in ranks):
        return ()
    return (LocalStep(index=None, src=start, dst=end),)


def _connect(start: Layout, end: Layout) -> Steps | None:
    """Return the steps between layouts that differ in one tier only; None if there are none."""
    if start == end:
        return ()
    if start.spec.top == end.spec.top and start.top_sizes == end.top_sizes:
        steps: Steps = ()
        pairs = zip(start.spec.subgroups, end.spec.subgroups, strict=True)
        for index, (old, new) in enumerate(pairs):
            block = block_shape(start.spec, start.shape, index, start.top_sizes)
            steps += bottom_steps(old, new, block, index)
        return steps
    if start.spec.subgroups == end.spec.subgroups:
        return top_steps(start, end)
    return None


def _cheapest_route(start: Layout, end: Layout) -> Steps:
    """Return the steps of the cheapest of ``ROUTES``."""
    best: tuple[tuple[int, int], Steps] | None = None
    for route in dict.fromkeys(_routes(start, end)):
        steps = _follow(route, end)
        if steps is None:
            continue
        collectives = [collective for step in steps for collective in step.collectives]
        cost = sum(collective.num_moved for collective in collectives), len(collectives)
        if best is None or cost < best[0]:
            best = cost, steps
    assert best is not None, f"no route from {start} to {end}"
    return best[1]


def _routes(start: Layout, end: Layout) -> Iterator[tuple[Layout, ...]]:
    """Yield each of ``ROUTES`` with its layouts, without repeats in a row."""
    src, dst, num_dims = start.spec, end.spec, len(start.shape)
    cut = {dim for spec in (src, dst) if (dim := shard_dim(spec.top)) is not None}
    reduced, new_reduced = _reduced(src.subgroups), _reduced(dst.subgroups)
    bottoms = {
        "B": src.subgroups,
        "r(B)": reduced,
        "r(B')": new_reduced,
        "n(B)": _without_cuts(reduced, cut, num_dims),
        "n(B')": _without_cuts(new_reduced, cut, num_dims),
        "R": _without_cuts(reduced, set(range(num_dims)), num_dims),
    }
    tops = {
        "T": (src.top, src.top_ratio, start.top_sizes),
        "T'": (dst.top, dst.top_ratio, end.top_sizes),
        "R": (Replicate(), None, None),
    }
    for text in ROUTES:
        route = [start]
        for point in text.split():
            top, ratio, top_sizes = tops[point.partition(":")[0]]
            groups = bottoms[point.partition(":")[2]]
            route.append(Layout(HDSpec(groups, top, ratio), start.shape, top_sizes))
        yield tuple(dict.fromkeys([*route, end]))


def _follow(route: Sequence[Layout], end: Layout) -> Steps | None:
    """Return the steps along a route, cutting to its end as soon as that is local."""
    steps: Steps = ()
    for here, there in itertools.pairwise(route):
        rest = _cut_to(here, end)
        if rest is not None:
            return steps + rest
        leg = _connect(here, there)
        if leg is None:
            return None
        steps += leg
    return steps


def _reduced(groups: tuple[Subgroup, ...]) -> tuple[Subgroup, ...]:
    """Return r(B): the subgroups with Replicate for every Partial."""
    return tuple(
        group.with_placements(
            Replicate() if isinstance(p, Partial) else p for p in group.placements
        )
        for group in groups
    )


def _without_cuts(
    groups: tuple[Subgroup, ...], dims: set[int], num_dims: int
) -> tuple[Subgroup, ...]:
    """Return n(B): the subgroups with Replicate for every cut of one of ``dims``."""
    return tuple(
        group.with_placements(
            Replicate() if normalize_dim(p, num_dims) in dims else p for p in group.placements
        )
        for group in groups
    )


def _align(start: Layout, end: Layout) -> tuple[Steps, Layout]:
    """Return ``start`` with its subgroups in the order of ``end``'s, and the steps that takes.

    Under a top Replicate or Partial the order means nothing. A top Shard is gathered first.

    Raises:
        RedistributeError: If the subgroups do not have the same ranks.
    """
    src, dst = start.spec, end.spec
    by_ranks = {frozenset(group.ranks): group for group in src.subgroups}
    order = [frozenset(group.ranks) for group in dst.subgroups]
    if set(order) != set(by_ranks):
        raise RedistributeError(_not_covered(src, dst))
    if order == list(by_ranks):
        return (), start
    if not is_cut(src.top):
        groups = tuple(by_ranks[ranks] for ranks in order)
        return (), start._replace(spec=src.replace(subgroups=groups))
    whole = Layout(HDSpec(_reduced(src.subgroups)), start.shape, None)
    steps = _steps(start, whole)
    more, aligned = _align(whole, end)
    return steps + more, aligned


def _same_ranks(start: Layout, end: Layout) -> bool:
    """Return whether subgroup by subgroup the ranks agree, in whatever order and mesh."""
    pairs = itertools.zip_longest(start.spec.subgroups, end.spec.subgroups)
    return all(a and b and set(a.ranks) == set(b.ranks) for a, b in pairs)


def _same_local(start: Layout, end: Layout, rank: int) -> bool:
    return start.boxes(rank) == end.boxes(rank) and start.local_shape(rank) == end.local_shape(rank)


def _not_covered(src: HDSpec, dst: HDSpec) -> str:
    return (
        f"cannot redistribute {src} to {dst}: the subgroups must have the same ranks, "
        f"got {_ranks_text(src)} and {_ranks_text(dst)}. Covered are changes of the top placement, of "
        f"the placements inside subgroups and of their order, and cuts of what each rank already "
        f"holds. To bring data to other ranks, gather it with full_tensor() and call "
        f"distribute_tensor with the new spec."
    )


def _ranks_text(spec: HDSpec) -> str:
    return " ".join(f"[{ranks_text(group.ranks)}]" for group in spec.subgroups)
