"""``ExpandedPlan``: the spec of every tensor, and where specs change on the way through the model."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from torch.distributed.tensor import Shard

from hdtensor.errors import PlanError, SpecError
from hdtensor.placements import HDSpec, spec_from_json
from hdtensor.plan import fields, table
from hdtensor.plan.annotation import VERSION, AnnotationPlan
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import Pattern
from hdtensor.plan.sequences import SharedSequences
from hdtensor.plan.validate import some_ranks_text


if TYPE_CHECKING:
    from torch import nn

_KEYS = (
    "tensors",
    "inputs",
    "labels",
    "points",
    "zero",
    "replicated_kv",
    "unmatched",
    "shared_sequences",
)
_POINT_KEYS = ("module", "side", "kind", "spec")
_OPTIONAL_POINT_KEYS = ("turns",)
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
#: Ranks in all different specs of one file; a text such as "0-999999:R" is short for many.
_MAX_RANKS_IN_ALL = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributePoint:
    """A place in the model where a tensor is brought to another spec.

    Attributes:
        module: Name of the module.
        side: Whether its "input" (the hidden states) or its "output" is redistributed.
        kind: "stage" where the data goes on to other ranks, "tp" for a collective inside subgroups.
        spec: The spec that the tensor has afterwards.
        turns: Subgroups of the spec where a stage begins though the ranks stay, as at the turn of a V.
    """

    module: str
    side: Literal["input", "output"]
    kind: Literal["stage", "tp"]
    spec: HDSpec
    turns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fields.check_text("module", self.module)
        if self.side not in ("input", "output"):
            raise PlanError(f"side: must be 'input' or 'output', got {fields.shown(self.side)}.")
        if self.kind not in ("stage", "tp"):
            raise PlanError(f"kind: must be 'stage' or 'tp', got {fields.shown(self.kind)}.")
        _check_spec("spec", self.spec)
        turns = fields.check_ints("turns", self.turns, 0, self.spec.num_subgroups - 1)
        if turns and self.kind != "stage":
            raise PlanError(f"turns: only points of kind 'stage' have them, got {list(turns)}.")
        object.__setattr__(self, "turns", turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedPlan(AnnotationPlan):
    """The plan of one model, tensor by tensor. Immutable; equal by value.

    Attributes:
        tensors: Parameter name -> spec, in the model's order.
        inputs: Spec of the model's inputs: dim 0, or dim 1, in shares, on each pipeline's first stage.
        labels: Spec of what the last stage needs: the same cut on each pipeline's last stage.
        points: Where hidden states are redistributed, in the order of the layers.
        zero: ZeRO stage that optimizer states, gradients and parameters are meant to have.
        replicated_kv: Stages that hold k and v projections whole, since their tp does not divide
            the KV heads; paths such as ``pipelines[0].stages[1]``.
        unmatched: Parameters that no pattern names; they are replicated in their stages.
        shared_sequences: How ranks share sequences, dim 1 of the inputs; None where they do not.
    """

    tensors: Mapping[str, HDSpec]
    inputs: HDSpec
    labels: HDSpec
    points: tuple[RedistributePoint, ...] = ()
    zero: int = 0
    replicated_kv: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    shared_sequences: SharedSequences | None = None

    def __post_init__(self) -> None:
        tensors = dict(fields.check_object("tensors", self.tensors))
        if not tensors:
            raise PlanError("tensors: must name at least one tensor, got none.")
        for name, spec in tensors.items():
            fields.check_text(tensor_path(name), name)
            _check_spec(tensor_path(name), spec)
        for name, spec in (("inputs", self.inputs), ("labels", self.labels)):
            _check_spec(name, spec)
            _check_batch_spec(name, spec, self.shared_sequences is not None)
        if _cut(self.inputs) != _cut(self.labels):
            raise PlanError(
                f"labels: must be cut as inputs are, {self.inputs}, got {self.labels}; the ranks "
                f"may differ."
            )
        points = tuple(fields.check_sequence("points", self.points, "points"))
        for index, point in enumerate(points):
            if not isinstance(point, RedistributePoint):
                text = fields.shown(point)
                raise PlanError(f"points[{index}]: must be a RedistributePoint, got {text}.")
        set_ = object.__setattr__
        set_(self, "tensors", MappingProxyType(tensors))
        set_(self, "points", points)
        set_(self, "zero", fields.check_int("zero", self.zero, 0, 3))
        set_(self, "replicated_kv", _texts("replicated_kv", self.replicated_kv))
        set_(self, "unmatched", _texts("unmatched", self.unmatched))

    def __hash__(self) -> int:
        parts = (self.inputs, self.labels, self.points, self.shared_sequences)
        return hash((tuple(self.tensors.items()), *parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpandedPlan.from_dict, (self.to_dict(),)

    @classmethod
    def from_fields(cls, value: Mapping[str, Any]) -> Self:
        """Build the plan from its JSON object without the version; ``from_dict`` calls it."""
        fields.check_keys(value, _KEYS, _KEYS[:3])
        read = _SpecReader()
        tensors = fields.check_object("tensors", value["tensors"])
        points = []
        for index, item in enumerate(
            fields.check_sequence("points", value.get("points", ()), "points")
        ):
            where = f"points[{index}]"
            item = fields.check_object(where, item)
            with fields.at(where):
                fields.check_keys(item, (*_POINT_KEYS, *_OPTIONAL_POINT_KEYS), _POINT_KEYS)
                points.append(RedistributePoint(**{**item, "spec": read("spec", item["spec"])}))
        return cls(
            tensors={name: read(tensor_path(name), spec) for name, spec in tensors.items()},
            inputs=read("inputs", value["inputs"]),
            labels=read("labels", value["labels"]),
            points=tuple(points),
            zero=value.get("zero", 0),
            replicated_kv=value.get("replicated_kv", ()),
            unmatched=value.get("unmatched", ()),
            shared_sequences=_sharing(value.get("shared_sequences")),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, specs in their short text form."""
        texts = {spec: str(spec) for spec in self.distinct_specs}
        out: dict[str, Any] = {
            "version": VERSION,
            "zero": self.zero,
            "inputs": texts[self.inputs],
            "labels": texts[self.labels],
            "tensors": {name: texts[spec] for name, spec in self.tensors.items()},
            "points": [
                {"module": p.module, "side": p.side, "kind": p.kind, "spec": texts[p.spec]}
                | ({"turns": list(p.turns)} if p.turns else {})
                for p in self.points
            ],
        }
        for name in ("replicated_kv", "unmatched"):
            if getattr(self, name):
                out[name] = list(getattr(self, name))
        if self.shared_sequences is not None:
            out["shared_sequences"] = fields.encode(self.shared_sequences)
        return out

    def expand(
        self,
        model: ModelDescription | nn.Module,
        patterns: Sequence[Pattern | tuple[str, str]] = (),
    ) -> ExpandedPlan:
        """Return this plan after a check that it fits the model.

        Args:
            model: The module or a description of it.
            patterns: None are allowed: every tensor has its spec already.

        Raises:
            PlanError: If the names differ from the model's parameters, or a spec cuts a dim that
                the parameter does not have.
        """
        if patterns:
            raise PlanError("patterns: an expanded plan has a spec for every tensor; change those.")
        if not isinstance(model, ModelDescription):
            model = ModelDescription.from_module(model)
        shapes = model.shapes
        for name in shapes:
            if name not in self.tensors:
                raise PlanError(f"{tensor_path(name)}: missing; the model has this parameter.")
        for name, spec in self.tensors.items():
            if name not in shapes:
                raise PlanError(f"{tensor_path(name)}: the model has no such parameter.")
            placements = [spec.top, *(p for group in spec.subgroups for p in group.placements)]
            dims = [p.dim for p in placements if isinstance(p, Shard)]
            if any(not -len(shapes[name]) <= dim < len(shapes[name]) for dim in dims):
                raise PlanError(
                    f"{tensor_path(name)}: {spec} cuts a dim that the parameter of shape "
                    f"{shapes[name]} does not have."
                )
        return self

    def check(self, *, world_size: int) -> None:
        """Raise if the plan names a rank that a world of this size does not have.

        Raises:
            PlanError: The message names the field and the ranks.
        """
        fields.check_int("world_size", world_size, 1, fields.MAX_RANKS)
        for path, spec in self._specs():
            beyond = tuple(sorted(rank for rank in spec.ranks if rank >= world_size))
            if beyond:
                raise PlanError(
                    f"{path}: {some_ranks_text(beyond)} beyond the world, which has ranks 0 to "
                    f"{world_size - 1}. Start more processes, or use other ranks."
                )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the plan, sorted."""
        return tuple(sorted({rank for spec in self.distinct_specs for rank in spec.ranks}))

    @property
    def distinct_specs(self) -> tuple[HDSpec, ...]:
        """Every spec of the plan once, in a fixed order: the same on every rank."""
        return tuple(dict.fromkeys(spec for _, spec in self._specs()))

    @property
    def shares(self) -> tuple[int, ...]:
        """Part of the batch of each pipeline, in proportion and lowest terms."""
        return self.inputs.top_ratio or (1,) * self.inputs.num_subgroups

    def table(self, world_size: int | None = None) -> str:
        """Return the plan as a table of tensors and specs, like layers in one row.

        Args:
            world_size: If given, a last line names the ranks outside the plan.
        """
        return table.expanded_table(self, world_size)

    def __str__(self) -> str:
        return self.table()

    def _specs(self) -> Iterable[tuple[str, HDSpec]]:
        yield "inputs", self.inputs
        yield "labels", self.labels
        for name, spec in self.tensors.items():
            yield tensor_path(name), spec
        for index, point in enumerate(self.points):
            yield f"points[{index}].spec", point.spec


def tensor_path(name: object) -> str:
    """Return the JSON path of a tensor.

    >>> tensor_path("lm_head.weight")
    "tensors['lm_head.weight']"
    """
    return f"tensors[{fields.shown(name)}]"


class _SpecReader:
    """Reads specs, each different text once, and bounds the work that a short text can ask for."""

    def __init__(self) -> None:
        self._found: dict[str, HDSpec] = {}
        self._num_ranks = 0

    def __call__(self, where: str, value: Any) -> HDSpec:
        known = self._found.get(value) if isinstance(value, str) else None
        if known is not None:
            return known
        if isinstance(value, str):
            spans = [int(b) - int(a) + 1 for a, b in _RANGE.findall(value)]
            self._num_ranks += sum(span for span in spans if span > 0)
        if self._num_ranks > _MAX_RANKS_IN_ALL:
            raise PlanError(f"{where}: the plan's specs name more than {_MAX_RANKS_IN_ALL} ranks.")
        try:
            spec = spec_from_json(value, where)
        except SpecError as error:
            raise PlanError(str(error)) from None
        if isinstance(value, str):
            self._found[value] = spec
        return spec


def _check_spec(field: str, spec: object) -> None:
    if not isinstance(spec, HDSpec):
        raise PlanError(f"{field}: must be an HDSpec, got {fields.shown(spec)}.")
    fault = _fault(spec)
    if fault is not None:
        raise PlanError(f"{field}: {fault}")


@functools.lru_cache(maxsize=4096)  # a plan has many tensors and few specs
def _fault(spec: HDSpec) -> str | None:
    if spec.has_partial():
        return f"{spec} is Partial; a plan's tensors are whole or cut."
    largest = max(spec.ranks)
    if largest >= fields.MAX_RANKS:
        return f"ranks must be below {fields.MAX_RANKS}, got {fields.shown(largest)}."
    return None


def _check_batch_spec(field: str, spec: HDSpec, shares_sequences: bool) -> None:
    dim = spec.top.dim if isinstance(spec.top, Shard) else None
    if spec.num_subgroups > 1 and dim != 0 and not (dim == 1 and shares_sequences):
        raise PlanError(
            f"{field}: the top placement must be S0, the batch (or S1, the sequence, in a plan with "
            f"shared_sequences), got {spec}."
        )


def _sharing(value: Any) -> SharedSequences | None:
    if value is None:
        return None
    value = fields.check_object("shared_sequences", value)
    with fields.at("shared_sequences"):
        return fields.decode(SharedSequences, value)


def _cut(spec: HDSpec) -> tuple[int, tuple[int, ...] | None]:
    return spec.num_subgroups, spec.top_ratio


def _texts(field: str, value: Any) -> tuple[str, ...]:
    items = fields.check_sequence(field, value, "texts")
    return tuple(fields.check_text(f"{field}[{i}]", item) for i, item in enumerate(items))
