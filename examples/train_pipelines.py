"""Train an unmodified Hugging Face Llama over two unlike pipelines on five local processes.

    python examples/train_pipelines.py
    torchrun --nproc-per-node 5 examples/train_pipelines.py --plan my_plan.json

By default lane 0 is ranks 0 and 1 together (tensor parallelism of degree 2) before rank 2, lane 1 is rank 3
before rank 4. Stages have unlike numbers of layers, lanes unlike numbers of micro-batches; both follow
the 1F1B schedule, and AdamW's states are cut over all ranks that hold a parameter (ZeRO-1). At the end the
first steps are repeated with plain PyTorch on one process, and the losses must be the same.
docs/demo.md explains what is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import launch
import report
import torch
import torch.distributed as dist
from command_line import exit_status, parse, training_parser
from lane_picture import draw_lanes
from small_llama import SEED, build_model, build_optimizer
from stdlib_functions import Batches, load_functions
from torch import Tensor

import hdtensor as hd
from hdtensor.pipeline import Runner, Timeline
from hdtensor.pipeline.dry_run import DryRun, DryRunOptions, dry_run
from hdtensor.plan import ModelDescription


PLAN = Path(__file__).resolve().parent / "plans" / "two_lanes.json"
NUM_RANKS = 5
MAX_NORM = 1.0


class Training:
    """A training: with a plan on all ranks together, without one on this process alone."""

    def __init__(
        self,
        options: argparse.Namespace,
        functions: list[bytes],
        plan: hd.AnnotationPlan | None = None,
    ) -> None:
        """Build model, runner, optimizer and batches."""
        self.model = build_model(options.context)
        self.runner: Runner | None = None
        self.parameters: list[Tensor] = list(self.model.parameters())
        if plan is not None:
            self.runner = Runner(self.model, plan, schedule=options.schedule)
            self.parameters = self.runner.optimizer_parameters()
        self.optimizer, self.warmup = build_optimizer(self.parameters, options.lr)
        self.batches = Batches(functions, options.batch, options.context, SEED)
        self.num_steps = 0

    def train(self, num_steps: int) -> Iterator[tuple[float, Tensor]]:
        """Go on for some steps.

        Yields:
            The loss, the mean over all tokens of the batch that count, and the batch's labels.
        """
        for _ in range(num_steps):
            input_ids, labels = self.batches.at(self.num_steps)
            loss = self._loss({"input_ids": input_ids, "labels": labels})
            hd.clip_grad_norm_(self.parameters, MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.warmup.step()
            self.num_steps += 1
            yield loss.item(), labels

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Run forward and backward of a whole batch, which every rank has."""
        if self.runner is not None:
            return self.runner.step(batch)
        loss: Tensor = self.model(**batch).loss
        loss.backward()
        return loss

    def state_bytes(self) -> int:
        """Return the bytes of AdamW's two states of each parameter that this rank keeps."""
        states = self.optimizer.state.values()
        return sum(_num_bytes(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq"))


def _num_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, hd.HDTensor) else tensor
    return local.numel() * local.element_size()


class Outcome(NamedTuple):
    """What a training on several ranks gives.

    Attributes:
        losses: Of each step.
        state_bytes: Of each rank's part of AdamW's states.
        last_step: What the ranks did when in the last step.
    """

    losses: list[float]
    state_bytes: list[int]
    last_step: Timeline


def train_on_this_rank(
    options: argparse.Namespace,
    functions: list[bytes],
    plan: hd.AnnotationPlan,
    layout: report.Layout,
) -> Outcome:
    """Train as one of several ranks, and record the last step."""
    training = Training(options, functions, plan)
    assert training.runner is not None, "there is a plan"
    with report.Progress(layout, options.steps, is_shown=dist.get_rank() == 0) as progress:
        for loss, labels in training.train(options.steps - 1):
            progress.advance(loss, labels)
        with training.runner.record() as recording:
            for loss, labels in training.train(1):
                progress.advance(loss, labels)
    state_bytes = [0] * dist.get_world_size()
    dist.all_gather_object(state_bytes, training.state_bytes())
    return Outcome(progress.losses, state_bytes, recording.timeline())


def run(options: argparse.Namespace) -> int:
    """Run the example; return the exit status."""
    num_ranks = launch.world_size(NUM_RANKS)
    plan = hd.AnnotationPlan.load(options.plan)
    rehearsal, layout = rehearse(plan, options, num_ranks)
    if launch.is_first():
        print(f"plan {options.plan.name}\n{draw_lanes(plan, rehearsal, layout.rows)}\n", flush=True)
    functions = load_functions()
    outcome = launch.run(
        train_on_this_rank,
        options,
        functions,
        plan,
        layout,
        num_ranks=num_ranks,
        time_limit=options.time_limit,
        expected=(hd.PlanError,),
    )
    if outcome is None:  # rank 0 of the launcher's processes does the rest
        return 0

    print(report.summary(outcome.losses))
    print(report.states(layout, outcome.state_bytes))
    print(report.recorded(options.output / "train_pipelines.json", outcome.last_step))
    is_equal = True
    if not options.no_check:
        reference = Training(options, functions).train(min(report.CHECKED_STEPS, options.steps))
        is_equal, text = report.compare(
            outcome.losses, [loss for loss, _ in reference], num_ranks, report.TOLERANCE
        )
        print(text)
    return 0 if is_equal else 1


def rehearse(
    plan: hd.AnnotationPlan, options: argparse.Namespace, num_ranks: int
) -> tuple[DryRun, report.Layout]:
    """Find out what does not fit before any process starts.

    Returns:
        What every rank would do, and who holds what.
    """
    plan.check(world_size=num_ranks)
    with torch.device("meta"):
        model = build_model(options.context)
    rehearsal = dry_run(
        plan,
        ModelDescription.from_module(model),
        DryRunOptions(schedules=(options.schedule,), context=options.context, itemsize=4),
    )
    shape = (options.batch, options.context)
    lanes = [run.lane.ranks for run in rehearsal.lanes]
    return rehearsal, report.Layout(plan.expand(model), model, shape, num_ranks, lanes)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = training_parser("Train a small Llama over unlike pipelines.", plan=PLAN, steps=40)
    parser.add_argument("--schedule", default="1F1B", help="name of a schedule, or a file")
    return parse(parser)


def main() -> int:
    """Run the example; say in a line what a user can mend."""
    return exit_status(run, parse_options())


if __name__ == "__main__":
    sys.exit(main())
