"""CPU time of several candidates, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping


Candidate = Callable[[], object]


def interleave(
    candidates: Mapping[str, Candidate], *, number: int, repeats: int, warmup: int = 3
) -> dict[str, float]:
    """Return each candidate's CPU time in microseconds a call: the smallest of its repeats.

    Each repeat runs every candidate ``number`` times before the next repeat begins, so that a
    machine that slows down slows all of them down. Ranks that call it with the same candidates stay in
    step. The garbage collector runs between repeats only.

    Args:
        candidates: Name -> what to call.
        number: Calls in a block.
        repeats: Blocks of each candidate.
        warmup: Calls of each candidate before the first block.
    """
    for run in candidates.values():
        for _ in range(warmup):
            run()
    seconds = dict.fromkeys(candidates, float("inf"))
    gc.collect()
    gc.freeze()  # what exists now is not looked at again: a collection of all of torch takes 0.1 s
    gc.disable()
    try:
        for _ in range(repeats):
            for name, run in candidates.items():
                seconds[name] = min(seconds[name], cpu_seconds(run, number))
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return {name: each / number * 1e6 for name, each in seconds.items()}


def cpu_seconds(run: Candidate, number: int = 1) -> float:
    """Return the CPU time of ``number`` calls, of all threads of this process."""
    turns = range(number)
    start = time.process_time()
    for _ in turns:
        run()
    return time.process_time() - start
