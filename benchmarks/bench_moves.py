"""redistribute of large tensors beside the bare messages or collectives of the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import wall
from report import Row
from settings import Settings

import hdtensor as hd
from hdtensor.collectives.groups import ensure_channels, ensure_groups, group_of
from hdtensor.placements import local_shape
from hdtensor.redistribute.execute import execute_many, make_runner
from hdtensor.redistribute.steps import (
    PointToPoint,
    RedistributePlan,
)


#: Bytes that are moved.
NUM_BYTES = 64 * 2**20

#: name, source, target, goal: 64 MiB of float32.
MOVES = (
    ("TP 4 -> TP 2 beside TP 1, rows", "R / 0-3:S0", "R / 0,1:S0 2:R", 1.1),
    ("TP 4 -> TP 2 beside TP 1, columns", "R / 0-3:S1", "R / 0,1:S1 2:R", 1.1),
    ("subgroup [0,1] -> [2,3]", "R / 0,1:S0", "R / 2,3:S0", 1.1),
    ("rows on [0,1] -> columns on [2,3]: packed", "R / 0,1:S0", "R / 2,3:S1", None),
)

SHAPE = (4096, 4096)


def measure(settings: Settings) -> list[Row]:
    """Run on 4 ranks."""
    rows = [_against_messages(*move, settings) for move in MOVES]
    rows += [_split_all_reduce(cut, settings) for cut in ("S0", "S1")]
    return rows


def _against_messages(name: str, src: str, dst: str, goal: float | None, settings: Settings) -> Row:
    shape = SHAPE
    plan = hd.resolve(src, dst, shape)
    ensure_groups(plan.rank_sets())
    ensure_channels()
    rank = dist.get_rank()
    local = torch.randn(local_shape(plan.src, shape, plan.src_top_sizes, rank))
    run = make_runner(plan)
    seconds = wall.interleave(
        {"hdtensor": lambda: run(local), "bare": _bare_messages(plan)},
        repeats=settings.scaled(25),
    )
    moved = plan.num_moved * 4
    return Row(
        section="Messages of large tensors",
        name=f"{name}, {moved / 2**20:.0f} MiB",
        figure="hdtensor / isend and irecv",
        value=wall.ratio(seconds, "hdtensor", "bare"),
        goal=goal,
        plain_us=wall.middle(seconds["bare"]) * 1e6,
        hdtensor_us=wall.middle(seconds["hdtensor"]) * 1e6,
    )


def _bare_messages(plan: RedistributePlan) -> Callable[[], None]:
    """Return the same bytes between the same ranks, from and into contiguous buffers."""
    rank = dist.get_rank()
    sizes: dict[tuple[int, int], int] = {}
    for step in plan.steps:
        assert isinstance(step, PointToPoint), f"{plan} has collectives"
        for box, src, dst in step.transfers:
            if src != dst:
                sizes[src, dst] = sizes.get((src, dst), 0) + box.numel
    sent = {dst: torch.randn(n) for (src, dst), n in sizes.items() if src == rank}

    def run() -> None:
        works = [dist.irecv(torch.empty(n), src) for (src, dst), n in sizes.items() if dst == rank]
        works += [dist.isend(buffer, dst) for dst, buffer in sent.items()]
        for work in works:
            work.wait()

    return run


def _split_all_reduce(cut: str, settings: Settings) -> Row:
    """TP 2 beside TP 1: ranks 0 and 1 hold a half each, rank 2 both; gradients as ``backward`` leaves them."""
    shape = SHAPE
    plan = hd.resolve(f"P / 0,1:{cut} 2:R", f"R / 0,1:{cut} 2:R", shape)
    ensure_groups(plan.rank_sets())
    rank = dist.get_rank()
    local = torch.zeros(local_shape(plan.src, shape, plan.src_top_sizes, rank))
    halves = {
        pair: torch.zeros(shape[0] * shape[1] // 2) for pair in ((0, 2), (1, 2)) if rank in pair
    }

    def bare() -> None:
        works = [
            dist.all_reduce(half, group=group_of(pair), async_op=True)
            for pair, half in halves.items()
        ]
        for work in works:
            work.wait()

    seconds = wall.interleave(
        {"hdtensor": lambda: execute_many([plan], [local], donate=True), "bare": bare},
        repeats=settings.scaled(25),
    )
    what = {"S0": "row halves", "S1": "column halves"}[cut]
    return Row(
        section="Split collectives of large tensors",
        name=f"SplitAllReduce, TP 2 beside TP 1, {what}, 64 MiB",
        figure="hdtensor / two all_reduces of 32 MiB",
        value=wall.ratio(seconds, "hdtensor", "bare"),
        goal=1.1,
        plain_us=wall.middle(seconds["bare"]) * 1e6,
        hdtensor_us=wall.middle(seconds["hdtensor"]) * 1e6,
    )
