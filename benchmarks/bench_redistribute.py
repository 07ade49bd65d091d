"""What redistribute and switching cost beside DTensor, bare messages and collectives, and a checkpoint.

    python benchmarks/bench_redistribute.py                       # everything, some minutes
    python benchmarks/bench_redistribute.py --quick               # does it work?
    python benchmarks/bench_redistribute.py --only moves switch   # some sections

The compared sides take turns in one run on local gloo processes. The whole run is also written as
docs/benchmarks/redistribute.md.
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

import bench_moves
import bench_overhead
import bench_switch
import processes
from report import Row, machine, markdown, text_table, write_page
from settings import Settings


PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "redistribute.md"

ABOUT = (
    "What redistribute and switching cost",
    "hdtensor beside the bare messages, collectives or DTensor calls that its figure names. Rows of large tensors "
    "are wall time of the slowest of four local gloo processes, and each figure is the median of the ratios of "
    "neighbouring turns; rows of overhead are CPU time over torch's fake process group, the smallest of the "
    "repeats. Times are in microseconds unless the figure says otherwise.",
)

SECTIONS: dict[str, Callable[[Settings], list[Row]]] = {
    "overhead": lambda settings: processes.run(bench_overhead.measure, 1, settings),
    "resolve": lambda settings: processes.run(bench_overhead.measure_resolve, 1, settings),
    "moves": lambda settings: processes.run(bench_moves.measure, 4, settings),
    "switch": lambda settings: processes.run(bench_switch.measure, 4, settings),
    "memory": lambda settings: processes.run(bench_switch.measure_memory, 4, settings),
}


def main() -> int:
    """Measure, print and write; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, nothing is written")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, help="some sections, nothing is written"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    settings = Settings(is_quick=options.quick)
    start = time.perf_counter()
    rows = [row for name in options.only or SECTIONS for row in SECTIONS[name](settings)]
    seconds = time.perf_counter() - start
    command = " ".join(["python", "benchmarks/bench_redistribute.py", *sys.argv[1:]])
    print(text_table(rows))
    print("\n".join(f"{name}: {text}" for name, text in machine(command, seconds).items()))
    if not options.quick and not options.only:
        write_page(PAGE, markdown(rows, command, seconds, about=ABOUT))
        print(f"written: {PAGE.name}")
    return int(any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
