"""``Runner``: trains a model whose plan has pipelines."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hdtensor.api import parallelize as api
from hdtensor.api.agreement import exchange
from hdtensor.api.local import prepare_groups
from hdtensor.collectives import groups
from hdtensor.errors import PlanError
from hdtensor.pipeline.exchanges import plan_lanes
from hdtensor.pipeline.runtime import losses, totals
from hdtensor.pipeline.runtime.compiled import CompiledModules
from hdtensor.pipeline.runtime.empty_gradients import EmptyGradients
from hdtensor.pipeline.runtime.failure import FailureGuard
from hdtensor.pipeline.runtime.feed import Feed, MicroBatch, Portions
from hdtensor.pipeline.runtime.homes import Home
from hdtensor.pipeline.runtime.inputs import InputLayout
from hdtensor.pipeline.runtime.lane_plan import LanePlan, lane_plan
from hdtensor.pipeline.runtime.lane_rank import LaneRank
from hdtensor.pipeline.runtime.losses import LossFunction, causal_lm_loss
from hdtensor.pipeline.runtime.options import (
    check_same,
    chosen_stages,
    lane_counts,
    lane_sizes,
    runner_options,
)
from hdtensor.pipeline.runtime.recording import Recording
from hdtensor.pipeline.runtime.surroundings import Surroundings
from hdtensor.pipeline.runtime.targets import OptimizerTargets
from hdtensor.pipeline.runtime.totals import End, Totals
from hdtensor.pipeline.runtime.watched_parameters import WatchedParameters
from hdtensor.pipeline.schedule.actions import Action, Kind
from hdtensor.pipeline.schedule.choose import DEFAULT_MICROBATCHES
from hdtensor.plan import AnnotationPlan, ModelDescription, StrategyPlan


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
                returns. A mean alone will do where all micro-batches have equally many targets. None: the own loss of a causal language model of ``transformers``.
            schedule: As for ``build_schedule``.
            num_microbatches: Of each lane, or of all; default the plan's ``microbatches``, or as many as
                have its ``mbs`` samples; 8 where it says neither.
            options: Those of ``RunnerOptions``.

        Raises:
            PlanError: If the plan does not fit the model, or is no set of pipelines, or an option is unknown.
            ScheduleError: If a lane cannot follow the schedule.
        """
        self.model = model
        self._options = runner_options(options)
        self._loss_fn = losses.ModelLoss(model) if loss_fn is None else loss_fn
        self._schedule_name = schedule
        if not api.is_parallelized(model):
            api.parallelize(
                model, plan, patterns=self._options.patterns, use_regions=self._options.use_regions
            )
        self._state = api.state_of(model)
        self._plan = self._state.plan
        description = ModelDescription.from_module(model)
        check_same(plan, self._plan, description, self._state.patterns)
        self.lanes = plan_lanes(self._plan)
        self.inputs = self._plan.inputs
        names = [(p.name, p.same_as or p.name) for p in description.parameters]
        plans = [lane_plan(self._plan, lane, names) for lane in self.lanes]
        self._prepare_groups(plans)
        self._rank = dist.get_rank()
        conflict = plan.batch_conflict() if isinstance(plan, StrategyPlan) else None
        if conflict is not None and num_microbatches is None and self._rank == 0:
            warnings.warn(conflict, stacklevel=2)
        found = (i for i, lane in enumerate(self.lanes) if self._rank in lane.ranks)
        self.lane_index = next(found, None)
        num_lanes = len(self.lanes)
        self._counts = lane_counts(plan, num_microbatches, num_lanes)
        portions = Portions(self.inputs, self._counts, lane_sizes(plan, num_lanes))
        layouts = [InputLayout(p, self._options.targets, self._options.keep_plain) for p in plans]
        self._feed = Feed(portions, layouts, self.lane_index)
        self._compiled = CompiledModules(model, description, self._options.use_regions)
        self._guard = FailureGuard(range(dist.get_world_size()))
        self._pending = Totals()
        self._empty = EmptyGradients()
        self._recording: Recording | None = None
        self._optimized = OptimizerTargets(model, self._plan.zero)
        self._mine = self._lane_rank(layouts, description)
        self._watched = WatchedParameters(model)

    def _lane_rank(
        self, layouts: Sequence[InputLayout], description: ModelDescription
    ) -> LaneRank | None:
        """Return this rank's part of its lane, hooked into the model; None outside of all lanes."""
        index = self.lane_index
        if index is None:
            return None
        mine = LaneRank(self.model, self._state, layouts[index], self._loss_fn, self._options)
        rows = mine.schedule(self._schedule_name, self._counts[index] or DEFAULT_MICROBATCHES).rows
        choices = ("activation_checkpointing", "activation_offload")
        checkpointed, offloaded = (
            chosen_stages(name, getattr(self._options, name), self.lanes, index) for name in choices
        )
        mine.install(
            description,
            is_split=any(a.kind is Kind.BACKWARD_INPUT for row in rows for a in row),
            checkpointed=checkpointed,
            offloaded=offloaded,
        )
        self._compiled.regions = mine.regions
        return mine

    def _prepare_groups(self, plans: Sequence[LanePlan]) -> None:
        specs = [s for p in plans for s in (p.inputs, p.labels, *p.slots.values())]
        specs += [point.spec for p in plans for point in p.points]
        prepare_groups(*dict.fromkeys(specs))
        groups.ensure_channels()
        groups.ensure_lane_groups()

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
            start = time.perf_counter()
            if end.has_failed:
                self._drop_started()
            else:
                self._pending += end.total
                if found is not None:
                    self._bring_home(found, is_again=end.is_late)
            if self._recording is not None and self._mine is not None:
                self._recording.note_sync(start, time.perf_counter())
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

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Note what every rank does when; every rank of the world calls it around the same steps.

        Yields:
            A recording, whose ``timeline()`` has the form of the simulator's.
        """
        self._recording = Recording(self.lane_index)
        try:
            yield self._recording
        finally:
            self._recording = None

    def sync_gradients(self) -> None:
        """Add what steps without ``sync`` left in the stages to the parameters' gradients; every rank calls it."""
        self._check_plan()
        with self._guard.step(self._let_go):
            found = self._optimized.homes()
            if self._mine is not None:
                self._mine.gradients.begin(found, ())
                self._mine.gradients.flush()
            self._bring_home(found, is_again=False)

    def drop_gradients(self) -> None:
        """Forget what steps without ``sync`` left in the stages."""
        if self._mine is not None:
            self._mine.gradients.drop_gradients()
        self._pending = Totals()

    def _take(self, batch: Any, lanes: Any, source: int | None) -> list[MicroBatch]:
        """Return this rank's micro-batches. What is wrong with the call raises here, alike on every rank."""
        self._check_plan()
        self._watched.check()
        losses.check_auxiliary(self.model)
        if self._compiled.look():
            self._watched.check_new()
        return self._feed.take(batch, lanes, source)

    def _check_plan(self) -> None:
        """Raise if the model has been switched to another plan, on every rank alike."""
        if self._state.plan is not self._plan:
            raise PlanError(
                "the model was switched to another plan since this Runner was made. Make a new one by that plan: "
                "Runner(model, plan, ...); the optimizer that was switched along goes on."
            )

    def _bring_home(self, found: Sequence[Home], *, is_again: bool) -> None:
        self._guard.doing("the synchronization of gradients")
        if self._mine is not None:
            count = self._pending.count
            self._mine.gradients.finish(1.0 / count if count else 0.0, is_again=is_again)
        self._empty.give(found)
        self._pending = Totals()

    def _drop_started(self) -> None:
        """Wait for gradients that are on their way, and forget them."""
        if self._mine is not None:
            self._mine.gradients.drop()

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
        mine = self._mine

        def note(action: Action) -> None:
            self._guard.doing(action)
            if found is not None and mine is not None:
                mine.gradients.before(action)

        surroundings = Surroundings(parts, note)
        is_late, counted, problem, means = False, Totals(), None, totals.NO_MEANS
        if mine is not None:
            row = mine.forward_row(len(parts))
            if loss_scale is not None:
                row = mine.row(self._schedule_name, len(parts))
            if found is not None:
                mine.gradients.begin(found, row)
            mine.run(row, parts, surroundings, loss_scale=loss_scale, recording=self._recording)
            is_late = found is not None and mine.gradients.flush()
            counted, problem, means = mine.counted(), mine.problem, mine.means
        self._guard.doing("the sum of losses")
        return totals.gather(
            counted, surroundings, has_failed=problem is not None, is_late=is_late, means=means
        )

    def _let_go(self) -> None:
        if self._mine is not None:
            self._mine.let_go()

    def _raise_alike(self, end: End) -> None:
        """Raise on all ranks if the loss of one failed."""
        problem = None
        if self._mine is not None:
            problem, self._mine.problem = self._mine.problem, None
        if end.has_failed:
            self.drop_gradients()
            if end.problem is not None:
                raise end.problem
            exchange("Runner.step", None, problem)
