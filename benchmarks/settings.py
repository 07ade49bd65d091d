"""How much a run measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for.

    Attributes:
        is_quick: Fewer repeats: figures that say whether the benchmark works, not how fast it is.
    """

    is_quick: bool = False

    def scaled(self, number: int) -> int:
        """Return a number of repeats: a fifth of it, at least 2, in a quick run."""
        return max(2, number // 5) if self.is_quick else number
