"""When 1F1B ends where messages block both ends, exactly and fast.

Number the passes of every stage by slots: stage s does the forward of micro-batch m in slot s + 2m, and its
backward in slot 2S - 1 - s + 2m. Then in each slot the stages are pairs of neighbours, one of which comes from
a forward and the other one from a backward: they exchange gradient and hidden states, and go on to their next
passes.
"""

from __future__ import annotations

from hdtensor.planner.lane_times import LaneTimes


_SAME = 1e-12


def blocking_end_times(times: LaneTimes, num_microbatches: int) -> tuple[float, ...]:
    """Return when each stage has done its last pass and message, in seconds.

    The numbers are those of the event simulator with ``is_blocking``.

    >>> blocking_end_times(LaneTimes((1.0, 1.0), (2.0, 2.0), (0.5,), (0.5,)), 2)
    (11.0, 9.0)

    Args:
        times: Seconds of passes and messages.
        num_microbatches: Micro-batches of a step.
    """
    num = times.num_stages
    worker = [0.0] * num
    history: list[list[float]] = []
    slot, num_slots = 0, 2 * (num_microbatches + num - 1)
    first_equal, last_equal = 2 * num, 2 * (num_microbatches - 1)
    while slot < num_slots:
        _do_slot(times, worker, slot, num_microbatches)
        if slot % 2 and first_equal <= slot < last_equal:
            slot += 2 * _skip(worker, history, (last_equal - slot) // 2)
        slot += 1
    return tuple(worker)


def _do_slot(times: LaneTimes, worker: list[float], slot: int, num_microbatches: int) -> None:
    num = len(worker)
    for stage in range(
        1 - slot % 2, num - 1, 2
    ):  # this one comes from a forward, the next one from a backward
        gradient = _backward_of(stage, slot, num)
        hidden = _forward_of(stage, slot - 1)
        has_gradient = 0 <= gradient < num_microbatches
        has_hidden = 0 <= hidden < num_microbatches
        if has_gradient or has_hidden:
            both = max(worker[stage], worker[stage + 1])
            both += (
                times.send_backward[stage] * has_gradient + times.send_forward[stage] * has_hidden
            )
            worker[stage] = worker[stage + 1] = both
    for stage in range(num):
        if (slot - stage) % 2 == 0:
            if 0 <= _forward_of(stage, slot) < num_microbatches:
                worker[stage] += times.forward[stage]
        elif 0 <= _backward_of(stage, slot, num) < num_microbatches:
            worker[stage] += times.backward[stage]


def _forward_of(stage: int, slot: int) -> int:
    return (slot - stage) // 2


def _backward_of(stage: int, slot: int, num: int) -> int:
    return (slot - (2 * num - 1 - stage)) // 2


def _skip(worker: list[float], history: list[list[float]], num_left: int) -> int:
    """Move all stages over whole cycles of micro-batches, if they repeat; return how many were skipped."""
    for length, old in enumerate(reversed(history), 1):
        by = worker[0] - old[0]
        same = all(
            abs(new - then - by) <= _SAME * worker[0] for new, then in zip(worker, old, strict=True)
        )
        if same and num_left >= length:
            cycles = num_left // length
            for stage, time in enumerate(worker):
                worker[stage] = time + cycles * by
            history.clear()
            return cycles * length
    history.append(worker[:])
    if len(history) > len(worker):
        del history[0]
    return 0
