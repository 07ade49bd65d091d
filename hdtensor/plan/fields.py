"""Checks of single fields, and the JSON paths that their errors name."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hdtensor.errors import PlanError


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


#: Limits of what a plan may say; they keep a short hostile file from making a long computation.
MAX_RANKS = 1 << 20
MAX_LAYERS = 10**5
MAX_MICROBATCHES = 1 << 20
MAX_SHARE = 1 << 40
MAX_TEXT = 1000
_MAX_SHOWN = 60
_MAX_DIGITS = 18

T = TypeVar("T", bound="DataclassInstance")


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Put a JSON path before the path that a ``PlanError`` raised inside begins with.

    >>> with at("pipelines[0]"):
    ...     raise PlanError("mbs: must be an integer, got 'x'.")
    Traceback (most recent call last):
    hdtensor.errors.PlanError: pipelines[0].mbs: must be an integer, got 'x'.
    """
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{where}.{error}") from None


def shown(value: object) -> str:
    """Return a short, printable text of a value of any kind and size."""
    if isinstance(value, bool | float) or value is None:
        return repr(value)
    if isinstance(value, int):
        num_digits = int(value.bit_length() * math.log10(2)) + 1
        return f"an integer of {num_digits} digits" if num_digits > _MAX_DIGITS else str(value)
    if isinstance(value, str):
        return ascii(value[:_MAX_SHOWN]) + ("..." if len(value) > _MAX_SHOWN else "")
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a value of type {type(value).__name__}"


def check_int(field: str, value: Any, low: int, high: int) -> int:
    """Return a plain integer.

    Raises:
        PlanError: Unless it is an integer (no bool, no float) in ``[low, high]``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise PlanError(f"{field}: must be an integer, got {shown(value)}.")
    number = operator.index(value)
    if not low <= number <= high:
        raise PlanError(f"{field}: must be from {low} to {high}, got {shown(number)}.")
    return number


def check_optional_int(field: str, value: Any, low: int, high: int) -> int | None:
    """Return None or what ``check_int`` returns."""
    return None if value is None else check_int(field, value, low, high)


def check_ints(field: str, value: Any, low: int, high: int) -> tuple[int, ...]:
    """Return a tuple of integers.

    Raises:
        PlanError: Unless it is a sequence of at most ``MAX_RANKS`` integers in ``[low, high]``.
    """
    if not is_sequence(value):
        raise PlanError(f"{field}: must be a list of integers, got {shown(value)}.")
    if len(value) > MAX_RANKS:
        raise PlanError(f"{field}: must hold at most {MAX_RANKS} numbers, got {len(value)}.")
    return tuple(check_int(f"{field}[{i}]", item, low, high) for i, item in enumerate(value))


def check_bool(field: str, value: Any) -> bool:
    """Return the bool.

    Raises:
        PlanError: If it is something else.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{field}: must be true or false, got {shown(value)}.")
    return value


def check_text(field: str, value: Any) -> str:
    """Return the text.

    Raises:
        PlanError: Unless it is a printable string of at most ``MAX_TEXT`` characters.
    """
    if not isinstance(value, str):
        raise PlanError(f"{field}: must be a text, got {shown(value)}.")
    if len(value) > MAX_TEXT or not value.isprintable():
        raise PlanError(
            f"{field}: must be at most {MAX_TEXT} printable characters, got {shown(value)}."
        )
    return value


def check_optional_text(field: str, value: Any) -> str | None:
    """Return None or what ``check_text`` returns."""
    return None if value is None else check_text(field, value)


def is_sequence(value: object) -> bool:
    """Return whether this is a list-like value; texts are none."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def check_sequence(field: str, value: Any, of: str) -> Sequence[Any]:
    """Return the sequence.

    Raises:
        PlanError: If it is no list.
    """
    if not is_sequence(value):
        raise PlanError(f"{field}: must be a list of {of}, got {shown(value)}.")
    sequence: Sequence[Any] = value
    return sequence


def check_object(field: str, value: Any) -> Mapping[str, Any]:
    """Return the mapping.

    Raises:
        PlanError: If it is no mapping.
    """
    if not isinstance(value, Mapping):
        raise PlanError(f"{field}: must be an object {{...}}, got {shown(value)}.")
    return value


def check_keys(value: Mapping[str, Any], allowed: Sequence[str], needed: Sequence[str]) -> None:
    """Raise on a key that is unknown, with the nearest known one, or missing.

    Raises:
        PlanError: The message begins with the key.
    """
    for key in value:
        if key not in allowed:
            word = key[:_MAX_SHOWN] if isinstance(key, str) else ""
            near = difflib.get_close_matches(word, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PlanError(f"{key_text(key)}: unknown key; {hint}allowed: {', '.join(allowed)}.")
    for key in needed:
        if key not in value:
            raise PlanError(f"{key}: missing; the keys {', '.join(needed)} are needed.")


def key_text(key: object) -> str:
    """Return a key as it stands in a path: bare where it is a plain word."""
    if isinstance(key, str) and key.isidentifier() and key.isascii() and len(key) <= _MAX_SHOWN:
        return key
    return shown(key)


def decode(cls: type[T], value: Mapping[str, Any]) -> T:
    """Build a dataclass from an object that has its fields as keys.

    Raises:
        PlanError: On unknown or missing keys, and whatever the class raises.
    """
    every = dataclasses.fields(cls)
    needed = [f.name for f in every if f.default is dataclasses.MISSING]
    check_keys(value, [f.name for f in every], needed)
    return cls(**value)


def encode(value: DataclassInstance) -> dict[str, Any]:
    """Return a dataclass's fields as JSON values, without those that have their default."""
    out = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if item != field.default:
            out[field.name] = _plain(item)
    return out


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return encode(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
