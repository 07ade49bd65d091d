"""What a redistribute of a small tensor costs beside DTensor's, and what planning one costs.

The process group is torch's fake one: messages and collectives cost nothing, so that only the overhead of
the two libraries is left.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import timing
import torch
import torch.distributed as dist
from report import Row
from settings import Settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import hdtensor as hd
from hdtensor.redistribute.topology import UNIFORM


#: name, placement before, after; two ranks.
TRANSITIONS: tuple[tuple[str, Placement, Placement], ...] = (
    ("no-op, Shard(0) -> Shard(0)", Shard(0), Shard(0)),
    ("local, Replicate -> Shard(0)", Replicate(), Shard(0)),
    ("all-reduce, Partial -> Replicate", Partial(), Replicate()),
    ("all-gather, Shard(0) -> Replicate", Shard(0), Replicate()),
)


def measure(settings: Settings) -> list[Row]:
    """Run in a process of its own; it becomes rank 0 of two."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = []
    for grad in (False, True):
        for name, src, dst in TRANSITIONS:
            times = timing.interleave(
                _candidates(mesh, src, dst, grad), number=200, repeats=settings.scaled(20)
            )
            rows.append(
                Row(
                    section="Overhead of a small redistribute (8 x 8), without communication",
                    name=name + (", with autograd" if grad else ""),
                    figure="hdtensor / DTensor",
                    value=times["hdtensor"] / times["dtensor"],
                    goal=0.5,
                    dtensor_us=times["dtensor"],
                    hdtensor_us=times["hdtensor"],
                )
            )
    return rows


def _candidates(
    mesh: object, src: Placement, dst: Placement, grad: bool
) -> dict[str, Callable[[], object]]:
    shape = (8, 8)
    rows = 4 if isinstance(src, Shard) else 8
    local = torch.randn(rows, 8)
    theirs = DTensor.from_local(local, mesh, [src], run_check=False).requires_grad_(grad)  # type: ignore[arg-type]
    before, after = (hd.HDSpec([hd.Subgroup((0, 1), [p])]) for p in (src, dst))
    ours = hd.from_local(local, before, shape=shape, check=False).requires_grad_(grad)
    placements = [dst]
    return {
        "hdtensor": lambda: ours.redistribute(after),
        "dtensor": lambda: theirs.redistribute(placements=placements),
    }


#: name, source, target, goal in milliseconds: each a pair that was never asked before.
PAIRS = (
    ("8 ranks, TP 4 -> TP 2 beside 1", "R / 0-3:S0", "R / 4,5:S0 6:R", 1.0),
    ("8 ranks, send-receive", "R / 0-3:S1", "R / 4-7:S1", 1.0),
    ("8 ranks, SplitAllReduce", "P / 0-3:S1 4-7:S0", "R / 0-3:S1 4-7:S0", 1.0),
    ("8 ranks, two subgroups -> a mesh", "S0 / 0-3:S1 4,5:S0 6,7:R", "R / 0-7(2x4):S0,S1", 1.0),
    (
        "48 ranks, four pipelines' stages -> others",
        "R / 0-3:S0 8-11:S0 16-19:S0 24-27:S0",
        "R / 4-7:S0 28-31:S0 32-35:S1 40,41:S0",
        5.0,
    ),
    ("48 ranks, 24 rows -> 24 columns", "R / 0-23:S0", "R / 24-47:S1", 5.0),
)


def measure_resolve(settings: Settings) -> list[Row]:
    """Run in a process of its own."""
    rows = []
    for name, src, dst, goal in PAIRS:
        before, after = hd.HDSpec.from_text(src), hd.HDSpec.from_text(dst)
        new = min(_new_pair(before, after, i) for i in range(settings.scaled(20)))
        shape = (4096, 4096)
        hd.resolve(before, after, shape)
        again = timing.interleave(
            {"again": functools.partial(hd.resolve, before, after, shape)}, number=2000, repeats=5
        )["again"]
        rows.append(_resolve_row(name, "milliseconds", new, goal))
        rows.append(_resolve_row(f"{name}, again", "microseconds", again, 2.0))
    return rows


def _new_pair(before: hd.HDSpec, after: hd.HDSpec, i: int) -> float:
    shape = (4096 + 48 * i, 4096)
    start = time.process_time()
    hd.resolve(before, after, shape, topology=UNIFORM)
    return (time.process_time() - start) * 1e3


def _resolve_row(name: str, figure: str, value: float, goal: float) -> Row:
    return Row(section="resolve", name=name, figure=figure, value=value, goal=goal)
