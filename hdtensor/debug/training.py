"""A loss curve, each rank's share, and who owns what, in one SVG file.

``write_training_picture`` is for a training under one plan, ``write_phased_training_picture`` for one in
which plans were switched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from hdtensor.debug import canvas
from hdtensor.debug.canvas import Block
from hdtensor.debug.svg import Colours, legend, spec_block, subgroup_colours
from hdtensor.placements import HDSpec


#: A spec with the shape it cuts, and the exact top extents where they differ from the spec's own.
PlacedSpec: TypeAlias = (
    tuple[HDSpec, Sequence[int]] | tuple[HDSpec, Sequence[int], Sequence[int] | None]
)


class Phase(NamedTuple):
    """The part of a training that ran under one plan.

    Attributes:
        num_steps: How many steps.
        shares: Rank -> its part of the work in any unit; 0 for a rank outside.
        specs: Name -> ``(spec, shape)`` or ``(spec, shape, top_sizes)``.
    """

    num_steps: int
    shares: Mapping[int, float]
    specs: Mapping[str, PlacedSpec]


_CURVE = "#0072b2"
_REFERENCE = "#d55e00"
_GRID = "#dfe3e6"
_OUTSIDE = "#b8bfc5"
_SWITCH = "#6b7780"
_CHART = (600.0, 300.0)
_BARS = 230.0
_PAGE_WIDTH = 980.0
#: Up to here each value of the reference is a circle of its own; beyond, they would run together.
_MAX_CIRCLES = 40


def write_training_picture(
    path: str | Path,
    losses: Sequence[float],
    reference_losses: Sequence[float] | None = None,
    *,
    shares: Mapping[int, float],
    specs: Mapping[str, PlacedSpec],
    title: str = "Training loss",
    log_scale: bool = False,
) -> Path:
    """Write one SVG file that shows how a training went and how its tensors were cut.

    Args:
        path: Where to write; missing folders are made.
        losses: Loss of each step, from step 1.
        reference_losses: Losses of the first steps of the same training on one device, or None.
        shares: Rank -> its part of the work in any unit, such as rows or tokens; 0 for a rank outside.
        specs: Name -> ``(spec, shape)`` or ``(spec, shape, top_sizes)``, such as the batch and a few
            parameters.
        title: Heading.
        log_scale: Whether the loss axis is logarithmic.

    Returns:
        The path.

    Raises:
        ValueError: If no loss can be drawn, or a share is negative or not finite.
        SpecError: If a spec does not fit its shape.
    """
    phases = [Phase(max(len(losses), 1), shares, specs)]
    return write_phased_training_picture(
        path, losses, reference_losses, phases=phases, title=title, log_scale=log_scale
    )


def write_phased_training_picture(
    path: str | Path,
    losses: Sequence[float],
    reference_losses: Sequence[float] | None = None,
    *,
    phases: Sequence[Phase],
    title: str = "Training loss",
    log_scale: bool = False,
) -> Path:
    """Write the same picture for a training in which plans were switched.

    Each switch is a line across the curve, each phase has its own shares and specs.

    Args:
        path: Where to write; missing folders are made.
        losses: Loss of each step, of all phases.
        reference_losses: As for ``write_training_picture``.
        phases: One for each plan, in order.
        title: Heading.
        log_scale: Whether the loss axis is logarithmic.

    Returns:
        The path.

    Raises:
        ValueError: As ``write_training_picture``; or if a phase has no step.
        SpecError: If a spec does not fit its shape.
    """
    names = _steps_of(phases)
    named = list(zip(names, phases, strict=True))
    colours = subgroup_colours(placed[0] for phase in phases for placed in phase.specs.values())
    switches = list(itertools.accumulate(phase.num_steps for phase in phases))[:-1]
    curve = _loss_chart(losses, reference_losses or (), switches, log_scale=log_scale)
    bars = [_share_bars(phase, name, colours) for name, phase in named if phase.shares]
    charts = [curve, canvas.below(bars, gap=20)] if bars else [curve]
    blocks = [_heading(title), canvas.beside(charts, gap=40, max_width=_PAGE_WIDTH)]
    for name, phase in named:
        blocks += _who_owns_what(phase, name, colours)
    picture = canvas.document(canvas.below(blocks, gap=18), description=title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture, encoding="utf-8")
    return path


def nice_ticks(low: float, high: float, num: int = 6) -> list[float]:
    """Return about ``num`` round numbers within ``[low, high]``.

    >>> nice_ticks(2.9, 5.55)
    [3.0, 3.5, 4.0, 4.5, 5.0, 5.5]
    """
    if high <= low:
        return [low]
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the 1, 2 and 5 of each decade within ``[low, high]``, or ``nice_ticks`` of a short range.

    >>> log_ticks(0.04, 6.0)
    [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{mantissa}e{power}") for power in decades for mantissa in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside if len(inside) > 2 else nice_ticks(low, high)


def _steps_of(phases: Sequence[Phase]) -> list[str]:
    """Return what to add to each phase's headings; nothing where it is the only one."""
    if any(phase.num_steps < 1 for phase in phases):
        raise ValueError(
            f"every phase must have a step, got {[phase.num_steps for phase in phases]}."
        )
    if len(phases) == 1:
        return [""]
    ends = itertools.accumulate((phase.num_steps for phase in phases), initial=0)
    return [f", steps {first + 1} to {last}" for first, last in itertools.pairwise(ends)]


