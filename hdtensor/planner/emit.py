"""``emit``: a strategy as the plan file that ranks run, and any such file as a strategy."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hdtensor.errors import PlannerError
from hdtensor.placements.checks import ranks_text
from hdtensor.plan import About, Pipeline, Stage, StrategyPlan
from hdtensor.planner.cluster import Cluster, Node
from hdtensor.planner.cluster_fields import cluster_of_fields, cluster_to_fields
from hdtensor.planner.cluster_text import NODE_SIZE, make_cluster, usual_inside, usual_uplink
from hdtensor.planner.library import find_device
from hdtensor.planner.model import ModelShape
from hdtensor.planner.models import MODELS, find_model
from hdtensor.planner.quantities import planner_errors, whole_number
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import MAX_BATCH, Workload


class Planned(NamedTuple):
    """A strategy and what it is for.

    Attributes:
        strategy: The lanes.
        model: The model.
        cluster: The devices.
        workload: The step.
    """

    strategy: Strategy
    model: ModelShape
    cluster: Cluster
    workload: Workload


def emit(
    planned: Planned,
    *,
    label: str | None = None,
    predicted: Mapping[str, Any] | None = None,
    lost: Sequence[int] = (),
) -> StrategyPlan:
    """Return the annotation plan of a strategy (HSPMD paper, section 3 and appendix A.1).

    Its ``planned_for`` says model, cluster and workload in full, so that ``read_planned`` needs nothing else.

    Args:
        planned: The strategy, and what it is for.
        label: A name of the plan.
        predicted: JSON values that the planner says of the plan, such as ``step_seconds``.
        lost: Ranks of the cluster that it had to do without.

    Raises:
        PlannerError: If the strategy does not fit the model or the cluster.
    """
    check_strategy(planned)
    strategy, model, cluster, workload = planned
    kinds = [device.name for device in cluster.devices()]
    pipelines = []
    for lane in strategy.lanes:
        stages, first = [], 0
        for choice in lane.stages:
            stages.append(
                Stage(
                    ranks=choice.ranks,
                    layers=(first, first + choice.num_layers - 1),
                    tp=choice.tp,
                    cp=choice.cp,
                    device=kinds[choice.ranks[0]],
                )
            )
            first += choice.num_layers
        pipelines.append(
            Pipeline(stages=tuple(stages), microbatches=lane.num_microbatches, mbs=lane.mbs)
        )
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    purpose: dict[str, Any] = {
        "model": model.name if MODELS.get(model.name) == model else dataclasses.asdict(model),
        "cluster": cluster_to_fields(cluster),
        "workload": dataclasses.asdict(workload),
    }
    if predicted is not None:
        purpose["predicted"] = dict(predicted)
    if lost:
        purpose["lost"] = list(lost)
    about = About(
        label=label,
        model=model.name,
        context=workload.context,
        cluster=tuple(counts.items()),
        planned_for=json.dumps(purpose, allow_nan=False),
    )
    return StrategyPlan(pipelines=tuple(pipelines), zero=workload.zero, about=about)


def read_planned(
    plan: StrategyPlan,
    *,
    model: str | None = None,
    cluster: Cluster | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Planned:
    """Return the strategy of a plan, and what it is for.

    A plan that ``emit`` made says everything. Of any other one, such as the paper's, model, context and kinds
    of devices are read where it states them; nodes are taken to be of 8 consecutive ranks.

    Args:
        plan: The plan.
        model: Name or ``config.json``, where the plan does not say it, or another one is meant.
        cluster: The devices, likewise.
        changes: Fields of ``Workload`` that the plan does not say, or that are to be others. The batch is the
            plan's where it gives micro-batches, and ZeRO is the plan's.

    Raises:
        PlannerError: If something is missing, or does not fit together.
    """
    about = plan.about
    purpose = json.loads(about.planned_for) if about.planned_for is not None else {}
    shape = _model(purpose, model, about.model)
    with planner_errors("plan"):
        plan = plan.with_pipelines(shape.num_layers)
    if cluster is None:
        cluster = (
            cluster_of_fields(purpose["cluster"]) if "cluster" in purpose else cluster_of_plan(plan)
        )
    known = {"context": about.context, **_fields_of(purpose.get("workload", {}))}
    known |= {key: value for key, value in (changes or {}).items() if value is not None}
    known["zero"] = plan.zero
    # Micro-batches in the file win over the batch that it was once planned for: people edit them.
    said = None if _says_samples(plan) else known.get("batch")
    strategy = strategy_of_plan(plan, (changes or {}).get("batch") or said)
    known["batch"] = sum(lane.num_microbatches * lane.mbs for lane in strategy.lanes)
    if known["context"] is None:
        raise PlannerError("context: the plan does not say the tokens of a sample; give it.")
    planned = Planned(strategy, shape, cluster, Workload(**known))
    check_strategy(planned)
    return planned


def strategy_of_plan(plan: StrategyPlan, batch: int | None = None) -> Strategy:
    """Return the lanes of a plan.

    Args:
        plan: A plan with pipelines.
        batch: Samples of a step, for pipelines that say their shares only. A share becomes micro-batches of
            ``mbs`` samples, or of one.

    Raises:
        PlannerError: If a pipeline asks for what a strategy cannot say.
    """
    if plan.split != "batch":
        raise PlannerError(
            "split: pipelines that share sequences are not planned; give each its part of the batch."
        )
    shares = _shares(plan, batch)
    lanes = []
    for index, (pipeline, samples) in enumerate(zip(plan.pipelines, shares, strict=True)):
        if samples == 0:
            continue
        if any(stage.ep > 1 for stage in pipeline.stages):
            raise PlannerError(f"pipelines[{index}]: expert parallel stages are not planned yet.")
        mbs, count = pipeline.mbs, pipeline.microbatches
        if mbs is None:
            mbs = samples // count if count else 1
        count = samples // mbs
        if not count or count * mbs != samples:
            raise PlannerError(
                f"pipelines[{index}]: {samples} samples are no whole number of micro-batches of equal size; "
                f"change microbatches, mbs or the share."
            )
        stages = tuple(
            StageChoice(stage.ranks, stage.num_layers, stage.tp, stage.cp)
            for stage in pipeline.stages
        )
        lanes.append(LaneChoice(stages, count, mbs))
    return Strategy(tuple(lanes))


def cluster_of_plan(plan: StrategyPlan, node_size: int = NODE_SIZE) -> Cluster:
    """Return the cluster whose kinds of devices a plan's stages name, in nodes of consecutive ranks.

    A rank that the plan leaves out is taken to be like the others of its node.

    Raises:
        PlannerError: If a stage does not name its kind.
    """
    kinds: dict[int, str] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.device is None:
                raise PlannerError(
                    f"cluster: pipelines[{p}].stages[{s}] does not name its device; describe the cluster."
                )
            kinds.update(dict.fromkeys(stage.ranks, stage.device))
    num_ranks = 1 + max(kinds)
    nodes: list[Node] = []
    for first in range(0, num_ranks, node_size):
        ranks = range(first, min(first + node_size, num_ranks))
        before = nodes[-1].device.name if nodes else kinds[min(kinds)]
        own = [kinds.get(rank) for rank in ranks]
        filled = _filled(own, next((kind for kind in own if kind), before))
        nodes += _nodes(filled)
    return make_cluster(nodes)


def check_strategy(planned: Planned) -> None:
    """Raise unless a strategy fits its model, cluster and batch.

    Raises:
        PlannerError: The message begins with the path of the lane or stage.
    """
    strategy, model, cluster, workload = planned
    if not strategy.lanes:
        raise PlannerError("lanes: a strategy has one lane or more, got none.")
    seen: set[int] = set()
    for p, lane in enumerate(strategy.lanes):
        num_layers = sum(stage.num_layers for stage in lane.stages)
        if num_layers != model.num_layers:
            raise PlannerError(
                f"lanes[{p}]: holds {num_layers} layers, but {model.name} has {model.num_layers}."
            )
        for s, stage in enumerate(lane.stages):
            _check_stage(f"lanes[{p}].stages[{s}]", stage, seen, cluster)
    total = sum(lane.num_microbatches * lane.mbs for lane in strategy.lanes)
    if total != workload.batch:
        raise PlannerError(
            f"batch: the lanes take {total} samples, but a step has {workload.batch}."
        )


def _check_stage(path: str, stage: StageChoice, seen: set[int], cluster: Cluster) -> None:
    beyond = tuple(rank for rank in stage.ranks if not 0 <= rank < cluster.num_ranks)
    if beyond:
        raise PlannerError(
            f"{path}: ranks {ranks_text(beyond[:16])} are beyond the cluster, which has ranks 0 to "
            f"{cluster.num_ranks - 1}."
        )
    if seen & set(stage.ranks) or len(set(stage.ranks)) != len(stage.ranks):
        raise PlannerError(f"{path}: a rank is in two stages; each is in one at most.")
    seen.update(stage.ranks)
    if stage.tp * stage.cp != len(stage.ranks) or stage.num_layers < 1:
        raise PlannerError(
            f"{path}: needs a layer and tp * cp = {stage.tp * stage.cp} ranks, got {stage.num_layers} layers "
            f"on {len(stage.ranks)} ranks."
        )
    kinds = {cluster.nodes[cluster.node_of(rank)].device.name for rank in stage.ranks}
    if len(kinds) > 1:
        raise PlannerError(
            f"{path}: its ranks are of unlike kinds, {', '.join(sorted(kinds))}; use one kind in a stage."
        )


def _model(purpose: Mapping[str, Any], given: str | None, said: str | None) -> ModelShape:
    if given is not None:
        return find_model(given)
    if isinstance(purpose.get("model"), Mapping):
        try:
            return ModelShape(**purpose["model"])
        except TypeError as error:
            raise PlannerError(
                f"planned_for.model: {error}; it must have the fields of a model."
            ) from None
    name = purpose.get("model", said)
    if not isinstance(name, str):
        raise PlannerError(
            f"model: the plan does not say its model; give one of {', '.join(MODELS)}, or a config.json."
        )
    return find_model(name)


def planned_model(plan: StrategyPlan) -> ModelShape | None:
    """Return the model that a plan was made for, None if no planner says it.

    Raises:
        PlannerError: If it is none.
    """
    purpose = json.loads(plan.about.planned_for) if plan.about.planned_for is not None else {}
    return _model(purpose, None, None) if purpose.get("model") is not None else None


def _fields_of(value: Any) -> dict[str, Any]:
    allowed = [field.name for field in dataclasses.fields(Workload)]
    if not isinstance(value, Mapping) or not set(value) <= set(allowed):
        raise PlannerError(f"planned_for.workload: must be an object of {', '.join(allowed)}.")
    return dict(value)


def _says_samples(plan: StrategyPlan) -> bool:
    """Return whether a plan says how many samples each pipeline takes, not only which part."""
    return plan.shares is not None and all(lane.share is None for lane in plan.pipelines)


def _shares(plan: StrategyPlan, batch: int | None) -> tuple[int, ...]:
    """Return the samples of each pipeline."""
    parts = plan.shares or (1,) * len(plan.pipelines)
    is_exact = (
        all(pipeline.share is None for pipeline in plan.pipelines) and plan.shares is not None
    )
    if batch is None and not is_exact:
        raise PlannerError(
            "batch: the plan says which part of a batch its pipelines take, but not of how many samples; give "
            "the batch."
        )
    if batch is None:
        return parts
    whole_number("batch", batch, 1, MAX_BATCH)
    total = sum(parts)
    if any(batch * part % total for part in parts):
        raise PlannerError(
            f"batch: {batch} samples cannot be dealt by the plan's parts {':'.join(map(str, parts))[:100]} without rest; "
            f"give a multiple."
        )
    return tuple(batch * part // total for part in parts)


def _filled(kinds: list[str | None], first: str) -> Iterator[str]:
    """Yield kinds with gaps filled by the kind before."""
    last = first
    for kind in kinds:
        last = kind or last
        yield last


def _nodes(kinds: Iterator[str]) -> Iterator[Node]:
    """Yield a node for each run of equal kinds."""
    for kind, run in itertools.groupby(kinds):
        device = find_device(kind, field="cluster")
        yield Node(
            device=device,
            num_devices=sum(1 for _ in run),
            inside=usual_inside(device),
            uplink=usual_uplink(device),
        )
