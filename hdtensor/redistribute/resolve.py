"""``resolve``: from (source, target) to steps. It chooses; the steps are built in ``bottom`` and ``top``."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch.distributed.tensor import Partial, Replicate

from hdtensor.errors import TopologyError
from hdtensor.placements import HDSpec, Subgroup, block_shape, check_top_sizes
from hdtensor.placements.checks import check_shape, is_cut
from hdtensor.placements.text import as_spec
from hdtensor.redistribute.bottom import bottom_steps
from hdtensor.redistribute.exchange import (
    block_exchange,
    block_middle,
    num_lacking,
    reduce_exchange,
    reduce_middle,
    value_exchange,
    value_middles,
)
from hdtensor.redistribute.steps import (
    Layout,
    LocalStep,
    RedistributePlan,
    Step,
    num_messages,
    num_moved,
)
from hdtensor.redistribute.top import is_within, top_steps
from hdtensor.redistribute.topology import UNIFORM, Topology


Steps: TypeAlias = tuple[Step, ...]

#: Ways of collectives from (T, B) to (T', B'), each a list of the layouts between as ``top:bottoms``.
#:
#: T and T' are the tops of source and target, B and B' their bottoms, R is Replicate. r(B) is B with
#: every Partial reduced. A layout differs from the next in one tier. Routes with a step that does not
#: exist are left out.
ROUTES = (
    "T':B",  # the top is a local cut that a pending reduction does not mind
    "T:r(B') T':r(B')",  # bottom, then top: the paper's way (Sec. 5.2 (II), Fig. 10)
    "T:r(B) T':r(B)",  # top, then bottom
)

#: Where none of them exists: two top steps, as from one pending reduction to another.
LONG_ROUTE = "T:r(B) R:r(B) R:r(B') T':r(B')"


def resolve(
    src: HDSpec | str,
    dst: HDSpec | str,
    shape: Sequence[int],
    *,
    src_top_sizes: Sequence[int] | None = None,
    dst_top_sizes: Sequence[int] | None = None,
    topology: Topology = UNIFORM,
) -> RedistributePlan:
    """Return how a tensor of ``shape`` gets from ``src`` to ``dst``: any pair has a plan (Sec. 5, Fig. 7).

    Pure, deterministic and cached: every rank, the simulator and ``explain`` work from one plan.

    ==================================================  ==========================================
    situation, first match wins                         plan
    ==================================================  ==========================================
    the same layout                                     no step
    no Partial, every rank holds all it wants           one local cut
    same top, same ranks in every subgroup              bottom steps, in the subgroups that differ
    same ranks in every subgroup, only the top differs  one top step, if ``top_steps`` has one
    anything else: the cheapest of
      same ranks in every subgroup                      ``ROUTES``, and with Partial nothing else if
                                                        one of them exists; ``LONG_ROUTE``
      same top                                          each subgroup by itself: bottom steps,
                                                        send-receive or batched send-receive
      any                                               what is pending reduced on its ranks, then
                                                        batched send-receive
      one kind of Partial                               every term sent, reduced by the receiver
    ==================================================  ==========================================

    Without Partial, collectives that send more than is lacking lose to batched send-receive, which
    never does. Subgroups may come in another order.

    Args:
        src: Spec before, or its short text.
        dst: Spec after, or its short text.
        shape: Global shape.
        src_top_sizes: Exact extents of the blocks before; default the spec's own.
        dst_top_sizes: Exact extents of the blocks after; default the spec's own.
        topology: Links between ranks, for the choice of senders; default: all alike.

    Raises:
        SpecError: If a spec does not fit the shape, or extents do not add up.
        TopologyError: If the topology does not know a rank that sends or receives.
    """
    key = (src, dst, shape, src_top_sizes, dst_top_sizes, topology)
    try:
        found = _asked.get(key)
    except TypeError:  # a list among them
        found = None
    # Numbers that are equal need not be whole ones: 4.0 finds what 4 was asked for, which is right.
    if found is not None:
        return found
    src, dst, shape = as_spec(src), as_spec(dst), check_shape(shape)
    if not isinstance(topology, Topology):
        raise TopologyError(f"topology: must be a Topology, got {topology!r}.")
    plan = _resolve(
        src,
        dst,
        shape,
        check_top_sizes(src, shape, src_top_sizes),
        check_top_sizes(dst, shape, dst_top_sizes),
        topology,
    )
    if len(_asked) >= _MAX_PLANS:
        _asked.clear()
    with contextlib.suppress(TypeError):
        _asked[key] = plan
    return plan


_MAX_PLANS = 16384

#: Plans by the arguments as they came: checks and short texts cost more than the look-up.
_asked: dict[tuple[Any, ...], RedistributePlan] = {}


@functools.lru_cache(maxsize=_MAX_PLANS)
def _resolve(
    src: HDSpec,
    dst: HDSpec,
    shape: tuple[int, ...],
    src_top_sizes: tuple[int, ...] | None,
    dst_top_sizes: tuple[int, ...] | None,
    topology: Topology,
) -> RedistributePlan:
    start, end = Layout(src, shape, src_top_sizes), Layout(dst, shape, dst_top_sizes)
    return RedistributePlan(
        src=src,
        dst=dst,
        shape=shape,
        src_top_sizes=src_top_sizes,
        dst_top_sizes=dst_top_sizes,
        steps=_steps(start, end, topology),
    )


def _steps(start: Layout, end: Layout, topology: Topology) -> Steps:
    steps = _direct(start, end)
    if steps is not None:
        return steps
    start = _reordered(start, end)
    steps = _direct(start, end)
    if steps is None:
        is_partial = start.spec.has_partial() or end.spec.has_partial()
        least = None if is_partial else num_lacking(start, end)
        steps = _cheapest(_ways(start, end, topology), least)
    assert steps is not None, f"no way from {start} to {end}"
    return steps


def _direct(start: Layout, end: Layout) -> Steps | None:
    """Return the steps of the table's first four rows, or None."""
    if start == end:
        return ()
    steps = _cut_to(start, end)
    if steps is None and _same_ranks(start, end):
        steps = _connect(start, end)
        if steps is not None and _is_wasteful(steps, start, end):
            return None
    return steps


