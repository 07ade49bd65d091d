"""``visualize``: who owns what of a tensor, as text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from hdtensor.debug.regions import Region, check_shape, faces, fit_sizes, idle_ranks, regions
from hdtensor.errors import SpecError
from hdtensor.placements import Box, HDSpec, check_top_sizes, checks
from hdtensor.placements.text import as_spec
from hdtensor.tensor import HDTensor


# A drawing beyond this is harder to read than a table.
_MAX_COLUMNS = 100
_MAX_LINES = 60
_CELL_COLUMNS = (3, 24)
_CELL_LINES = (1, 6)


def visualize(
    spec: HDSpec | str | HDTensor | DTensor,
    shape: Sequence[int] | None = None,
    top_sizes: Sequence[int] | None = None,
) -> str:
    """Draw a 1-D or 2-D tensor's parts; list the parts of any other as slices and the ranks that hold them.

    Needs no process group and no tensor: any process can look at any plan. Paper: Fig. 6.

    >>> print(visualize(HDSpec.from_text("S0[3:1] / 0,1:S1 2:R"), (4, 4)))
    S0[3:1] / 0,1:S1 2:R
    shape [4, 4], dim 0 down, dim 1 across; subgroups hold 3 + 1 of dim 0
      0   2   4
    0 +---+---+
      |   |   |
      | 0 | 1 |
      |   |   |
    3 +---+---+
      |   2   |
    4 +-------+

    >>> print(visualize(HDSpec.from_text("S0 / 0,1:S2 2:P"), (4, 1, 6)))
    S0 / 0,1:S2 2:P
    shape [4, 1, 6]; subgroups hold 2 + 2 of dim 0
    slice          ranks
    [0:2, :, 0:3]  0
    [0:2, :, 3:6]  1
    [2:4, :, :]    2

    A list such as ``0,1`` means that each of the ranks holds the part; ``sum(0,1)`` that each holds
    one term of it; in ``sum(0,1; 2)`` ranks 0 and 1 hold the same term and rank 2 another.

    Args:
        spec: How the tensor is cut; or a tensor, which tells its shape and extents itself.
        shape: Global shape; with a spec.
        top_sizes: Exact extent of each subgroup's block; default as the spec cuts.

    Returns:
        Several lines, the last without a newline. Numbers on the edges are global indices.

    Raises:
        SpecError: If the spec or the extents do not fit the shape, or a spec comes without a shape.
    """
    if isinstance(spec, HDTensor | DTensor):
        spec, shape, top_sizes = _layout_of(spec, shape, top_sizes)
    spec = as_spec(spec)
    if shape is None:
        raise SpecError(
            f"visualize needs the shape of the tensor that {str(spec)!r} cuts: visualize(spec, shape), or "
            f"visualize(tensor)."
        )
    shape = check_shape(shape)
    sizes = check_top_sizes(spec, shape, top_sizes)
    parts = regions(spec, shape, sizes)
    body = _grid(parts, len(shape)) if parts and len(shape) in (1, 2) else None
    lines = [str(spec), _heading(spec, shape, sizes, drawn=body is not None)]
    lines += _table(parts, shape) if body is None else body
    return "\n".join(lines + notes(spec, parts))


def _layout_of(
    tensor: HDTensor | DTensor, shape: Sequence[int] | None, top_sizes: Sequence[int] | None
) -> tuple[HDSpec, Sequence[int], Sequence[int] | None]:
    if shape is not None or top_sizes is not None:
        raise SpecError(
            f"visualize got a tensor of shape {tuple(tensor.shape)} and a shape or top_sizes: a tensor has its own. "
            f"Pass the tensor alone, or tensor.spec with another shape."
        )
    if isinstance(tensor, DTensor):
        return HDSpec.from_meshes([(tensor.device_mesh, tensor.placements)]), tensor.shape, None
    return tensor.spec, tensor.shape, tensor.top_sizes


def notes(spec: HDSpec, parts: Sequence[Region]) -> list[str]:
    """Return the lines below a picture: what reductions mean, and who holds nothing."""
    lines = []
    if any("(" in part.label for part in parts):
        plural = any(";" in part.label for part in parts)
        lines.append(
            "op(...): each rank holds one term, to be reduced"
            + ("; ranks before a ';' hold the same term." if plural else ".")
        )
    idle = idle_ranks(spec, parts)
    if idle:
        lines.append(
            f"no element: {'rank' if len(idle) == 1 else 'ranks'} {checks.ranks_text(idle)}"
        )
    return lines


def slice_text(part: Region, shape: Sequence[int]) -> str:
    """Return a region as a Python index, ``[0:2, :, 3:6]``."""
    dims = [
        ":" if (start, stop) == (0, size) else f"{start}:{stop}"
        for start, stop, size in zip(part.box.start, part.box.stop, shape, strict=True)
    ]
    return f"[{', '.join(dims)}]"


def _heading(
    spec: HDSpec, shape: tuple[int, ...], sizes: tuple[int, ...] | None, *, drawn: bool
) -> str:
    text = f"shape {list(shape)}"
    if drawn:
        text += ", dim 0 down, dim 1 across" if len(shape) == 2 else ", dim 0 across"
    if sizes is not None:
        text += f"; subgroups hold {' + '.join(map(str, sizes))} of dim {spec.hdim}"
    return text


def _table(parts: Sequence[Region], shape: tuple[int, ...]) -> list[str]:
    if not parts:
        return ["(no elements)"]
    slices = [slice_text(part, shape) for part in parts]
    width = max(map(len, ["slice", *slices]))
    rows = [("slice", "ranks"), *zip(slices, (part.label for part in parts), strict=True)]
    return [f"{left:<{width}}  {right}" for left, right in rows]


def _grid(parts: Sequence[Region], num_dims: int) -> list[str] | None:
    """Return the lines of a drawing, or None where it would be too large to read."""
    boxes = [part.box if num_dims == 2 else _as_row(part.box) for part in parts]
    labels = [part.label for part in parts]
    down, across = faces(boxes, 0), faces(boxes, 1)
    columns = [(across.index(box.start[1]), across.index(box.stop[1])) for box in boxes]
    needs = [(*span, len(text) + 2.0) for span, text in zip(columns, labels, strict=True)]
    needs += [(i, i + 1, float(len(str(x)))) for i, x in enumerate(across[:-1])]
    column_at = _positions(across, _CELL_COLUMNS, needs, _MAX_COLUMNS)
    line_at = _positions(down, _CELL_LINES, [], _MAX_LINES)
    if column_at is None or line_at is None:
        return None
    canvas = [[" "] * (column_at[-1] + 1) for _ in range(line_at[-1] + 1)]
    for box, (first, last), text in zip(boxes, columns, labels, strict=True):
        lines = line_at[down.index(box.start[0])], line_at[down.index(box.stop[0])]
        _draw_box(canvas, lines, (column_at[first], column_at[last]), text)
    return _with_indices(canvas, down if num_dims == 2 else [], across, line_at, column_at)


def _as_row(box: Box) -> Box:
    return Box((0, *box.start), (1, *box.stop))


def _positions(
    cuts: Sequence[int],
    limits: tuple[int, int],
    needs: Sequence[tuple[int, int, float]],
    largest: int,
) -> list[int] | None:
    """Return where on the canvas each face lies: in proportion if that fits, else as close as can be."""
    extents = [b - a for a, b in itertools.pairwise(cuts)]
    low, high = limits
    in_proportion = [float(min(high, round(low * n / min(extents)))) for n in extents]
    for wanted in (in_proportion, [float(low)] * len(extents)):
        sizes = fit_sizes(wanted, needs, 1.0)
        at = list(itertools.accumulate((math.ceil(size) + 1 for size in sizes), initial=0))
        if at[-1] < largest:
            return at
    return None


def _draw_box(
    canvas: list[list[str]], lines: tuple[int, int], columns: tuple[int, int], label: str
) -> None:
    top, bottom = lines
    left, right = columns
    for line in lines:
        for column in range(left + 1, right):
            if canvas[line][column] != "+":  # the corner of a neighbour stays
                canvas[line][column] = "-"
    for column in columns:
        for line in range(top + 1, bottom):
            if canvas[line][column] != "+":
                canvas[line][column] = "|"
        canvas[top][column] = canvas[bottom][column] = "+"
    start = left + 1 + (right - left - 1 - len(label)) // 2
    canvas[(top + bottom) // 2][start : start + len(label)] = label


def _with_indices(
    canvas: list[list[str]],
    down: Sequence[int],
    across: Sequence[int],
    line_at: Sequence[int],
    column_at: Sequence[int],
) -> list[str]:
    """Write the faces' global indices on the left and above."""
    margin = max((len(str(x)) + 1 for x in down), default=0)
    ruler = ""
    for x, column in zip(across, column_at, strict=True):
        ruler = ruler.ljust(column) + str(x)
    index_at = dict(zip(line_at, map(str, down), strict=False))
    body = [
        f"{index_at.get(i, ''):>{max(margin - 1, 0)}}{' ' if margin else ''}{''.join(line)}"
        for i, line in enumerate(canvas)
    ]
    return [" " * margin + ruler, *body]
