"""``SharedSequences``: how the ranks of a plan share every sequence, where they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hdtensor.errors import PlanError
from hdtensor.plan import fields
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import HEAD_ROLES
from hdtensor.plan.sites import Use
from hdtensor.plan.stages import Pipeline


Split = Literal["batch", "sequence"]
Method = Literal["all_gather", "ring"]
Order = Literal["contiguous", "zigzag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSequences:
    """How ranks share sequences, in an expanded plan.

    Attributes:
        method: Whether keys and values are gathered, or go around inside subgroups.
        order: Which rows a rank takes: neighbours, or also the mirror image, so that causal work is even.
        modules: Names of the modules whose attention shares sequences; "" is the model itself.
    """

    method: Method = "all_gather"
    order: Order = "contiguous"
    modules: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(Method))
        check_choice("order", self.order, get_args(Order))
        modules = fields.check_sequence("modules", self.modules, "texts")
        checked = tuple(
            fields.check_text(f"modules[{i}]", name) if name else ""
            for i, name in enumerate(modules)
        )
        object.__setattr__(self, "modules", checked)


def check_choice(field: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise unless a value is one of some texts.

    Raises:
        PlanError: The message names the field.
    """
    if value not in allowed:
        raise PlanError(f"{field}: must be one of {', '.join(allowed)}, got {fields.shown(value)}.")


def shares_sequences(pipelines: Iterable[Pipeline], split: Split) -> bool:
    """Return whether ranks share sequences: between pipelines, or inside some stage."""
    return split == "sequence" or any(s.cp > 1 for p in pipelines for s in p.stages)


def attention_modules(model: ModelDescription, uses: Sequence[Use]) -> tuple[str, ...]:
    """Return the modules around query and key projections; without any, the layers, or the model itself."""
    found = {
        use.name.rpartition(".")[0].rpartition(".")[0]: None
        for use in uses
        if use.role in HEAD_ROLES
    }
    layers = [name for names in model.layer_modules.values() for name in names]
    return tuple(found) or tuple(layers) or ("",)
