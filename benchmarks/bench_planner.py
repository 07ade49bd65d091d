"""How fast the planner is, and how good its plans are.

    python benchmarks/bench_planner.py          # some minutes
    python benchmarks/bench_planner.py --quick  # the small rows

The table is also written as docs/benchmarks/planner.md, and the plans on Sailor's clusters as outputs/sailor_*.json in
the form of Sailor's plan files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from report import machine, write_page

from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.models import find_model
from hdtensor.planner.planning import with_tight_bound
from hdtensor.planner.replan import replan
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.sailor_files import SailorFolder
from hdtensor.planner.sailor_plans import write_plan
from hdtensor.planner.search import SearchResult, search
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.workload import Workload


HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks" / "planner.md"
OUTPUTS = HERE.parent / "outputs"

ABOUT = """# The planner

Seconds are CPU seconds of one core (`time.process_time`), of everything from a cluster and a cost model to a plan with its bound.
"""


class Row(NamedTuple):
    """A figure beside its goal.

    Attributes:
        what: What was measured.
        value: The figure.
        goal: The largest value that is good enough.
        unit: Of both.
        notes: What else there is to say.
    """

    what: str
    value: float
    goal: float
    unit: str
    notes: str

    def line(self) -> str:
        """Return the row of the table."""
        result = "PASS" if self.value <= self.goal else "miss"
        return f"| {self.what} | {self.value:.3g} {self.unit} | <= {self.goal:g} {self.unit} | {result} | {self.notes} |"


def plan(cluster_text: str, model: str, batch: int) -> tuple[SearchResult, float]:
    """Return a plan with roofline costs, and its CPU seconds."""
    cluster = cluster_of_text(cluster_text)
    workload = Workload(batch=batch, context=4096)
    start = time.process_time()
    costs = RooflineCosts(model=find_model(model), workload=workload)
    space = make_space(cluster, costs, workload, costs.model.num_layers)
    found = search(space)
    return found, time.process_time() - start


def paper_rows() -> Iterator[Row]:
    """Yield the rows of the paper's cluster."""
    found, seconds = plan("16x H800 + 32x H20", "llama-32B", 64)
    what = "plan 32B on 16 H800 + 32 H20 (paper: 6.4-18.2 s)"
    yield Row(what, seconds, 0.5, "s", found.candidates[0].what)
    notes = f"step {found.seconds:.3f} s, bound {found.bound.seconds:.3f} s, uniform "
    notes += f"{found.uniform.seconds:.3f} s" if found.uniform else "none"
    parts = found.bound.parts
    if parts:
        notes += f"; the plan's own lanes take {parts.seconds:.3f} s or more, of which whole layers cost "
        notes += f"{parts.layers / found.seconds:.1%} of the step and whole micro-batches {parts.microbatches / found.seconds:.1%}"
    yield Row("its gap to the bound", 100 * found.gap, 2, "%", notes)
    worst, slowest = 0.0, 0.0
    ranks = set(range(48))
    for lost in sorted(ranks):
        start = time.process_time()
        again = replan(found, ranks - {lost})
        worst = max(worst, time.process_time() - start)
        slowest = max(slowest, again.seconds)
    notes = f"the worst of 48; steps up to {slowest:.3f} s"
    yield Row("re-plan after losing any one GPU (paper: 0.05-1.2 s)", worst, 0.05, "s", notes)


def large_rows() -> Iterator[Row]:
    """Yield the rows of large clusters."""
    for text, model, batch, goal, beside in (
        ("64x H800 + 64x H20", "llama-32B", 256, 1.0, "Sailor: 2.2 s"),
        ("256x H800 + 256x H20", "llama-32B", 1024, 3.0, "Sailor: 11.6 s"),
        ("256x H800 + 512x H20 + 256x A100-80", "llama-32B", 2048, 5.0, ""),
    ):
        found, seconds = plan(text, model, batch)
        uniform = f"{found.uniform.seconds:.2f} s" if found.uniform else "none"
        gaps = f"gap {found.gap:.1%}"
        if len(found.space.pools) == 2:
            start = time.process_time()
            tight = with_tight_bound(found)
            gaps += f" (tight {tight.gap:.1%}, in {time.process_time() - start:.1f} s more)"
        notes = f"step {found.seconds:.2f} s, {gaps}, uniform {uniform}; {found.candidates[0].what}"
        yield Row(f"{text}, {model}, batch {batch} {beside}", seconds, goal, "s", notes)


def sailor_rows() -> Iterator[Row]:
    """Yield the rows of Sailor's clusters, and write the plans."""
    folder = SailorFolder(HERE / "data" / "sailor")
    cluster = folder.cluster({"A100-40": 32, "V100-16": 96})
    OUTPUTS.mkdir(exist_ok=True)
    for config, model, goal in (
        ("training_config_opt_350.json", "OPT-350", 5.2),
        ("training_config_gpt_neo27.json", "GPT-Neo-2.7", 32.2),
    ):
        shape, workload = folder.training(config)
        costs = folder.costs(model, workload)
        for equal in (False, True):
            options = SearchOptions(
                tp_degrees=(1, 2, 4), mbs=(1, 2, 4, 8), max_stages=12, equal_lanes=equal
            )
            start = time.process_time()
            space = make_space(cluster, costs, workload, shape.num_layers, options)
            found = search(space)
            seconds = time.process_time() - start
            best = found.candidates[0].what if found.candidates else "uniform"
            notes = f"planned in {seconds:.1f} s, bound {found.bound.seconds:.2f} s; {best}"
            form = "equal lanes, as Sailor's plans" if equal else "unlike lanes"
            yield Row(f"{model} on 32 A100 + 96 V100, {form}", found.seconds, goal, "s", notes)
            if equal:
                text = json.dumps(write_plan(found.strategy, cluster), indent=1)
                (OUTPUTS / f"sailor_{model}.json").write_text(text + "\n")


def main() -> int:
    """Print the table, write the page, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small rows, no page")
    quick = parser.parse_args().quick
    start = time.monotonic()
    lines = ["| what | value | goal | | notes |", "|---|---|---|---|---|"]
    is_missed = False
    for rows in (paper_rows,) if quick else (paper_rows, large_rows, sailor_rows):
        for row in rows():
            is_missed |= row.value > row.goal
            lines.append(row.line())
            print(lines[-1], flush=True)
    if not quick:
        about = machine("python benchmarks/bench_planner.py", time.monotonic() - start)
        facts = [f"* {name}: {value}" for name, value in about.items()]
        write_page(PAGE, "\n".join([ABOUT, *facts, "", *lines, ""]))
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
