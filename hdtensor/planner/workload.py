"""``Workload``: what a step trains, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


#: Which activations a layer computes again in its backward.
Recompute: TypeAlias = Literal["none", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A step.

    Attributes:
        batch: Samples of a step, over all lanes.
        context: Tokens of a sample.
        precision: Element type of parameters and activations, such as ``bfloat16``.
        optimizer: ``adam``, ``adamw``, ``sgd`` or ``sgd_momentum``.
        zero: Stage of ZeRO, 0 or 1.
        recompute: Which activations are computed again.
        schedule: As for ``build_schedule``.
    """

    batch: int
    context: int
    precision: str = "bfloat16"
    optimizer: str = "adamw"
    zero: int = 1
    recompute: Recompute = "none"
    schedule: str = "1F1B"
