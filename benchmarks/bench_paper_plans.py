"""Our plans beside the paper's, under one cost model.

    python benchmarks/bench_paper_plans.py          # a minute
    python benchmarks/bench_paper_plans.py --quick  # two of the plans

The table is also written as docs/benchmarks/paper_plans.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paper_plans import PaperPlan, make_costs, read_plans, whole_cluster
from report import machine, write_page

from hdtensor.planner.replan import replan
from hdtensor.planner.search import SearchResult, search
from hdtensor.planner.simulate import step_seconds
from hdtensor.planner.space import SearchOptions, make_space


PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "paper_plans.md"

ABOUT = """# The paper's plans

The 13 plans of Tables 9, 11 and 12 beside ours for the same devices, both timed by the event simulator with the same roofline costs,
in which a layer on H20 takes 3.235 times (TP 4) and 2.63 times (TP 8, 70B) as long as on H800, as the tables' splits of layers
imply. Plans of Tables 11 and 12 keep two lanes or more and do not shard optimizer states. The bound holds for all plans of up to 8
stages. Seconds of planning are CPU seconds of one core.
"""


def plan_for(plan: PaperPlan) -> tuple[float, SearchResult, float]:
    """Return the step of the paper's plan, our plan, and the seconds of planning."""
    cluster = whole_cluster()
    costs, workload = make_costs(plan, cluster)
    theirs = step_seconds(plan.strategy, cluster, costs, workload)
    options = SearchOptions(min_lanes=1 if plan.zero else 2)
    start = time.process_time()
    num_layers = costs.model.num_layers
    space = make_space(cluster, costs, workload, num_layers, options, ranks=plan.ranks)
    return theirs, search(space), time.process_time() - start


def trace(plans: list[PaperPlan]) -> list[str]:
    """Return the lines of the elastic trace: each configuration re-planned from the one before."""
    lines = ["", "## The elastic trace, re-planned", ""]
    lines += ["| from | to | ranks left | seconds | planned anew | re-plan (s) | lanes kept |"]
    lines += ["|---|---|---|---|---|---|---|"]
    _, now, _ = plan_for(plans[0])
    for before, after in zip(plans, plans[1:], strict=False):  # noqa: RUF007 - as elsewhere
        old = now.strategy
        start = time.process_time()
        now = replan(now, after.ranks)
        seconds = time.process_time() - start
        _, fresh, _ = plan_for(after)
        places = {tuple(s.ranks for s in lane.stages) for lane in old.lanes}
        kept = sum(tuple(s.ranks for s in lane.stages) in places for lane in now.strategy.lanes)
        lines.append(
            f"| {before.label} | {after.label} | {len(after.ranks)} | {now.seconds:.3f} | {fresh.seconds:.3f} | "
            f"{seconds:.3f} | {kept} of {len(old.lanes)} |"
        )
    return lines


def main() -> int:
    """Print the table, write the page, and return 1 if one of the paper's plans is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two plans, no page")
    quick = parser.parse_args().quick
    start = time.monotonic()
    plans = read_plans()
    lines = [
        "| table | plan | paper's (s) | ours (s) | ours / paper's | gap to the bound | planning (s) | our lanes |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    missed = 0
    for plan in plans[2:4] if quick else plans:
        theirs, ours, seconds = plan_for(plan)
        missed += ours.seconds > theirs
        best = ours.candidates[0].what if ours.candidates else "uniform"
        lines.append(
            f"| {plan.table} | {plan.label} | {theirs:.3f} | {ours.seconds:.3f} | {ours.seconds / theirs:.3f} | "
            f"{ours.gap:.1%} | {seconds:.2f} | {best} |"
        )
        print(lines[-1], flush=True)
    if not quick:
        lines += trace([plan for plan in plans if plan.table in (11, 12)])
        print("\n".join(lines[-8:]))
        about = machine("python benchmarks/bench_paper_plans.py", time.monotonic() - start)
        facts = [f"* {name}: {value}" for name, value in about.items()]
        write_page(PAGE, "\n".join([ABOUT, *facts, "", *lines, ""]))
    print(f"{missed} of the paper's plans are faster than ours.")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
