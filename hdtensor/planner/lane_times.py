"""``LaneTimes``: what the stages of a lane take; and when 1F1B, ZB-H1 and GPipe end, exactly and fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hdtensor.errors import PlannerError


#: Times are equal if they differ by less, relatively: sums in another order round differently.
_SAME = 1e-12


class LaneTimes(NamedTuple):
    """Seconds of one micro-batch in each stage of a lane, in the order of stages.

    Attributes:
        forward: Of each stage.
        backward: Of each stage.
        send_forward: Of the message from each stage to the next one; one fewer than stages.
        send_backward: Of the gradient's message from each stage's follower back to it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send_forward: tuple[float, ...]
    send_backward: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.forward)


class _State(NamedTuple):
    """When everything that one stage waits for is done; stages in order.

    Attributes:
        worker: The stage's last pass.
        forward: The arrival of its last hidden states at the next stage.
        backward: The arrival of its last gradient at the stage before.
    """

    worker: list[float]
    forward: list[float]
    backward: list[float]

    def copy(self) -> _State:
        return _State(self.worker[:], self.forward[:], self.backward[:])

    def moved_from(self, old: _State) -> float | None:
        """Return by how much every time is later than in an older state, None if not by the same."""
        step = self.worker[0] - old.worker[0]
        slack = _SAME * self.worker[0]
        low, high = step - slack, step + slack
        for new, then in zip(self.worker, old.worker, strict=True):
            if not low <= new - then <= high:
                return None
        last = len(self.worker) - 1
        # Nobody waits for hidden states of the last stage, nor for gradients of the first one.
        for i in range(last):
            if not low <= self.forward[i] - old.forward[i] <= high:
                return None
            if not low <= self.backward[i + 1] - old.backward[i + 1] <= high:
                return None
        return step

    def move(self, by: float) -> None:
        for times in self:
            for i, time in enumerate(times):
                times[i] = time + by


def end_times(times: LaneTimes, num_microbatches: int, schedule: str = "1F1B") -> tuple[float, ...]:
    """Return when each stage of a lane has done its last pass, in seconds.

    The numbers are those of the event simulator. A pass starts when its stage is free and its message has
    come; a message takes its channel for as long as it takes, while the sender goes on.

    ========  ====================================================================================
    schedule  how
    ========  ====================================================================================
    1F1B      turn by turn; as soon as all stages do a micro-batch by the same time later than the
              last one, all like ones are skipped at once
    ZB-H1     likewise, with each backward's half for the weights put off by the stage's number
    GPipe     forwards, then backwards, go through a line of stages and channels: M like jobs leave
              its n-th machine after sum(d_1 .. d_n) + (M - 1) max(d_1 .. d_n)
    ========  ====================================================================================

    >>> times = LaneTimes((1.0, 1.0), (2.0, 2.0), (0.0,), (0.0,))
    >>> end_times(times, 2), end_times(times, 2, "ZB-H1"), end_times(times, 2, "GPipe")
    ((9.0, 7.0), (7.0, 7.0), (9.0, 7.0))

    Args:
        times: Seconds of passes and messages.
        num_microbatches: Micro-batches of a step.
        schedule: ``1F1B``, ``ZB-H1`` or ``GPipe``, in any case.

    Raises:
        PlannerError: If it is another one.
    """
    if num_microbatches == 0:
        return (0.0,) * times.num_stages
    match schedule.lower():
        case "1f1b":
            return _alternating(times, num_microbatches, is_split=False)
        case "zb-h1":
            return _alternating(times, num_microbatches, is_split=True)
        case "gpipe":
            return _forwards_first(times, num_microbatches)
        case _:
            raise PlannerError(
                f"schedule: {schedule[:40]!r} is not planned; allowed: 1F1B, ZB-H1, GPipe, which have one stage on "
                f"each rank."
            )


