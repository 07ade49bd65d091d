"""Train an unmodified Hugging Face Llama on four local processes that are not alike.

    python examples/train_llama.py
    torchrun --nproc-per-node 4 examples/train_llama.py --plan my_plan.json

By default ranks 0 and 1 share every layer (tensor parallelism of degree 2) and take 5 of 8 rows of each
batch, rank 2 takes the other 3 alone, and rank 3 holds nothing. The text is the functions of Python's
own standard library, as bytes. At the end the first steps are repeated with plain PyTorch on one
process, and the losses must be the same. docs/demo.md explains what is printed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import launch
import report
import torch
import torch.distributed as dist
from stdlib_functions import BEGIN, END, VOCABULARY_SIZE, Batches, load_functions
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM

import hdtensor as hd


NUM_RANKS = 4
SEED = 0
WARMUP_STEPS = 10
CHECKED_STEPS = 5
#: Largest relative difference of a loss from the same step on one process, in float32.
TOLERANCE = 1e-5


def build_model(context: int) -> LlamaForCausalLM:
    """Return the model, with the same weights wherever it is built."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=BEGIN,
        eos_token_id=END,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(
    options: argparse.Namespace, functions: list[bytes], plan: hd.AnnotationPlan | None
) -> Iterator[tuple[float, Tensor]]:
    """Train step by step: with a plan on all ranks together, without one on this process alone.

    Yields:
        The loss, the mean over all tokens of the batch that count, and the batch's labels.
    """
    model = build_model(options.context)
    if plan is not None:
        hd.parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    warmup = LinearLR(optimizer, start_factor=1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    batches = Batches(functions, options.batch, options.context, SEED)

    for input_ids, labels in itertools.islice(batches, options.steps):
        batch = {"input_ids": input_ids, "labels": labels}
        if plan is not None:
            batch = hd.distribute_batch(model, batch)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        yield float(loss.item() if plan is None else hd.item(loss)), labels


def train_on_this_rank(
    options: argparse.Namespace,
    functions: list[bytes],
    plan: hd.AnnotationPlan,
    layout: report.Layout,
) -> tuple[list[float], dict[int, float]]:
    """Train as one of several ranks; return the losses and each rank's share of the work."""
    rank = dist.get_rank()
    with report.Progress(layout, options.steps, is_shown=rank == 0) as progress:
        for loss, labels in train(options, functions, plan):
            progress.advance(loss, labels)
    dist.barrier()  # rank 0's progress line stands
    if rank in plan.outside(dist.get_world_size()):
        # With its newline, or lines of several such ranks could run together.
        line = f"rank {rank} holds nothing and sees loss {progress.losses[-1]:.4f}\n"
        print(line, end="", flush=True)
    return progress.losses, progress.shares


def run(options: argparse.Namespace) -> int:
    """Run the example; return the exit status."""
    num_ranks = launch.world_size(NUM_RANKS)
    plan = hd.AnnotationPlan.load(options.plan)
    plan.check(world_size=num_ranks)
    with torch.device("meta"):
        model = build_model(options.context)
    layout = report.Layout(plan.expand(model), model, (options.batch, options.context), num_ranks)
    # A rehearsal: what does not fit the model is found out here, before any process starts.
    with hd.as_rank(0):
        hd.parallelize(model, plan)

    functions = load_functions()
    if launch.is_first():
        num_bytes = sum(map(len, functions))
        print(f"{len(functions):,} functions of Python's standard library, {num_bytes:,} bytes")
        print(f"plan {options.plan.name}: {layout.plan.inputs}\n{layout}\n", flush=True)
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

    losses, shares = outcome
    print(report.summary(losses))
    reference: list[float] = []
    is_equal = True
    if not options.no_check:
        alone = itertools.islice(train(options, functions, plan=None), CHECKED_STEPS)
        reference = [loss for loss, _ in alone]
        is_equal, text = report.compare(losses, reference, num_ranks, TOLERANCE)
        print(text)
    picture = report.draw(options.output / "train_llama.svg", layout, losses, reference, shares)
    print(f"picture: {picture}")
    return 0 if is_equal else 1


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    plan = Path(__file__).resolve().parent / "plans" / "two_unlike.json"
    parser = argparse.ArgumentParser(
        description="Train a small Llama on processes that are not alike.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--plan", default=plan, type=Path, help="who holds what, as JSON")
    add("--steps", default=100, type=whole, help="batches to train on")
    add("--batch", default=16, type=whole, help="rows of a batch, over all ranks")
    add("--context", default=128, type=whole, help="tokens of a row")
    add("--lr", default=3e-3, type=positive, help="learning rate after the warmup")
    add("--output", default=Path("outputs"), type=Path, help="folder of the picture")
    add("--no-check", action="store_true", help="do not repeat the first steps on one process")
    add("--time-limit", default=600.0, type=positive, help="seconds after which all processes end")
    options = parser.parse_args()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: cannot make {options.output}: {error.strerror}")
    if options.context < 2:
        parser.error("argument --context: must be at least 2, one token to see and one to predict")
    return options


def whole(text: str) -> int:
    """Read a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive(text: str) -> float:
    """Read a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {value}")
    return value


def main() -> int:
    """Run the example; say in a line what a user can mend."""
    options = parse_options()
    try:
        return run(options)
    except hd.PlanError as error:
        launch.complain(f"PlanError: {error}")
        return 2
    except launch.RanksFailedError as error:
        launch.complain(str(error))
        return 1
    except KeyboardInterrupt:
        if launch.is_first():
            print("interrupted; all processes have ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
