"""Wall time of candidates that communicate, in turns; a turn takes as long as its slowest rank."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def interleave(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Return each candidate's seconds, one for each repeat: the longest over all ranks.

    Every rank calls it with the same candidates. Each repeat runs every candidate once; whoever begins
    changes from repeat to repeat. The ranks meet before each turn.
    """
    names = list(candidates)
    for name in names * warmup:
        candidates[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            candidates[name]()
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name].append(taken.item())
        gc.collect()
    gc.enable()
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: str, beside: str) -> float:
    """Return the median over repeats of one candidate's time over another's in the same repeat."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[beside], strict=True))


def middle(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)