def _forwards_first(times: LaneTimes, num_microbatches: int) -> tuple[float, ...]:
    """Return the ends of GPipe.

    A gradient comes to a stage after the last stage's last forward, which ends after its own: so the backwards'
    line is never kept waiting by forwards.
    """
    filled = _line(times.forward, times.send_forward, num_microbatches)[-1]
    back = _line(times.backward[::-1], times.send_backward[::-1], num_microbatches)
    return tuple(filled + end for end in reversed(back))


def _line(passes: Sequence[float], messages: Sequence[float], num_jobs: int) -> list[float]:
    """Return when the last of like jobs leaves each machine of a line."""
    ends, total, slowest = [], 0.0, 0.0
    for seconds, message in zip(passes, (*messages, 0.0), strict=True):
        total, slowest = total + seconds, max(slowest, seconds)
        ends.append(total + (num_jobs - 1) * slowest)
        total, slowest = total + message, max(slowest, message)
    return ends


def _alternating(times: LaneTimes, num_microbatches: int, *, is_split: bool) -> tuple[float, ...]:
    """Return the ends of 1F1B, or of ZB-H1 if backwards are split in halves."""
    num = times.num_stages
    weights = tuple(seconds / 2 if is_split else 0.0 for seconds in times.backward)
    state = _State([0.0] * num, [0.0] * num, [0.0] * num)
    history: list[_State] = []
    turn = 1 - num  # the backward that every stage does in this turn; below 0 there is none yet
    first_equal = num - 1 if is_split else 0  # before it some stage has no weights' part to do
    last_equal = num_microbatches - num  # from then on the first stage has no forward left
    while turn < num_microbatches:
        _do_turn(times, weights, state, turn, num_microbatches)
        if first_equal <= turn < last_equal:
            turn += _skip(state, history, last_equal - turn)
        turn += 1
    left = (min(stage, num_microbatches) for stage in range(num))
    return tuple(
        end + count * weight for end, count, weight in zip(state.worker, left, weights, strict=True)
    )


def _do_turn(
    times: LaneTimes, weights: Sequence[float], state: _State, turn: int, num_microbatches: int
) -> None:
    """Do, in every stage, the next forward and then the backward of micro-batch ``turn``.

    The backward's part for the weights, if it is split, is of the micro-batch that many turns ago as the stage's
    number says.

    Stage s is S - 1 - s forwards ahead, so hidden states are always those that the stage before sent one turn
    earlier: going through the stages from the last to the first, nothing is overwritten too early.
    """
    worker, forward_at, backward_at = state
    forward, backward, send_forward, send_backward = times
    last = len(worker) - 1
    for stage in range(last, -1, -1):
        ready = worker[stage]
        index = turn + last - stage
        if 0 <= index < num_microbatches:
            if stage and forward_at[stage - 1] > ready:
                ready = forward_at[stage - 1]
            ready += forward[stage]
            if stage < last:
                arrival = forward_at[stage]
                forward_at[stage] = (arrival if arrival > ready else ready) + send_forward[stage]
        if turn >= 0:
            if stage < last and backward_at[stage + 1] > ready:
                ready = backward_at[stage + 1]
            ready += backward[stage] - weights[stage]
            if stage:
                arrival = backward_at[stage]
                backward_at[stage] = (arrival if arrival > ready else ready) + send_backward[
                    stage - 1
                ]
            if turn >= stage:
                ready += weights[stage]
        worker[stage] = ready


def _skip(state: _State, history: list[_State], num_left: int) -> int:
    """Move the state over whole cycles of micro-batches, if it repeats; return how many it skipped."""
    for length, old in enumerate(reversed(history), 1):
        by = state.moved_from(old)
        if by is not None and num_left >= length:
            cycles = num_left // length
            state.move(cycles * by)
            history.clear()
            return cycles * length
    history.append(state.copy())
    if len(history) > len(state.worker):  # longer cycles than stages were never seen
        del history[0]
    return 0
