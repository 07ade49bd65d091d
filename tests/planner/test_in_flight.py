"""Micro-batches in flight, counted for a search without a schedule, are those of the schedule."""

import pytest

from hdtensor.pipeline.lanes import Lane
from hdtensor.pipeline.schedule.choose import build_schedule
from hdtensor.planner.memory import held_microbatches, in_flight
from hdtensor.planner.workload import SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_search_counts_what_the_schedule_holds(name):
    for num_stages in range(1, 7):
        lane = Lane.chain([(rank,) for rank in range(num_stages)])
        for num_microbatches in range(1, 10):
            held = in_flight(build_schedule(name, lane, num_microbatches))
            counted = held_microbatches(name, num_stages, num_microbatches)
            assert [held[stage] for stage in range(num_stages)] == counted
