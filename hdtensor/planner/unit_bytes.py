"""``span_bytes``: bytes of some layers by the measured sizes of their units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hdtensor.planner.costs import LayerSpan
from hdtensor.planner.profiles import ProfiledUnit, UnitSize


class SpanBytes(NamedTuple):
    """What a rank holds of some layers.

    Attributes:
        parameters: Bytes.
        activation: Bytes that one sample keeps for backward.
        context: Tokens of that sample.
    """

    parameters: float
    activation: float
    context: int


def span_bytes(sizes: Iterable[UnitSize], layers: LayerSpan, tp: int) -> SpanBytes | None:
    """Return the bytes of some layers on a rank; None where a unit was not measured at this degree."""
    counts: dict[ProfiledUnit, int] = {
        "embedding": int(layers.is_first),
        "layer": layers.num_layers,
        "head": int(layers.is_last),
    }
    by_unit = {size.unit: size for size in sizes if size.tp == tp and size.unit in counts}
    needed = [unit for unit, count in counts.items() if count]
    if not all(unit in by_unit for unit in needed) or not needed:
        return None
    return SpanBytes(
        parameters=sum(counts[unit] * by_unit[unit].parameter_bytes for unit in needed),
        activation=sum(counts[unit] * by_unit[unit].activation_bytes for unit in needed),
        context=by_unit[needed[0]].context,
    )
