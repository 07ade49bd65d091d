"""``Runner``: trains a model whose plan has pipelines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hdtensor._torch_compat import new_wrapper
from hdtensor.api import parallelize as api, regions
from hdtensor.api.local import prepare_groups, shard_of
from hdtensor.collectives import groups
from hdtensor.errors import PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.pipeline.exchanges import plan_lanes
from hdtensor.pipeline.runtime import stage_points
from hdtensor.pipeline.runtime.batches import lane_rows, map_tensors, microbatches, num_rows, rows
from hdtensor.pipeline.runtime.execute import Executor, describe
from hdtensor.pipeline.runtime.failure import FailureGuard
from hdtensor.pipeline.runtime.gradients import StepGradients, give_empty
from hdtensor.pipeline.runtime.lane_plan import LanePlan, lane_plan
from hdtensor.pipeline.runtime.losses import causal_lm_loss, read_loss
from hdtensor.pipeline.runtime.parameters import LaneParameters
from hdtensor.pipeline.runtime.passage import Learned, running
from hdtensor.pipeline.runtime.targets import OptimizerTargets
from hdtensor.pipeline.schedule.actions import Action, Kind, Schedule
from hdtensor.pipeline.schedule.choose import build_schedule
from hdtensor.placements import HDSpec
from hdtensor.plan import AnnotationPlan, ModelDescription, Pattern
from hdtensor.plan.strategy import StrategyPlan
from hdtensor.tensor import HDTensor


#: ``loss_fn(output, target)`` returns the sum of a micro-batch's losses, and how many they are.
LossFunction = Callable[[Any, Any], tuple[torch.Tensor, Any]]


#: Of so many shapes of micro-batches a rank remembers what arrives; past it the table starts anew.
_MAX_SHAPES = 4096


class Runner:
    """Runs training steps of a model over pipelines, one program on every rank.

    >>> runner = Runner(model, plan, schedule="1f1b")  # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(runner.optimizer_parameters())  # doctest: +SKIP
    >>> loss = runner.step(batch)  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP

    Attributes:
        model: The model.
        lanes: The lanes that the plan makes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: AnnotationPlan,
        loss_fn: LossFunction = causal_lm_loss,
        *,
        schedule: str = "1F1B",
        num_microbatches: int | Sequence[int] | None = None,
        targets: Collection[str] = ("labels",),
        keep_plain: Collection[str] = ("attention_mask",),
        patterns: Sequence[Pattern | tuple[str, str]] = (),
        use_regions: bool = True,
    ) -> None:
        """Find the lanes and get ready; every rank of the world calls it.

        Args:
            model: A model, which is parallelized, or one that is already, by this plan.
            plan: The plan.
            loss_fn: ``loss_fn(output, target) -> (sum, count)``; called on the last stage with what the model
                returns.
            schedule: As for ``build_schedule``.
            num_microbatches: Of each lane, or of all; default the plan's ``microbatches``.
            targets: Names in a batch that go to ``loss_fn`` and not to the model.
            keep_plain: Names in a batch that stay plain tensors, as for ``distribute_batch``.
            patterns: As for ``parallelize``.
            use_regions: As for ``parallelize``.

        Raises:
            PlanError: If the plan does not fit the model, or is no set of pipelines.
            ScheduleError: If a lane cannot follow the schedule.
        """
        self.model = model
        self._loss_fn = loss_fn
        self._targets = tuple(targets)
        self._keep_plain = tuple(keep_plain)
        self._schedule_name = schedule
        if not api.is_parallelized(model):
            api.parallelize(model, plan, patterns=patterns, use_regions=use_regions)
        self._state = api.state_of(model)
        self._plan = self._state.plan
        self.lanes = plan_lanes(self._plan)
        self._sizes = _sizes(plan, len(self.lanes))
        self._counts = _counts(plan, num_microbatches, len(self.lanes))
        names = [
            (p.name, p.same_as or p.name) for p in ModelDescription.from_module(model).parameters
        ]
        plans = [lane_plan(self._plan, lane, names) for lane in self.lanes]
        self._prepare_groups(plans)
        self._rank = dist.get_rank()
        self._index = next(
            (i for i, lane in enumerate(self.lanes) if self._rank in lane.ranks), None
        )
        self._guard = FailureGuard(range(dist.get_world_size()))
        self._executor: Executor | None = None
        self._learned: dict[Any, Learned] = {}
        self._schedules: dict[int, Schedule] = {}
        self._sum, self._count = 0.0, 0.0
        self._optimized = OptimizerTargets(model, self._plan.zero)
        self._lane: LanePlan | None = None
        if self._index is not None:
            self._lane = plans[self._index]
            self._place = self._lane.lane.place_of(self._rank)
            self._stages = self._lane.lane.places[self._place].stages
            self._parameters = LaneParameters(model, self._lane.slots)
            self._install(use_regions)

    def _prepare_groups(self, plans: Sequence[LanePlan]) -> None:
        specs = [s for p in plans for s in (p.inputs, p.labels, *p.slots.values())]
        specs += [point.spec for p in plans for point in p.points]
        prepare_groups(*dict.fromkeys(specs))
        groups.ensure_channels()
        groups.ensure_lane_groups()

    def _install(self, use_regions: bool) -> None:
        assert self._lane is not None, "only ranks of lanes run the model"
        self._gradients = StepGradients(self._parameters, self._stages)
        with self._parameters.in_place():
            self._hooks = stage_points.place(self.model, self._lane)
            if use_regions:
                description = ModelDescription.from_module(self.model)
                sync: Any = self._gradients
                # A backward in two parts looks for each weight in the graph.
                self._regions = regions.install(
                    self.model, description, sync, only_skips=self._is_split()
                )

    def _is_split(self) -> bool:
        """Whether the schedule's backwards are in two parts."""
        assert self._lane is not None, "only ranks of lanes have a schedule"
        count = max(self._counts[self.lanes.index(self._lane.lane)], 1)
        rows_ = build_schedule(self._schedule_name, self._lane.lane, count).rows
        return any(a.kind is Kind.BACKWARD_INPUT for row in rows_ for a in row)

    def optimizer_parameters(
        self, free_bytes: Mapping[int, int] | None = None
    ) -> list[torch.Tensor]:
        """Return the tensors to build the optimizer from; every rank of the world calls it.

        With zero 0 these are the model's parameters. With zero 1 they are masters: fp32, each cut over all ranks that hold
        its parameter, so that optimizer state is too. ``step`` fills their gradients; after a step of the optimizer the
        parameters get their values.

        Args:
            free_bytes: With zero 1, at the first call: bytes of memory that every rank has free for optimizer state, which
                is dealt in proportion; default: every rank of a parameter gets as much of it.

        Raises:
            PlanError: If free memory is given for zero 0, later, or not for all ranks.
        """
        return self._optimized.tensors(free_bytes)

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """Run forward and backward of a batch; gradients are added to the parameters', as by ``backward()``.

        Args:
            batch: The same whole batch on every rank: a mapping of tensors with samples along dim 0.

        Returns:
            The mean loss over everything that counts in the batch: a plain tensor, the same on every rank of the world.
        """
        with self._guard.step(self._let_go):
            found = self._optimized.homes()
            self._run(batch, is_training=True)
            is_late = self._lane is not None and self._gradients.flush()
            self._guard.doing("the sum of losses")
            total, count, num_late = self._all_counted(is_late)
            if self._lane is not None:
                self._guard.doing("the synchronization of gradients")
                self._gradients.finish(1.0 / count if count else 0.0, is_again=num_late > 0)
            give_empty(found)
        return torch.tensor(total / count if count else float("nan"))

    @torch.no_grad()
    def eval(self, batch: Any) -> torch.Tensor:
        """Run forward only; arguments and result as of ``step``."""
        with self._guard.step(self._let_go):
            self._run(batch, is_training=False)
            self._guard.doing("the sum of losses")
            total, count, _ = self._all_counted()
        return torch.tensor(total / count if count else float("nan"))

    def _run(self, batch: Any, *, is_training: bool) -> None:
        self._sum, self._count = 0.0, 0.0
        if self._lane is None:
            return
        parts = self._microbatches(batch)
        row = self._row(len(parts), is_training)
        if is_training:
            self._gradients.begin(self._optimized.homes(), row)
        self._executor = executor = Executor(
            self._stages,
            lambda number: self._call(parts[number], is_training),
            lambda: (leaf for leaf in self._parameters if leaf.is_local and leaf.requires_grad),
            is_training=is_training,
            note=self._note if is_training else lambda action: self._guard.doing(describe(action)),
            learned=lambda number: self._learned_with(parts[number], is_training),
            may_leave=self._rank not in self._lane.labels.ranks,
        )
        with self._parameters.in_place(), self._state.running_lane():
            executor.run(row)

    def _note(self, action: Action) -> None:
        self._guard.doing(describe(action))
        self._gradients.before(action)

    def _learned_with(self, part: Any, is_training: bool) -> Learned:
        """Return what is known of calls with a micro-batch of these shapes."""
        shapes: list[Any] = [is_training, torch.is_grad_enabled(), self.model.training]
        map_tensors(part, lambda name, t: shapes.append((name, t.shape, t.dtype)))
        if len(self._learned) >= _MAX_SHAPES:
            self._learned.clear()
        return self._learned.setdefault(tuple(shapes), Learned())

    def _let_go(self) -> None:
        if self._executor is not None:
            self._executor.let_go()

    def _row(self, num: int, is_training: bool) -> tuple[Action, ...]:
        assert self._lane is not None, "only ranks of lanes have a row"
        if not is_training:
            return tuple(Action(s, Kind.FORWARD, m) for m in range(num) for s in self._stages)
        schedule = self._schedules.get(num)
        if schedule is None:
            schedule = build_schedule(self._schedule_name, self._lane.lane, num)
            self._schedules[num] = schedule
        return schedule.rows[self._place]

    def _microbatches(self, batch: Any) -> list[Any]:
        assert self._index is not None, "only ranks of lanes have a part of the batch"
        start, stop = lane_rows(self._plan.inputs, num_rows(batch))[self._index]
        if start == stop:
            return []
        num = self._counts[self._index]
        return microbatches(rows(batch, start, stop), num, self._sizes[self._index])

    def _call(self, part: Any, is_training: bool) -> None:
        """Call the model with a micro-batch; on the last stage, the loss function."""
        assert self._lane is not None, "only ranks of lanes run the model"
        inputs, target = self._divide(part)
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        if self._rank not in self._lane.labels.ranks:
            return
        total, count = read_loss(self._loss_fn(output, target))
        passage = running()
        assert passage is not None, "a runner calls the model"
        if is_training:
            passage.segments[-1].loss = total
        if (
            self._rank == self._lane.labels.subgroups[0].ranks[0]
            or len(self._lane.labels.ranks) > 1
        ):
            total, count = _value(total), _value(count)
        if self._rank == self._lane.labels.subgroups[0].ranks[0]:
            self._sum += total
            self._count += count

    def _divide(self, part: Any) -> tuple[Any, Any]:
        """Return what the model is called with and what the loss function gets."""
        assert self._lane is not None, "only ranks of lanes run the model"
        inputs, labels = self._lane.inputs, self._lane.labels
        if isinstance(part, dict):
            to_model = {
                k: v if k in self._keep_plain else _cut(v, inputs)
                for k, v in part.items()
                if k not in self._targets
            }
            found = {k: _cut(part[k], labels) for k in self._targets if k in part}
            return to_model, next(iter(found.values())) if len(found) == 1 else found
        *first, last = part
        return [_cut(v, inputs) for v in first], _cut(last, labels)

    def _all_counted(self, is_late: bool = False) -> tuple[float, float, float]:
        """Return the sum of all losses, how many count, of all lanes, and how many ranks have late gradients."""
        mine = torch.tensor([self._sum, self._count, is_late], dtype=torch.float64)
        dist.all_reduce(mine, group=groups.lane_group())
        total, count, num_late = mine.tolist()
        return total, count, num_late


