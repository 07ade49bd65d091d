"""GPipe, 1F1B and ZB-H1: schedules of places with one stage each, in closed form.

F is a forward, B a backward; I and W are the backward's parts for the input and for the weights. With
S stages, stage s has S - 1 - s stages behind it::

    GPipe    every F, then every B
    1F1B     S - 1 - s times F, then F B until no F is left, then B
    ZB-H1    1F1B with I for B, and each W put off by s micro-batches, where it fills a bubble

1F1B: PipeDream; ZB-H1: "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hdtensor.errors import ScheduleError
from hdtensor.pipeline.schedule.actions import Action, Kind, Schedule


#: The stages of each place of a lane.
Places = Sequence[Sequence[int]]


def gpipe(places: Places, num_microbatches: int) -> Schedule:
    """Return all forwards before all backwards (GPipe); places may have several stages.

    >>> print(gpipe([(0,), (1,)], 2))
    # schedule: GPipe
    # micro-batches: 2
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1

    Args:
        places: The stages of each place.
        num_microbatches: Micro-batches of a step; 0 for none.
    """
    microbatches = range(num_microbatches)
    rows = []
    for stages in places:
        forward = [Action(s, Kind.FORWARD, m) for s in sorted(stages) for m in microbatches]
        backward = [
            Action(s, Kind.BACKWARD, m) for s in sorted(stages, reverse=True) for m in microbatches
        ]
        rows.append((*forward, *backward))
    return Schedule(name="GPipe", num_microbatches=num_microbatches, rows=tuple(rows))


def one_forward_one_backward(places: Places, num_microbatches: int) -> Schedule:
    """Return 1F1B: as few forwards ahead as keep the last stage busy.

    >>> print(one_forward_one_backward([(0,), (1,)], 3))
    # schedule: 1F1B
    # micro-batches: 3
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2

    Args:
        places: The stage of each place.
        num_microbatches: Micro-batches of a step; 0 for none.

    Raises:
        ScheduleError: If a place has several stages.
    """
    stages = _one_each("1F1B", places)
    num_stages = 1 + max(stages, default=-1)
    rows = []
    for stage in stages:
        ahead = min(num_stages - 1 - stage, num_microbatches)
        pairs = num_microbatches - ahead
        row = [Action(stage, Kind.FORWARD, m) for m in range(ahead)]
        for m in range(pairs):
            row += [Action(stage, Kind.FORWARD, ahead + m), Action(stage, Kind.BACKWARD, m)]
        row += [Action(stage, Kind.BACKWARD, m) for m in range(pairs, num_microbatches)]
        rows.append(tuple(row))
    return Schedule(name="1F1B", num_microbatches=num_microbatches, rows=tuple(rows))


def zero_bubble_h1(places: Places, num_microbatches: int) -> Schedule:
    """Return ZB-H1: a third of 1F1B's bubble, with as many activations as its first stage holds.

    >>> print(zero_bubble_h1([(0,), (1,)], 3))
    # schedule: ZB-H1
    # micro-batches: 3
    0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2

    Args:
        places: The stage of each place.
        num_microbatches: Micro-batches of a step; 0 for none.

    Raises:
        ScheduleError: If a place has several stages.
    """
    _one_each("ZB-H1", places)
    plain = one_forward_one_backward(places, num_microbatches)
    rows = tuple(tuple(_split(row)) for row in plain.rows)
    return Schedule(name="ZB-H1", num_microbatches=num_microbatches, rows=rows)


def _split(row: Sequence[Action]) -> Iterator[Action]:
    """Yield a row of 1F1B with every backward in two parts, the second put off by the stage's number."""
    waiting: list[Action] = []
    for action in row:
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            yield action
            continue
        yield Action(stage, Kind.BACKWARD_INPUT, microbatch)
        waiting.append(Action(stage, Kind.BACKWARD_WEIGHT, microbatch))
        if len(waiting) > stage:
            yield waiting.pop(0)
    yield from waiting


def _one_each(name: str, places: Places) -> list[int]:
    for stages in places:
        if len(stages) != 1:
            raise ScheduleError(
                f"{name} is for places with one stage each, but one has stages {list(stages)}. Use "
                f"Interleaved1F1B, ZBV or GPipe."
            )
    return [stages[0] for stages in places]