def _is_wasteful(steps: Steps, start: Layout, end: Layout) -> bool:
    """Return whether collectives send more than is lacking, where a batched send-receive would not."""
    if start.spec.has_partial() or end.spec.has_partial():
        return False
    if not any(step.collectives for step in steps):
        return False
    return not _same_meshes(start, end) or sum(map(num_moved, steps)) > num_lacking(start, end)


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


def _cheapest(ways: Iterable[Steps], least: int | None) -> Steps | None:
    """Return the cheapest steps: by elements sent, then by number of messages, then by place.

    Args:
        ways: What there is.
        least: The first way that sends so little is taken.
    """
    best: tuple[tuple[int, int], Steps] | None = None
    for steps in ways:
        moved = sum(map(num_moved, steps))
        if moved == least:
            return steps
        cost = moved, sum(map(num_messages, steps))
        if best is None or cost < best[0]:
            best = cost, steps
    return best and best[1]


def _ways(start: Layout, end: Layout, topology: Topology) -> Iterator[Steps]:
    """Yield ways from one layout to another, collectives before messages."""
    is_partial = start.spec.has_partial() or end.spec.has_partial()
    if _same_meshes(start, end) or (is_partial and _same_ranks(start, end)):
        found = list(_along(ROUTES, start, end))
        yield from found
        if is_partial and found:
            return
        if is_partial:
            yield from _along([LONG_ROUTE], start, end)
    middle = block_middle(start, end)
    if middle is not None:
        steps = _connect(start, middle)
        assert steps is not None, f"{start.spec} and {middle.spec} have the same top"
        yield (*steps, *(() if middle == end else (block_exchange(middle, end, topology),)))
    for middle in value_middles(start):
        settled = _settle(start, middle)
        if settled is not None:
            last = _cut_to(middle, end)
            if last is None:
                last = (value_exchange(middle, end, topology),)
            yield settled + last
    middle = reduce_middle(start)
    if middle is not None:
        settled = _settle(start, middle)
        assert settled is not None, f"{start.spec} can be reduced inside its subgroups"
        yield (*settled, reduce_exchange(middle, end, topology))


def _settle(start: Layout, middle: Layout) -> Steps | None:
    """Return the steps that reduce first inside subgroups, then over them; None if there are none."""
    inside = start._replace(spec=start.spec.replace(subgroups=middle.spec.subgroups))
    below, above = _connect(start, inside), _connect(inside, middle)
    return None if below is None or above is None else below + above


def _along(texts: Sequence[str], start: Layout, end: Layout) -> Iterator[Steps]:
    """Yield the steps along each of the routes that exist."""
    for route in dict.fromkeys(_routes(texts, start, end)):
        steps = _follow(route, end)
        if steps is not None:
            yield steps


def _routes(texts: Sequence[str], start: Layout, end: Layout) -> Iterator[tuple[Layout, ...]]:
    """Yield each of the routes with its layouts, without repeats in a row."""
    src, dst = start.spec, end.spec
    bottoms = {
        "B": src.subgroups,
        "r(B)": _reduced(src.subgroups),
        "r(B')": _reduced(dst.subgroups),
    }
    tops = {
        "T": (src.top, src.top_ratio, start.top_sizes),
        "T'": (dst.top, dst.top_ratio, end.top_sizes),
        "R": (Replicate(), None, None),
    }
    for text in texts:
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


def _reordered(start: Layout, end: Layout) -> Layout:
    """Return ``start`` with its subgroups in the order of ``end``'s, if the order means nothing."""
    src = start.spec
    by_ranks = {frozenset(group.ranks): group for group in src.subgroups}
    order = [frozenset(group.ranks) for group in end.spec.subgroups]
    if is_cut(src.top) or set(order) != set(by_ranks):
        return start
    return start._replace(spec=src.replace(subgroups=[by_ranks[ranks] for ranks in order]))


def _same_ranks(start: Layout, end: Layout) -> bool:
    """Return whether subgroup by subgroup the ranks agree, in whatever order and mesh."""
    pairs = itertools.zip_longest(start.spec.subgroups, end.spec.subgroups)
    return all(a and b and set(a.ranks) == set(b.ranks) for a, b in pairs)


def _same_meshes(start: Layout, end: Layout) -> bool:
    """Return whether subgroup by subgroup the ranks agree in order and mesh."""
    pairs = itertools.zip_longest(start.spec.subgroups, end.spec.subgroups)
    return all(a and b and (a.ranks, a.mesh_shape) == (b.ranks, b.mesh_shape) for a, b in pairs)


def _same_local(start: Layout, end: Layout, rank: int) -> bool:
    return start.boxes(rank) == end.boxes(rank) and start.local_shape(rank) == end.local_shape(rank)
