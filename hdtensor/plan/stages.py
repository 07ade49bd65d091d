"""The parts of a compact plan: ``Stage``, ``Pipeline``, ``Uniform``, and what a plan says of itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hdtensor.errors import PlanError
from hdtensor.plan import fields
from hdtensor.plan.reader import parse_json


#: Default of ``Stage.tp``, which the constructor replaces by a number.
_DERIVED: Any = None
_MAX_COUNT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers on one group of ranks: a cell of the paper's strategy tables (Tables 9-16).

    The ranks form a mesh of cp x ep x tp, tp innermost: ``tp * cp * ep == len(ranks)``.

    >>> Stage(ranks=(12, 13, 14, 15), layers=(45, 59)).tp
    4

    Attributes:
        ranks: Global ranks, without repeats.
        layers: First and last layer, both included, counted from 0.
        tp: Tensor parallel degree. Default: ``len(ranks) // (cp * ep)``.
        cp: Context parallel degree.
        ep: Expert parallel degree.
        device: Kind of device, such as "H20". Descriptive.
        name: Descriptive.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]
    tp: int = _DERIVED
    cp: int = 1
    ep: int = 1
    device: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        ranks = fields.check_ints("ranks", self.ranks, 0, fields.MAX_RANKS - 1)
        _check_ranks(ranks)
        first_last = fields.check_ints("layers", self.layers, 0, fields.MAX_LAYERS - 1)
        if len(first_last) != 2 or first_last[0] > first_last[1]:
            raise PlanError(
                f"layers: must be [first, last], both included and first <= last, got {first_last}."
            )
        cp = fields.check_int("cp", self.cp, 1, fields.MAX_RANKS)
        ep = fields.check_int("ep", self.ep, 1, fields.MAX_RANKS)
        if len(ranks) % (cp * ep):
            raise PlanError(
                f"ranks: {len(ranks)} ranks do not divide by cp * ep = {cp * ep}; "
                f"give a multiple of it."
            )
        tp = len(ranks) // (cp * ep)
        if self.tp is not None:
            tp = fields.check_int("tp", self.tp, 1, fields.MAX_RANKS)
        if tp * cp * ep != len(ranks):
            raise PlanError(
                f"tp: tp * cp * ep = {tp} * {cp} * {ep} = {tp * cp * ep} must be the number of "
                f"ranks, {len(ranks)}. Leave tp out to have it follow from the ranks."
            )
        _set(self, ranks=ranks, layers=first_last, cp=cp, ep=ep, tp=tp)
        _set(self, device=fields.check_optional_text("device", self.device))
        _set(self, name=fields.check_optional_text("name", self.name))

    @property
    def num_layers(self) -> int:
        """Number of layers that the stage holds."""
        return self.layers[1] - self.layers[0] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages that a micro-batch passes one after another: a row of the paper's strategy tables.

    What part of the global batch a pipeline takes (``samples``) follows from what is given:

    =====  ============  ===  ==========================================
    share  microbatches  mbs  part of the batch
    =====  ============  ===  ==========================================
    s      -             -    s
    s      m             -    s, in m micro-batches
    s      -             b    s, in micro-batches of b samples
    -      m             b    m * b
    -      -             -    equal parts; so in every pipeline or none
    =====  ============  ===  ==========================================

    Attributes:
        stages: At least one; they cover the layers in order.
        microbatches: Number of micro-batches in a step.
        mbs: Micro-batch size, samples.
        share: Part of the batch in proportion to the other pipelines' shares; 0 for none.
        name: Descriptive.
        role: What the pipeline is meant for, such as "long" sequences. Descriptive.
        implied_by_ellipsis: Whether the paper's table writes "..." for this row. Descriptive.
    """

    stages: tuple[Stage, ...]
    microbatches: int | None = None
    mbs: int | None = None
    share: int | None = None
    name: str | None = None
    role: str | None = None
    implied_by_ellipsis: bool = False

    def __post_init__(self) -> None:
        stages = tuple(fields.check_sequence("stages", self.stages, "stages"))
        if not stages:
            raise PlanError("stages: must hold at least one stage, got none.")
        for index, stage in enumerate(stages):
            if not isinstance(stage, Stage):
                raise PlanError(f"stages[{index}]: must be a Stage, got {fields.shown(stage)}.")
        most = fields.MAX_MICROBATCHES
        count = fields.check_optional_int("microbatches", self.microbatches, 1, most)
        size = fields.check_optional_int("mbs", self.mbs, 1, most)
        share = fields.check_optional_int("share", self.share, 0, fields.MAX_SHARE)
        _check_batch(count, size, share)
        _set(self, stages=stages, microbatches=count, mbs=size, share=share)
        _set(self, name=fields.check_optional_text("name", self.name))
        _set(self, role=fields.check_optional_text("role", self.role))
        fields.check_bool("implied_by_ellipsis", self.implied_by_ellipsis)

    @property
    def samples(self) -> int | None:
        """Part of the batch as an integer, or None where the batch is cut into equal parts."""
        if self.share is not None:
            return self.share
        if self.microbatches is None or self.mbs is None:
            return None
        return self.microbatches * self.mbs

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all stages, in stage order."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @classmethod
    def from_fields(cls, value: Mapping[str, Any]) -> Self:
        """Build from a JSON object.

        Raises:
            PlanError: The message begins with the path of the field, from the pipeline on.
        """
        value = dict(value)
        if "stages" in value:
            value["stages"] = tuple(
                _stage(f"stages[{i}]", item)
                for i, item in enumerate(fields.check_sequence("stages", value["stages"], "stages"))
            )
        return fields.decode(cls, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Pipelines that are all alike: dp of them, each of pp stages of tp ranks (Tables 8, 10, 13-14).

    Attributes:
        dp: Data parallel degree: number of pipelines.
        tp: Tensor parallel degree.
        pp: Pipeline parallel degree: stages per pipeline.
        cp: Context parallel degree.
        ep: Expert parallel degree.
        sp: Sequence parallel degree of DeepSpeed's kind (Ulysses).
        microbatches: Number of micro-batches of each pipeline in a step.
        mbs: Micro-batch size, samples.
        gpus: Number of ranks; must be the product of the degrees.
        activation_checkpointing: Whether activations are computed again in backward. Descriptive.
        text: Short form, such as "DP2TP4PP4, bs2". Descriptive.
    """

    dp: int
    tp: int
    pp: int
    cp: int = 1
    ep: int = 1
    sp: int = 1
    microbatches: int | None = None
    mbs: int | None = None
    gpus: int | None = None
    activation_checkpointing: bool = False
    text: str | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "sp"):
            degree = fields.check_int(name, getattr(self, name), 1, fields.MAX_RANKS)
            _set(self, **{name: degree})
        most = fields.MAX_MICROBATCHES
        count = fields.check_optional_int("microbatches", self.microbatches, 1, most)
        _set(self, microbatches=count, mbs=fields.check_optional_int("mbs", self.mbs, 1, most))
        if self.num_ranks > fields.MAX_RANKS:
            raise PlanError(
                f"dp: the degrees multiply to {self.num_ranks} ranks, more than {fields.MAX_RANKS}."
            )
        gpus = fields.check_optional_int("gpus", self.gpus, 1, fields.MAX_RANKS)
        if gpus is not None and gpus != self.num_ranks:
            raise PlanError(f"gpus: {gpus}, but the degrees multiply to {self.num_ranks}.")
        _set(self, gpus=gpus, text=fields.check_optional_text("text", self.text))
        fields.check_bool("activation_checkpointing", self.activation_checkpointing)

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the product of the degrees."""
        return math.prod((self.dp, self.tp, self.pp, self.cp, self.ep, self.sp))


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a plan says of itself. Nothing here changes what the plan does.

    Attributes:
        label: Name of the plan.
        model: Name of the model.
        context: Context length, tokens.
        cluster: Kind of device -> number of them.
        source_table: Table of the paper that the plan comes from.
        system: System that the plan is for.
        interval: Sequence lengths that the plan is for.
        max_seq_len_interval: Lengths of the longest sequence that the plan is for.
        tokens_per_step: Size of a step, tokens.
        reported_step_time_s: Time of a step that the paper reports, seconds.
        note: Anything else.
        planned_for: What a planner took this plan to be for, as JSON text; in a plan's JSON it is an object.
    """

    label: str | None = None
    model: str | None = None
    context: int | None = None
    cluster: tuple[tuple[str, int], ...] = ()
    source_table: int | None = None
    system: str | None = None
    interval: str | None = None
    max_seq_len_interval: tuple[str, str] | None = None
    tokens_per_step: int | None = None
    reported_step_time_s: float | None = None
    note: str | None = None
    planned_for: str | None = None

    def __post_init__(self) -> None:
        for name in ("label", "model", "system", "interval", "note"):
            fields.check_optional_text(name, getattr(self, name))
        for name in ("context", "source_table", "tokens_per_step"):
            fields.check_optional_int(name, getattr(self, name), 0, _MAX_COUNT)
        _set(self, cluster=_cluster(self.cluster))
        if self.max_seq_len_interval is not None:
            ends = fields.check_sequence("max_seq_len_interval", self.max_seq_len_interval, "texts")
            for index, end in enumerate(ends):
                fields.check_text(f"max_seq_len_interval[{index}]", end)
            _set(self, max_seq_len_interval=tuple(ends))
        _set(self, planned_for=_object_text("planned_for", self.planned_for))
        seconds = self.reported_step_time_s
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float)
        ):
            raise PlanError(
                f"reported_step_time_s: must be a number of seconds, got {fields.shown(seconds)}."
            )


def _set(value: object, **changes: Any) -> None:
    """Set checked fields of a frozen dataclass while it is being made."""
    for name, item in changes.items():
        object.__setattr__(value, name, item)


def _check_ranks(ranks: tuple[int, ...]) -> None:
    if not ranks:
        raise PlanError("ranks: must hold at least one rank, got none.")
    if len(set(ranks)) != len(ranks):
        seen: set[int] = set()
        for index, rank in enumerate(ranks):
            if rank in seen:
                raise PlanError(
                    f"ranks[{index}]: rank {rank} stands twice in this stage; keep one."
                )
            seen.add(rank)


def _check_batch(count: int | None, size: int | None, share: int | None) -> None:
    """Raise unless the three say one part of the batch (``Pipeline``'s table)."""
    if share is not None and count is not None and size is not None:
        raise PlanError(
            "share: microbatches and mbs already say how much of the batch this pipeline takes; "
            "leave out one of the three."
        )
    if share is None and (count is None) != (size is None):
        missing = "mbs" if size is None else "microbatches"
        raise PlanError(f"{missing}: missing; give microbatches and mbs together, or a share.")


def _stage(where: str, value: Any) -> Stage:
    if isinstance(value, Stage):
        return value
    value = fields.check_object(where, value)
    with fields.at(where):
        return fields.decode(Stage, value)


def _object_text(path: str, value: Any) -> str | None:
    """Return an object, or its JSON text, as JSON text."""
    if value is None:
        return None
    if isinstance(value, str):
        with fields.at(path):
            value = parse_json(value, "the text")
    try:
        return json.dumps(fields.check_object(path, value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path}: must be an object of JSON values: {error}.") from None


def _cluster(value: Any) -> tuple[tuple[str, int], ...]:
    pairs = value if isinstance(value, tuple) else fields.check_object("cluster", value).items()
    out = []
    for kind, count in pairs:
        path = f"cluster.{fields.key_text(kind)}"
        fields.check_text(path, kind)
        out.append((kind, fields.check_int(path, count, 0, fields.MAX_RANKS)))
    return tuple(out)
