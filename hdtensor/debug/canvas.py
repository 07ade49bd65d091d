"""A few SVG elements as text, and blocks that are placed beside one another. No dependency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr


INK = "#1f2933"
FAINT = "#6b7680"
#: Estimated width of a character, in font sizes; on the safe side for the fonts below.
CHARACTER_WIDTH = 0.6
SWATCH_OPACITY = 0.62
_TERMS = (
    '<defs><pattern id="terms" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<path d="M-2 2 L2 -2 M0 8 L8 0 M6 10 L10 6" stroke="#ffffff" stroke-width="1.5"/>'
    "</pattern></defs>"
)
_FONTS = "Helvetica, Arial, 'DejaVu Sans', 'Liberation Sans', sans-serif"


class Block(NamedTuple):
    """A drawing whose upper left corner is the origin.

    Attributes:
        width: In pixels.
        height: In pixels.
        elements: SVG elements.
    """

    width: float
    height: float
    elements: tuple[str, ...]


def number(value: float) -> str:
    """Return a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def printable(value: str) -> str:
    """Return the text with ``?`` for the characters that XML does not allow or nobody can see."""
    return "".join(character if character.isprintable() else "?" for character in value)


def text_width(value: str, size: float) -> float:
    """Return about how many pixels a text takes."""
    return len(value) * size * CHARACTER_WIDTH


def text(
    x: float,
    y: float,
    value: str,
    *,
    size: float = 12,
    anchor: str = "start",
    fill: str = INK,
    bold: bool = False,
) -> str:
    """Return a line of text whose baseline is at ``y``; ``anchor`` is start, middle or end."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}" '
        f'fill="{fill}"{weight}>{escape(printable(value))}</text>'
    )


def rectangle(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str,
    opacity: float = 1,
    stroke: str = INK,
) -> str:
    """Return a filled rectangle with an edge."""
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
        f'fill="{fill}" fill-opacity="{number(opacity)}" stroke="{stroke}"/>'
    )


def hatch(x: float, y: float, width: float, height: float) -> str:
    """Return oblique lines over a rectangle: the mark of a value that is only one term."""
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
        f'fill="url(#terms)"/>'
    )


def upright(element: str, x: float, y: float) -> str:
    """Return the element turned to read from bottom to top around ``(x, y)``."""
    return f'<g transform="rotate(-90 {number(x)} {number(y)})">{element}</g>'


def line(points: Sequence[tuple[float, float]], *, stroke: str, width: float = 1) -> str:
    """Return an open line through the points."""
    joined = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return (
        f'<polyline points="{joined}" fill="none" stroke="{stroke}" stroke-width="{number(width)}" '
        f'stroke-linejoin="round"/>'
    )


def arrow(start: tuple[float, float], stop: tuple[float, float], *, stroke: str) -> str:
    """Return a level line with a head at its end."""
    (x, y), back = stop, -7 if stop[0] > start[0] else 7
    head = line([(x + back, y - 4), stop, (x + back, y + 4)], stroke=stroke, width=1.6)
    return line([start, stop], stroke=stroke, width=1.6) + head


def swatch(x: float, y: float, colour: str) -> str:
    """Return a small square of a colour, for legends."""
    return rectangle(x, y, 12, 12, fill=colour, opacity=SWATCH_OPACITY)


def text_lines(lines: Sequence[str], *, size: float, first: str | None = None) -> Block:
    """Return lines of text, below a bold one if given."""
    elements = [] if first is None else [text(0, 12, first, size=13, bold=True)]
    y = 0.0 if first is None else 17.0
    for value in lines:
        elements.append(text(0, y + size, value, size=size))
        y += size + 4
    widths = [text_width(value, size) for value in lines]
    widths += [] if first is None else [text_width(first, 14)]
    return Block(max(widths), y, tuple(elements))


def circle(x: float, y: float, radius: float, *, fill: str, stroke: str) -> str:
    """Return a circle with an edge."""
    return (
        f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def moved(block: Block, x: float, y: float) -> str:
    """Return the block as one element, with its corner at ``(x, y)``."""
    return f'<g transform="translate({number(x)} {number(y)})">{"".join(block.elements)}</g>'


def beside(blocks: Iterable[Block], *, gap: float, max_width: float) -> Block:
    """Return the blocks from left to right, in as many rows as ``max_width`` asks for."""
    elements: list[str] = []
    x = y = row_height = width = 0.0
    for block in blocks:
        if x and x + block.width > max_width:
            x, y, row_height = 0.0, y + row_height + gap, 0.0
        elements.append(moved(block, x, y))
        width = max(width, x + block.width)
        row_height = max(row_height, block.height)
        x += block.width + gap
    return Block(width, y + row_height, tuple(elements))


def below(blocks: Iterable[Block], *, gap: float) -> Block:
    """Return the blocks from top to bottom."""
    return beside(blocks, gap=gap, max_width=0)


def document(block: Block, *, description: str, margin: float = 16) -> str:
    """Return a complete SVG file with the block on a white page.

    Args:
        block: What to show.
        description: What a reader who cannot see the picture should know.
        margin: Pixels around the block.
    """
    width, height = number(block.width + 2 * margin), number(block.height + 2 * margin)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family={quoteattr(_FONTS)} role="img">',
            f"<title>{escape(printable(description))}</title>",
            _TERMS,
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<g transform="translate({number(margin)} {number(margin)})">',
            *block.elements,
            "</g>",
            "</svg>",
            "",
        ]
    )
