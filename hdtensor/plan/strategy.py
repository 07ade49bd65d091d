"""``StrategyPlan``: the compact form of a plan, as people and planners write it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, get_args

from hdtensor.errors import PlanError
from hdtensor.plan import fields, table
from hdtensor.plan.annotation import VERSION, AnnotationPlan
from hdtensor.plan.expand import expand_strategy
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import Pattern, as_patterns
from hdtensor.plan.sequences import (
    Method,
    Order,
    SharedSequences,
    Split,
    check_choice,
    shares_sequences,
)
from hdtensor.plan.stages import About, Pipeline, Uniform
from hdtensor.plan.validate import check_pipelines, check_world, uniform_pipelines


if TYPE_CHECKING:
    from torch import nn

    from hdtensor.plan.expanded import ExpandedPlan

_ABOUT = tuple(field.name for field in dataclasses.fields(About))
_OWN = (
    "pipelines",
    "uniform",
    "zero",
    "sequence_parallel",
    "split",
    "context_parallel",
    "sequence_order",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyPlan(AnnotationPlan):
    """Pipelines of stages (Tables 9, 11, 12, 15, 16), or the degrees of a uniform plan.

    >>> plan = AnnotationPlan.from_json('''{"pipelines": [
    ...     {"share": 5, "stages": [{"ranks": [0, 1], "layers": [0, 3]}]},
    ...     {"share": 3, "stages": [{"ranks": [2], "layers": [0, 3]}]}]}''')
    >>> print(plan)
    plan: 2 pipelines, 3 ranks, 4 layers
    pipeline  share      micro-batches  stage  ranks  tp  layers
    0         5 (62.5%)  -              0      0,1    2   0-3
    1         3 (37.5%)  -              0      2      1   0-3

    Attributes:
        pipelines: The pipelines; empty for a uniform plan.
        uniform: The degrees of a uniform plan, or None.
        zero: ZeRO stage of optimizer states, gradients and parameters, 0 to 3.
        sequence_parallel: Cut hidden states between blocks on the sequence, over each stage's tp axis.
        split: What the pipelines' shares are parts of: the batch, or every sequence.
        context_parallel: How attention brings keys to ranks that share a sequence inside a stage.
        sequence_order: Which part of a sequence a rank takes: see ``SharedSequences``.
        about: What the plan says of itself; in JSON its fields stand beside the others.
    """

    pipelines: tuple[Pipeline, ...] = ()
    uniform: Uniform | None = None
    zero: int = 0
    sequence_parallel: bool = False
    split: Split = "batch"
    context_parallel: Method = "all_gather"
    sequence_order: Order = "contiguous"
    about: About = About()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        pipelines = tuple(fields.check_sequence("pipelines", self.pipelines, "pipelines"))
        for index, pipeline in enumerate(pipelines):
            if not isinstance(pipeline, Pipeline):
                text = fields.shown(pipeline)
                raise PlanError(f"pipelines[{index}]: must be a Pipeline, got {text}.")
        if self.uniform is not None and not isinstance(self.uniform, Uniform):
            raise PlanError(f"uniform: must be a Uniform, got {fields.shown(self.uniform)}.")
        if pipelines and self.uniform is not None:
            raise PlanError("uniform: the plan has pipelines too; give one of the two.")
        if not pipelines and self.uniform is None:
            raise PlanError("pipelines: must hold at least one pipeline, got none.")
        object.__setattr__(self, "pipelines", pipelines)
        object.__setattr__(self, "zero", fields.check_int("zero", self.zero, 0, 3))
        fields.check_bool("sequence_parallel", self.sequence_parallel)
        check_pipelines(pipelines)
        self._check_sharing()

    def _check_sharing(self) -> None:
        """Raise on unknown words, and on an order that no rank would follow."""
        check_choice("split", self.split, get_args(Split))
        check_choice("context_parallel", self.context_parallel, get_args(Method))
        check_choice("sequence_order", self.sequence_order, get_args(Order))
        has_cp = self.uniform is not None and self.uniform.cp > 1
        if has_cp or shares_sequences(self.pipelines, self.split):
            return
        for field, value, default in (
            ("context_parallel", self.context_parallel, "all_gather"),
            ("sequence_order", self.sequence_order, "contiguous"),
        ):
            if value != default:
                raise PlanError(
                    f"{field}: {value!r} is for ranks that share sequences, and none do: give a stage "
                    f"cp > 1, or the plan split 'sequence'."
                )

    @classmethod
    def from_fields(cls, value: Mapping[str, Any]) -> Self:
        """Build the plan from its JSON object without the version; ``from_dict`` calls it."""
        value = dict(value)
        fields.check_keys(value, (*_OWN, *_ABOUT), ())
        if "pipelines" not in value and "uniform" not in value:
            raise PlanError("pipelines: missing; give pipelines, or uniform degrees.")
        about = fields.decode(About, {key: value.pop(key) for key in _ABOUT if key in value})
        value["pipelines"] = _pipelines(value.get("pipelines"))
        if value.get("uniform") is not None:
            degrees = fields.check_object("uniform", value["uniform"])
            with fields.at("uniform"):
                value["uniform"] = fields.decode(Uniform, degrees)
        return cls(**value, about=about)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, ``from_dict``'s inverse."""
        about = fields.encode(self.about)
        if self.about.cluster:
            about["cluster"] = dict(self.about.cluster)
        if self.about.planned_for is not None:
            about["planned_for"] = json.loads(self.about.planned_for)
        own = {key: value for key, value in fields.encode(self).items() if key in _OWN}
        return {"version": VERSION, **about, **own}

    def batch_conflict(self) -> str | None:
        """Return what is wrong if the pipelines take another batch than the plan was made for, None if they do not.

        People edit micro-batches; what a planner says of such a plan, and its shares of the work, are of another step.
        """
        if self.about.planned_for is None or not self.pipelines:
            return None
        workload = json.loads(self.about.planned_for).get("workload")
        wanted = workload.get("batch") if isinstance(workload, dict) else None
        parts = [(p.share, p.microbatches, p.mbs) for p in self.pipelines]
        taken = sum((count or 0) * (size or 0) for _, count, size in parts)
        if any(part.count(None) != 1 or part[0] is not None for part in parts) or taken == wanted:
            return None
        if not isinstance(wanted, int):
            return None
        return (
            f"batch: the pipelines take {taken} samples, but planned_for says that the plan is for {wanted}; the pipelines "
            f"hold. Plan anew for {taken}, or give the pipelines their microbatches back."
        )

    def expand(
        self,
        model: ModelDescription | nn.Module,
        patterns: Sequence[Pattern | tuple[str, str]] = (),
    ) -> ExpandedPlan:
        """Return the plan of every parameter of a model.

        Args:
            model: The module (the meta device is enough), or a description of it.
            patterns: Rules that come before the built-in ones: ``Pattern`` or ``(glob, role)``.

        Raises:
            PlanError: If the layers, the heads or a pattern do not fit the model, or if the plan
                asks for expert or sequence parallelism, which this version cannot run.
        """
        if not isinstance(model, ModelDescription):
            model = ModelDescription.from_module(model)
        pipelines = self.with_pipelines(model.num_layers).pipelines
        sharing = SharedSequences(method=self.context_parallel, order=self.sequence_order)
        return expand_strategy(
            pipelines,
            self.zero,
            model,
            as_patterns(patterns),
            sequence_parallel=self.sequence_parallel,
            split=self.split,
            sharing=sharing,
        )

    def with_pipelines(self, num_layers: int, *, world_size: int | None = None) -> StrategyPlan:
        """Return the plan with a uniform form written out as pipelines.

        Ranks are dealt with tp innermost, then pp, then dp: pipeline 0 has the first ranks. If the
        layers do not divide by pp, the first stages have one more.

        >>> plan = StrategyPlan(uniform=Uniform(dp=2, tp=2, pp=2))
        >>> [stage.ranks for stage in plan.with_pipelines(3).pipelines[1].stages]
        [(4, 5), (6, 7)]

        Args:
            num_layers: Number of layers of the model.
            world_size: Number of ranks; checked if given.

        Raises:
            PlanError: If there are fewer layers than stages, or fewer ranks than the plan needs.
        """
        plan = self
        if self.uniform is not None:
            pipelines = uniform_pipelines(self.uniform, num_layers)
            plan = dataclasses.replace(self, pipelines=pipelines, uniform=None)
        if world_size is not None:
            plan.check(world_size=world_size)
        return plan

    def check(self, *, world_size: int) -> None:
        """Raise if the plan names a rank that a world of this size does not have.

        Raises:
            PlanError: The message names the field and the ranks.
        """
        check_world(self.pipelines, self.uniform, world_size)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the plan, sorted."""
        if self.uniform is not None:
            return tuple(range(self.uniform.num_ranks))
        return tuple(sorted(rank for pipeline in self.pipelines for rank in pipeline.ranks))

    @property
    def num_layers(self) -> int | None:
        """Number of layers that the pipelines cover; None for a uniform plan."""
        return self.pipelines[0].stages[-1].layers[1] + 1 if self.pipelines else None

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Part of the batch of each pipeline, as integers; None where the parts are equal."""
        samples = [pipeline.samples for pipeline in self.pipelines]
        known = [part for part in samples if part is not None]
        return tuple(known) if known else None

    def table(self, world_size: int | None = None) -> str:
        """Return the plan as a table of pipelines and stages.

        Args:
            world_size: If given, a last line names the ranks outside the plan.
        """
        return table.strategy_table(self, world_size)

    def __str__(self) -> str:
        return self.table()


def _pipelines(value: Any) -> tuple[Pipeline, ...]:
    if value is None:
        return ()
    out = []
    for index, item in enumerate(fields.check_sequence("pipelines", value, "pipelines")):
        where = f"pipelines[{index}]"
        item = fields.check_object(where, item)
        with fields.at(where):
            out.append(Pipeline.from_fields(item))
    return tuple(out)