def _value(x: Any) -> float:
    if isinstance(x, HDTensor):
        x = x.detach().to_dtensor().full_tensor()
    return float(x)


def _cut(value: Any, spec: HDSpec) -> Any:
    """Return a plain batch's tensors as this rank's part of a micro-batch."""

    def cut(_: str, tensor: torch.Tensor) -> Any:
        if not tensor.ndim:
            return tensor
        bound = BoundSpec.bind(spec, tensor.shape, None, tensor.dtype)
        return new_wrapper(HDTensor, shard_of(tensor, bound), bound, False)

    return map_tensors(value, cut)


def _counts(plan: AnnotationPlan, given: int | Sequence[int] | None, num_lanes: int) -> list[int]:
    """Return each lane's number of micro-batches."""
    if given is not None:
        counts = [given] * num_lanes if isinstance(given, int) else list(given)
        if len(counts) != num_lanes or any(not isinstance(n, int) or n < 1 for n in counts):
            raise PlanError(
                f"num_microbatches must be one number for each of the {num_lanes} lanes, at least 1, got {given}."
            )
        return counts
    pipelines = plan.pipelines if isinstance(plan, StrategyPlan) else ()
    if len(pipelines) != num_lanes or any(p.microbatches is None for p in pipelines):
        raise PlanError(
            f"the plan does not say how many micro-batches each of its {num_lanes} lanes runs; give its pipelines "
            f"'microbatches', or pass num_microbatches."
        )
    return [p.microbatches or 1 for p in pipelines]


def _sizes(plan: AnnotationPlan, num_lanes: int) -> list[int | None]:
    pipelines = plan.pipelines if isinstance(plan, StrategyPlan) else ()
    return [p.mbs for p in pipelines] if len(pipelines) == num_lanes else [None] * num_lanes
