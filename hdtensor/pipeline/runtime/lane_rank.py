"""One rank's part of its lane: its stages, its leaves of the model's parameters, its rows of the schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hdtensor.api import regions
from hdtensor.api.parallelize import ParallelState
from hdtensor.pipeline.runtime import losses, stage_points
from hdtensor.pipeline.runtime.activations import Offload, checkpoint_layers
from hdtensor.pipeline.runtime.batches import map_tensors
from hdtensor.pipeline.runtime.execute import Executor
from hdtensor.pipeline.runtime.feed import MicroBatch
from hdtensor.pipeline.runtime.gradients import StepGradients
from hdtensor.pipeline.runtime.inputs import InputLayout
from hdtensor.pipeline.runtime.lane_plan import LanePlan
from hdtensor.pipeline.runtime.options import RunnerOptions
from hdtensor.pipeline.runtime.parameters import LaneParameters
from hdtensor.pipeline.runtime.passage import Learned, running
from hdtensor.pipeline.runtime.recording import Recording
from hdtensor.pipeline.runtime.surroundings import Surroundings, configs_of, without_cache
from hdtensor.pipeline.runtime.totals import Totals
from hdtensor.pipeline.schedule.actions import Action, Kind, Schedule
from hdtensor.pipeline.schedule.choose import build_schedule
from hdtensor.plan import ModelDescription


#: Of so many shapes of micro-batches a rank remembers what arrives; past it the table starts anew.
_MAX_SHAPES = 4096


class LaneRank:
    """Calls the model for the micro-batches of this rank's lane.

    Attributes:
        plan: What the lane executes.
        parameters: Leaves that stand in for the model's parameters.
        gradients: Sends their gradients home.
        regions: Modules that run, or are skipped, as a whole.
        problem: The first error of the loss function in this step.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState,
        plan: LanePlan,
        loss_fn: losses.LossFunction,
        options: RunnerOptions,
    ) -> None:
        """Make the leaves.

        Args:
            model: Parallelized.
            state: What ``parallelize`` knows of it.
            plan: What the lane executes.
            loss_fn: As for ``Runner``.
            options: As for ``Runner``.
        """
        self.plan = plan
        self._model, self._state = model, state
        self._loss_fn, self._options = loss_fn, options
        self._configs = configs_of(model)
        self._rank = dist.get_rank()
        self._place = plan.lane.place_of(self._rank)
        self._stages = plan.lane.places[self._place].stages
        #: One rank has all of the last stage: the loss is computed on plain tensors.
        self._is_alone = plan.labels.ranks == (self._rank,) and not isinstance(
            loss_fn, losses.ModelLoss
        )
        self._layout = InputLayout(plan, options.targets, options.keep_plain)
        self.parameters = LaneParameters(model, plan.slots, options.gradient_dtype)
        self.gradients = StepGradients(self.parameters, self._stages)
        self.regions: list[regions.Region] = []
        self.problem: Exception | None = None
        self._checkpointed: Any = None
        self._offloaded: frozenset[int] = frozenset()
        self._executor: Executor | None = None
        self._learned: dict[Any, Learned] = {}
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._results: list[tuple[Any, Any]] = []

    def install(
        self,
        description: ModelDescription,
        *,
        is_split: bool,
        checkpointed: frozenset[int],
        offloaded: frozenset[int],
    ) -> None:
        """Hook the lane into the model.

        Args:
            description: Tells which modules are layers.
            is_split: Whether backwards are in two parts, which look for each weight in the graph.
            checkpointed: Stages that compute their layers again in the backward.
            offloaded: Stages whose activations wait in host memory.
        """
        with self.parameters.in_place():
            stage_points.place(self._model, self.plan, description.layer_modules)
            if self._options.use_regions:
                sync: Any = self.gradients
                self.regions = regions.install(self._model, description, sync, only_skips=is_split)
        self._checkpointed = checkpoint_layers(self._model, description, checkpointed)
        self._offloaded = offloaded

    def schedule(self, name: str, num_microbatches: int) -> Schedule:
        """Return the lane's schedule.

        Raises:
            ScheduleError: As ``build_schedule``.
        """
        key = name, num_microbatches
        if key not in self._schedules:
            self._schedules[key] = build_schedule(name, self.plan.lane, num_microbatches)
        return self._schedules[key]

    def row(self, name: str, num_microbatches: int) -> tuple[Action, ...]:
        """Return this rank's actions of a training step; arguments are those of ``schedule``."""
        return self.schedule(name, num_microbatches).rows[self._place]

    def forward_row(self, num_microbatches: int) -> tuple[Action, ...]:
        """Return this rank's actions where nothing is trained."""
        numbers = range(num_microbatches)
        return tuple(Action(stage, Kind.FORWARD, m) for m in numbers for stage in self._stages)

    def run(
        self,
        row: Sequence[Action],
        parts: Sequence[MicroBatch],
        surroundings: Surroundings,
        *,
        loss_scale: float | None,
        recording: Recording | None,
    ) -> None:
        """Run a row of actions.

        Args:
            row: The actions.
            parts: The micro-batches.
            surroundings: Of the micro-batches.
            loss_scale: A factor for the loss; None to run forward only.
            recording: Notes the actions.
        """
        is_training = loss_scale is not None
        offload = Offload(self._offloaded, self.parameters)

        def call(number: int) -> None:
            with offload.around_call():
                self._call(parts[number].data, loss_scale, surroundings)

        self._executor = Executor(
            self._stages,
            call,
            lambda: (leaf for leaf in self.parameters if leaf.is_local and leaf.requires_grad),
            around=surroundings.around,
            learned=lambda number: self._learned_with(parts[number].data, is_training),
            may_leave=self._rank not in self.plan.labels.ranks,
        )
        with self.parameters.in_place(), self._state.running_lane(), without_cache(self._configs):
            self._executor.run(row, is_training=is_training, recording=recording)

    def let_go(self) -> None:
        """Drop all that is on its way, after an error."""
        if self._executor is not None:
            self._executor.let_go()

    def counted(self) -> Totals:
        """Return what this rank's micro-batches sum to; one rank of each last stage speaks."""
        results, self._results = self._results, []
        mine = Totals()
        speaker, *others = self.plan.labels.subgroups[0].ranks
        if self._rank == speaker or others:
            for total, count in results:
                mine += Totals(losses.value_of(total), losses.value_of(count))
        return mine if self._rank == speaker else Totals()

    def _learned_with(self, part: Any, is_training: bool) -> Learned:
        """Return what is known of calls with a micro-batch of these shapes."""
        shapes: list[Any] = [is_training, torch.is_grad_enabled(), self._model.training]
        shapes += [
            torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in ("cpu", "cuda")
        ]
        map_tensors(part, lambda name, t: shapes.append((name, t.shape, t.dtype)))
        if len(self._learned) >= _MAX_SHAPES:
            self._learned.clear()
        return self._learned.setdefault(tuple(shapes), Learned())

    def _call(self, part: Any, loss_scale: float | None, surroundings: Surroundings) -> None:
        """Call the model with a micro-batch; on the last stage, the loss function."""
        inputs, target = self._layout.divide(part, plain_target=self._is_alone)
        if isinstance(self._loss_fn, losses.ModelLoss):
            inputs = {**inputs, "labels": target, **self._loss_fn.arguments}
        call: Callable[..., Any] = self._model
        output = call(**inputs) if isinstance(inputs, dict) else call(*inputs)
        surroundings.note_called()
        if self._rank not in self.plan.labels.ranks:
            return
        passage = running()
        assert passage is not None, "an executor calls the model"
        loss = self._loss_of(output, target)
        if loss_scale is not None:
            passage.segments[-1].loss = (
                loss if loss_scale == 1.0 or loss is None else loss * loss_scale
            )

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor | None:
        """Return a micro-batch's loss. What fails here is told to all ranks at the end of the step, which goes on."""
        try:
            found = losses.plain_of(output) if self._is_alone else output
            total, count = losses.read_loss(self._loss_fn(found, target))
        except Exception as error:
            self.problem = self.problem or error
            return losses.zero_loss(output)
        self._results.append((total.detach(), count))
        return total
