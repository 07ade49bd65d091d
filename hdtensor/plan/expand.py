"""From pipelines of stages to the spec of every tensor. Pure: names, shapes and numbers only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

from torch.distributed.tensor import Replicate, Shard

from hdtensor.errors import PlanError
from hdtensor.placements import HDSpec
from hdtensor.plan.crossings import find_points
from hdtensor.plan.cuts import check_heads, one_placement, replicated_kv, stage_group
from hdtensor.plan.expanded import ExpandedPlan
from hdtensor.plan.families import VOCAB_PARALLEL
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import Pattern
from hdtensor.plan.sequences import (
    SharedSequences,
    Split,
    attention_modules,
    shares_sequences,
)
from hdtensor.plan.sites import Site, Use, find_uses, stages_at
from hdtensor.plan.stages import Pipeline
from hdtensor.plan.validate import check_executable


def expand_strategy(
    pipelines: Sequence[Pipeline],
    zero: int,
    model: ModelDescription,
    patterns: Sequence[Pattern] = (),
    *,
    sequence_parallel: bool = False,
    split: Split = "batch",
    sharing: SharedSequences | None = None,
) -> ExpandedPlan:
    """Return the spec of every parameter, of the batch, and of the points between.

    Top tier: a parameter has one subgroup in each pipeline, the stage that uses it (``find_uses``),
    and is replicated over them (Sec. 4.2); a tied weight has one per use. Bottom tier: by ``Role``.
    The batch, or every sequence, is cut over the pipelines in proportion to their shares.

    Args:
        pipelines: Checked pipelines (``check_pipelines``).
        zero: ZeRO stage, recorded.
        model: What to spread.
        patterns: Rules before the built-in ones (``plan.families``).
        sequence_parallel: Cut hidden states between blocks on the sequence, over the tp axis.
        split: What the pipelines' shares are parts of.
        sharing: Method and order where ranks share sequences.

    Raises:
        PlanError: If the pipelines do not fit the model.
    """
    check_executable(pipelines)
    _check_patterns(patterns, model)
    uses = find_uses(pipelines, model, patterns)
    check_heads(pipelines, model, uses)
    by_parameter: dict[str, list[Use]] = {}
    for use in uses:
        by_parameter.setdefault(use.first_name, []).append(use)
    specs: dict[tuple[Hashable, ...], HDSpec] = {}
    tensors = {
        name: _parameter_spec(pipelines, model, group, specs)
        for name, group in by_parameter.items()
    }
    activation = functools.cache(functools.partial(activation_spec, pipelines, split=split))
    matched = {use.first_name for use in uses if use.is_matched}
    return ExpandedPlan(
        tensors=tensors,
        inputs=activation((0,) * len(pipelines)),
        labels=activation(tuple(len(p.stages) - 1 for p in pipelines)),
        points=tuple(find_points(pipelines, model, uses, activation, sequence_parallel)),
        zero=zero,
        replicated_kv=replicated_kv(pipelines, model, uses),
        unmatched=tuple(name for name in tensors if name not in matched),
        shared_sequences=_shared_sequences(pipelines, model, uses, split, sharing),
    )


def _shared_sequences(
    pipelines: Sequence[Pipeline],
    model: ModelDescription,
    uses: Sequence[Use],
    split: Split,
    sharing: SharedSequences | None,
) -> SharedSequences | None:
    if not shares_sequences(pipelines, split):
        return None
    modules = attention_modules(model, uses)
    return dataclasses.replace(sharing or SharedSequences(), modules=modules)


def _check_patterns(patterns: Sequence[Pattern], model: ModelDescription) -> None:
    """Raise on a rule of the user that names nothing: it is a typing error, and would cut nothing."""
    names = [parameter.name for parameter in model.parameters]
    for index, pattern in enumerate(patterns):
        if pattern not in VOCAB_PARALLEL and not any(map(pattern.matches, names)):
            raise PlanError(
                f"patterns[{index}]: {pattern.glob!r} names none of the model's {len(names)} parameters. "
                f"Names look like {', '.join(map(repr, names[:3]))}."
            )


def activation_spec(
    pipelines: Sequence[Pipeline],
    site: Site,
    split: Split = "batch",
    *,
    sequence_parallel: bool = False,
) -> HDSpec:
    """Return the spec of hidden states at a site: batch or sequence in shares, the sequence cut over each stage's cp.

    Between blocks, under sequence parallelism, it is cut over tp too.
    """
    samples = [pipeline.samples for pipeline in pipelines]
    known = [part for part in samples if part is not None]
    along_tp = Shard(1) if sequence_parallel else None
    subgroups = [
        stage_group(stage, along_tp, along_cp=Shard(1)) for stage in stages_at(pipelines, site)
    ]
    return HDSpec(subgroups, Shard(0 if split == "batch" else 1), known or None)


def _parameter_spec(
    pipelines: Sequence[Pipeline],
    model: ModelDescription,
    uses: Sequence[Use],
    specs: dict[tuple[Hashable, ...], HDSpec],
) -> HDSpec:
    """Return the spec of a parameter; ``specs`` keeps each, since there are few different ones."""
    key = tuple((use.role, len(use.shape), use.transposed, use.site) for use in uses)
    if key not in specs:
        subgroups = []
        for p, pipeline in enumerate(pipelines):
            stages = [pipeline.stages[s] for s in sorted({use.site[p] for use in uses})]
            # Stages on the same ranks share what both use.
            for stage in {stage.ranks: stage for stage in stages}.values():
                subgroups.append(stage_group(stage, one_placement(uses, stage, model)))
        specs[key] = HDSpec(subgroups, Replicate())
    return specs[key]
