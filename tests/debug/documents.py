"""Reading SVG files back: what is drawn, and where."""

import xml.etree.ElementTree as ET
from typing import NamedTuple


SVG = "{http://www.w3.org/2000/svg}"


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str


class Text(NamedTuple):
    x: float
    y: float
    value: str
    bold: bool


class Drawing(NamedTuple):
    """The elements of a file in page coordinates; texts that stand upright are left out of ``texts``."""

    width: float
    height: float
    rectangles: list[Rectangle]
    texts: list[Text]
    upright: list[str]
    lines: list[list[tuple[float, float]]]
    circles: list[tuple[float, float]]

    @property
    def values(self):
        return [text.value for text in self.texts]


def read(document):
    """Parse a file; a malformed one raises. The white page is not among the rectangles."""
    root = ET.fromstring(document)
    assert root.tag == SVG + "svg"
    drawing = Drawing(float(root.get("width")), float(root.get("height")), [], [], [], [], [])
    for child in root:
        if child.tag == SVG + "g":
            _read(child, 0.0, 0.0, drawing, is_upright=False)
    return drawing


def _read(element, x, y, drawing, *, is_upright):
    def at(name):
        return float(element.get(name))

    match element.tag.removeprefix(SVG):
        case "g":
            kind, _, numbers = element.get("transform").rstrip(")").partition("(")
            if kind == "translate":
                dx, dy = map(float, numbers.split())
                x, y = x + dx, y + dy
            for child in element:
                _read(child, x, y, drawing, is_upright=is_upright or kind == "rotate")
        case "rect":
            box = (x + at("x"), y + at("y"), at("width"), at("height"))
            drawing.rectangles.append(Rectangle(*box, element.get("fill")))
        case "text" if is_upright:
            drawing.upright.append(element.text)
        case "text":
            bold = element.get("font-weight") == "bold"
            drawing.texts.append(Text(x + at("x"), y + at("y"), element.text or "", bold))
        case "circle":
            drawing.circles.append((x + at("cx"), y + at("cy")))
        case "polyline":
            points = [tuple(map(float, p.split(","))) for p in element.get("points").split()]
            drawing.lines.append([(x + a, y + b) for a, b in points])
