"""Schedules by name, and the micro-batches of a lane."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hdtensor.errors import ScheduleError
from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.actions import Schedule
from hdtensor.pipeline.schedule.orders import (
    Places,
    gpipe,
    one_forward_one_backward,
    zero_bubble_h1,
)
from hdtensor.pipeline.schedule.planned import interleaved, zero_bubble_v
from hdtensor.pipeline.schedule.validate import validate


#: Name -> what builds it from the stages of each place and the number of micro-batches.
SCHEDULES: Mapping[str, Callable[[Places, int], Schedule]] = MappingProxyType(
    {
        "GPipe": gpipe,
        "1F1B": one_forward_one_backward,
        "Interleaved1F1B": interleaved,
        "ZB-H1": zero_bubble_h1,
        "ZBV": zero_bubble_v,
    }
)

#: Names of ``torch.distributed.pipelining`` -> ours.
_TORCH_NAMES = {"zbvzerobubble": "ZBV"}

#: Micro-batches of a lane whose plan does not say how many.
DEFAULT_MICROBATCHES = 8

_MAX_MICROBATCHES = 1 << 20


def build_schedule(name: str | os.PathLike[str], lane: Lane, num_microbatches: int) -> Schedule:
    """Return a lane's schedule, validated.

    >>> build_schedule("1f1b", Lane.chain([(0,), (1,)]), 2).rows[1]
    (Action(stage=1, kind=<Kind.FORWARD: 'F'>, microbatch=0), Action(stage=1, kind=<Kind.BACKWARD: 'B'>, microbatch=0), Action(stage=1, kind=<Kind.FORWARD: 'F'>, microbatch=1), Action(stage=1, kind=<Kind.BACKWARD: 'B'>, microbatch=1))

    Args:
        name: One of ``SCHEDULES``, in any case, or the path of a text file (with a dot or a slash).
        lane: Its stages.
        num_microbatches: Micro-batches of a step; 0 for a lane that has no part of the batch.

    Raises:
        ScheduleError: If there is no such schedule, the number is none, a file is for another number, or
            the lane cannot follow it.
    """
    text = os.fspath(name)
    if not isinstance(num_microbatches, int) or not 0 <= num_microbatches <= _MAX_MICROBATCHES:
        raise ScheduleError(
            f"num_microbatches: must be from 0 to {_MAX_MICROBATCHES}, got {num_microbatches!r}."
        )
    if "." in text or "/" in text:
        schedule = Schedule.load(text)
        if schedule.num_microbatches != num_microbatches:
            raise ScheduleError(
                f"{text!r} is for {schedule.num_microbatches} micro-batches, but the lane has "
                f"{num_microbatches}. Change the plan's number, or give another file."
            )
    else:
        schedule = _builder(text)([place.stages for place in lane.places], num_microbatches)
    validate(schedule, lane)
    return schedule


def _builder(name: str) -> Callable[[Places, int], Schedule]:
    wanted = name.lower()
    for known, build in SCHEDULES.items():
        if known.lower() == _TORCH_NAMES.get(wanted, wanted).lower():
            return build
    raise ScheduleError(
        f"there is no schedule {name[:40]!r}; there are {', '.join(SCHEDULES)}, and files by their path."
    )


def microbatch_sizes(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches, as equal as possible, larger ones first.

    >>> microbatch_sizes(33, 5), microbatch_sizes(31, 3)
    ((7, 7, 7, 6, 6), (11, 10, 10))

    Args:
        num_samples: Samples of the lane in a step.
        num_microbatches: How many micro-batches.

    Raises:
        ScheduleError: If a micro-batch would be empty, or samples would be left.
    """
    is_empty = num_samples == 0 and num_microbatches == 0
    if not is_empty and not 1 <= num_microbatches <= num_samples:
        raise ScheduleError(
            f"{num_samples} samples cannot be {num_microbatches} micro-batches; give each at least one sample."
        )
    least, more = divmod(num_samples, max(num_microbatches, 1))
    return tuple(least + (i < more) for i in range(num_microbatches))
