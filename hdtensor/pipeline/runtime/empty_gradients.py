"""The gradients of what a rank holds nothing of: they exist, so that all ranks see the same, and cost nothing in a step."""

from __future__ import annotations

from collections.abc import Sequence

from hdtensor.ops.skips import count_skips
from hdtensor.pipeline.runtime.homes import Home


class EmptyGradients:
    """The gradients of parameters of which this rank holds nothing: they are made when somebody looks at them."""

    def __init__(self) -> None:
        """Begin without any."""
        self._found: Sequence[Home] | None = None
        self._homes: list[Home] = []
        self._steps = [0]

    def give(self, found: Sequence[Home]) -> None:
        """Say that the targets of parameters that this rank has no part of have gradients now, those that train.

        Args:
            found: Homes of all parameters.
        """
        if found is not self._found:
            self._found = found
            self._homes = [home for home in found if not home.parameter.is_local]
        for home in self._homes:
            count_skips(home.target, self._steps, trains=home.parameter.requires_grad)
        self._steps[0] += 1
