"""Sizes that a compiler has not fixed: ``torch.SymInt`` beside ``int``.

Arithmetic on them is ordinary, and asking for a truth value is a *guard*: the program that is being traced then holds
only for sizes that answer alike. So code that decides by sizes asks as little as it can, and asks alike on every rank.
"""

from __future__ import annotations

import functools
import operator
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


def total(sizes: Iterable[Any]) -> Any:
    """Return the sum of sizes. Unlike ``sum`` it adds no zero.

    Tracers note of what each symbol was made, and what ``0 + n`` gives is named as ``n`` is: where they do not know an ``n``
    by another name, they look for it in itself without end. So what open sizes go through leaves operations out that
    change nothing.

    >>> total([2, 0, 3]), total([])
    (5, 0)
    """
    parts = [size for size in sizes if is_open(size) or size]
    return functools.reduce(operator.add, parts) if parts else 0


def extent(start: Any, stop: Any) -> Any:
    """Return how many indices there are from ``start`` to ``stop``; as ``total``, without an operation if it can.

    >>> extent(0, 3), extent(1, 3)
    (3, 2)
    """
    return stop - start if is_open(start) or start else stop


def exact_quotient(a: Any, b: Any) -> Any:
    """Return ``a / b``, None if that is no whole number.

    >>> exact_quotient(12, 4), exact_quotient(7, 2)
    (3, None)
    """
    if not is_open(b) and b == 1:
        return a
    quotient = a // b
    return quotient if quotient * b == a else None
