"""A recorded step has every action of the schedule on every rank, in its order, and the trace of a simulated one."""

import itertools

import pytest
import torch

from hdtensor.pipeline import Runner, Timeline, build_schedule
from tests.pipeline.tiny import batch, llama, pairs
from tests.support.world import run_world


def _check(rank):
    runner = Runner(llama(), pairs())
    with runner.record() as recording:
        runner.step(batch())
    timeline = recording.timeline()
    for number, lane in enumerate(runner.lanes):
        counts = {s.microbatch for s in timeline.spans if s.lane == number and s.kind == "F"}
        schedule = build_schedule("1F1B", lane, len(counts))
        for place, row in zip(lane.places, schedule.rows, strict=True):
            for member in place.ranks:
                spans = [s for s in timeline.spans if s.ranks == (member,)]
                passes = [s for s in spans if s.kind != "sync"]
                assert [s.name for s in passes] == [str(action) for action in row]
                assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    assert 0 <= timeline.bubble_share() < 1
    assert Timeline.from_trace(timeline.trace()).seconds == pytest.approx(timeline.seconds)
    assert torch.isfinite(runner.step(batch()))  # unrecorded again


@pytest.mark.dist(4)
def test_a_recorded_step_follows_the_schedule():
    run_world(_check, 4)
