"""Sizes that a compiler has not fixed: ``torch.SymInt`` beside ``int``.

Arithmetic on them is ordinary, and asking for a truth value is a *guard*: the program that is being traced then holds
only for sizes that answer alike. So code that decides by sizes asks as little as it can, and asks alike on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def is_open(value: Any) -> bool:
    """Return whether a size is not fixed.

    >>> is_open(2)
    False
    """
    return isinstance(value, torch.SymInt)


def is_symbolic(values: Iterable[Any]) -> bool:
    """Return whether one of the sizes is not fixed.

    >>> is_symbolic((2, 3))
    False
    """
    return any(map(is_open, values))


def hint(value: Any) -> Any:
    """Return the number that stands for a size while it is traced: the first one it had. No guard."""
    if not is_open(value):
        return value
    from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415 - loads sympy, which eager code does not need
        guarding_hint_or_throw,
    )

    return guarding_hint_or_throw(value)


def hints(values: Iterable[Any]) -> tuple[int, ...]:
    """Return ``hint`` of each.

    >>> hints([2, 3])
    (2, 3)
    """
    return tuple(hint(value) for value in values)


def same(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal, for all that is known of them. No guard: two that only happen to be are not.

    >>> same(2, 2)
    True
    """
    if is_open(a) or is_open(b):
        from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415 - as above
            statically_known_true,
        )

        return statically_known_true(a == b)
    return bool(a == b)


def exact_quotient(a: Any, b: Any) -> Any:
    """Return ``a / b``, None if that is no whole number.

    >>> exact_quotient(12, 4), exact_quotient(7, 2)
    (3, None)
    """
    quotient = a // b
    return quotient if quotient * b == a else None
