"""``LaneTimes``: what the stages of a lane take; and when 1F1B ends, exactly and fast."""

from __future__ import annotations

from typing import NamedTuple


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


def end_times(times: LaneTimes, num_microbatches: int) -> tuple[float, ...]:
    """Return when each stage of a lane with 1F1B has done its last backward, in seconds.

    The numbers are those of the event simulator. A pass starts when its stage is free and its message has
    come; a message takes its channel for as long as it takes, while the sender goes on. As soon as all stages
    do a micro-batch by the same time later than the last one, all like ones are skipped at once.

    >>> times = LaneTimes((1.0, 1.0), (2.0, 2.0), (0.0,), (0.0,))
    >>> end_times(times, 2)
    (9.0, 7.0)

    Args:
        times: Seconds of passes and messages.
        num_microbatches: Micro-batches of a step.
    """
    num = times.num_stages
    state = _State([0.0] * num, [0.0] * num, [0.0] * num)
    if num_microbatches == 0:
        return tuple(state.worker)
    history: list[_State] = []
    turn = 1 - num  # the backward that every stage does in this turn; below 0 there is none yet
    last_equal = num_microbatches - num  # from then on the first stage has no forward left
    while turn < num_microbatches:
        _do_turn(times, state, turn, num_microbatches)
        if 0 <= turn < last_equal:
            turn += _skip(state, history, last_equal - turn)
        turn += 1
    return tuple(state.worker)


def _do_turn(times: LaneTimes, state: _State, turn: int, num_microbatches: int) -> None:
    """Do, in every stage, the next forward and then the backward of micro-batch ``turn``.

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
            ready += backward[stage]
            if stage:
                arrival = backward_at[stage]
                backward_at[stage] = (arrival if arrival > ready else ready) + send_backward[
                    stage - 1
                ]
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
