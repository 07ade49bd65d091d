"""``AnnotationPlan``: what the two forms of a plan have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hdtensor.errors import PlanError
from hdtensor.plan.fields import MAX_RANKS, check_int, check_object
from hdtensor.plan.reader import format_json, parse_json, read_file


if TYPE_CHECKING:
    from torch import nn

    from hdtensor.plan.expanded import ExpandedPlan
    from hdtensor.plan.model import ModelDescription
    from hdtensor.plan.patterns import Pattern


#: The version of the JSON that this package writes, and the only one that it reads.
VERSION = 1


class AnnotationPlan(ABC):
    """How a model is spread over ranks: a versioned JSON file, or the same as Python values.

    There are two forms. ``StrategyPlan`` is the compact one that people and planners write:
    pipelines of stages. ``ExpandedPlan`` gives every tensor its ``HDSpec``. ``load`` and
    ``from_json`` read either; ``expand(model)`` turns either into an ``ExpandedPlan`` that fits the
    model. Paper: annotation plan (Sec. 3, App. A.1).
    """

    __slots__ = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan file.

        Raises:
            PlanError: If there is no such file, or as ``from_json``.
        """
        return cls.from_json(read_file(path))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse a plan's JSON text.

        Args:
            text: At most 64 MiB, UTF-8.

        Raises:
            PlanError: If it is no JSON or no plan. The message begins with the path of the field,
                such as ``pipelines[0].stages[1].ranks``.
        """
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Build a plan from parsed JSON.

        Args:
            value: An object. ``version`` must be 1; an object without it, such as one of the
                paper's plans, is read as version 1.

        Raises:
            PlanError: If it is no plan; the message begins with the path of the field.
        """
        from hdtensor.plan.expanded import ExpandedPlan  # noqa: PLC0415 - the forms build on this
        from hdtensor.plan.strategy import StrategyPlan  # noqa: PLC0415

        fields = dict(check_object("plan", value))
        version = check_int("version", fields.pop("version", VERSION), 0, 1 << 30)
        if version != VERSION:
            raise PlanError(f"version: {version} is unknown; this package reads version {VERSION}.")
        form: type[AnnotationPlan] = ExpandedPlan if "tensors" in fields else StrategyPlan
        if issubclass(form, cls):
            return form.from_fields(fields)
        raise PlanError(
            f"plan: its form is {form.__name__}, not {cls.__name__}; read it with AnnotationPlan, "
            f"which takes either form."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a JSON file.

        Raises:
            OSError: If the file cannot be written.
        """
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """Return the plan as JSON text, ``from_json``'s inverse."""
        return format_json(self.to_dict())

    @classmethod
    @abstractmethod
    def from_fields(cls, value: Mapping[str, Any]) -> Self:
        """Build this form from an object without its version; ``from_dict`` calls it."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, ``from_dict``'s inverse."""

    @abstractmethod
    def expand(
        self,
        model: ModelDescription | nn.Module,
        patterns: Sequence[Pattern | tuple[str, str]] = (),
    ) -> ExpandedPlan:
        """Return the plan of every parameter of a model.

        Args:
            model: The module (the meta device is enough), or a description of it.
            patterns: Rules that come before the built-in ones.

        Raises:
            PlanError: If the plan does not fit the model.
        """

    @abstractmethod
    def check(self, *, world_size: int) -> None:
        """Raise if the plan names a rank that a world of this size does not have.

        Args:
            world_size: Number of ranks.

        Raises:
            PlanError: The message names the field and the ranks.
        """

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the plan, sorted."""

    def outside(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks of a world that the plan leaves out, sorted.

        Raises:
            PlanError: If the size is no number of ranks.
        """
        check_int("world_size", world_size, 1, MAX_RANKS)
        return tuple(sorted(set(range(world_size)) - set(self.ranks)))
