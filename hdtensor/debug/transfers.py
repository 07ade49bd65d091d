"""``transfer_svg``: who sends what to whom in a plan, step by step, as an SVG picture.

Up to eight ranks are lines going down, and each message is an arrow between two of them; a collective
is a line through its ranks. Beyond that a step is a matrix of senders and receivers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hdtensor.debug import canvas
from hdtensor.debug.canvas import Block
from hdtensor.debug.svg import legend, spec_block, subgroup_colours
from hdtensor.redistribute.cell_collectives import (
    AllReduce,
    Collective,
)
from hdtensor.redistribute.cost import Flow, PlanCost, StepCost, cost
from hdtensor.redistribute.explain import (
    bytes_text,
    cells_text,
    collective_text,
    fills_of,
    ranks_text_of,
    seconds_text,
    step_title,
    transfers_of,
)
from hdtensor.redistribute.steps import (
    LocalStep,
    PointToPoint,
    RedistributePlan,
    Step,
)
from hdtensor.redistribute.topology import UNIFORM, Topology


#: Beyond so many ranks a step is drawn as a matrix.
MAX_LINES = 8
_PAGE_WIDTH = 940.0
_GRID = "#dfe3e6"
_COLLECTIVE = "#3d4852"
#: By class of links; not the colours that subgroups have first.
_LINK_COLOURS = ("#5b3a8c", "#d55e00", "#8c7b3f", "#0072b2")
_COLUMN, _ROW = 44.0, 20.0
_LABEL_SIZE, _SMALL = 11.0, 10.0
_MAX_LABEL = 96
_MAX_COLLECTIVES = 8
# Of a matrix: with numbers in its fields, without, and what it may take in all.
_WIDE_FIELD, _FIELD, _MAX_MATRIX = 44.0, 15.0, 780.0
_MAX_WIDE = 14


def transfer_svg(
    plan: RedistributePlan,
    *,
    dtype: torch.dtype = torch.float32,
    topology: Topology = UNIFORM,
    title: str | None = None,
    dim_names: Sequence[str] | None = None,
) -> str:
    """Return an SVG file that shows a plan: the tensor before and after, and each step between.

    Colours of arrows and fields are classes of links. Paper: Fig. 8 to 11.

    Args:
        plan: What ``resolve`` returned.
        dtype: Of the tensor, for bytes and seconds.
        topology: Links between the ranks.
        title: Heading; default the two specs.
        dim_names: One name per dim; default ``dim 0`` and so on.

    Raises:
        SpecError: If the names do not fit the shape.
        TopologyError: If the topology does not know a rank that sends or receives.
    """
    found = cost(plan, itemsize=dtype.itemsize, topology=topology)
    page = _Page(plan, found, dtype.itemsize)
    heading = f"{plan.src} -> {plan.dst}"
    blocks = [
        canvas.text_lines([_summary(plan, found, dtype)], size=11.5, first=title or heading),
        _before_and_after(plan, dim_names),
    ]
    for number, (step, step_cost) in enumerate(zip(plan.steps, found.steps, strict=True), 1):
        chart = _lines if len(page.ranks) <= MAX_LINES else _matrix
        detail = _step_detail(step_cost)
        head = canvas.text_lines([detail], size=11.5, first=f"{number}. {step_title(step)}")
        blocks.append(canvas.below([head, chart(page, step, step_cost)], gap=8))
    if any(found.link_bytes):
        blocks.append(_link_legend(found))
    description = heading if title is None else f"{title}: {heading}"
    return canvas.document(
        canvas.below(blocks, gap=20), description=f"{description}, shape {list(plan.shape)}"
    )


def write_transfer_picture(
    path: str | Path,
    plan: RedistributePlan,
    *,
    dtype: torch.dtype = torch.float32,
    topology: Topology = UNIFORM,
    title: str | None = None,
) -> Path:
    """Write ``transfer_svg`` to a file.

    Args:
        path: Where to write; missing folders are made.
        plan: What ``resolve`` returned.
        dtype: Of the tensor.
        topology: Links between the ranks.
        title: Heading; default the two specs.

    Returns:
        The path.

    Raises:
        TopologyError: If the topology does not know a rank that sends or receives.
        OSError: If the file cannot be written.
    """
    picture = transfer_svg(plan, dtype=dtype, topology=topology, title=title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture, encoding="utf-8")
    return path


class _Page(NamedTuple):
    """What all steps of a picture share."""

    plan: RedistributePlan
    cost: PlanCost
    itemsize: int

    @property
    def ranks(self) -> list[int]:
        return sorted(self.cost.extra_bytes)

    def x_of(self) -> dict[int, float]:
        """Return where each rank's line is."""
        return {rank: _COLUMN * (i + 0.5) for i, rank in enumerate(self.ranks)}


