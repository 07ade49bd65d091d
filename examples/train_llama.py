"""Train an unmodified Hugging Face Llama on four local processes that are not alike.

    python examples/train_llama.py
    torchrun --nproc-per-node 4 examples/train_llama.py --plan my_plan.json

By default ranks 0 and 1 share every layer (tensor parallelism of degree 2) and take 5 of 8 rows of each
batch, rank 2 takes the other 3 alone, and rank 3 holds nothing. The text is the functions of Python's
own standard library, as bytes. At the end the first steps are repeated with plain PyTorch on one
process, and the losses must be the same. docs/demo.md explains the output.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import launch
import report
import torch
import torch.distributed as dist
from stdlib_functions import BEGIN, END, VOCABULARY_SIZE, Batches, load_functions
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hdtensor as hd


NUM_RANKS = 4
SEED = 0
WARMUP_STEPS = 10
CHECKED_STEPS = 5
TOLERANCE = 1e-5


def build_model(context: int) -> LlamaForCausalLM:
    """Return the model, with the same weights wherever it is called."""
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
    """Train step by step; with a plan on all of its ranks, without one on this process alone.

    Yields:
        The loss, over all tokens of the batch that count, and the batch's labels.
    """
    batches = Batches(functions, options.batch, options.context, SEED)
    model = build_model(options.context)
    if plan is not None:
        hd.parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, 1, WARMUP_STEPS)

    for input_ids, labels in itertools.islice(batches, options.steps):
        batch = {"input_ids": input_ids, "labels": labels}
        if plan is not None:
            batch = hd.distribute_batch(model, batch)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        yield (loss.item() if plan is None else hd.item(loss)), labels


def train_on_this_rank(
    options: argparse.Namespace,
    functions: list[bytes],
    plan: hd.AnnotationPlan,
    layout: report.Layout,
) -> tuple[list[float], dict[int, float]]:
    """Train, as one of several ranks; return the losses and each rank's share of the work."""
    rank = dist.get_rank()
    with report.Progress(layout, options.steps, is_shown=rank == 0) as progress:
        for loss, labels in train(options, functions, plan):
            progress.advance(loss, labels)
    if rank in plan.outside(dist.get_world_size()):
        print(f"rank {rank} holds nothing and sees loss {progress.losses[-1]:.4f}", flush=True)
    return progress.losses, progress.shares


def compare(
    options: argparse.Namespace, functions: list[bytes], losses: list[float]
) -> tuple[list[float], bool]:
    """Repeat the first steps on one process; return their losses, and whether they are the same."""
    steps = itertools.islice(train(options, functions, plan=None), CHECKED_STEPS)
    reference = [loss for loss, _ in steps]
    comparison = report.Comparison(losses[: len(reference)], reference)
    print(f"\nthe first {len(reference)} steps beside plain PyTorch on one process:")
    print(comparison.table(launch.world_size(NUM_RANKS)))
    largest = max(comparison.differences)
    is_equal = comparison.agrees(TOLERANCE)
    verdict = "equal: the largest relative difference is" if is_equal else "NOT EQUAL: it is"
    print(f"{verdict} {largest:.1e}, allowed is {TOLERANCE:.0e}")
    return reference, is_equal


def run(options: argparse.Namespace) -> int:
    """Run the example; return the exit status."""
    world_size = launch.world_size(NUM_RANKS)
    plan = hd.AnnotationPlan.load(options.plan)
    plan.check(world_size=world_size)
    with torch.device("meta"):
        model = build_model(options.context)
    layout = report.Layout(plan.expand(model), model, (options.batch, options.context), world_size)
    with hd.as_rank(0):  # a rehearsal in this process: what does not fit is found out before the start
        hd.parallelize(model, plan)
    functions = load_functions()
    if launch.is_first():
        size = sum(map(len, functions)) / 1e6
        print(f"{len(functions):,} functions of Python's standard library, {size:.1f} MB")
        print(f"plan {options.plan}: {layout.plan.inputs}\n{layout}\n", flush=True)

    outcome = launch.run(
        train_on_this_rank,
        options,
        functions,
        plan,
        layout,
        num_ranks=NUM_RANKS,
        time_limit=options.time_limit,
        expected=(hd.PlanError,),
    )
    if outcome is None:  # rank 0 of torchrun's processes does the rest
        return 0
    losses, shares = outcome
    last = losses[-10:]
    print(f"loss {losses[0]:.3f} at first, {sum(last) / len(last):.3f} over the last {len(last)} steps")
    reference, is_equal = ([], True) if options.no_check else compare(options, functions, losses)
    picture = Path(options.output) / "train_llama.svg"
    print("picture:", report.draw(picture, layout, losses, reference, shares))
    return 0 if is_equal else 1


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    examples = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(
        description="Train a small Llama on processes that are not alike.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--plan", default=examples / "plans" / "two_unlike.json", type=Path, help="who holds what")
    add("--steps", default=120, type=positive(int), help="batches to train on")
    add("--batch", default=16, type=positive(int), help="rows of a batch, over all ranks")
    add("--context", default=128, type=positive(int, 2), help="tokens of a row")
    add("--lr", default=3e-3, type=positive(float), help="learning rate after the warmup")
    add("--output", default=Path("outputs"), type=Path, help="folder for the picture")
    add("--no-check", action="store_true", help="do not repeat the first steps on one process")
    add("--time-limit", default=600.0, type=positive(float), help="seconds after which all ends")
    return parser.parse_args()


def positive(kind: type[int] | type[float], least: float = 0) -> Callable[[str], int | float]:
    """Return a reader of numbers above 0, and not below ``least``, for the command line."""

    def read(text: str) -> int | float:
        value = kind(text)
        if not (0 < value < math.inf and value >= least):
            raise argparse.ArgumentTypeError(f"must be a number from {least or 'above 0'} on, got {text}")
        return value

    read.__name__ = kind.__name__
    return read


def main() -> int:
    """Run the example and say in one line what a user can mend."""
    try:
        return run(parse_options())
    except hd.PlanError as error:
        status, text = 2, f"PlanError: {error}"
    except launch.RanksFailedError as error:
        status, text = 1, str(error)
    except KeyboardInterrupt:
        status, text = 130, "interrupted; all ranks have ended"
    if launch.is_first():
        print(text, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
