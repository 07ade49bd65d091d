"""Text and files of plans, read with care: a bad or hostile one gives a ``PlanError``, nothing else."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from hdtensor.errors import PlanError
from hdtensor.plan.fields import is_sequence, shown


MAX_BYTES = 64 << 20
MAX_DEPTH = 32
_MAX_DIGITS = 18
_LINE_WIDTH = 100


def read_file(path: str | os.PathLike[str], what: str = "the plan") -> bytes:
    """Return the bytes of a file.

    Args:
        path: The file.
        what: What an error calls it.

    Raises:
        PlanError: If it cannot be read or has more than 64 MiB.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"cannot read {what} {str(path)!r}: {reason}.") from error
    if len(data) > MAX_BYTES:
        raise PlanError(
            f"{what} {str(path)!r} has more than {MAX_BYTES} bytes, the largest allowed."
        )
    return data


def parse_json(text: str | bytes, what: str = "the plan") -> Any:
    """Parse strict JSON: UTF-8, no NaN or Infinity, no key twice, no long number, not deep.

    >>> parse_json('{"zero": 1, "zero": 2}')
    Traceback (most recent call last):
    hdtensor.errors.PlanError: the key 'zero' stands twice in one object; keep one.

    Args:
        text: The JSON text.
        what: What an error calls it.

    Raises:
        PlanError: If the text is anything else.
    """
    if not isinstance(text, str | bytes):
        raise PlanError(f"the text of {what} must be a str or bytes, got {shown(text)}.")
    if len(text) > MAX_BYTES:
        raise PlanError(f"{what} has more than {MAX_BYTES} bytes, the largest allowed.")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        if not text.strip():
            raise PlanError(f"{what} is empty; write an object {{...}}.")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{what} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from None
    except RecursionError:
        raise PlanError(f"{what} is nested deeper than {MAX_DEPTH} levels.") from None
    _check_depth(value, what)
    return value


def format_json(value: Any, indent: int = 0) -> str:
    """Return JSON text in which whatever fits on a line stays on one line."""
    line = json.dumps(value, allow_nan=False)
    items: list[str]
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(k)}: {format_json(v, indent + 1)}" for k, v in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, list) and value:
        items = [format_json(item, indent + 1) for item in value]
        opening, closing = "[", "]"
    else:
        return line
    if indent and len(line) + 2 * indent <= _LINE_WIDTH:
        return line
    margin = "\n" + "  " * (indent + 1)
    return f"{opening}{margin}{f',{margin}'.join(items)}\n{'  ' * indent}{closing}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise PlanError(f"the key {shown(key)} stands twice in one object; keep one.")
            seen.add(key)
    return out


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise PlanError(f"the number {text[:_MAX_DIGITS]}... has {len(text)} digits; allowed: 18.")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise PlanError(f"the number {text[:_MAX_DIGITS]} is too large for a float.")
    return value


def _constant(text: str) -> NoReturn:
    raise PlanError(f"{text} is not JSON; write a finite number or null.")


def _check_depth(value: Any, what: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif is_sequence(item):
                below += item
        if not below:
            return
        level = below
    raise PlanError(f"{what} is nested deeper than {MAX_DEPTH} levels.")