class _Axis(NamedTuple):
    """A range of values laid over pixels."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the value's pixel."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.stop - self.start) * (value - low) / (high - low)


def _loss_chart(
    losses: Sequence[float], reference: Sequence[float], switches: Sequence[int], *, log_scale: bool
) -> Block:
    points, references = _drawable(losses, log_scale), _drawable(reference, log_scale)
    if not points:
        raise ValueError(
            f"no loss to draw among {len(losses)} values: they must be finite"
            f"{' and, on a logarithmic axis, positive' if log_scale else ''}."
        )
    width, height = _CHART
    values = [value for _, value in points + references]
    low, high = _padded(min(values), max(values), log_scale)
    steps = max(len(losses), len(reference), 2)
    across = _Axis(1, steps, 54, width - 12)
    up = _Axis(low, high, height - 40, 8, log_scale)
    ticks = log_ticks(low, high) if log_scale else nice_ticks(low, high, num=8)
    elements = _axes(across, up, ticks)
    for after in switches:
        elements += _mark(across.at(after + 0.5), across, up)
    shown = [(across.at(step), up.at(value)) for step, value in references]
    if len(shown) > _MAX_CIRCLES:
        elements += _segments(references, shown, _REFERENCE, 4.5)
    elements += _segments(points, [(across.at(s), up.at(v)) for s, v in points], _CURVE, 2)
    if len(shown) <= _MAX_CIRCLES:
        elements += [canvas.circle(x, y, 4, fill="none", stroke=_REFERENCE) for x, y in shown]
    chart = Block(width, height, tuple(elements))
    num_left_out = len(losses) + len(reference) - len(points) - len(references)
    return canvas.below([chart, *_key(losses, reference, num_left_out)], gap=4)


def _drawable(values: Sequence[float], log_scale: bool) -> list[tuple[int, float]]:
    """Return ``(step, value)`` where the axis has a place for the value."""
    numbered = ((step, float(value)) for step, value in enumerate(values, start=1))
    return [(s, v) for s, v in numbered if math.isfinite(v) and (v > 0 or not log_scale)]


def _padded(low: float, high: float, log_scale: bool) -> tuple[float, float]:
    """Return the range with some room at both ends, also where it is a single value."""
    if log_scale:
        factor = max((high / low) ** 0.05, 1.02)
        return low / factor, high * factor
    room = max((high - low) * 0.05, abs(high) * 0.01, 1e-6)
    return low - room, high + room


def _axes(across: _Axis, up: _Axis, ticks: Sequence[float]) -> list[str]:
    elements = []
    for tick in ticks:
        y = up.at(tick)
        elements.append(canvas.line([(across.start, y), (across.stop, y)], stroke=_GRID))
        elements.append(canvas.text(across.start - 7, y + 4, f"{tick:g}", size=11, anchor="end"))
    for tick in nice_ticks(across.low, across.high):
        if tick == int(tick):
            x = across.at(tick)
            elements.append(canvas.line([(x, up.start), (x, up.start + 5)], stroke=canvas.INK))
            label = canvas.text(x, up.start + 18, f"{tick:g}", size=11, anchor="middle")
            elements.append(label)
    corner = [(across.start, up.stop), (across.start, up.start), (across.stop, up.start)]
    elements.append(canvas.line(corner, stroke=canvas.INK))
    centre = 12.0, (up.start + up.stop) / 2
    elements.append(canvas.upright(canvas.text(*centre, "loss", anchor="middle"), *centre))
    elements.append(
        canvas.text((across.start + across.stop) / 2, up.start + 34, "step", anchor="middle")
    )
    return elements


def _mark(x: float, across: _Axis, up: _Axis) -> list[str]:
    """Return the line of a switch, with its name on the side that has room."""
    is_left = x < (across.start + across.stop) / 2
    side, anchor = (6, "start") if is_left else (-6, "end")
    return [
        canvas.line([(x, up.start), (x, up.stop)], stroke=_SWITCH),
        canvas.text(x + side, up.stop + 11, "switch", size=11, anchor=anchor, fill=_SWITCH),
    ]


def _segments(
    points: Sequence[tuple[int, float]],
    shown: Sequence[tuple[float, float]],
    stroke: str,
    width: float,
) -> list[str]:
    """Return one line for each run of steps without a gap; a dot for a step alone."""
    runs: list[list[tuple[float, float]]] = []
    previous = None
    for (step, _), pixel in zip(points, shown, strict=True):
        if previous is None or step != previous + 1:
            runs.append([])
        runs[-1].append(pixel)
        previous = step
    return [
        canvas.line(run, stroke=stroke, width=width)
        if len(run) > 1
        else canvas.circle(*run[0], width, fill=stroke, stroke=stroke)
        for run in runs
    ]


def _key(losses: Sequence[float], reference: Sequence[float], num_left_out: int) -> list[Block]:
    """Return the lines below the chart; the reference's tells how far the run is from it."""
    lines = []
    if reference:
        away = [
            abs(float(a) - float(b)) / abs(float(b))
            for a, b in zip(losses, reference, strict=False)
            if math.isfinite(float(a)) and math.isfinite(float(b)) and float(b)
        ]
        entry = f"the first {len(reference)} steps on one device"
        if away:
            entry += f"; largest relative difference {max(away):.1e}"
        mark = (
            canvas.circle(72, 8, 4, fill="none", stroke=_REFERENCE)
            if len(reference) <= _MAX_CIRCLES
            else canvas.line([(62, 8), (82, 8)], stroke=_REFERENCE, width=4.5)
        )
        run = canvas.line([(62, 8), (82, 8)], stroke=_CURVE, width=2)
        lines += [(run, "this run"), (mark, entry)]
    if num_left_out:
        num_values = len(losses) + len(reference)
        lines.append(
            ("", f"{num_left_out} of {num_values} values cannot be drawn and are left out")
        )
    return [Block(_CHART[0], 16, (mark, canvas.text(90, 12, entry))) for mark, entry in lines]


