"""``Runner``: trains a model whose plan has pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hdtensor.api import parallelize as api, regions
from hdtensor.api.agreement import exchange
from hdtensor.api.local import prepare_groups
from hdtensor.collectives import groups
from hdtensor.errors import PlanError
from hdtensor.pipeline.exchanges import plan_lanes
from hdtensor.pipeline.runtime import losses, stage_points, totals
from hdtensor.pipeline.runtime.activations import Offload, checkpoint_layers
from hdtensor.pipeline.runtime.batches import map_tensors
from hdtensor.pipeline.runtime.compiled import CompiledModules
from hdtensor.pipeline.runtime.execute import Executor, describe
from hdtensor.pipeline.runtime.failure import FailureGuard
from hdtensor.pipeline.runtime.feed import Feed, MicroBatch, Portions
from hdtensor.pipeline.runtime.gradients import Home, StepGradients, give_empty
from hdtensor.pipeline.runtime.inputs import InputLayout
from hdtensor.pipeline.runtime.lane_plan import LanePlan, lane_plan
from hdtensor.pipeline.runtime.losses import LossFunction, causal_lm_loss
from hdtensor.pipeline.runtime.options import RunnerOptions, chosen_stages
from hdtensor.pipeline.runtime.parameters import LaneParameters
from hdtensor.pipeline.runtime.passage import Learned, running
from hdtensor.pipeline.runtime.surroundings import Surroundings, without_cache
from hdtensor.pipeline.runtime.targets import OptimizerTargets
from hdtensor.pipeline.runtime.totals import End, Totals
from hdtensor.pipeline.schedule.actions import Action, Kind, Schedule
from hdtensor.pipeline.schedule.choose import build_schedule
from hdtensor.plan import AnnotationPlan, ModelDescription
from hdtensor.plan.strategy import StrategyPlan


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
        lane_index: Number of this rank's lane; None on a rank outside of all.
        inputs: Spec whose subgroups are the first stages, with the lanes' shares of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: AnnotationPlan,
        loss_fn: LossFunction | None = causal_lm_loss,
        *,
        schedule: str = "1F1B",
        num_microbatches: int | Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        """Find the lanes and get ready; every rank of the world calls it.

        Args:
            model: A model, which is parallelized, or one that is already, by this plan.
            plan: The plan.
            loss_fn: ``loss_fn(output, target) -> (sum, count)``; called on the last stage with what the model
                returns. None: the own loss of a causal language model of ``transformers``.
            schedule: As for ``build_schedule``.
            num_microbatches: Of each lane, or of all; default the plan's ``microbatches``.
            options: Those of ``RunnerOptions``.

        Raises:
            PlanError: If the plan does not fit the model, or is no set of pipelines.
            ScheduleError: If a lane cannot follow the schedule.
        """
        self.model = model
        self._options = RunnerOptions(**options)
        self._loss_fn = losses.ModelLoss(model) if loss_fn is None else loss_fn
        self._schedule_name = schedule
        if not api.is_parallelized(model):
            api.parallelize(
                model, plan, patterns=self._options.patterns, use_regions=self._options.use_regions
            )
        self._state = api.state_of(model)
        self._plan = self._state.plan
        self.lanes = plan_lanes(self._plan)
        self.inputs = self._plan.inputs
        description = ModelDescription.from_module(model)
        names = [(p.name, p.same_as or p.name) for p in description.parameters]
        plans = [lane_plan(self._plan, lane, names) for lane in self.lanes]
        self._prepare_groups(plans)
        self._rank = dist.get_rank()
        found = (i for i, lane in enumerate(self.lanes) if self._rank in lane.ranks)
        self.lane_index = next(found, None)
        num_lanes = len(self.lanes)
        self._counts = _counts(plan, num_microbatches, num_lanes)
        portions = Portions(self.inputs, self._counts, _sizes(plan, num_lanes))
        layouts = [InputLayout(p, self._options.targets, self._options.keep_plain) for p in plans]
        self._feed = Feed(portions, layouts, self.lane_index)
        self._compiled = CompiledModules(model, description, self._options.use_regions)
        self._guard = FailureGuard(range(dist.get_world_size()))
        self._executor: Executor | None = None
        self._learned: dict[Any, Learned] = {}
        self._schedules: dict[int, Schedule] = {}
        self._results: list[tuple[Any, Any]] = []
        self._problem: Exception | None = None
        self._pending = Totals()
        self._optimized = OptimizerTargets(model, self._plan.zero)
        self._lane: LanePlan | None = None
        if self.lane_index is not None:
            self._lane = plans[self.lane_index]
            self._place = self._lane.lane.place_of(self._rank)
            self._stages = self._lane.lane.places[self._place].stages
            self._layout = layouts[self.lane_index]
            self._parameters = LaneParameters(model, self._lane.slots, self._options.gradient_dtype)
            self._install(description)

    def _prepare_groups(self, plans: Sequence[LanePlan]) -> None:
        specs = [s for p in plans for s in (p.inputs, p.labels, *p.slots.values())]
        specs += [point.spec for p in plans for point in p.points]
        prepare_groups(*dict.fromkeys(specs))
        groups.ensure_channels()
        groups.ensure_lane_groups()

    def _install(self, description: ModelDescription) -> None:
        assert self._lane is not None, "only ranks of lanes run the model"
        self._gradients = StepGradients(self._parameters, self._stages)
        with self._parameters.in_place():
            self._hooks = stage_points.place(self.model, self._lane, description.layer_modules)
            if self._options.use_regions:
                sync: Any = self._gradients
                # A backward in two parts looks for each weight in the graph.
                self._compiled.regions = regions.install(
                    self.model, description, sync, only_skips=self._is_split()
                )
        stages = self._chosen("activation_checkpointing")
        self._checkpointed = checkpoint_layers(self.model, description, stages)
        self._offloaded = self._chosen("activation_offload")

    def _is_split(self) -> bool:
        """Whether the schedule's backwards are in two parts."""
        assert self._lane is not None, "only ranks of lanes have a schedule"
        count = max(self._counts[self.lanes.index(self._lane.lane)], 1)
        rows = build_schedule(self._schedule_name, self._lane.lane, count).rows
        return any(a.kind is Kind.BACKWARD_INPUT for row in rows for a in row)

    def _chosen(self, name: str) -> frozenset[int]:
        assert self.lane_index is not None, "only ranks of lanes have stages"
        return chosen_stages(name, getattr(self._options, name), self.lanes, self.lane_index)

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

    def step(
        self,
        batch: Any = None,
        *,
        lanes: Mapping[int, Any] | Sequence[Any] | None = None,
        src_data_rank: int | None = None,
        sync: bool = True,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Run forward and backward of a batch; gradients are added to the parameters', as by ``backward()``.

        Args:
            batch: A mapping of tensors with samples along dim 0, or a tuple (inputs..., target): the same whole batch on
                every rank, of which each lane takes its share.
            lanes: Instead of a batch, what each lane gets: for each, or by number, a list of micro-batches, of any sizes
                and lengths, or a batch to be cut into the plan's number of them. A rank may pass None for other lanes
                than its own.
            src_data_rank: The only rank that passes a batch, or all lanes'; the others pass None and are sent what they
                need.
            sync: Whether gradients are summed over lanes. Without, as inside ``no_sync(model)``, they stay in their
                stages, and the next step that sums divides by all that counted since.
            loss_scale: A factor for the gradients, for ``torch.amp.GradScaler``.

        Returns:
            The mean loss over everything that counts in the batch: a plain tensor, the same on every rank of the world.

        Raises:
            PlanError: If the batch has a form that is not known, or the loss is no (sum, count).
            DisagreementError: On every rank, if ranks pass what does not fit together.
        """
        parts = self._take(batch, lanes, src_data_rank)
        with self._guard.step(self._let_go):
            found = self._optimized.homes() if sync and self._state.sync.enabled else None
            end = self._run(parts, loss_scale=loss_scale, found=found)
            if end.has_failed:
                self._drop_started()
            else:
                self._pending += end.total
                if found is not None:
                    self._bring_home(found, is_again=end.is_late)
        self._raise_alike(end)
        return end.total.mean()

    @torch.no_grad()
    def eval(
        self,
        batch: Any = None,
        *,
        lanes: Mapping[int, Any] | Sequence[Any] | None = None,
        src_data_rank: int | None = None,
    ) -> torch.Tensor:
        """Run forward only; arguments and result as of ``step``."""
        parts = self._take(batch, lanes, src_data_rank)
        with self._guard.step(self._let_go):
            end = self._run(parts, loss_scale=None)
        self._raise_alike(end)
        return end.total.mean()

    def sync_gradients(self) -> None:
        """Add what steps without ``sync`` left in the stages to the parameters' gradients; every rank calls it."""
        with self._guard.step(self._let_go):
            found = self._optimized.homes()
            if self._lane is not None:
                self._gradients.begin(found, ())
                self._gradients.flush()
            self._bring_home(found, is_again=False)

    def drop_gradients(self) -> None:
        """Forget what steps without ``sync`` left in the stages."""
        if self._lane is not None:
            self._parameters.drop_gradients()
        self._pending = Totals()

    def _take(self, batch: Any, lanes: Any, source: int | None) -> list[MicroBatch]:
        """Return this rank's micro-batches. What is wrong with the call raises here, alike on every rank."""
        losses.check_auxiliary(self.model)
        self._compiled.look()
        return self._feed.take(batch, lanes, source)

    def _bring_home(self, found: Sequence[Home], *, is_again: bool) -> None:
        self._guard.doing("the synchronization of gradients")
        if self._lane is not None:
            count = self._pending.count
            self._gradients.finish(1.0 / count if count else 0.0, is_again=is_again)
        give_empty(found)
        self._pending = Totals()

    def _drop_started(self) -> None:
        """Wait for gradients that are on their way, and forget them."""
        if self._lane is not None:
            self._gradients.drop()

    def _run(
        self,
        parts: Sequence[MicroBatch],
        *,
        loss_scale: float | None,
        found: Sequence[Home] | None = None,
    ) -> End:
        """Run all micro-batches; return what all ranks learn of it.

        Args:
            parts: This rank's.
            loss_scale: None to run forward only.
            found: Where gradients go as they become ready; None where they stay.
        """

        def note(action: Action) -> None:
            self._guard.doing(describe(action))
            if found is not None:
                self._gradients.before(action)

        surroundings = Surroundings(parts, note)
        is_late = False
        if self._lane is not None:
            row = self._row(len(parts), is_training=loss_scale is not None)
            if found is not None:
                self._gradients.begin(found, row)
            self._run_lane(parts, row, surroundings, loss_scale)
            is_late = found is not None and self._gradients.flush()
        self._guard.doing("the sum of losses")
        return totals.gather(
            self._counted(), surroundings, has_failed=self._problem is not None, is_late=is_late
        )

    def _run_lane(
        self,
        parts: Sequence[MicroBatch],
        row: Sequence[Action],
        surroundings: Surroundings,
        loss_scale: float | None,
    ) -> None:
        assert self._lane is not None, "only ranks of lanes run the model"
        is_training = loss_scale is not None
        offload = Offload(self._offloaded, self._parameters)

        def call(number: int) -> None:
            with offload.around_call():
                self._call(parts[number].data, loss_scale, surroundings)

        self._executor = Executor(
            self._stages,
            call,
            lambda: (leaf for leaf in self._parameters if leaf.is_local and leaf.requires_grad),
            around=surroundings.around,
            is_training=is_training,
            learned=lambda number: self._learned_with(parts[number].data, is_training),
            may_leave=self._rank not in self._lane.labels.ranks,
        )
        with self._parameters.in_place(), self._state.running_lane(), without_cache(self.model):
            self._executor.run(row)

    def _learned_with(self, part: Any, is_training: bool) -> Learned:
        """Return what is known of calls with a micro-batch of these shapes."""
        shapes: list[Any] = [is_training, torch.is_grad_enabled(), self.model.training]
        shapes += [
            torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in ("cpu", "cuda")
        ]
        map_tensors(part, lambda name, t: shapes.append((name, t.shape, t.dtype)))
        if len(self._learned) >= _MAX_SHAPES:
            self._learned.clear()
        return self._learned.setdefault(tuple(shapes), Learned())

    def _let_go(self) -> None:
        if self._executor is not None:
            self._executor.let_go()

    def _raise_alike(self, end: End) -> None:
        """Raise on all ranks if the loss of one failed."""
        problem, self._problem = self._problem, None
        if end.has_failed:
            self.drop_gradients()
            exchange("Runner.step", None, problem)

    def _row(self, num: int, is_training: bool) -> tuple[Action, ...]:
        assert self._lane is not None, "only ranks of lanes have a row"
        if not is_training:
            return tuple(Action(s, Kind.FORWARD, m) for m in range(num) for s in self._stages)
        schedule = self._schedules.get(num)
        if schedule is None:
            schedule = build_schedule(self._schedule_name, self._lane.lane, num)
            self._schedules[num] = schedule
        return schedule.rows[self._place]

    def _call(self, part: Any, loss_scale: float | None, surroundings: Surroundings) -> None:
        """Call the model with a micro-batch; on the last stage, the loss function."""
        assert self._lane is not None, "only ranks of lanes run the model"
        inputs, target = self._layout.divide(part)
        if isinstance(self._loss_fn, losses.ModelLoss):
            inputs = {**inputs, "labels": target, **self._loss_fn.arguments}
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        surroundings.note_called()
        if self._rank not in self._lane.labels.ranks:
            return
        passage = running()
        assert passage is not None, "a runner calls the model"
        loss = self._loss_of(output, target)
        if loss_scale is not None:
            passage.segments[-1].loss = (
                loss if loss_scale == 1.0 or loss is None else loss * loss_scale
            )

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor | None:
        """Return a micro-batch's loss. What fails here is told to all ranks at the end of the step, which goes on."""
        try:
            total, count = losses.read_loss(self._loss_fn(output, target))
        except Exception as error:
            self._problem = self._problem or error
            return losses.zero_loss(output)
        self._results.append((total.detach(), count))
        return total

    def _counted(self) -> Totals:
        """Return what this rank's micro-batches sum to; one rank of each last stage speaks."""
        results, self._results = self._results, []
        mine = Totals()
        if self._lane is None:
            return mine
        speaker, *others = self._lane.labels.subgroups[0].ranks
        if self._rank == speaker or others:
            for total, count in results:
                mine += Totals(losses.value_of(total), losses.value_of(count))
        return mine if self._rank == speaker else Totals()


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
