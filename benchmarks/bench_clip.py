"""What clipping by the total norm costs beside plain local tensors and one all-reduce.

    python benchmarks/bench_clip.py          # some minutes
    python benchmarks/bench_clip.py --quick  # does it work?

The compared sides take turns in one run on local gloo processes. The whole run is also written as
docs/benchmarks/clip.md.
"""

from __future__ import annotations

import os


# Before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import processes
import timing
import torch
import torch.distributed as dist
import wall
from report import Row, machine, markdown, text_table, write_page
from settings import Settings
from torch import nn

import hdtensor as hd


PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "clip.md"

ABOUT = (
    "What clipping gradients costs",
    "`hdtensor.clip_grad_norm_` beside the same on each rank's plain local tensors with one all-reduce of the squares "
    "(torch's `_foreach_norm` and `_foreach_mul_`). 200 parameters, half of them on ranks 0 and 1, half on ranks 0 to 3. "
    "Of the slowest of four local gloo processes: CPU time (`time.process_time`) is the smallest of the repeats; wall "
    "time is the median, and its figure the median of the ratios of neighbouring turns. Times are in microseconds.",
)

NUM_PARAMETERS = 200
#: Two sets of ranks, as in the case that DTensor refuses.
SPECS = ("R / 0,1:S0", "R / 0-3:S0")
#: name, shape of each parameter
SHAPES = {"small": (64, 64), "medium": (256, 256), "large": (512, 1024)}
GOAL = 1.5


def measure(settings: Settings) -> list[Row]:
    """Run on 4 ranks."""
    return [row for name, shape in SHAPES.items() for row in _rows(name, shape, settings)]


def _rows(name: str, shape: tuple[int, int], settings: Settings) -> list[Row]:
    parameters = [
        nn.Parameter(
            hd.distribute_tensor(torch.randn(shape), SPECS[i % len(SPECS)], src_data_rank=None)
        )
        for i in range(NUM_PARAMETERS)
    ]
    for p in parameters:
        p.grad = torch.ones_like(p)
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in parameters if p.is_local]
    for q in plain:
        q.grad = torch.ones_like(q)
    candidates = {
        "hdtensor": _clipping(lambda limit: hd.clip_grad_norm_(parameters, limit)),
        "plain": _clipping(lambda limit: _clip_plain(plain, limit)),
    }
    cpu = timing.interleave(candidates, number=5, repeats=settings.scaled(12))
    slowest = torch.tensor([cpu["hdtensor"], cpu["plain"]], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ours_us, plain_us = slowest.tolist()
    seconds = wall.interleave(candidates, repeats=settings.scaled(40))
    ratio = wall.ratio(seconds, "hdtensor", "plain")
    ours_wall, plain_wall = (wall.middle(seconds[k]) * 1e6 for k in candidates)
    named = f"{name}, {shape[0]} x {shape[1]} each"
    return [
        _row(f"{named}: CPU time", ours_us / plain_us, ours_us, plain_us),
        _row(f"{named}: wall time", ratio, ours_wall, plain_wall),
    ]


def _row(name: str, value: float, ours_us: float, plain_us: float) -> Row:
    return Row(
        section="clip_grad_norm_ of 200 parameters on two sets of ranks",
        name=name,
        figure="hdtensor / plain",
        value=value,
        goal=GOAL,
        plain_us=plain_us,
        hdtensor_us=ours_us,
    )


def _clipping(clip: Callable[[float], object]) -> Callable[[], object]:
    """Return a call that scales every time: each limit is a little below the one before."""
    limit = [1e2]

    def run() -> object:
        limit[0] *= 0.999
        return clip(limit[0])

    return run


def _clip_plain(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))).square()
    dist.all_reduce(square)
    total = square.sqrt()
    torch._foreach_mul_(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def main() -> int:
    """Measure, print and write; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, nothing is written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    rows = processes.run(measure, 4, Settings(is_quick=options.quick))
    seconds = time.perf_counter() - start
    command = " ".join(["python", "benchmarks/bench_clip.py", *sys.argv[1:]])
    print(text_table(rows))
    print("\n".join(f"{name}: {text}" for name, text in machine(command, seconds).items()))
    if not options.quick:
        write_page(PAGE, markdown(rows, command, seconds, about=ABOUT))
        print(f"written: {PAGE.name}")
    return int(any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
