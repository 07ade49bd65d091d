"""``svg``: who owns what of a tensor, as an SVG picture in plain text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.tensor import Partial, Shard

from hdtensor.debug import canvas
from hdtensor.debug.canvas import Block
from hdtensor.debug.regions import Region, check_shape, faces, fit_sizes, regions
from hdtensor.debug.visualize import notes, slice_text
from hdtensor.errors import SpecError
from hdtensor.placements import Box, HDSpec, check_top_sizes, checks
from hdtensor.placements.text import as_spec


#: Okabe and Ito's colours, which readers with any colour vision tell apart.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c7b3f", "#5b3a8c")
_OPACITIES = (canvas.SWATCH_OPACITY, 0.34)
_LABEL_SIZE = 13.0
_INDEX_SIZE = 10.0
_PAGE_WIDTH = 940.0
_MIN_SIDE = 64.0

Colours = Mapping[tuple[int, ...], str]


class _Panel(NamedTuple):
    """Parts that are drawn in one frame, with their boxes on the two dims that show."""

    parts: tuple[Region, ...]
    boxes: tuple[Box, ...]


def svg(
    spec: HDSpec | str,
    shape: Sequence[int],
    top_sizes: Sequence[int] | None = None,
    *,
    title: str | None = None,
    dim_names: Sequence[str] | None = None,
) -> str:
    """Return an SVG file that shows which ranks own which part of a tensor.

    One colour per subgroup. A top ``Shard`` gives one frame; otherwise each subgroup has its own, with
    ``=`` between copies and ``+`` between the terms of a sum. Hatched parts hold one term of a
    reduction inside their subgroup. Of a tensor of more than two dims those show that are cut; where
    more than two are, the picture is a table. Paper: Fig. 6.

    Args:
        spec: How the tensor is cut.
        shape: Global shape.
        top_sizes: Exact extent of each subgroup's block; default as the spec cuts.
        title: Heading; default the spec's text.
        dim_names: One name per dim; default ``dim 0`` and so on.

    Raises:
        SpecError: If the spec, the extents or the names do not fit the shape.
    """
    spec = as_spec(spec)
    colours = subgroup_colours([spec])
    picture = spec_block(spec, shape, top_sizes, colours=colours, title=title, dim_names=dim_names)
    body = canvas.below([picture, legend([spec], colours)], gap=14)
    shown = f"{spec} on {list(shape)}"
    return canvas.document(body, description=shown if title is None else f"{title}: {shown}")


def subgroup_colours(specs: Iterable[HDSpec]) -> dict[tuple[int, ...], str]:
    """Return a colour for each list of ranks that is a subgroup of some spec."""
    groups = dict.fromkeys(group.ranks for spec in specs for group in spec.subgroups)
    return dict(zip(groups, itertools.cycle(PALETTE), strict=False))


def legend(specs: Iterable[HDSpec], colours: Colours) -> Block:
    """Return one swatch per subgroup, with its ranks."""
    entries = []
    for ranks in dict.fromkeys(group.ranks for spec in specs for group in spec.subgroups):
        name = f"{'rank' if len(ranks) == 1 else 'ranks'} {checks.ranks_text(ranks)}"
        width = 18 + canvas.text_width(name, 12)
        mark = canvas.swatch(0, 0, colours[ranks])
        entries.append(Block(width, 15, (mark, canvas.text(18, 11, name))))
    return canvas.beside(entries, gap=18, max_width=_PAGE_WIDTH)


def spec_block(
    spec: HDSpec,
    shape: Sequence[int],
    top_sizes: Sequence[int] | None = None,
    *,
    colours: Colours,
    title: str | None = None,
    dim_names: Sequence[str] | None = None,
    longest: float = 220,
) -> Block:
    """Return the picture of one spec, without a legend, for use in a larger one.

    Args:
        spec: How the tensor is cut.
        shape: Global shape.
        top_sizes: Exact top extents.
        colours: ``subgroup_colours`` of all specs in the larger picture.
        title: Heading; default the spec's text.
        dim_names: One name per dim.
        longest: Pixels of a frame's longer side, before it grows to fit its labels.

    Raises:
        SpecError: If the spec, the extents or the names do not fit the shape.
    """
    shape = check_shape(shape)
    names = _check_names(dim_names, len(shape))
    sizes = check_top_sizes(spec, shape, top_sizes)
    parts = regions(spec, shape, sizes)
    detail = str(list(shape)) if title is None else f"{spec}  on {list(shape)}"
    heading = canvas.text_lines([detail], size=11.5, first=title or str(spec))
    shown = _shown_dims(parts, len(shape))
    if shown is None:
        body, remarks = _table(spec, parts, shape, colours), notes(spec, parts)
    else:
        one_frame = isinstance(spec.top, Shard) or spec.num_subgroups == 1
        held = [parts] if one_frame else _parts_by_subgroup(spec, shape, sizes)
        panels = [_Panel(p, tuple(_project(part.box, shown) for part in p)) for p in held]
        shown_names = [None if dim is None else names[dim] for dim in shown]
        body = _frames(spec, panels, shown_names, colours, longest)
        remarks = notes(spec, [part for drawn in held for part in drawn])
    blocks = [heading, body] + ([canvas.text_lines(remarks, size=11)] if remarks else [])
    return canvas.below(blocks, gap=8)


def _check_names(dim_names: Sequence[str] | None, num_dims: int) -> list[str]:
    if dim_names is None:
        return [f"dim {dim}" for dim in range(num_dims)]
    if len(dim_names) != num_dims:
        raise SpecError(
            f"dim_names needs one name per dim: {num_dims} dims, got {len(dim_names)} names "
            f"{list(dim_names)}."
        )
    return list(dim_names)


def _parts_by_subgroup(
    spec: HDSpec, shape: tuple[int, ...], sizes: tuple[int, ...] | None
) -> list[tuple[Region, ...]]:
    return [regions(spec, shape, sizes, subgroup=i) for i in range(spec.num_subgroups)]


def _shown_dims(parts: Sequence[Region], num_dims: int) -> tuple[int | None, int] | None:
    """Return the dims to draw downwards and across; None where a drawing cannot show all cuts."""
    boxes = [part.box for part in parts]
    cut = [dim for dim in range(num_dims) if len(faces(boxes, dim)) > 2]
    whole = [dim for dim in range(num_dims) if dim not in cut]
    if not boxes or num_dims == 0 or len(cut) > 2:
        return None
    chosen = sorted(cut + whole[: 2 - len(cut)])
    return (chosen[0], chosen[1]) if len(chosen) == 2 else (None, chosen[0])


def _project(box: Box, shown: tuple[int | None, int]) -> Box:
    down, across = shown
    first, last = (0, 1) if down is None else (box.start[down], box.stop[down])
    return Box((first, box.start[across]), (last, box.stop[across]))


def _frames(
    spec: HDSpec,
    panels: Sequence[_Panel],
    names: Sequence[str | None],
    colours: Colours,
    longest: float,
) -> Block:
    """Return the panels beside one another, all of one size, with the top tier's sign between."""
    fits = [_fit(panel, longest, is_row=names[0] is None) for panel in panels]
    height = max(sum(heights) for heights, _ in fits)
    width = max(sum(widths) for _, widths in fits)
    blocks: list[Block] = []
    for panel, (heights, widths) in zip(panels, fits, strict=True):
        grown = [
            [size * total / sum(sizes) for size in sizes]
            for sizes, total in ((heights, height), (widths, width))
        ]
        frame = _frame(spec, panel, grown, names, colours)
        if blocks:
            frame = _signed(_sign(spec), frame, frame.height - height / 2)
        blocks.append(frame)
        names = (names[0] and "", names[1])  # the others share the first frame's dim going down
    return canvas.beside(blocks, gap=8, max_width=_PAGE_WIDTH)


