"""``plan_switch``: what a switch from one plan to another moves, for all ranks, without processes (Sec. 7)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from hdtensor.errors import PlanError, SpecError
from hdtensor.placements import HDSpec, check_top_sizes
from hdtensor.placements.text import as_spec
from hdtensor.plan import AnnotationPlan, ExpandedPlan, ModelDescription
from hdtensor.plan.fields import shown
from hdtensor.redistribute.exchange import merged
from hdtensor.redistribute.fuse import FusedScheme, Move, fuse
from hdtensor.redistribute.pour import Route
from hdtensor.redistribute.relay import RelayScheme, relay
from hdtensor.redistribute.steps import (
    Layout,
)
from hdtensor.redistribute.topology import UNIFORM, Topology
from hdtensor.redistribute.transfers import SenderRules


#: A plan of a model, or the spec of each tensor.
Specs: TypeAlias = AnnotationPlan | Mapping[str, HDSpec | str]

#: Rules for direct senders, or "relay"; None for the paper's rules.
Rules: TypeAlias = SenderRules | Literal["relay"] | None


class Item(NamedTuple):
    """One tensor of a switch.

    Attributes:
        name: What errors and tables call it.
        src: How it is cut before.
        dst: How it is cut after.
        itemsize: Bytes per element.
        is_contiguous: Whether every rank's local tensor is; parts of others are packed.
    """

    name: str
    src: Layout
    dst: Layout
    itemsize: int
    is_contiguous: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SwitchPlan:
    """Who sends what to whom: the same value on every rank.

    Attributes:
        items: The tensors, in registration order.
        scheme: Senders of all of them, chosen together.
        exclude_ranks: Ranks that take no part.
    """

    items: tuple[Item, ...]
    scheme: FusedScheme | RelayScheme
    exclude_ranks: frozenset[int]

    def __repr__(self) -> str:
        return (
            f"SwitchPlan({len(self.items)} tensors, {self.num_bytes:,} bytes, about {self.seconds:.3g} s; "
            f"see table())"
        )

    @property
    def topology(self) -> Topology:
        """Links that the senders were chosen by."""
        return self.scheme.topology

    @property
    def sent_bytes(self) -> dict[int, dict[str, int]]:
        """Rank -> class of links -> bytes it sends; without zeros."""
        return self._by_rank(self.scheme.sent)

    @property
    def received_bytes(self) -> dict[int, dict[str, int]]:
        """Rank -> class of links -> bytes it receives; without zeros."""
        return self._by_rank(self.scheme.received)

    @property
    def num_bytes(self) -> int:
        """Bytes that travel between ranks."""
        return self.scheme.num_bytes

    @property
    def seconds(self) -> float:
        """Estimated time: that of the busiest direction of a rank's links."""
        return self.scheme.seconds

    def routes(self, index: int) -> tuple[Route, ...]:
        """Return how each part of one tensor travels; ``(rank,)`` where it stays on a rank."""
        if isinstance(self.scheme, RelayScheme):
            return self.scheme.routes[index]
        item = self.items[index]
        return tuple(
            Route(box, (src,) if src == dst else (src, dst))
            for box, src, dst in merged(self.scheme.transfers[index], item.src, item.dst)
        )

    def table(self) -> str:
        """Return a table of the bytes that each rank sends and receives, by class of links.

        One line per rank that does either, then the sum and the estimated seconds.
        """
        links = self.topology.links
        head = [f"sent {link}" for link in links] + [f"received {link}" for link in links]
        sent, received = self.sent_bytes, self.received_bytes
        rows = [["rank", *head]]
        for rank in sorted({*sent, *received}):
            numbers = [
                side.get(rank, {}).get(link, 0) for side in (sent, received) for link in links
            ]
            rows.append([str(rank), *(f"{number:,}" for number in numbers)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        lines.append(f"{self.num_bytes:,} bytes in all, about {self.seconds:.3g} s")
        return "\n".join(lines)

    def _by_rank(self, counts: Mapping[tuple[int, int], int]) -> dict[int, dict[str, int]]:
        found: dict[int, dict[str, int]] = {}
        for (rank, link), num_bytes in sorted(counts.items()):
            if num_bytes:
                found.setdefault(rank, {})[self.topology.links[link]] = num_bytes
        return found


def plan_switch(
    src_plan: Specs,
    dst_plan: Specs,
    params: ModelDescription | Mapping[str, Any],
    topology: Topology = UNIFORM,
    *,
    exclude_ranks: Collection[int] = (),
    rules: Rules = None,
    bytes_per_element: int | None = None,
) -> SwitchPlan:
    """Plan the switch of a model from one plan to another; pure, and the same on every rank.

    >>> plan = plan_switch({"w": "R / 0,1:S0"}, {"w": "R / 0:R"}, {"w": (8, 4)}, bytes_per_element=4)
    >>> plan.sent_bytes
    {1: {'any': 64}}

    Args:
        src_plan: Plan before; or the spec of each tensor. A strategy is expanded by the built-in patterns:
            with patterns of your own pass ``plan.expand(model, patterns)``.
        dst_plan: Plan after, for the same tensors.
        params: The model's description; or name -> shape, or anything with a shape and a dtype, in
            registration order.
        topology: Links between the ranks.
        exclude_ranks: Dead ranks: they neither hold, want, send nor relay.
        rules: How senders are chosen; default the paper's heuristics. "relay": idle neighbours forward
            parts of cells (``redistribute.relay``).
        bytes_per_element: Bytes that move with each element, optimizer states included; default: the
            dtype's, or 4 for plain shapes.

    Raises:
        PlanError: If the plans do not describe the same tensors.
        RedistributeError: If only excluded ranks hold a part of a tensor.
    """
    if bytes_per_element is not None:
        bytes_per_element = whole_number("bytes_per_element", bytes_per_element, 1)
    src, dst = (_specs(plan, params) for plan in (src_plan, dst_plan))
    shapes = params.shapes if isinstance(params, ModelDescription) else params
    items = []
    for name, value in shapes.items():
        missing = [side for side, specs in (("src", src), ("dst", dst)) if name not in specs]
        if missing:
            raise PlanError(f"the {missing[0]}_plan says nothing of the parameter {shown(name)}.")
        shape, itemsize = _shape_and_size(name, value)
        before, after = (_layout(as_spec(specs[name]), shape) for specs in (src, dst))
        items.append(
            Item(name, before, after, itemsize if bytes_per_element is None else bytes_per_element)
        )
    return plan_items(items, topology, exclude_ranks=exclude_ranks, rules=rules)


def plan_items(
    items: Sequence[Item],
    topology: Topology = UNIFORM,
    *,
    exclude_ranks: Collection[int] = (),
    rules: Rules = None,
) -> SwitchPlan:
    """Plan the switch of tensors whose layouts are known.

    Args:
        items: In registration order, the same on every rank.
        topology: As for ``plan_switch``, and so the others.
        exclude_ranks: As above.
        rules: As above.

    Raises:
        PlanError: If a tensor has a pending reduction.
        RedistributeError: If only excluded ranks hold a part of a tensor.
    """
    excluded = frozenset(check_ranks(exclude_ranks))
    check_rules(rules)
    for name, src, dst, *_ in items:
        revived = sorted(excluded.intersection(dst.spec.ranks))
        if revived:
            raise PlanError(
                f"exclude_ranks: the new spec of {shown(name)}, {dst.spec}, needs the excluded ranks "
                f"{revived}. Leave them out of the new plan, or do not exclude them."
            )
        if src.spec.has_partial() or dst.spec.has_partial():
            raise PlanError(
                f"{shown(name)} has a pending reduction: {src.spec} -> {dst.spec}. Reduce it first "
                f"(sync_gradients); a switch moves values."
            )
    moves = [Move(src, dst, itemsize, name) for name, src, dst, itemsize, _ in items]
    scheme: FusedScheme | RelayScheme
    if rules == "relay":
        scheme = relay(moves, topology=topology, exclude_ranks=excluded)
    else:
        scheme = fuse(moves, topology=topology, rules=rules, exclude_ranks=excluded)
    return SwitchPlan(items=tuple(items), scheme=scheme, exclude_ranks=excluded)


@functools.lru_cache(maxsize=4096)
def _layout(spec: HDSpec, shape: tuple[int, ...]) -> Layout:
    return Layout(spec, shape, check_top_sizes(spec, shape, None))


def _specs(plan: Specs, params: Any) -> Mapping[str, HDSpec | str]:
    if isinstance(plan, ExpandedPlan):
        return plan.tensors
    if isinstance(plan, AnnotationPlan):
        if not isinstance(params, ModelDescription):
            raise PlanError(
                "a strategy says where layers are, not parameters: pass a ModelDescription as params, "
                "or the expanded plan (plan.expand(model))."
            )
        return plan.expand(params).tensors
    if not isinstance(plan, Mapping):
        raise PlanError(f"a plan is an AnnotationPlan or name -> spec, got {shown(plan)}.")
    return plan


def _shape_and_size(name: str, value: Any) -> tuple[tuple[int, ...], int]:
    size = getattr(getattr(value, "dtype", None), "itemsize", _DEFAULT_SIZE)
    try:
        return tuple(int(extent) for extent in getattr(value, "shape", value)), size
    except TypeError:
        raise SpecError(
            f"the parameter {shown(name)} needs a shape or a tensor, got {shown(value)}."
        ) from None


_DEFAULT_SIZE = 4


def whole_number(name: str, value: Any, least: int) -> int:
    """Return the value as an int.

    Raises:
        PlanError: If it is no whole number, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise PlanError(f"{name}: must be a whole number >= {least}, got {shown(value)}.")
    return number


def check_ranks(ranks: Any) -> tuple[int, ...]:
    """Return ranks sorted and without repeats.

    Raises:
        PlanError: If some are none.
    """
    if isinstance(ranks, str) or not isinstance(ranks, Collection):
        raise PlanError(f"exclude_ranks: must be a collection of ranks, got {shown(ranks)}.")
    return tuple(sorted({whole_number("exclude_ranks", rank, 0) for rank in ranks}))


def check_rules(rules: Any) -> None:
    """Raise unless these are rules for senders.

    Raises:
        PlanError: Otherwise.
    """
    if rules is not None and rules != "relay" and not isinstance(rules, SenderRules):
        raise PlanError(f"rules: must be SenderRules, 'relay' or None, got {shown(rules)}.")
