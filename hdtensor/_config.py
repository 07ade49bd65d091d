"""Every environment variable of hdtensor: read once, at import, and checked."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hdtensor.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        field: The attribute of ``Config`` that it sets.
        default: What an unset or empty one means.
        values: What it may be, in words.
        meaning: What it does, in words.
        parse: From its text to its value; raises ``ValueError`` on a text that it may not be.
    """

    name: str
    field: str
    default: str
    values: str
    meaning: str
    parse: Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the environment says.

    Attributes:
        debug: 0 off, 1 ranks compare what they communicate, 2 operators are logged too.
        debug_seconds: How long a rank waits for another one in debugging before it gives up.
    """

    debug: int
    debug_seconds: float


def _level(text: str) -> int:
    return ("0", "1", "2").index(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


VARIABLES = (
    Variable(
        name="HDTENSOR_DEBUG",
        field="debug",
        default="0",
        values="0, 1, 2",
        meaning="1: ranks compare what they are about to communicate, and the first difference is an error on all "
        "of them. 2: the error also lists the operators before it.",
        parse=_level,
    ),
    Variable(
        name="HDTENSOR_DEBUG_SECONDS",
        field="debug_seconds",
        default="120",
        values="a number > 0",
        meaning="with `HDTENSOR_DEBUG`: how long a rank waits for another one before both are named.",
        parse=_seconds,
    ),
)

#: Variables of the tests, which the package leaves alone.
_TEST_PREFIX = "HDTENSOR_TEST_"


def read_config(environ: Mapping[str, str]) -> Config:
    """Return what the environment says.

    >>> read_config({"HDTENSOR_DEBUG": "1"})
    Config(debug=1, debug_seconds=120.0)

    Raises:
        ConfigError: If a variable has a value that it may not have, or an ``HDTENSOR_`` variable does not exist.
    """
    known = {variable.name: variable for variable in VARIABLES}
    for name in environ:
        if name.startswith("HDTENSOR_") and not name.startswith(_TEST_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"the environment has {name}={environ[name]!r}, which hdtensor does not know. {hint}Its variables are "
                f"{', '.join(known)}; unset {name}."
            )
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip() or variable.default
        try:
            values[variable.field] = variable.parse(text)
        except ValueError:
            raise ConfigError(
                f"the environment has {variable.name}={text!r}, which must be {variable.values}. Change it, or "
                f"unset it for {variable.default}."
            ) from None
    return Config(**values)


def table() -> str:
    """Return all variables as a table in Markdown, for the documentation."""
    rows = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{v.name}` | {v.values} | {v.default} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(rows)


#: The environment of this process, as it was at import.
CONFIG = read_config(os.environ)
