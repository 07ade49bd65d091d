"""Train an unmodified Hugging Face Llama on four local processes that are not alike.

    python examples/train_llama.py
    torchrun --nproc-per-node 4 examples/train_llama.py --plan my_plan.json

By default ranks 0 and 1 share every layer (tensor parallelism of degree 2) and take half of each batch,
ranks 2 and 3 take a quarter each, alone. Half-way the plan is switched in place: then ranks 2 and 3 are
the pair, and 0 and 1 alone. The text is the functions of Python's own standard library, as bytes. At the
end the first steps, and those after the switch, are repeated with plain PyTorch on one process, and the
losses must be the same. docs/demo.md explains what is printed.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch
import report
import torch
import torch.distributed as dist
from command_line import exit_status, parse, training_parser, whole
from small_llama import SEED, build_model, build_optimizer
from stdlib_functions import Batches, load_functions
from torch import Tensor

import hdtensor as hd
from hdtensor.plan import ExpandedPlan


PLANS = Path(__file__).resolve().parent / "plans"
FIRST_PLAN, SECOND_PLAN = PLANS / "three_subgroups.json", PLANS / "other_pairs.json"
NUM_RANKS = 4


class Training:
    """A training: with a plan on all ranks together, without one on this process alone."""

    def __init__(
        self,
        options: argparse.Namespace,
        functions: list[bytes],
        plan: hd.AnnotationPlan | None = None,
    ) -> None:
        """Build model, optimizer and batches."""
        self.model = build_model(options.context)
        self.has_plan = plan is not None
        if plan is not None:
            hd.parallelize(self.model, plan)
        self.optimizer, self.warmup = build_optimizer(self.model.parameters(), options.lr)
        self.batches = Batches(functions, options.batch, options.context, SEED)
        self.num_steps = 0

    def train(self, num_steps: int) -> Iterator[tuple[float, Tensor]]:
        """Go on for some steps.

        Yields:
            The loss, the mean over all tokens of the batch that count, and the batch's labels.
        """
        for _ in range(num_steps):
            input_ids, labels = self.batches.at(self.num_steps)
            batch = {"input_ids": input_ids, "labels": labels}
            if self.has_plan:
                batch = hd.distribute_batch(self.model, batch)
            loss = self.model(**batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.warmup.step()
            self.num_steps += 1
            yield float(hd.item(loss) if self.has_plan else loss.item()), labels

    def switch(self, plan: hd.AnnotationPlan) -> hd.elastic.SwitchReport:
        """Go on under another plan: weights and optimizer states change place."""
        return hd.switch(self.model, plan, self.optimizer)

    def state(self) -> bytes:
        """Return all that a training without a plan needs to go on from here; all ranks call it."""
        weights = {name: _whole(p) for name, p in self.model.named_parameters()}
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {
            number: {key: _whole(value) for key, value in state.items()}
            for number, state in optimizer["state"].items()
        }
        file = io.BytesIO()
        torch.save((weights, optimizer, self.warmup.state_dict(), self.num_steps), file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        """Go on from a state."""
        weights, optimizer, warmup, self.num_steps = torch.load(io.BytesIO(state))
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        self.warmup.load_state_dict(warmup)


def _whole(value: Any) -> Any:
    return hd.full_tensor(value.detach()) if isinstance(value, hd.HDTensor) else value


def train_on_this_rank(
    options: argparse.Namespace,
    functions: list[bytes],
    plans: list[hd.AnnotationPlan],
    layouts: list[report.Layout],
) -> tuple[list[float], list[report.Part], bytes]:
    """Train as one of several ranks, half-way under another plan if there are two.

    Returns:
        The losses, what was done under each plan, and the state before the switch.
    """
    rank = dist.get_rank()
    training = Training(options, functions, plans[0])
    state = b""  # for the check only
    with report.Progress(layouts[0], options.steps, is_shown=rank == 0) as progress:
        for loss, labels in training.train(options.switch_at or options.steps):
            progress.advance(loss, labels)
        if options.switch_at:
            state = b"" if options.no_check else training.state()
            done = training.switch(plans[1])
            progress.switch(
                layouts[1],
                report.switched(done, options.switch_to.name, layouts[1], options.switch_at),
            )
            for loss, labels in training.train(options.steps - options.switch_at):
                progress.advance(loss, labels)
    dist.barrier()  # rank 0's progress line stands
    if rank in plans[-1].outside(dist.get_world_size()):
        # With its newline, or lines of several such ranks could run together.
        line = f"rank {rank} holds nothing and sees loss {progress.losses[-1]:.4f}\n"
        print(line, end="", flush=True)
    return progress.losses, progress.parts, state


def run(options: argparse.Namespace) -> int:
    """Run the example; return the exit status."""
    num_ranks = launch.world_size(NUM_RANKS)
    paths = [options.plan, options.switch_to] if options.switch_at else [options.plan]
    plans = [hd.AnnotationPlan.load(path) for path in paths]
    layouts = [rehearse(plan, options, num_ranks) for plan in plans]

    functions = load_functions()
    if launch.is_first():
        num_bytes = sum(map(len, functions))
        print(f"{len(functions):,} functions of Python's standard library, {num_bytes:,} bytes")
        print(f"plan {options.plan.name}: {layouts[0].plan.inputs}\n{layouts[0]}\n", flush=True)
    outcome = launch.run(
        train_on_this_rank,
        options,
        functions,
        plans,
        layouts,
        num_ranks=num_ranks,
        time_limit=options.time_limit,
        expected=(hd.PlanError,),
    )
    if outcome is None:  # rank 0 of the launcher's processes does the rest
        return 0

    losses, parts, state = outcome
    print(report.summary(losses))
    is_equal, reference = True, []
    if not options.no_check:
        is_equal, reference = check(options, functions, losses, state, num_ranks)
    picture = report.draw(options.output / "train_llama.svg", layouts, losses, reference, parts)
    print(f"picture: {picture}")
    return 0 if is_equal else 1


def rehearse(plan: hd.AnnotationPlan, options: argparse.Namespace, num_ranks: int) -> report.Layout:
    """Find out what does not fit the model before any process starts; return who holds what."""
    plan.check(world_size=num_ranks)
    with torch.device("meta"):
        model = build_model(options.context)
    expanded = plan.expand(model)
    refuse_pipelines(expanded)
    layout = report.Layout(expanded, model, (options.batch, options.context), num_ranks)
    with hd.as_rank(0):
        hd.parallelize(model, plan)
    return layout


def refuse_pipelines(plan: ExpandedPlan) -> None:
    """Raise for a plan that a program without a runner cannot train.

    Raises:
        PlanError: If it has several stages in a pipeline, or zero 1.
    """
    instead = "Train it with examples/train_pipelines.py, or give a plan of"
    if plan.zero:
        raise hd.PlanError(
            f"zero: this example trains zero 0 only, got {plan.zero}. {instead} zero 0."
        )
    if any(point.kind == "stage" for point in plan.points):
        raise hd.PlanError(
            f"stages: this example trains one stage a pipeline, and here is a pipeline of several. {instead} "
            f"one stage in each pipeline."
        )


def check(
    options: argparse.Namespace,
    functions: list[bytes],
    losses: list[float],
    state: bytes,
    num_ranks: int,
) -> tuple[bool, list[float]]:
    """Repeat steps on this process alone and print both losses.

    Returns:
        Whether they are the same, and the losses of the first steps here; with a switch up to some steps
        after it.
    """
    num_steps = min(options.switch_at + report.CHECKED_STEPS, options.steps)
    reference = [loss for loss, _ in Training(options, functions).train(num_steps)]
    is_equal, text = report.compare(
        losses, reference[: report.CHECKED_STEPS], num_ranks, report.TOLERANCE
    )
    print(text)
    if options.switch_at:
        training = Training(options, functions)
        training.load(state)
        later = [loss for loss, _ in training.train(num_steps - options.switch_at)]
        is_same, text = report.compare(
            losses, later, num_ranks, report.TOLERANCE, after=options.switch_at
        )
        print(text)
        away = report.largest(report.differences(losses, reference))
        print(f"\none process from step 1 to step {num_steps}: differences up to {away:.1e}")
        is_equal = is_equal and is_same
    return is_equal, reference


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = training_parser(
        "Train a small Llama on processes that are not alike.", plan=FIRST_PLAN, steps=100
    )
    switch = parser.add_mutually_exclusive_group().add_argument
    switch(
        "--switch-to",
        type=Path,
        metavar="PLAN",
        help=f"plan of the second half; without --plan {SECOND_PLAN.name}, with it none",
    )
    switch("--no-switch", action="store_true", help="keep the first plan")
    parser.add_argument(
        "--switch-at", type=whole, metavar="STEP", help="steps before the switch; half by default"
    )
    options = parse(parser)
    check_switch(parser, options)
    return options


def check_switch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set where and to what to switch: ``switch_at`` is 0 where no switch is wanted."""
    if options.switch_to is None and not options.no_switch:
        options.switch_to = SECOND_PLAN if options.plan.resolve() == FIRST_PLAN else None
    if options.switch_to is None:
        if options.switch_at is not None:
            parser.error("argument --switch-at: say to which plan, with --switch-to")
        options.switch_at = 0
        return
    if options.steps < 2:
        parser.error("argument --steps: must be at least 2 to switch half-way; or add --no-switch")
    if options.switch_at is None:
        options.switch_at = options.steps // 2
    if options.switch_at >= options.steps:
        parser.error(f"argument --switch-at: must be below --steps, {options.steps}")


def main() -> int:
    """Run the example; say in a line what a user can mend."""
    return exit_status(run, parse_options())


if __name__ == "__main__":
    sys.exit(main())
