"""What hdtensor costs beside plain torch and beside DTensor of the same torch.

    python benchmarks/bench_dispatch.py                    # everything, a few minutes
    python benchmarks/bench_dispatch.py --quick            # does it work?
    python benchmarks/bench_dispatch.py --only ops layer   # some sections

Every row is CPU time of the compared sides in one process, in turns. The whole run is also written as
docs/benchmarks/dispatch.md.
"""

from __future__ import annotations

import os


# Before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import bench_caches
import bench_layer
import bench_ops
import bench_pruned
import bench_step
import processes
import torch
from report import Row, machine, markdown, text_table, write_page
from settings import Settings


PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "dispatch.md"

Section = Callable[[Settings], list[Row]]


def _layer(settings: Settings) -> list[Row]:
    cases = [(kind, size) for kind in ("TP", "DP") for size in (1, 2)]
    return [
        row
        for kind, size in cases
        for row in processes.run(bench_layer.measure, size, kind, settings)
    ]


def _shapes(settings: Settings) -> list[Row]:
    parts = (bench_caches.measure_keys, bench_caches.measure_lengths)
    return [row for part in parts for row in processes.run(part, 1, settings)]


def _first_step(settings: Settings) -> list[Row]:
    times: dict[str, float] = {}
    for _ in range(settings.scaled(3)):
        for side in ("dtensor", "op by op", "region"):
            found = processes.run(bench_caches.measure_first_step, 1, side)
            times[side] = min(found, times.get(side, found))
    return bench_caches.first_step_rows(times)


SECTIONS: Mapping[str, Section] = {
    "ops": lambda settings: processes.run(bench_ops.measure, 1, settings),
    "layer": _layer,
    "pruned": lambda settings: processes.run(bench_pruned.measure, 2, settings),
    "shapes": _shapes,
    "first": _first_step,
    "step": lambda settings: [
        r for n in (1, 2) for r in processes.run(bench_step.measure, n, settings)
    ],
}


def main() -> int:
    """Measure, print, write; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repeats; the figures are rough")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        metavar="SECTION",
        help=f"measure only these of: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--page", type=Path, help="write the page here, also after a partial run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(is_quick=options.quick)
    command = " ".join(["python", "benchmarks/bench_dispatch.py", *sys.argv[1:]])

    start = time.monotonic()
    rows: list[Row] = []
    for name in options.only or SECTIONS:
        began = time.monotonic()
        found = SECTIONS[name](settings)
        rows += found
        print(f"{text_table(found)}\n\n[{name}: {time.monotonic() - began:.0f} s]\n", flush=True)
    seconds = time.monotonic() - start

    for what, text in machine(command, seconds).items():
        print(f"{what}: {text}")
    missed = [row for row in rows if row.is_missed]
    print(
        f"{sum(row.goal is not None for row in rows) - len(missed)} goals reached, {len(missed)} missed"
    )
    for row in missed:
        print(f"  miss: {row.section}: {row.name}: {row.value:.3g} (goal {row.goal:g})")
    is_whole = not options.quick and not options.only
    if is_whole or options.page:
        write_page(options.page or PAGE, markdown(rows, command, seconds))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