class _Mark(NamedTuple):
    """One row of a chart of lines: what is drawn, and the label beside it."""

    elements: list[str]
    label: str


def _summary(plan: RedistributePlan, found: PlanCost, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    text = f"{list(plan.shape)} of {name}"
    if not plan.steps:
        return f"{text}: every rank keeps its local tensor"
    peak = f"at most {bytes_text(found.peak_bytes)} beside the old local tensor"
    return f"{text}: {_sent(found.link_bytes, found.links)}; {peak}"


def _sent(link_bytes: Sequence[int], links: Sequence[str]) -> str:
    parts = [f"{bytes_text(n)} over {name}" for n, name in zip(link_bytes, links, strict=True) if n]
    return ", ".join(parts) or "nothing is sent"


def _step_detail(found: StepCost) -> str:
    total = sum(flow.num_bytes for flow in found.flows)
    if not total:
        return "nothing is sent"
    return f"{bytes_text(total)} sent, about {seconds_text(found.seconds)}"


def _before_and_after(plan: RedistributePlan, dim_names: Sequence[str] | None) -> Block:
    specs = [plan.src, plan.dst]
    colours = subgroup_colours(specs)
    before, after = (
        spec_block(
            spec,
            plan.shape,
            sizes,
            colours=colours,
            title=title,
            dim_names=dim_names,
            longest=160,
        )
        for spec, sizes, title in (
            (plan.src, plan.src_top_sizes, "before"),
            (plan.dst, plan.dst_top_sizes, "after"),
        )
    )
    row = canvas.beside([before, after], gap=48, max_width=_PAGE_WIDTH)
    return canvas.below([row, legend(specs, colours)], gap=12)


def _lines(page: _Page, step: Step, found: StepCost) -> Block:
    """Return a step as arrows between the lines of ranks."""
    x_of, marks = page.x_of(), list(_marks(page, step))
    top, height = 22.0, 28.0 + _ROW * max(len(marks), 1)
    elements = []
    for rank, x in x_of.items():
        elements.append(canvas.line([(x, top), (x, height)], stroke=_GRID, width=1.5))
        elements.append(canvas.text(x, 14, str(rank), anchor="middle", bold=True))
    left = _COLUMN * len(x_of) + 8
    width = left
    for row, mark in enumerate(marks):
        y = top + _ROW * (row + 0.7)
        elements.append(canvas.moved(Block(0, 0, tuple(mark.elements)), 0, y))
        elements.append(canvas.text(left, y + 4, mark.label, size=_LABEL_SIZE))
        width = max(width, left + canvas.text_width(mark.label, _LABEL_SIZE))
    return Block(width, height, tuple(elements))


def _marks(page: _Page, step: Step) -> Iterator[_Mark]:
    if isinstance(step, PointToPoint):
        yield from _message_marks(page, step)
    elif isinstance(step, LocalStep):
        x_of = page.x_of()
        taking = step.dst.spec.ranks if step.keepers is None else step.keepers
        yield _Mark([_square(x_of[rank]) for rank in taking], f"stays on {ranks_text_of(taking)}")
        if step.keepers is not None and step.fill is not None:
            others = tuple(rank for rank in step.dst.spec.ranks if rank not in step.keepers)
            yield _fill_mark(page, others, step.fill)
    else:
        for collective in step.collectives:
            yield _collective_mark(page, collective)


def _message_marks(page: _Page, step: PointToPoint) -> Iterator[_Mark]:
    x_of, links = page.x_of(), _links_of(page)
    kept: dict[int, int] = {}
    for (src, dst), boxes in transfers_of(step).items():
        size = page.itemsize * sum(box.numel for box in boxes)
        if src == dst:
            kept[src] = size
            continue
        link = links[src, dst]
        stroke = _link_colour(link)
        dot = canvas.circle(x_of[src], 0, 3, fill=stroke, stroke=stroke)
        arrow = canvas.arrow((x_of[src], 0), (x_of[dst], 0), stroke=stroke)
        label = f"{cells_text(boxes)}, {bytes_text(size)} over {page.cost.links[link]}"
        yield _Mark([dot, arrow], _cut(label))
    if kept:
        label = f"stays on {ranks_text_of(tuple(kept))}: {bytes_text(sum(kept.values()))}"
        yield _Mark([_square(x_of[rank]) for rank in kept], label)
    for ranks, value in fills_of(step):
        yield _fill_mark(page, ranks, value)


def _collective_mark(page: _Page, collective: Collective) -> _Mark:
    x_of = page.x_of()
    ends = [x_of[rank] for rank in collective.ranks]
    elements = [canvas.line([(min(ends), 0), (max(ends), 0)], stroke=_COLLECTIVE, width=3)]
    terms = collective.terms if isinstance(collective, AllReduce) else collective.ranks
    for rank in collective.ranks:
        fill = _COLLECTIVE if rank in terms else "#ffffff"
        elements.append(canvas.circle(x_of[rank], 0, 5, fill=fill, stroke=_COLLECTIVE))
    return _Mark(elements, _cut(collective_text(collective)))


def _fill_mark(page: _Page, ranks: tuple[int, ...], value: float) -> _Mark:
    x_of = page.x_of()
    rings = [canvas.circle(x_of[rank], 0, 4, fill="#ffffff", stroke=canvas.FAINT) for rank in ranks]
    return _Mark(rings, f"filled with {value:g}: {ranks_text_of(ranks)}")


def _square(x: float) -> str:
    return canvas.rectangle(x - 4, -4, 8, 8, fill=canvas.FAINT, stroke=canvas.FAINT)


def _matrix(page: _Page, step: Step, found: StepCost) -> Block:
    """Return a step as a matrix, senders going down and receivers across, and its collectives."""
    texts = [_cut(collective_text(c)) for c in step.collectives[:_MAX_COLLECTIVES]]
    if len(step.collectives) > _MAX_COLLECTIVES:
        texts.append(f"and {len(step.collectives) - _MAX_COLLECTIVES} more")
    if isinstance(step, PointToPoint):
        stay = [(src, boxes) for (src, dst), boxes in transfers_of(step).items() if src == dst]
        if stay:
            size = page.itemsize * sum(box.numel for _, boxes in stay for box in boxes)
            ranks = tuple(src for src, _ in stay)
            texts.append(f"stays on {ranks_text_of(ranks)}: {bytes_text(size)}")
        texts += [f"filled with {v:g}: {ranks_text_of(ranks)}" for ranks, v in fills_of(step)]
    blocks = [canvas.text_lines(texts, size=_LABEL_SIZE)] if texts else []
    if found.flows:
        blocks.append(_fields(found.flows))
    return canvas.below(blocks, gap=10) if blocks else Block(0, 0, ())


def _fields(flows: Sequence[Flow]) -> Block:
    """Return the matrix with what each rank sends on its right and receives below it."""
    down, across = sorted({f.src for f in flows}), sorted({f.dst for f in flows})
    side = _WIDE_FIELD if max(len(down), len(across)) <= _MAX_WIDE else _FIELD
    side = min(side, _MAX_MATRIX / max(len(down), len(across)))
    left, top = 58.0, 32.0
    x_of = {rank: left + side * i for i, rank in enumerate(across)}
    y_of = {rank: top + side * i for i, rank in enumerate(down)}
    right, bottom = left + side * len(across), top + side * len(down)
    elements = [
        canvas.text(left, 11, "to rank", size=_SMALL, fill=canvas.FAINT),
        canvas.text(0, top - 5, "from", size=_SMALL, fill=canvas.FAINT),
        canvas.text(right + 6, top - 5, "sent", size=_SMALL, fill=canvas.FAINT),
        canvas.text(
            left - 6, bottom + 42, "received", size=_SMALL, anchor="end", fill=canvas.FAINT
        ),
        canvas.rectangle(left, top, right - left, bottom - top, fill="#ffffff", stroke=_GRID),
    ]
    most = max(flow.num_bytes for flow in flows)
    for src, dst, num_bytes, link in flows:
        x, y = x_of[dst], y_of[src]
        tone = 0.12 + 0.46 * num_bytes / most
        colour = _link_colour(link)
        elements.append(canvas.rectangle(x, y, side, side, fill=colour, opacity=tone, stroke=_GRID))
        if side >= _WIDE_FIELD:
            middle = x + side / 2, y + side / 2 + 4
            label = _short(num_bytes)
            elements.append(canvas.text(*middle, label, size=_SMALL, anchor="middle"))
    sent = {rank: sum(f.num_bytes for f in flows if f.src == rank) for rank in down}
    received = {rank: sum(f.num_bytes for f in flows if f.dst == rank) for rank in across}
    every = math.ceil((_SMALL + 2) / side)
    for rank in itertools.islice(down, 0, None, every):
        y = y_of[rank] + side / 2 + 3.5
        elements.append(canvas.text(left - 6, y, str(rank), size=_SMALL, anchor="end"))
        elements.append(_total(right + 6, y, sent[rank]))
    every = math.ceil(max(_SMALL + 2, canvas.text_width(str(across[-1]), _SMALL) + 3) / side)
    for rank in itertools.islice(across, 0, None, every):
        x = x_of[rank] + side / 2
        elements.append(canvas.text(x, top - 5, str(rank), size=_SMALL, anchor="middle"))
        centre = x + 3.5, bottom + 42
        elements.append(canvas.upright(_total(*centre, received[rank]), *centre))
    return Block(right + 6 + canvas.text_width("1000M", _SMALL), bottom + 44, tuple(elements))


def _total(x: float, y: float, num_bytes: int) -> str:
    return canvas.text(x, y, _short(num_bytes), size=_SMALL, fill=canvas.FAINT)


def _short(num_bytes: int) -> str:
    """Return a size in at most six characters: ``96``, ``5.34M``."""
    if num_bytes < 1000:
        return str(num_bytes)
    power = min(int(math.log(num_bytes, 1024) + 1e-3) or 1, 6)
    return f"{num_bytes / 1024**power:.3g}{'KMGTPE'[power - 1]}"


def _cut(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 3]}..."


def _link_colour(link: int) -> str:
    return _LINK_COLOURS[link % len(_LINK_COLOURS)]


def _links_of(page: _Page) -> dict[tuple[int, int], int]:
    return {(flow.src, flow.dst): flow.link for flow in page.cost.flows()}


def _link_legend(found: PlanCost) -> Block:
    entries = []
    for link, (name, num_bytes) in enumerate(zip(found.links, found.link_bytes, strict=True)):
        if num_bytes:
            text = f"{name}: {bytes_text(num_bytes)}"
            mark = canvas.swatch(0, 0, _link_colour(link))
            width = 18 + canvas.text_width(text, 12)
            entries.append(Block(width, 15, (mark, canvas.text(18, 11, text))))
    return canvas.beside(entries, gap=18, max_width=_PAGE_WIDTH)