def _sign(spec: HDSpec) -> str:
    if not isinstance(spec.top, Partial):
        return "="
    return "+" if spec.top == Partial() else spec.top.reduce_op


def _signed(sign: str, frame: Block, middle: float) -> Block:
    room = canvas.text_width(sign, 20) + 10
    mark = canvas.text(room / 2, middle + 7, sign, size=20, anchor="middle")
    return Block(room + frame.width, frame.height, (mark, canvas.moved(frame, room, 0)))


def _fit(panel: _Panel, longest: float, *, is_row: bool) -> tuple[list[float], list[float]]:
    """Return the heights and widths of the intervals between faces, large enough for the labels."""
    down, across = faces(panel.boxes, 0), faces(panel.boxes, 1)
    extents = down[-1] - down[0], across[-1] - across[0]
    height, width = (max(_MIN_SIDE, longest * extent / max(extents)) for extent in extents)
    if is_row:
        height, width = 40.0, longest
    high, wide = [], []
    for part, box in zip(panel.parts, panel.boxes, strict=True):
        high.append((down.index(box.start[0]), down.index(box.stop[0]), _LABEL_SIZE + 8))
        room = canvas.text_width(part.label, _LABEL_SIZE) + 10
        wide.append((across.index(box.start[1]), across.index(box.stop[1]), room))
    heights = [height * (b - a) / extents[0] for a, b in itertools.pairwise(down)]
    widths = [width * (b - a) / extents[1] for a, b in itertools.pairwise(across)]
    return fit_sizes(heights, high, 0), fit_sizes(widths, wide, 0)


