"""One rank's part of its lane: its stages, its leaves of the model's parameters, its rows of the schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor.api.module_state import Switches
from hdtensor.api.parallelize import ParallelState
from hdtensor.api.points import PlacedPoint
from hdtensor.api.region_install import install
from hdtensor.api.regions import Region
from hdtensor.pipeline.runtime import losses, stage_points
from hdtensor.pipeline.runtime.activations import CheckpointedLayer, Offload, checkpoint_layers
from hdtensor.pipeline.runtime.batches import map_tensors, signature
from hdtensor.pipeline.runtime.execute import Executor
from hdtensor.pipeline.runtime.feed import MicroBatch
from hdtensor.pipeline.runtime.gradients import StepGradients
from hdtensor.pipeline.runtime.inputs import InputLayout
from hdtensor.pipeline.runtime.learned import Learned, Manner
from hdtensor.pipeline.runtime.options import RunnerOptions
from hdtensor.pipeline.runtime.parameters import LaneParameters
from hdtensor.pipeline.runtime.passage import Passage, running
from hdtensor.pipeline.runtime.plain_stage import PlainStage, StageCall
from hdtensor.pipeline.runtime.recording import Recording
from hdtensor.pipeline.runtime.surroundings import Surroundings, configs_of, without_cache
from hdtensor.pipeline.runtime.totals import NO_MEANS, Totals
from hdtensor.pipeline.runtime.weight_draws import WeightDraws
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
        plain: Which calls run on plain tensors.
        regions: Modules that run, or are skipped, as a whole.
        problem: The first error of the loss function in this step.
        means: The least and the most targets of micro-batches in this step of whose losses the mean alone is known.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState,
        layout: InputLayout,
        loss_fn: losses.LossFunction,
        options: RunnerOptions,
    ) -> None:
        """Make the leaves.

        Args:
            model: Parallelized.
            state: What ``parallelize`` knows of it.
            layout: Of the lane's inputs, with what the lane executes.
            loss_fn: As for ``Runner``.
            options: As for ``Runner``.
        """
        plan = self.plan = layout.plan
        self._model, self._state = model, state
        self._loss_fn, self._options = loss_fn, options
        self._configs = configs_of(model)
        self._rank = dist.get_rank()
        self._place = plan.lane.place_of(self._rank)
        self._stages = plan.lane.places[self._place].stages
        #: One rank has all of the last stage: the loss is computed on plain tensors.
        self._is_alone = plan.labels.ranks == (self._rank,)
        self._layout = layout
        self.parameters = LaneParameters(model, plan.slots, options.gradient_dtype)
        self.gradients = StepGradients(self.parameters, self._stages)
        is_alone = [plan.lane.stages[s].ranks for s in self._stages] == [(self._rank,)]
        self.plain = PlainStage(
            model,
            self.parameters,
            self.gradients,
            is_possible=is_alone and options.use_regions,
        )
        self.regions: list[Region] = []
        self.problem: Exception | None = None
        self.means = NO_MEANS
        self._hooks: Sequence[RemovableHandle | PlacedPoint] = []
        self._checkpointed: list[CheckpointedLayer] = []
        self._offloaded: frozenset[int] = frozenset()
        self._executor: Executor | None = None
        self._learned: dict[Any, Learned] = {}
        self._manners: dict[Any, Manner] = {}
        self._settings: tuple[Any, ...] = ()
        self._switches = Switches(model)
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._weight_draws = WeightDraws()
        self._results: list[tuple[Any, Any, bool]] = []

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
            self._hooks = stage_points.place(self._model, self.plan, description.layer_modules)
            if self._options.use_regions:
                sync: Any = self.gradients
                self.regions = install(self._model, description, sync, only_skips=is_split)
        self._checkpointed = checkpoint_layers(self._model, description, checkpointed)
        self._offloaded = offloaded
        self._state.undo.append(self.remove)

    def remove(self) -> None:
        """Take from the model what ``install`` put on it; those of later runners went before."""
        for layer in reversed(self._checkpointed):
            layer.remove()
        for region in reversed(self.regions):
            region.remove()
        for hook in self._hooks:
            hook.remove()

    def _runs_compiled(self) -> bool:
        """Whether some of this rank's modules run compiled."""
        compiled = [r.plain_forward for r in self.regions if r.plain_forward.is_compiled]
        return any(each.takes_hdtensors or self.plain.is_possible for each in compiled)

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
        self._settings = self._present_settings()
        offload = Offload(self._offloaded, self.parameters)

        def call(number: int) -> None:
            with offload.around_call():
                self._call(parts[number], loss_scale, surroundings)

        def begin(number: int) -> Passage:
            return self._passage(number, parts[number], lambda: call(number), is_training)

        self._executor = Executor(
            self._stages,
            begin,
            self.plain.weights,
            around=surroundings.around,
            stand=self.plain.stand,
            is_split=not self._runs_compiled(),
        )
        with (
            self.parameters.in_place(),
            self._state.running_lane(),
            without_cache(self._configs),
            self._weight_draws.watched((is_training, self._settings, bool(row))),
        ):
            self.plain.prepare()
            try:
                self._executor.run(row, is_training=is_training, recording=recording)
            finally:
                self.plain.stand(False)

    def let_go(self) -> None:
        """Drop all that is on its way, after an error."""
        if self._executor is not None:
            self._executor.let_go()
        self.gradients.let_go()

    def counted(self) -> Totals:
        """Return what this rank's micro-batches sum to; one rank of each last stage speaks."""
        results, self._results = self._results, []
        mine, self.means = Totals(), NO_MEANS
        speaker, *others = self.plan.labels.subgroups[0].ranks
        if self._rank == speaker or others:
            sums = losses.values_of([total for total, _, _ in results])
            numbers = losses.values_of([count for _, count, _ in results])
            for total, number, (_, _, is_mean) in zip(sums, numbers, results, strict=True):
                mine += Totals(total, number)
                if is_mean:
                    self.means = min(self.means[0], number), max(self.means[1], number)
        return mine if self._rank == speaker else Totals()

    def _passage(
        self, number: int, part: MicroBatch, call: Callable[[], None], is_training: bool
    ) -> Passage:
        """Return a micro-batch's call of the model."""
        learned = self._learned_with(part.data, is_training)
        may_leave = self._rank not in self.plan.labels.ranks
        if len(self._stages) > 1:
            return Passage(number, self._stages, call, learned, may_leave=may_leave)
        found = StageCall(number, self._stages, call, learned, may_leave=may_leave)
        return found.decide_by(self.plain, part)

    def _present_settings(self) -> tuple[Any, ...]:
        """Return what else a call depends on, the same for all micro-batches of a step."""
        casts = [
            torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in ("cpu", "cuda")
        ]
        return (torch.is_grad_enabled(), self._switches.present(), *casts)

    def _learned_with(self, part: Any, is_training: bool) -> Learned:
        """Return what is known of calls with a micro-batch of these shapes."""
        key = is_training, *self._settings, signature(part)
        found = self._learned.get(key)
        if found is None:
            if len(self._learned) >= _MAX_SHAPES:
                self._learned.clear()
            kinds: list[Any] = []
            map_tensors(part, lambda name, t: kinds.append((name, t.ndim, t.dtype)))
            manner = is_training, *self._settings, *kinds
            found = Learned(manner=self._manners.setdefault(manner, Manner()))
            self._learned[key] = found
        return found

    def _call(self, part: MicroBatch, loss_scale: float | None, surroundings: Surroundings) -> None:
        """Call the model with a micro-batch; on the last stage, the loss function."""
        passage = running()
        assert passage is not None, "an executor calls the model"
        takes_labels = isinstance(self._loss_fn, losses.ModelLoss)
        needs_no_cut = self._is_alone or self._rank not in self.plan.labels.ranks
        inputs, target = self._layout.divide(
            part.data,
            plain_inputs=passage.is_plain and self._rank in self.plan.inputs.ranks,
            plain_target=passage.is_plain and self._is_alone if takes_labels else needs_no_cut,
        )
        if takes_labels:
            inputs = {**inputs, "labels": target, **losses.ModelLoss.arguments}
        call: Callable[..., Any] = self._model
        output = call(**inputs) if isinstance(inputs, dict) else call(*inputs)
        surroundings.note_called()
        passage.end_model(output)
        if passage.is_rehearsal or self._rank not in self.plan.labels.ranks:
            return
        loss = self._loss_of(output, target, part.num_rows)
        if loss_scale is not None:
            passage.segments[-1].loss = (
                loss if loss_scale == 1.0 or loss is None else loss * loss_scale
            )

    def _loss_of(self, output: Any, target: Any, num_rows: int) -> torch.Tensor | None:
        """Return a micro-batch's loss. What fails here is told to all ranks at the end of the step, which goes on."""
        try:
            found = losses.plain_of(output) if self._is_alone else output
            total, count = losses.read_loss(self._loss_fn(found, target))
            is_mean = count is None
            if is_mean:
                count = losses.num_targets(target, num_rows)
                total = total * count
        except Exception as error:
            self.problem = self.problem or error
            return losses.zero_loss(output)
        self._results.append((total.detach(), count, is_mean))
        return total
