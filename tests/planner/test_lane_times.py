"""When 1F1B ends: the fast ways beside the event simulator, hand-computed lanes, and published formulas as bounds."""

import pytest
from hypothesis import given, settings, strategies as st

from hdtensor.errors import PlannerError
from hdtensor.pipeline import Durations, Lane, LaneRun, build_schedule, simulate
from hdtensor.planner.blocking_times import blocking_end_times
from hdtensor.planner.lane_times import LaneTimes, end_times
from hdtensor.planner.workload import Workload


def run(times, count, *, is_blocking=False, name="1F1B"):
    num = times.num_stages
    lane = Lane.chain([(i,) for i in range(num)])
    message = {(i, i + 1): times.send_forward[i] for i in range(num - 1)}
    message |= {(i + 1, i): times.send_backward[i] for i in range(num - 1)}
    durations = Durations(forward=times.forward, backward=times.backward, message=message)
    schedule = build_schedule(name, lane, count)
    return simulate(
        [LaneRun(lane=lane, schedule=schedule, durations=durations, is_blocking=is_blocking)]
    )


def by_events(times, count, *, is_blocking=False, name="1F1B"):
    kinds = {"F", "B", "I", "W"} | ({"message"} if is_blocking else set())
    timeline = run(times, count, is_blocking=is_blocking, name=name)
    spans = [span for span in timeline.spans if span.kind in kinds]
    return [
        max((span.end for span in spans if i in span.ranks), default=0.0)
        for i in range(times.num_stages)
    ]


@st.composite
def lanes(draw):
    num = draw(st.integers(1, 6))
    seconds = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), st.floats(0.01, 5))
    passes = [draw(st.lists(seconds, min_size=num, max_size=num)) for _ in range(2)]
    messages = [draw(st.lists(seconds, min_size=num - 1, max_size=num - 1)) for _ in range(2)]
    return LaneTimes(*map(tuple, (*passes, *messages)))


@given(times=lanes(), count=st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]))
@settings(max_examples=120, deadline=None)
def test_the_fast_ways_give_the_numbers_of_the_events(times, count):
    close = {"rel": 1e-9, "abs": 1e-9}
    assert end_times(times, count) == pytest.approx(
        by_events(times, count, is_blocking=False), **close
    )
    for name in ("ZB-H1", "GPipe"):
        assert end_times(times, count, name) == pytest.approx(
            by_events(times, count, name=name), **close
        )
    if count:
        assert blocking_end_times(times, count) == pytest.approx(
            by_events(times, count, is_blocking=True), **close
        )


@pytest.mark.parametrize(
    "ends",
    [
        end_times,
        blocking_end_times,
        lambda times, count: end_times(times, count, "zb-h1"),
        lambda times, count: end_times(times, count, "gpipe"),
    ],
    ids=["1F1B", "blocking", "ZB-H1", "GPipe"],
)
def test_thousands_of_microbatches_are_skipped_over_exactly(ends):
    """Periods are of whole numbers here, so every sum is exact."""
    times = LaneTimes((3.0, 5.0, 2.0), (7.0, 8.0, 4.0), (1.0, 1.0), (2.0, 1.0))
    few, more, many = (max(ends(times, count)) for count in (100, 101, 100_100))
    assert many - few == (more - few) * 100_000


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBV"])
def test_schedules_with_several_stages_on_a_rank_are_refused(name):
    times = LaneTimes((1.0,), (1.0,), (), ())
    with pytest.raises(PlannerError, match=f"^schedule: '{name}' is not planned; allowed: 1F1B"):
        end_times(times, 1, name)
    with pytest.raises(
        PlannerError, match=f"^schedule: must be one of 1F1B, GPipe, ZB-H1, got '{name}'"
    ):
        Workload(batch=1, context=1, schedule=name)


def test_unlike_stages_by_hand():
    """Stage 0 takes 1 + 2, stage 1 2 + 4 s; hidden states travel 0.5 s, gradients 1 s.

    ::

        stage 0  F0 0-1, F1 1-2,            B0 8.5-10.5  B1 14.5-16.5
        stage 1           F0 1.5-3.5, B0 3.5-7.5, F1 7.5-9.5, B1 9.5-13.5
    """
    times = LaneTimes((1.0, 2.0), (2.0, 4.0), (0.5,), (1.0,))
    assert end_times(times, 2) == (16.5, 13.5)


def test_blocking_messages_by_hand():
    """The same stages; both ends stand still during a message, the gradient before the hidden states.

    ::

        stage 0  F0 0-1, send 1-1.5, F1 1.5-2.5, receive 7.5-8.5, send 8.5-9, B0 9-11, receive 15-16, B1 16-18
        stage 1          1-1.5, F0 1.5-3.5, B0 3.5-7.5, 7.5-8.5, 8.5-9, F1 9-11, B1 11-15, send 15-16
    """
    times = LaneTimes((1.0, 2.0), (2.0, 4.0), (0.5,), (1.0,))
    assert blocking_end_times(times, 2) == (18.0, 16.0)


@given(
    num=st.integers(1, 8),
    count=st.integers(1, 40),
    forward=st.floats(0.1, 3),
    backward=st.floats(0.1, 5),
)
@settings(max_examples=60, deadline=None)
def test_like_stages_take_the_sum_and_the_rest_of_the_slowest(num, count, forward, backward):
    times = LaneTimes((forward,) * num, (backward,) * num, (0.0,) * (num - 1), (0.0,) * (num - 1))
    whole = forward + backward
    assert max(end_times(times, count)) == pytest.approx(num * whole + (count - 1) * whole)


def hapmoe(times, count):
    """Equations 4 and 5 of HAPMoE as printed: both passes of every stage, then the slowest ones."""
    whole = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    slowest = max(range(len(whole)), key=whole.__getitem__)
    return sum(times.forward[:slowest]) + (count - slowest - 1) * max(whole) + sum(whole)


@given(times=lanes(), count=st.integers(8, 30))
@settings(max_examples=80, deadline=None)
def test_sum_and_rest_of_the_slowest_is_a_lower_bound_of_unlike_stages(times, count):
    """One micro-batch passes all stages; the slowest stage does all others besides."""
    whole = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    bound = sum(whole) + (count - 1) * max(whole)
    first = sum(times.forward[: whole.index(max(whole))])
    assert max(end_times(times, count)) >= count * max(whole) + first - 1e-9
    if len(set(times.forward)) == len(set(times.backward)) == 1:
        assert max(end_times(times, count)) >= bound - 1e-9


def test_hapmoes_formula_is_far_below_the_events_where_the_last_stage_is_slowest():
    """So it is no prediction: of 8 nearly like stages and 8 micro-batches it leaves out 31% of the time."""
    times = LaneTimes((1.0,) * 7 + (1.01,), (2.0,) * 7 + (2.02,), (0.0,) * 7, (0.0,) * 7)
    events = max(end_times(times, 8))
    assert events == pytest.approx(7 * 3 + 8 * 3.03)
    assert hapmoe(times, 8) / events == pytest.approx(1 - 0.314, abs=1e-3)
