"""What the last backward hides of summing gradients over lanes: buckets that start early beside all at the end.

    python benchmarks/bench_gradients.py          # a minute
    python benchmarks/bench_gradients.py --quick  # does it work?

Layers sleep in their backward, as if another device computed; the compared sides take turns in one run on local gloo
processes. The whole run is also written as docs/benchmarks/gradients.md.
"""

from __future__ import annotations

import os


# Before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import processes
import torch
import torch.distributed as dist
from report import Row, machine, markdown, text_table, write_page
from settings import Settings
from transformers import LlamaConfig, LlamaForCausalLM

import hdtensor as hd
from hdtensor.pipeline.runtime import Runner


PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "gradients.md"

ABOUT = (
    "What the last backward hides of summing gradients",
    "A Llama of 8 layers of 16 MiB on 3 lanes, of tp 2, tp 1 and tp 1, one micro-batch each; a layer's backward sleeps "
    "100 ms. What `Runner.step` still takes when a rank's last backward has ended, beside itself with all buckets started "
    "only then. Median wall time of the slowest of four local gloo processes, and the median of the ratios of "
    "neighbouring turns; in microseconds. The processes share two cores, so that sending itself takes their time.",
)

SLEEP_S = 0.1
GOAL = 0.9


def measure(settings: Settings) -> list[Row]:
    """Run on 4 ranks."""
    return [_row(zero, settings) for zero in (0, 1)]


def _row(zero: int, settings: Settings) -> Row:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=256,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    lanes = [
        {"stages": [{"ranks": ranks, "layers": [0, 7]}], "microbatches": 1, "mbs": 1}
        for ranks in ([0, 1], [2], [3])
    ]
    runner = Runner(model, hd.AnnotationPlan.from_dict({"pipelines": lanes, "zero": zero}))
    for layer in model.model.layers:
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    ids = torch.randint(0, 256, (3, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    gradients: Any = runner._mine.gradients
    before, flush = gradients.before, gradients.flush
    ended = [0.0]

    def note_end() -> bool:
        ended[0] = time.perf_counter()
        return flush()

    def tail(is_early: bool) -> float:
        """Return the seconds from the end of the last backward to the end of the step, on the slowest rank."""
        gradients.before = before if is_early else lambda _: None
        runner.step(batch)
        taken = torch.tensor([time.perf_counter() - ended[0]], dtype=torch.float64)
        for tensor in runner.optimizer_parameters():
            tensor.grad = None
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    gradients.flush = note_end
    tail(True)
    turns = [(tail(True), tail(False)) for _ in range(settings.scaled(10))]
    return Row(
        section="From the end of the last backward to the end of the step",
        name=f"zero {zero}: buckets early / all at the end",
        figure="early / at the end",
        value=statistics.median(early / late for early, late in turns),
        goal=GOAL,
        plain_us=statistics.median(late for _, late in turns) * 1e6,
        hdtensor_us=statistics.median(early for early, _ in turns) * 1e6,
    )


def main() -> int:
    """Measure, print and write; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, nothing is written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    rows = processes.run(measure, 4, Settings(is_quick=options.quick))
    seconds = time.perf_counter() - start
    command = " ".join(["python", "benchmarks/bench_gradients.py", *sys.argv[1:]])
    print(text_table(rows))
    print("\n".join(f"{name}: {text}" for name, text in machine(command, seconds).items()))
    if not options.quick:
        write_page(PAGE, markdown(rows, command, seconds, about=ABOUT))
        print(f"written: {PAGE.name}")
    return int(any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
