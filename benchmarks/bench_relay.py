"""How much sooner a switch of plans is done when idle neighbours relay, and how long it takes to plan.

    python benchmarks/bench_relay.py

Pure planning, no processes: seconds of the switch are those of the link model (``Topology.makespan``).
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdtensor.placements.layout import owned_boxes
from hdtensor.plan import AnnotationPlan, ModelDescription, Pattern
from hdtensor.redistribute import fuse as fuse_module
from hdtensor.redistribute.fuse import FusedScheme, Move, fuse
from hdtensor.redistribute.relay import RelayScheme, relay
from hdtensor.redistribute.steps import (
    Layout,
)
from hdtensor.redistribute.topology import Topology


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "relay.md"
PLANS = ROOT / "tests" / "paper" / "data" / "plans.json"
PATTERNS = (Pattern("lm_head.weight", "column", "last"),)
#: Bytes per parameter, as the paper's Table 4 counts.
ITEMSIZE = 6
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A switch.

    Attributes:
        name: What the table calls it.
        src: Plan before.
        dst: Plan after.
        num_ranks: Ranks of the cluster, in nodes of 8.
        dead: Ranks that are lost.
        num_layers: Layers of the model.
    """

    name: str
    src: AnnotationPlan
    dst: AnnotationPlan
    num_ranks: int
    dead: tuple[int, ...] = ()
    num_layers: int = 60


def paper_plan(label: str) -> AnnotationPlan:
    """Return a plan of Table 11 or 12."""
    (found,) = (
        plan
        for plan in json.loads(PLANS.read_text())["plans"]
        if plan["source_table"] in (11, 12) and plan["label"].startswith(f"{label}:")
    )
    return AnnotationPlan.from_dict(found)


def large_plan(num_pipelines: int, tp: int, bounds: Sequence[int]) -> AnnotationPlan:
    """Return pipelines of consecutive ranks; stage i has layers ``bounds[i]`` to ``bounds[i + 1]``."""
    num_stages = len(bounds) - 1
    pipelines: list[Any] = []
    for p in range(num_pipelines):
        stages = []
        for s in range(num_stages):
            first = (p * num_stages + s) * tp
            layers = [bounds[s], bounds[s + 1] - 1]
            stages.append({"ranks": list(range(first, first + tp)), "layers": layers})
        pipelines.append({"stages": stages, "share": 1})
    return AnnotationPlan.from_dict({"pipelines": pipelines})


def cases() -> list[Case]:
    """Return the switches of the table."""
    even, shifted = (0, 8, 16, 24, 32, 40, 48, 56, 64), (0, 7, 14, 22, 31, 40, 49, 57, 64)
    eight = large_plan(32, 4, even)
    return [
        Case(
            name="C1 to C2, rank 31 lost",
            src=paper_plan("C1"),
            dst=paper_plan("C2"),
            num_ranks=32,
            dead=(31,),
        ),
        Case(name="C2 to C3", src=paper_plan("C2"), dst=paper_plan("C3"), num_ranks=32),
        Case(name="C4 to C5", src=paper_plan("C4"), dst=paper_plan("C5"), num_ranks=48),
        Case(
            name="C5 to C6, rank 15 lost",
            src=paper_plan("C5"),
            dst=paper_plan("C6"),
            num_ranks=48,
            dead=(15,),
        ),
        Case(name="C6 to C7", src=paper_plan("C6"), dst=paper_plan("C7"), num_ranks=48),
        Case(
            name="32 pipelines x 8 stages x TP 4, other stages",
            src=eight,
            dst=large_plan(32, 4, shifted),
            num_ranks=1024,
            num_layers=64,
        ),
        Case(
            name="the same, the last pipeline lost",
            src=eight,
            dst=large_plan(31, 4, shifted),
            num_ranks=1024,
            dead=tuple(range(992, 1024)),
            num_layers=64,
        ),
        Case(
            name="8 stages to 4, 64 pipelines",
            src=eight,
            dst=large_plan(64, 4, even[::2]),
            num_ranks=1024,
            num_layers=64,
        ),
    ]


def moves_of(case: Case) -> list[Move]:
    """Return the moves of a Llama of the 32B model's width."""
    model = ModelDescription.llama(
        num_layers=case.num_layers,
        hidden_size=6656,
        intermediate_size=17920,
        num_attention_heads=64,
        num_key_value_heads=64,
        vocab_size=30592,
    )
    before, after = (plan.expand(model, PATTERNS).tensors for plan in (case.src, case.dst))
    return [
        Move(Layout(before[name], shape, None), Layout(after[name], shape, None), ITEMSIZE, name)
        for name, shape in model.shapes.items()
    ]


def timed(plan: Callable[[], Any]) -> tuple[Any, float]:
    """Return a scheme, and the least seconds of planning it with empty caches."""
    seconds = []
    for _ in range(REPEATS):
        fuse_module._layout_table.cache_clear()
        owned_boxes.cache_clear()
        gc.collect()
        start = time.perf_counter()
        scheme = plan()
        seconds.append(time.perf_counter() - start)
    return scheme, min(seconds)


def row(case: Case) -> str:
    """Measure one switch."""
    moves = moves_of(case)
    topology = Topology.of_nodes(8, case.num_ranks)
    fused: FusedScheme
    relayed: RelayScheme
    fused, fuse_s = timed(lambda: fuse(moves, topology=topology, exclude_ranks=case.dead))
    relayed, relay_s = timed(lambda: relay(moves, topology=topology, exclude_ranks=case.dead))
    cells = (
        case.name,
        f"{1e3 * fused.seconds:.1f}",
        f"{1e3 * relayed.seconds:.1f}",
        f"{1e3 * relayed.bound_seconds:.1f}",
        f"{relayed.seconds / fused.seconds:.3f}",
        f"{relayed.seconds / relayed.bound_seconds:.3f}",
        f"{relayed.num_bytes / fused.num_bytes:.2f}",
        f"{fuse_s:.3f}",
        f"{relay_s:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, print and write the page."""
    head = f"""\
# Relays in a switch of plans

The fused scheme of the paper (Sec. 7) beside the relayed one, for the parameters of a Llama 32B
({ITEMSIZE} bytes per parameter, as Table 4 counts). Makespans are those of the link model: the busiest
direction of a NIC (50 GB/s) or of a rank's fast links (400 GB/s), nodes of 8 ranks; everything overlaps
perfectly. The bound is proven for each switch by link prices (`hdtensor/redistribute/balance.py`). Planning
times are the least of {REPEATS}, with empty caches.

* machine: {platform.machine()}, {os.cpu_count()} cores, {platform.system()}
* software: Python {platform.python_version()}
* date: {datetime.datetime.now(tz=datetime.UTC).date()}
* command: `python benchmarks/bench_relay.py`

| switch | fused ms | relayed ms | bound ms | relayed / fused | relayed / bound | bytes relayed / fused | plan fused s | plan relayed s |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""
    lines = []
    for case in cases():
        lines.append(row(case))
        print(lines[-1], flush=True)
    PAGE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
