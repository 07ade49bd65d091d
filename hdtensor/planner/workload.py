"""``Workload``: what a step trains, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import shown
from hdtensor.planner.quantities import whole_number


#: Which activations a layer computes again in its backward.
Recompute: TypeAlias = Literal["none", "full"]

#: Short name -> element type.
PRECISIONS: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bfloat16",
        "bfloat16": "bfloat16",
        "fp16": "float16",
        "float16": "float16",
        "fp32": "float32",
        "float32": "float32",
    }
)
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd_momentum")
#: Schedules whose stages each have their own ranks.
SCHEDULES = ("1F1B", "GPipe", "ZB-H1")
MAX_BATCH = 1 << 20
MAX_CONTEXT = 1 << 24


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
        schedule: As for ``build_schedule``: ``1F1B``, ``GPipe`` or ``ZB-H1``.
    """

    batch: int
    context: int
    precision: str = "bfloat16"
    optimizer: str = "adamw"
    zero: int = 1
    recompute: Recompute = "none"
    schedule: str = "1F1B"

    def __post_init__(self) -> None:
        whole_number("batch", self.batch, 1, MAX_BATCH)
        whole_number("context", self.context, 1, MAX_CONTEXT)
        whole_number("zero", self.zero, 0, 1)
        object.__setattr__(self, "precision", find_precision(self.precision))
        for field, allowed in (
            ("optimizer", OPTIMIZERS),
            ("recompute", get_args(Recompute)),
            ("schedule", SCHEDULES),
        ):
            words = {word.lower(): word for word in allowed}
            object.__setattr__(self, field, _word(field, getattr(self, field), words))


def find_precision(name: str) -> str:
    """Return the element type of a name, such as ``bf16``.

    Raises:
        PlannerError: If there is none.
    """
    return PRECISIONS[_word("precision", name, {key: key for key in PRECISIONS})]


def _word(field: str, value: Any, words: Mapping[str, str]) -> str:
    """Return the spelling of a word that may come in any case."""
    found = words.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise PlannerError(
            f"{field}: must be one of {', '.join(dict.fromkeys(words.values()))}, got {shown(value)}."
        )
    return found