def _who_owns_what(phase: Phase, steps: str, colours: Colours) -> list[Block]:
    """Return the heading, the pictures and the legend of one phase."""
    pictures = [
        spec_block(*placed, colours=colours, title=name, longest=110)
        for name, placed in phase.specs.items()
    ]
    if not pictures:
        return []
    return [
        _heading(f"Who owns what{steps}"),
        canvas.beside(pictures, gap=36, max_width=_PAGE_WIDTH),
        legend((placed[0] for placed in phase.specs.values()), colours),
    ]


def _share_bars(phase: Phase, steps: str, colours: Colours) -> Block:
    """Return one bar per rank, as long as its part of the work, in its subgroup's colour."""
    shares = phase.shares
    for rank, share in shares.items():
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(f"the share of rank {rank} must be finite and >= 0, got {share}.")
    total = sum(shares.values()) or 1.0
    largest = max(shares.values(), default=0.0) or 1.0
    colour_of: dict[int, str] = {}
    for ranks in (group.ranks for placed in phase.specs.values() for group in placed[0].subgroups):
        # The first subgroup's colour stays.
        colour_of = dict.fromkeys(ranks, colours[ranks]) | colour_of
    elements = [canvas.text(0, 14, f"Share of the work{steps}", size=13, bold=True)]
    for row, (rank, share) in enumerate(sorted(shares.items())):
        y = 32 + 28.0 * row
        length = max((_BARS - 110) * share / largest, 1)
        colour = colour_of.get(rank, _OUTSIDE)
        elements += [
            canvas.text(50, y + 13, f"rank {rank}", anchor="end"),
            canvas.rectangle(58, y, length, 18, fill=colour, opacity=0.62, stroke=colour),
            canvas.text(64 + length, y + 13, f"{100 * share / total:.3g} %"),
        ]
    return Block(_BARS, 32 + 28.0 * len(shares), tuple(elements))


def _heading(value: str) -> Block:
    size = 15.0
    mark = canvas.text(0, size, value, size=size, bold=True)
    return Block(canvas.text_width(value, size) * 1.1, size + 3, (mark,))
