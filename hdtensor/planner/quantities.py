"""Numbers with units, as people write them: ``50 GB/s``, ``5 us``, ``80 GiB``, ``990 TFLOPS``."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hdtensor.errors import HDTensorError, PlannerError
from hdtensor.plan.fields import check_int, shown


_NUMBER = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,2})?) ?([A-Za-zµ/]{0,12})")

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

#: Unit -> its size in bytes.
BYTES: Mapping[str, float] = MappingProxyType(
    {f"{prefix}B": size for prefix, size in {**_PREFIXES, **_BINARY}.items()}
)
#: Unit -> its size in bytes per second; a small b is a bit.
BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {f"{unit}/s": size for unit, size in BYTES.items()}
    | {f"{prefix}b/s": size / 8 for prefix, size in _PREFIXES.items()}
)
#: Unit -> its size in seconds.
SECONDS: Mapping[str, float] = MappingProxyType(
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
)
#: Unit -> its size in operations per second.
FLOPS: Mapping[str, float] = MappingProxyType(
    {f"{prefix}FLOPS": size for prefix, size in {**_PREFIXES, "P": 1e15}.items()}
)


class Plain(NamedTuple):
    """What a number without a unit may be; others are likely to lack their unit.

    Attributes:
        least: In the base unit.
        most: Likewise.
        base: Name of the base unit.
        usual: The unit that people mean by a number out of these limits.
    """

    least: float
    most: float
    base: str
    usual: str


#: Of a device's memory, of links, of rates, and of a link's latency.
PLAIN_MEMORY = Plain(1e9, math.inf, "B", "GB")
PLAIN_RATE = Plain(1e6, math.inf, "B/s", "GB/s")
PLAIN_FLOPS = Plain(1e9, math.inf, "FLOPS", "TFLOPS")
PLAIN_LATENCY = Plain(0.0, 0.1, "s", "us")


def read_quantity(
    field: str,
    value: Any,
    units: Mapping[str, float],
    *,
    least: float = 0.0,
    most: float = 1e18,
    plain: Plain | None = None,
) -> float:
    """Return a number in the base unit.

    >>> read_quantity("network", "400 Gb/s", BYTES_PER_SECOND)
    50000000000.0

    Args:
        field: What an error begins with.
        value: A number of the base unit, or a text of a number and a unit.
        units: Unit -> its size.
        least: The smallest number allowed.
        most: The largest one.
        plain: What it may be without a unit; None for anything.

    Raises:
        PlannerError: If it is no such quantity.
    """
    number: float | None = None
    has_unit = False
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) <= most else math.inf
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())) is not None:
        unit = match[2]
        if not unit or unit in units:
            number, has_unit = float(match[1]) * units.get(unit, 1.0), bool(unit)
    if number is None:
        named = ", ".join(unit for unit in units if unit)
        allowed = f"a number with one of the units {named}" if named else "a number"
        raise PlannerError(f"{field}: must be {allowed}, got {shown(value)}.")
    if not least <= number <= most:
        raise PlannerError(f"{field}: must be from {least:g} to {most:g}, got {shown(value)}.")
    if plain is not None and not has_unit and not plain.least <= number <= plain.most:
        text = shown(value).strip("'\"")
        raise PlannerError(
            f"{field}: {text} has no unit and would be {text} {plain.base}. Write its unit, such as '{text} {plain.usual}', "
            f"or '{text} {plain.base}' if that is meant."
        )
    return number


def quantity_field(number: float, plain: Plain) -> float | str:
    """Return a number as a JSON value that ``read_quantity`` takes: with its unit where it needs one.

    >>> quantity_field(5e7, PLAIN_MEMORY), quantity_field(8e9, PLAIN_MEMORY)
    ('50000000.0 B', 8000000000.0)
    """
    return number if plain.least <= number <= plain.most else f"{number!r} {plain.base}"


def whole_number(field: str, value: Any, least: int, most: int) -> int:
    """Return an integer in ``[least, most]``.

    Raises:
        PlannerError: If it is none.
    """
    with planner_errors():
        return check_int(field, value, least, most)


@contextlib.contextmanager
def planner_errors(field: str = "") -> Iterator[None]:
    """Turn errors of plans and topologies raised inside into a ``PlannerError``.

    Args:
        field: What is put before their message.
    """
    try:
        yield
    except HDTensorError as error:
        raise PlannerError(f"{field}: {error}" if field else str(error)) from None
