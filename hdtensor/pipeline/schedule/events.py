"""The event engine: durations in, times out. It knows tasks, workers and orders, nothing of pipelines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hdtensor.errors import ScheduleError


class Task(NamedTuple):
    """Something that takes time.

    Attributes:
        seconds: How long it takes.
        after: Indices of tasks that must have ended before it starts, beside those that its workers do
            before it.
    """

    seconds: float
    after: tuple[int, ...] = ()


def run_tasks(tasks: Sequence[Task], orders: Iterable[Sequence[int]]) -> list[float]:
    """Return when each task starts, in seconds from the start of the first.

    A worker does its tasks one after another. A task in several orders is done by all of these workers
    together. Every task starts as early as it can: nothing is chosen, so the times are those of the longest
    chains of tasks.

    >>> forward, message, other = Task(2.0), Task(0.5, after=(0,)), Task(1.0, after=(1,))
    >>> run_tasks([forward, message, other], [[0], [1], [2]])
    [0.0, 2.0, 2.5]

    Args:
        tasks: What there is to do.
        orders: For each worker the indices of its tasks, in the order in which it does them.

    Raises:
        ScheduleError: If tasks wait for one another in a circle.
    """
    num = len(tasks)
    waits_for = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in range(num)]
    for index, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(index)
    for order in orders:
        for before, after in zip(order, order[1:], strict=False):  # noqa: RUF007 - a slice is faster
            followers[before].append(after)
            waits_for[after] += 1
    starts = [0.0] * num
    ready = deque(index for index in range(num) if waits_for[index] == 0)
    num_done = 0
    while ready:
        index = ready.popleft()
        num_done += 1
        end = starts[index] + tasks[index].seconds
        for follower in followers[index]:
            starts[follower] = max(starts[follower], end)
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                ready.append(follower)
    if num_done < num:
        stuck = [index for index in range(num) if waits_for[index]]
        raise ScheduleError(
            f"{len(stuck)} of {num} tasks wait for one another in a circle, the first being number {stuck[0]}. "
            f"Call validate, which says why."
        )
    return starts
