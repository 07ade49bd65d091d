"""A schedule as a picture: steps down, places across."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from hdtensor.pipeline.schedule.actions import Action


#: A cell: (place, step).
Cell = tuple[int, int]

_MAX_WIDTH = 110


def draw_grid(
    rows: Sequence[Sequence[Action | None]],
    titles: Sequence[str],
    *,
    marked: Collection[Cell] = (),
    around: int | None = None,
) -> str:
    """Return the grid of steps and places; marked cells stand in brackets, their lines have an arrow.

    >>> rows = [[Action.parse("0F0"), Action.parse("0B0")], [None, Action.parse("1F0")]]
    >>> print(draw_grid(rows, ["rank 0", "rank 1"], marked=[(1, 1)]))
    step  rank 0  rank 1
       0   0F0      .
       1   0B0    [1F0]  <-- here

    Args:
        rows: For each place what it does in each step; None is idle.
        titles: A name for each place.
        marked: Cells to mark; a step beyond a row's end is marked as idle.
        around: Show only so many steps before and after the marked ones, and as many places.
    """
    num_steps = max([len(row) for row in rows] + [step + 1 for _, step in marked], default=0)
    steps = range(num_steps)
    columns: Sequence[int] = range(len(rows))
    if around is not None and marked:
        near = sorted({step for _, step in marked})
        steps = range(max(0, near[0] - around), min(num_steps, near[-1] + around + 1))
        columns = _columns(len(rows), sorted({place for place, _ in marked}))
    table = [["step", *(titles[place] for place in columns)]]
    arrows = [""]
    for step in steps:
        line = [str(step)]
        for place in columns:
            action = rows[place][step] if step < len(rows[place]) else None
            text = "." if action is None else str(action)
            line.append(f"[{text}]" if (place, step) in marked else f" {text} ")
        table.append(line)
        arrows.append("  <-- here" if any(step == s and p in columns for p, s in marked) else "")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for line, arrow in zip(table, arrows, strict=True):
        first = line[0].rjust(widths[0])
        rest = [cell.center(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip() + arrow)
    return "\n".join(lines)


def _columns(num_places: int, marked: Sequence[int]) -> Sequence[int]:
    """Return the places to show: all if there is room, else the marked ones and their neighbours."""
    most = _MAX_WIDTH // 10
    if num_places <= most:
        return range(num_places)
    near = [p + d for d, p in itertools.product((0, -1, 1), marked) if 0 <= p + d < num_places]
    return sorted(list(dict.fromkeys(near))[:most])
