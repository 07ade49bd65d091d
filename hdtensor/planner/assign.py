"""The second level of planning: layers to the stages of a lane, micro-batches to lanes. Exact, without a solver.

``certificates`` states the same problems as integer programs; the tests compare both.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from hdtensor.errors import PlannerError


class StageLoad(NamedTuple):
    """What layers do to a stage.

    Attributes:
        per_layer: Seconds of one layer.
        beside: Seconds of what the stage does whatever its layers, such as the head.
        max_layers: How many fit in memory.
    """

    per_layer: float
    beside: float
    max_layers: int


class LaneLoad(NamedTuple):
    """What micro-batches do to a lane.

    Attributes:
        per_microbatch: Seconds that one more takes.
        beside: Seconds of filling and draining the lane.
        mbs: Samples of a micro-batch.
    """

    per_microbatch: float
    beside: float
    mbs: int


def assign_layers(stages: Sequence[StageLoad], num_layers: int) -> list[int]:
    """Return the number of layers of each stage that minimizes the slowest stage.

    ::

        minimize    max_s (beside_s + n_s * per_layer_s)
        subject to  1 <= n_s <= max_layers_s, integer;  sum_s n_s = num_layers

    Every stage gets one layer; then each layer goes where the stage is fastest with it. That is exact: let T
    be the greatest value, taken by stage s when it got its last layer. At that moment every other stage was
    full, or would have taken T or more with one layer more. A split whose slowest stage is faster than T has
    fewer layers in s, and in no other stage more than the greedy one had then; so it has too few layers.

    >>> assign_layers([StageLoad(1.0, 0.0, 60)] * 2 + [StageLoad(0.31, 0.0, 60)], 60)
    [11, 11, 38]

    Args:
        stages: The stages of a lane, in order; the first of equal ones gets a layer first.
        num_layers: Decoder layers of the model.

    Raises:
        PlannerError: If memory does not hold them, or there are more stages than layers.

    Source: HSPMD, appendix A.1, second-level problem.
    """
    room = [stage.max_layers for stage in stages]
    if len(stages) > num_layers or min(room, default=0) < 1 or sum(room) < num_layers:
        raise PlannerError(
            f"num_layers: {num_layers} layers do not go on {len(stages)} stages, whose memory holds {room} layers, "
            f"{sum(room)} in all; each stage needs one. Use fewer stages, higher TP or more devices."
        )
    counts = [1] * len(stages)
    heap = [
        (stage.beside + 2 * stage.per_layer, s)
        for s, stage in enumerate(stages)
        if stage.max_layers > 1
    ]
    heapq.heapify(heap)
    for _ in range(num_layers - len(stages)):
        _, s = heapq.heappop(heap)
        counts[s] += 1
        if counts[s] < room[s]:
            heapq.heappush(heap, (stages[s].beside + (counts[s] + 1) * stages[s].per_layer, s))
    return counts


def assign_microbatches(lanes: Sequence[LaneLoad], batch: int) -> list[int]:
    """Return the number of micro-batches of each lane that minimizes the slowest lane.

    ::

        minimize    max_l (beside_l + m_l * per_microbatch_l)
        subject to  m_l >= 1, integer;  sum_l m_l * mbs_l = batch

    With equal sizes this is ``assign_layers`` with other names. With unlike sizes the best T is one of the
    times that some lane takes for some number of micro-batches. For a T, lane l may do up to cap_l(T) of them,
    and the sums that lanes can make are found by a subset-sum over bits; they grow with T, so a bisection
    over the times finds the first T that makes the batch.

    >>> assign_microbatches([LaneLoad(1.0, 3.0, 1), LaneLoad(1.1, 3.0, 1)], 64)
    [34, 30]

    Args:
        lanes: The lanes.
        batch: Samples of a step.

    Raises:
        PlannerError: If no numbers of micro-batches of these sizes make the batch.

    Source: HSPMD, appendix A.1, second-level problem.
    """
    sizes = sorted({lane.mbs for lane in lanes})
    left = batch - sum(lane.mbs for lane in lanes)
    if len(sizes) == 1 and left >= 0 and left % sizes[0] == 0:
        loads = [StageLoad(lane.per_microbatch, lane.beside, batch) for lane in lanes]
        return assign_layers(loads, batch // sizes[0])
    most = [left // lane.mbs for lane in lanes]
    if left < 0 or not _sums(lanes, most, left)[-1] >> left & 1:
        raise PlannerError(
            f"batch: micro-batches of {sizes} samples in {len(lanes)} lanes, one or more in each, do not make "
            f"{batch} samples. Choose a batch that is a multiple, or mbs 1."
        )
    times = sorted(
        {
            lane.beside + count * lane.per_microbatch
            for lane, high in zip(lanes, most, strict=True)
            for count in range(1, high + 2)
        }
    )
    slowest = max(lane.beside + lane.per_microbatch for lane in lanes)
    first = bisect_left(times, slowest)
    found = bisect_left(
        range(first, len(times)),
        1,
        key=lambda t: _sums(lanes, _caps(lanes, most, times[t]), left)[-1] >> left & 1,
    )
    caps = _caps(lanes, most, times[first + found])
    return [1 + extra for extra in _take(lanes, caps, left)]


def _caps(lanes: Sequence[LaneLoad], most: Sequence[int], seconds: float) -> list[int]:
    """Return how many micro-batches beside the first one each lane can do in a time."""
    caps = []
    for lane, high in zip(lanes, most, strict=True):
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            if lane.beside + (middle + 1) * lane.per_microbatch <= seconds:
                low = middle
            else:
                high = middle - 1
        caps.append(low)
    return caps


def _sums(lanes: Sequence[LaneLoad], caps: Sequence[int], total: int) -> list[int]:
    """Return, after each lane, the sums of samples up to a total that lanes make, as bits."""
    mask = (1 << (total + 1)) - 1
    sums = [1]
    for lane, cap in zip(lanes, caps, strict=True):
        bits, left, part = sums[-1], cap, 1
        while left > 0:
            part = min(part, left)
            bits |= bits << (part * lane.mbs) & mask
            left -= part
            part *= 2
        sums.append(bits)
    return sums


def _take(lanes: Sequence[LaneLoad], caps: Sequence[int], total: int) -> list[int]:
    """Return how many micro-batches each lane takes, so that all make the total.

    Each lane takes no more than is needed to leave a sum that the lanes before it make, the last lane first.
    """
    sums = _sums(lanes, caps, total)
    taken = []
    for index in range(len(lanes) - 1, -1, -1):
        mbs = lanes[index].mbs
        count = next(
            count
            for count in range(caps[index] + 1)
            if count * mbs <= total and sums[index] >> (total - count * mbs) & 1
        )
        taken.append(count)
        total -= count * mbs
    return taken[::-1]
