"""From pipelines of stages to the spec of every tensor. Pure: names, shapes and numbers only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence

from torch.distributed.tensor import Replicate, Shard

from hdtensor.errors import PlanError
from hdtensor.placements import HDSpec, Subgroup
from hdtensor.plan import cuts
from hdtensor.plan.cuts import check_heads, one_placement, replicated_kv
from hdtensor.plan.expanded import ExpandedPlan, RedistributePoint
from hdtensor.plan.model import ModelDescription
from hdtensor.plan.patterns import LLAMA_PATTERNS, VOCAB_PARALLEL, Pattern, Role
from hdtensor.plan.sites import Site, Use, find_uses, layer_sites, stages_at
from hdtensor.plan.stages import Pipeline
from hdtensor.plan.validate import check_executable


def expand_strategy(
    pipelines: Sequence[Pipeline],
    zero: int,
    model: ModelDescription,
    patterns: Sequence[Pattern] = (),
) -> ExpandedPlan:
    """Return the spec of every parameter, of the batch, and of the points between.

    Top tier: a parameter has one subgroup in each pipeline, the stage that uses it (``find_uses``),
    and is replicated over them (Sec. 4.2); a tied weight has one per use. Bottom tier: by ``Role``.
    The batch is cut over the pipelines in proportion to their shares.

    Args:
        pipelines: Checked pipelines (``check_pipelines``).
        zero: ZeRO stage, recorded.
        model: What to spread.
        patterns: Rules before ``LLAMA_PATTERNS``.

    Raises:
        PlanError: If the pipelines do not fit the model.
    """
    check_executable(pipelines)
    _check_patterns(patterns, model)
    uses = find_uses(pipelines, model, (*patterns, *LLAMA_PATTERNS))
    check_heads(pipelines, model, uses)
    by_parameter: dict[str, list[Use]] = {}
    for use in uses:
        by_parameter.setdefault(use.first_name, []).append(use)
    specs: dict[tuple[Hashable, ...], HDSpec] = {}
    tensors = {
        name: _parameter_spec(pipelines, model, group, specs)
        for name, group in by_parameter.items()
    }
    matched = {use.first_name for use in uses if use.is_matched}
    return ExpandedPlan(
        tensors=tensors,
        inputs=activation_spec(pipelines, (0,) * len(pipelines)),
        labels=activation_spec(pipelines, tuple(len(p.stages) - 1 for p in pipelines)),
        points=tuple(_points(pipelines, model, uses)),
        zero=zero,
        replicated_kv=replicated_kv(pipelines, model, uses),
        unmatched=tuple(name for name in tensors if name not in matched),
    )


def _check_patterns(patterns: Sequence[Pattern], model: ModelDescription) -> None:
    """Raise on a rule of the user that names nothing: it is a typing error, and would cut nothing."""
    names = [name for name, _, _ in model.parameters]
    for index, pattern in enumerate(patterns):
        if pattern not in VOCAB_PARALLEL and not any(map(pattern.matches, names)):
            raise PlanError(
                f"patterns[{index}]: {pattern.glob!r} names none of the model's {len(names)} parameters. "
                f"Names look like {', '.join(map(repr, names[:3]))}."
            )


def activation_spec(pipelines: Sequence[Pipeline], site: Site) -> HDSpec:
    """Return the spec of hidden states at a site: the batch in shares, whole inside each stage."""
    samples = [pipeline.samples for pipeline in pipelines]
    known = [part for part in samples if part is not None]
    subgroups = [Subgroup(stage.ranks) for stage in stages_at(pipelines, site)]
    return HDSpec(subgroups, Shard(0), known or None)


def _parameter_spec(
    pipelines: Sequence[Pipeline],
    model: ModelDescription,
    uses: Sequence[Use],
    specs: dict[tuple[Hashable, ...], HDSpec],
) -> HDSpec:
    """Return the spec of a parameter; ``specs`` keeps each, since there are few different ones."""
    key = tuple((use.role, len(use.shape), use.site) for use in uses)
    if key not in specs:
        subgroups = []
        for p, pipeline in enumerate(pipelines):
            for s in sorted({use.site[p] for use in uses}):
                stage = pipeline.stages[s]
                subgroups.append(Subgroup(stage.ranks, (one_placement(uses, stage, model),)))
        specs[key] = HDSpec(subgroups, Replicate())
    return specs[key]


def _points(
    pipelines: Sequence[Pipeline], model: ModelDescription, uses: Sequence[Use]
) -> Iterator[RedistributePoint]:
    """Yield each point once, in the order in which the parameters are registered.

    =====================================  =======================================  =====
    point                                  why                                      kind
    =====================================  =======================================  =====
    input of a layer                       some pipeline's stage begins there       stage
    input of the module around a column    its gradient is Partial inside the       tp
    (or heads) weight that is cut          subgroup
    output of a row or vocab weight's      it is Partial inside the subgroup        tp
    module, if the weight is cut
    =====================================  =======================================  =====
    """
    seen: set[tuple[str, str]] = set()
    is_cut: dict[tuple[Hashable, ...], bool] = {}
    by_layer = layer_sites(pipelines)
    modules = model.layer_modules
    begins = {b for a, b in itertools.pairwise(modules) if by_layer[a] != by_layer[b]}
    activation = functools.cache(functools.partial(activation_spec, pipelines))
    for use in uses:
        spec = activation(use.site)
        wanted: list[RedistributePoint] = []
        if use.layer is not None and use.layer in begins:
            wanted += (
                RedistributePoint(module=module, side="input", kind="stage", spec=spec)
                for module in modules[use.layer]
            )
        key = (use.role, len(use.shape), use.site)
        if key not in is_cut:
            is_cut[key] = _is_cut(use, pipelines, model)
        if is_cut[key]:
            wanted.append(_tp_point(use, model, spec))
        for point in wanted:
            if (point.module, point.side) not in seen:
                seen.add((point.module, point.side))
                yield point


def _is_cut(use: Use, pipelines: Sequence[Pipeline], model: ModelDescription) -> bool:
    """Return whether some stage that uses the parameter cuts it."""
    stages = stages_at(pipelines, use.site)
    return any(isinstance(cuts.placement(use, stage, model), Shard) for stage in stages)


def _tp_point(use: Use, model: ModelDescription, spec: HDSpec) -> RedistributePoint:
    module = use.name.rpartition(".")[0]
    if use.role in (Role.ROW, Role.VOCAB):
        return RedistributePoint(module=module, side="output", kind="tp", spec=spec)
    around = module.rpartition(".")[0]
    layer = model.layer_of(use.name)
    if layer is not None and around.startswith(f"{layer[0]}."):
        module = around  # q, k and v have one input: one redistribute for all of them
    return RedistributePoint(module=module, side="input", kind="tp", spec=spec)