def _frame(
    spec: HDSpec,
    panel: _Panel,
    sizes: Sequence[Sequence[float]],
    names: Sequence[str | None],
    colours: Colours,
) -> Block:
    """Return one panel with global indices and dim names on its edges."""
    down, across = faces(panel.boxes, 0), faces(panel.boxes, 1)
    is_row = names[0] is None
    left = 4.0
    if not is_row:
        left = 8 + 14 * bool(names[0]) + max(canvas.text_width(str(x), _INDEX_SIZE) for x in down)
    top = 32.0
    y_of = dict(zip(down, itertools.accumulate(sizes[0], initial=top), strict=True))
    x_of = dict(zip(across, itertools.accumulate(sizes[1], initial=left), strict=True))
    elements = []
    num_drawn: dict[int, int] = {}
    for part, box in zip(panel.parts, panel.boxes, strict=True):
        index = spec.index_of(part.ranks[0])
        assert index is not None, f"rank {part.ranks[0]} owns a part of {spec} but is outside it"
        tone = _OPACITIES[num_drawn.get(index, 0) % len(_OPACITIES)]
        num_drawn[index] = num_drawn.get(index, 0) + 1
        x, y = x_of[box.start[1]], y_of[box.start[0]]
        width, height = x_of[box.stop[1]] - x, y_of[box.stop[0]] - y
        colour = colours[spec.subgroups[index].ranks]
        elements.append(canvas.rectangle(x, y, width, height, fill=colour, opacity=tone))
        if "(" in part.label:
            elements.append(canvas.hatch(x, y, width, height))
        middle = x + width / 2, y + height / 2 + _LABEL_SIZE * 0.36
        elements.append(canvas.text(*middle, part.label, size=_LABEL_SIZE, anchor="middle"))
    elements += _indices(x_of, lambda x, value: _index(x, top - 5, value, "middle"), is_wide=True)
    right, bottom = x_of[across[-1]], y_of[down[-1]]
    elements.append(_index((left + right) / 2, 11, str(names[1]), "middle"))
    if not is_row:
        elements += _indices(y_of, lambda y, value: _index(left - 5, y + 3.5, value, "end"))
        centre = 9.0, (top + bottom) / 2
        elements.append(canvas.upright(_index(*centre, str(names[0]), "middle"), *centre))
    room = canvas.text_width(str(across[-1]), _INDEX_SIZE) / 2
    return Block(right + room, bottom + 5, tuple(elements))


def _index(x: float, y: float, value: str, anchor: str) -> str:
    return canvas.text(x, y, value, size=_INDEX_SIZE, anchor=anchor, fill=canvas.FAINT)


def _indices(
    position_of: Mapping[int, float],
    draw: Callable[[float, str], str],
    *,
    is_wide: bool = False,
) -> list[str]:
    """Draw the faces' indices, without those that would touch a neighbour; the last always shows."""

    def room(face: int) -> float:
        return canvas.text_width(str(face), _INDEX_SIZE) + 4 if is_wide else _INDEX_SIZE + 1

    *others, last = position_of
    drawn, limit = [last], position_of[last] - room(last) / 2
    for face in reversed(others):
        if position_of[face] + room(face) / 2 <= limit:
            drawn.append(face)
            limit = position_of[face] - room(face) / 2
    return [draw(position_of[face], str(face)) for face in reversed(drawn)]


def _table(
    spec: HDSpec, parts: Sequence[Region], shape: tuple[int, ...], colours: Colours
) -> Block:
    if not parts:
        return canvas.text_lines(["(no elements)"], size=12)
    slices = [slice_text(part, shape) for part in parts]
    left = 16 * spec.num_subgroups + 4
    middle = left + 14 + max(canvas.text_width(value, 12) for value in slices)
    elements = []
    for row, (part, value) in enumerate(zip(parts, slices, strict=True)):
        y = row * 18.0
        for index, group in enumerate(spec.subgroups):
            if not set(group.ranks).isdisjoint(part.ranks):
                elements.append(canvas.swatch(16 * index, y + 1, colours[group.ranks]))
        elements.append(canvas.text(left, y + 11.5, value))
        elements.append(canvas.text(middle, y + 11.5, part.label))
    width = middle + max(canvas.text_width(part.label, 12) for part in parts)
    return Block(width, 18.0 * len(parts), tuple(elements))
