"""What it costs that a micro-batch's call waits between two stages of a rank: in a thread of its own, or in a greenlet.

    python benchmarks/bench_turns.py     # some seconds; greenlets only where that package is installed

A call is resumed once for each stage; a stage is some small tensor operations, or none. Both ways take turns in one run,
and the smallest of the repeats counts.
"""

from __future__ import annotations

import os


# Before torch is imported: OpenMP reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable

import torch

from hdtensor.pipeline.runtime.turns import Turns


try:
    import greenlet
except ImportError:
    greenlet = None


NUM_CALLS, NUM_REPEATS = 200, 9
X = torch.ones(64, 64)


class GreenletTurns:
    """The same as ``Turns``, in a greenlet. Settings of torch are the thread's, so none is carried over."""

    def __init__(self, function: Callable[[], None]) -> None:
        """Take the function."""
        self._greenlet = greenlet.greenlet(function)

    def resume(self) -> None:
        """Let the function run until it pauses or ends; raise what it raises."""
        self._greenlet.switch()

    def pause(self) -> None:
        """Called by the function: wait for the next turn."""
        self._greenlet.parent.switch()


def microseconds(
    kind: type[Turns] | type[GreenletTurns], num_stages: int, num_operations: int
) -> float:
    """Return the time of one call that is cut between its stages."""
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        _run_call(kind, num_stages, num_operations)
    return (time.perf_counter() - start) / NUM_CALLS * 1e6


def _run_call(
    kind: type[Turns] | type[GreenletTurns], num_stages: int, num_operations: int
) -> None:
    def call() -> None:
        for stage in range(num_stages):
            if stage:
                turns.pause()
            for _ in range(num_operations):
                torch.mm(X, X)

    turns = kind(call)
    for _ in range(num_stages):
        turns.resume()


def main() -> None:
    """Measure and print."""
    kinds: dict[str, type[Turns] | type[GreenletTurns]] = {"thread": Turns}
    if greenlet is not None:
        kinds["greenlet"] = GreenletTurns
    torch.set_num_threads(1)
    for num_stages in (2, 4):
        for num_operations in (0, 200):
            found = {name: float("inf") for name in kinds}
            for _ in range(NUM_REPEATS):
                for name, kind in kinds.items():
                    found[name] = min(found[name], microseconds(kind, num_stages, num_operations))
            figures = ", ".join(f"{name} {value:,.0f} us" for name, value in found.items())
            print(f"{num_stages} stages of {num_operations} operations: a call takes {figures}")


if __name__ == "__main__":
    main()
