"""The picture of an ``ExecutableGraph``: one operator a row, part by part, with lines from results to their readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hdtensor.debug import canvas
from hdtensor.debug.canvas import Block
from hdtensor.debug.graph_nodes import PHASES, GraphNode, Kind, LocalTensor


_COLOURS: dict[Kind, str] = {"compute": "#0072b2", "layout": "#dfe3e6", "communication": "#d55e00"}
_LINE = "#9aa5b1"
_ROW, _SIZE, _LANE = 17.0, 11.0, 7.0
_MAX_TEXT = 140
#: Lines beside one another; where there are more, the longest are left out.
_MAX_LANES = 14


class _Row(NamedTuple):
    """One line of the picture.

    Attributes:
        y: Of its middle.
        made: What it makes.
        read: What it reads.
        node: The operator; None for a tensor from outside.
    """

    y: float
    made: tuple[LocalTensor, ...]
    read: tuple[str, ...]
    node: GraphNode | None


class _Span(NamedTuple):
    """A line from a result to its readers: heights, the first where it is made."""

    name: str
    ys: tuple[float, ...]

    @property
    def length(self) -> float:
        return self.ys[-1] - self.ys[0]


def draw(
    heading: str,
    inputs: Sequence[LocalTensor],
    nodes: Sequence[GraphNode],
    outputs: Sequence[tuple[str, str]],
) -> str:
    """Return an SVG file that shows a rank's graph.

    Args:
        heading: The first line.
        inputs: Tensors from outside.
        nodes: The operators, in order.
        outputs: What goes out, and its name.
    """
    titles, rows, height = _place(inputs, nodes)
    lanes = _lanes(_spans(rows))
    left = _LANE * (1 + max((lane for _, lane in lanes), default=-1)) + 8
    texts = {row.y: _text_of(row) for row in rows}
    middle = left + 24 + max((canvas.text_width(t, _SIZE) for t in texts.values()), default=0)
    elements = [canvas.text(left, y, title, size=13, bold=True) for y, title in titles]
    for span, lane in lanes:
        elements += _line_of(span, left - 10 - _LANE * lane, left)
    width = middle
    for row in rows:
        elements += _mark(row, left)
        elements.append(canvas.text(left + 18, row.y + 4, texts[row.y], size=_SIZE))
        detail = _detail(row)
        elements.append(canvas.text(middle, row.y + 4, detail, size=_SIZE, fill=canvas.FAINT))
        width = max(width, middle + canvas.text_width(detail, _SIZE))
    body = [Block(width, height, tuple(elements)), _legend()]
    if outputs:
        lines = [f"{what}: {name}" for what, name in outputs]
        body.insert(1, canvas.text_lines(lines, size=_SIZE, first="outputs"))
    head = canvas.text_lines([], size=_SIZE, first=heading)
    return canvas.document(canvas.below([head, *body], gap=14), description=heading)


def _place(
    inputs: Sequence[LocalTensor], nodes: Sequence[GraphNode]
) -> tuple[list[tuple[float, str]], list[_Row], float]:
    """Return titles with their heights, the rows, and the height of all."""
    titles, rows, y = [], [], 0.0
    if inputs:
        titles.append((y + 12, "inputs"))
        y += 24
        for tensor in inputs:
            rows.append(_Row(y, (tensor,), (), None))
            y += _ROW
    for phase in PHASES:
        part = [node for node in nodes if node.phase == phase]
        if not part:
            continue
        titles.append((y + 14, phase))
        y += 28
        for node in part:
            rows.append(_Row(y, node.outputs, node.inputs, node))
            y += _ROW
    return titles, rows, y


def _spans(rows: Sequence[_Row]) -> Iterator[_Span]:
    made: dict[str, float] = {}
    readers: dict[str, list[float]] = {}
    for row in rows:
        for name in row.read:
            readers.setdefault(name, []).append(row.y)
        for tensor in row.made:
            made.setdefault(tensor.name, row.y)
    for name, y in made.items():
        after = [reader for reader in readers.get(name, ()) if reader > y]
        if after:
            yield _Span(name, (y, *after))


def _lanes(spans: Iterator[_Span]) -> list[tuple[_Span, int]]:
    """Return the lane of each line, the shortest next to the rows; lines of one lane do not meet."""
    taken: list[list[_Span]] = [[] for _ in range(_MAX_LANES)]
    placed = []
    for span in sorted(spans, key=lambda span: (span.length, span.ys)):
        for lane, others in enumerate(taken):
            if all(o.ys[-1] < span.ys[0] or o.ys[0] > span.ys[-1] for o in others):
                others.append(span)
                placed.append((span, lane))
                break
    return placed


def _line_of(span: _Span, x: float, left: float) -> Iterator[str]:
    begin, *ends = span.ys
    yield canvas.line([(left, begin + 2), (x, begin + 2), (x, ends[-1] - 2)], stroke=_LINE)
    for end in ends:
        yield canvas.line([(x, end - 2), (left, end - 2)], stroke=_LINE)


def _mark(row: _Row, left: float) -> Iterator[str]:
    if row.node is None:
        yield canvas.circle(left + 6, row.y, 4, fill="#ffffff", stroke=canvas.INK)
    else:
        colour = _COLOURS[row.node.kind]
        yield canvas.rectangle(left, row.y - 6, 12, 12, fill=colour, stroke=colour)


def _text_of(row: _Row) -> str:
    if row.node is None:
        return row.made[0].name
    others = ", ..." if len(row.made) > 1 else ""
    text = f"{row.node.name}{others} = {row.node.op}({', '.join(row.read)})"
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _detail(row: _Row) -> str:
    shapes = ", ".join(tensor.kind for tensor in row.made)
    transfer = None if row.node is None else row.node.transfer
    return shapes if transfer is None else f"{shapes}  {transfer}"


def _legend() -> Block:
    entries = []
    for kind, colour in _COLOURS.items():
        mark = canvas.rectangle(0, 0, 12, 12, fill=colour, stroke=colour)
        entries.append(
            Block(18 + canvas.text_width(kind, 12), 15, (mark, canvas.text(18, 11, kind)))
        )
    return canvas.beside(entries, gap=18, max_width=940)
