"""What a call of a module depends on beside its arguments and parameters: what it keeps, and whether it draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hdtensor.errors import DeductionError
from hdtensor.ops.special.random import draw_key, num_draws


#: Tables of torch's own, which a call leaves alone.
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class KeptState:
    """What modules keep from call to call beside parameters: buffers, counters, what they saw last."""

    def __init__(self, module: nn.Module) -> None:
        """Look at a module and all inside."""
        self._module = module
        self._values = list(_kept(module))

    def has_changed(self) -> bool:
        """Return whether it is another now, so that one more call would count twice."""
        now = list(_kept(self._module))
        return len(now) != len(self._values) or not all(map(_is_same, now, self._values))


def _kept(module: nn.Module) -> Iterator[tuple[Any, int]]:
    """Yield (value, what shows that it was changed in place)."""
    for inner in module.modules():
        values = [v for key, v in inner.__dict__.items() if key not in _TABLES]
        for value in (*values, *inner._buffers.values()):
            if isinstance(value, torch.Tensor):
                yield value, value._version
            else:
                yield value, len(value) if isinstance(value, list | dict | set) else 0


def _is_same(now: tuple[Any, int], before: tuple[Any, int]) -> bool:
    (a, change), (b, earlier) = now, before
    is_equal = a is b or (isinstance(a, int | float | str) and type(a) is type(b) and a == b)
    return is_equal and change == earlier


class Switches:
    """What says whether a module's calls draw random numbers: modes of modules, and rates of what drops."""

    def __init__(self, module: nn.Module) -> None:
        """Take a module; it is looked at when it is first called."""
        self._module = module
        self._places: list[tuple[dict[str, Any], str]] = []

    def present(self) -> tuple[Any, ...]:
        """Return how they stand now, in the module and all inside."""
        if not self._places:
            self._places = [found for inner in self._module.modules() for found in _switches(inner)]
        return tuple([table.get(key) for table, key in self._places])


def _switches(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    is_dropout = "Drop" in type(module).__name__
    for key, value in module.__dict__.items():
        is_rate = "drop" in key or (is_dropout and key in ("p", "prob", "rate"))
        if key == "training" or (is_rate and isinstance(value, int | float)):
            yield module.__dict__, key


def draws_itself(before: torch.Tensor, num_before: int) -> bool:
    """Return whether something else than operators on ``HDTensor``s has drawn, as ``torch.rand(())`` does.

    Args:
        before: torch's generator earlier.
        num_before: ``num_draws`` then.
    """
    now, num_now = torch.get_rng_state(), num_draws[0]
    torch.set_rng_state(before)
    for _ in range(num_now - num_before):
        draw_key()
    expected, num_draws[0] = torch.get_rng_state(), num_now
    torch.set_rng_state(now)
    return not torch.equal(now, expected)


def check_draws(before: torch.Tensor, module: nn.Module) -> None:
    """Raise if a module that runs on plain tensors has drawn: the values of a part would not be those of the whole.

    Args:
        before: torch's generator when it began.
        module: The module.

    Raises:
        DeductionError: If it has.
    """
    if not torch.equal(before, torch.get_rng_state()):
        raise DeductionError(
            f"{type(module).__name__} draws random numbers now, and drew none when it was recorded; no module's training flag and no "
            f"rate of a module that drops has changed since. Say it by one of these (module.train(), dropout.p), or "
            f"pass use_regions=False."
        )
