"""Times of schedules: known formulas, a slow independent count, unlike lanes, and the trace."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings, strategies as st

from hdtensor.errors import ScheduleError
from hdtensor.pipeline import (
    Action,
    Durations,
    Edge,
    Event,
    Kind,
    Lane,
    LaneRun,
    LaneStage,
    Schedule,
    Task,
    Timeline,
    build_schedule,
    peak_activations,
    run_tasks,
    simulate,
)
from tests.pipeline.emulation import needs
from tests.pipeline.test_schedules import (
    LANES,
    as_rows,
    chain,
    looped,
    mutated_schedules,
    torch_order,
    v_shape,
)


def timed(name, lane, count, durations=None):
    schedule = name if isinstance(name, Schedule) else build_schedule(name, lane, count)
    run = LaneRun(
        lane=lane, schedule=schedule, durations=durations or Durations.unit(lane.num_stages)
    )
    return simulate([run])


@pytest.mark.parametrize("num_stages", [1, 2, 4, 6])
@pytest.mark.parametrize("count", [1, 3, 4, 6, 13])
def test_bubbles_are_those_of_the_literature(num_stages, count):
    """With F = 1, B = 2 (I = W = 1), P places and m micro-batches."""
    bubble = 3 * (num_stages - 1)
    for name in ("GPipe", "1F1B"):
        timeline = timed(name, chain(num_stages), count)
        assert timeline.seconds == 3 * count + bubble
        assert timeline.bubble_share() == pytest.approx(bubble / (3 * count + bubble))
    if count >= num_stages:
        assert timed("ZB-H1", chain(num_stages), count).seconds == 3 * count + num_stages - 1
        wanted = 6 * count + num_stages - 1
        assert timed("ZBV", v_shape(num_stages), count).seconds == wanted
    if count % num_stages == 0:
        for per_place in (2, 3):
            lane = looped(num_stages, per_place)
            wanted = 3 * count * per_place + bubble
            assert timed("Interleaved1F1B", lane, count).seconds == wanted


@pytest.mark.parametrize(("places", "count"), [(2, 4), (4, 8), (4, 9)])
def test_zbv_is_no_slower_than_torchs(places, count):
    rows = as_rows(torch_order("ZBVZeroBubble", places, count, 2))
    theirs = Schedule(name="torch", num_microbatches=count, rows=rows)
    lane = v_shape(places)
    assert timed("ZBV", lane, count).seconds <= timed(theirs, lane, count).seconds


@pytest.mark.parametrize(("name", "lane"), LANES, ids=lambda x: str(x))
def test_peaks_in_time_are_those_of_the_rows(name, lane):
    schedule = build_schedule(name, lane, 5)
    timeline = timed(schedule, lane, 5)
    found = {stage: peak for (_, stage), peak in timeline.peak_activations().items()}
    assert found == peak_activations(schedule.rows)
    busy = 5 * 3 * sum(len(place.ranks) * len(place.stages) for place in lane.places)
    assert sum(timeline.busy_seconds().values()) == busy


def earliest(rows, lane, durations):
    """Start of every action by going round until nothing changes; messages keep their order."""
    at = {stage: p for p, place in enumerate(lane.places) for stage in place.stages}
    actions = {a for row in rows for a in row}

    def whole(stage, mb):
        whole = Action(stage, Kind.BACKWARD, mb)
        return Kind.BACKWARD if whole in actions else Kind.BACKWARD_INPUT

    needed = {a: needs(a, lane, whole) for a in actions}
    starts, changed = dict.fromkeys(actions, 0.0), True
    while changed:
        came, free = {}, {}
        for place, row in enumerate(rows):
            for action in row:
                takers = [t for t in actions if action in needed[t] and at[t.stage] != place]
                takers.sort(reverse=action.kind is not Kind.FORWARD)
                for taker in takers:
                    channel = (place, at[taker.stage], action.kind is Kind.FORWARD)
                    end = starts[action] + durations.compute_seconds(action)
                    size = durations.sizes[action.microbatch]
                    pair = (action.stage, taker.stage)
                    took = durations.latency + durations.message.get(pair, 0.0) * size
                    free[channel] = came[action, taker] = max(end, free.get(channel, 0.0)) + took
        changed = False
        for row in rows:
            now = 0.0
            for action in row:
                inputs = []
                for need in needed[action]:
                    own = starts[need] + durations.compute_seconds(need)
                    inputs.append(came.get((need, action), own))
                start = max([now, starts[action], *inputs])
                changed |= start > starts[action]
                starts[action] = start
                now = start + durations.compute_seconds(action)
    return starts


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_times_are_those_of_a_slow_count(data):
    lane, schedule = data.draw(mutated_schedules())
    seconds = st.integers(0, 5).map(float)
    lists = [
        tuple(data.draw(seconds) for _ in range(lane.num_stages)) for _ in ("forward", "weight")
    ]
    sizes = tuple(data.draw(st.integers(1, 3)) for _ in range(schedule.num_microbatches))
    durations = Durations(
        forward=lists[0],
        backward=tuple(w + 1 for w in lists[1]),
        backward_weight=lists[1],
        sizes=tuple(map(float, sizes)),
        message={edge[:2]: data.draw(seconds) for edge in lane.edges},
        latency=data.draw(seconds),
    )
    run = LaneRun(lane=lane, schedule=schedule, durations=durations)
    try:
        timeline = simulate([run])
    except ScheduleError as error:
        assert "in a circle" in str(error)  # noqa: PT017 - which of the two comes depends on the draw
        return
    starts = earliest(schedule.rows, lane, durations)
    found = {s.name: s.start for s in timeline.spans if s.kind != "message"}
    assert found == {str(action): start for action, start in starts.items()}


def test_lanes_of_unlike_stages_counts_and_sizes():
    """33 beside 31, 5 beside 3, fewer micro-batches than stages, one stage beside four."""
    runs = [
        LaneRun(
            lane=Lane.chain([range(4 * i, 4 * i + 4) for i in range(4)]),
            schedule=build_schedule("1F1B", chain(4), 33),
            durations=Durations.unit(4),
        ),
        LaneRun(
            lane=Lane.chain([(16, 17), (18,), (19, 20, 21), (22,), (23,)]),
            schedule=build_schedule("ZB-H1", chain(5), 3),
            durations=Durations(
                forward=(1.0, 2.0, 1.0, 1.0, 1.0),
                backward=(2.0, 4.0, 2.0, 2.0, 2.0),
                sizes=(3.0, 1.0, 1.0),
                message={(0, 1): 0.5},
                latency=0.25,
            ),
        ),
        LaneRun(
            lane=Lane.chain([(30, 31)]),
            schedule=build_schedule("GPipe", chain(1), 5),
            durations=Durations.unit(1),
        ),
        LaneRun(
            lane=Lane.chain([(40,)]),
            schedule=build_schedule("1F1B", chain(1), 0),
            durations=Durations.unit(1),
        ),
    ]
    events = [
        Event("gather", "gather", 10.0, (0, 16), "before"),
        Event("gradients", "sync", 4.0, (12, 23, 30, 40)),
        Event("AdamW", "optimizer", 1.0, (30,)),
    ]
    timeline = simulate(runs, events)
    spans = {(s.lane, s.name): s for s in timeline.spans}
    assert timeline.lanes == (0, 1, 2)
    assert spans[0, "0F0"].start == spans[1, "0F0"].start == 10.0
    # The message takes the channel 0.25 + 3 * 0.5 after 3 seconds of a micro-batch of size 3.
    assert spans[1, "0->1 F0"].start == 13.0
    assert spans[1, "1F0"].start == 13.0 + 0.25 + 1.5
    assert spans[2, "0B4"].end == 15.0
    assert timeline.bubble_share(2) == 0.0
    assert timeline.bubble_share(0) == pytest.approx(9 / (99 + 9))
    last = max(s.end for s in timeline.spans if s.kind in "FBIW" and {12, 23, 30} & {*s.ranks})
    assert spans[0, "gradients"].start == last
    assert spans[2, "AdamW"].start == last + 4.0
    assert timeline.seconds == max(last + 5.0, max(s.end for s in timeline.spans))


def test_ranks_of_several_places_compute_a_shared_stage_together():
    lane = Lane(stages=(LaneStage((0, 1)), LaneStage((1, 2))), edges=(Edge(0, 1),))
    rows = "0F0,0F1,0B0,0B1\n0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n1F0,1F1,1B0,1B1"
    timeline = timed(Schedule.parse(rows), lane, 2)
    shared = [s for s in timeline.spans if s.name == "1F0"]
    assert [(s.start, s.ranks) for s in shared] == [(1.0, (1, 2))]
    assert timeline.busy_seconds() == {0: 6.0, 1: 12.0, 2: 6.0}


def test_the_trace_is_read_again(tmp_path):
    lane = chain(3)
    run = LaneRun(
        lane=lane,
        schedule=build_schedule("1F1B", lane, 4),
        durations=Durations(forward=(1e-3,) * 3, backward=(2e-3,) * 3, latency=1e-4),
    )
    timeline = simulate([run], [Event("AdamW", "optimizer", 1e-3, (0, 1, 2))])
    timeline.save_trace(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    again = Timeline.from_trace(trace)
    assert len(again.spans) == len(timeline.spans)
    for one, other in zip(again.spans, timeline.spans, strict=True):
        assert one._replace(start=0, seconds=0) == other._replace(start=0, seconds=0)
        assert math.isclose(one.start, other.start, abs_tol=1e-12)
    assert again.bubble_share() == pytest.approx(timeline.bubble_share())
    events = trace["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"lane 0", "rank 0", "rank 2", "0 -> 1", "2 -> 1"} <= names
    first = next(e for e in events if e["ph"] == "X")
    assert (first["name"], first["pid"], first["tid"]) == ("0F0", 0, 0)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named
    assert first["dur"] == pytest.approx(1000)  # microseconds
    with pytest.raises(ScheduleError, match="the trace is none of a timeline: KeyError"):
        Timeline.from_trace({"events": []})


def test_a_measured_timeline_has_a_span_for_each_rank():
    spans = [s for s in timed("1F1B", Lane.chain([(0, 1), (2,)]), 2).spans if s.kind != "message"]
    measured = [s._replace(ranks=(rank,)) for s in spans for rank in s.ranks]
    both = Timeline(spans=tuple(spans)), Timeline(spans=tuple(measured))
    assert both[0].bubble_share() == pytest.approx(both[1].bubble_share())
    assert both[0].peak_activations() == both[1].peak_activations() == {(0, 0): 2, (0, 1): 1}
    assert both[0].busy_seconds() == both[1].busy_seconds()


def test_faults_are_named():
    with pytest.raises(ScheduleError, match="2 of 3 tasks wait for one another in a circle"):
        run_tasks([Task(1.0), Task(1.0, (2,)), Task(1.0)], [[1, 2]])
    with pytest.raises(ScheduleError, match="forward has 1, backward 2"):
        Durations(forward=(1.0,), backward=(1.0, 1.0))
    for bad in ({"latency": -1.0}, {"backward_weight": (3.0,)}, {"sizes": (float("nan"),)}):
        with pytest.raises(ScheduleError, match="must not be negative"):
            Durations(forward=(1.0,), backward=(2.0,), **bad)
    lane, schedule = chain(2), build_schedule("1F1B", chain(2), 3)
    with pytest.raises(ScheduleError, match="of 1 stages, but the lane 0 -> 1 has 2"):
        LaneRun(lane=lane, schedule=schedule, durations=Durations.unit(1))
    sized = Durations(forward=(1.0,) * 2, backward=(1.0,) * 2, sizes=(1.0,))
    with pytest.raises(ScheduleError, match="1 sizes are given for 3 micro-batches"):
        LaneRun(lane=lane, schedule=schedule, durations=sized)
    with pytest.raises(ScheduleError, match="rank 7 is in none of the lanes"):
        simulate([], [Event("x", "sync", 1.0, (7,))])
    broken = Schedule.parse("0F0,0B0\n1F0")
    with pytest.raises(ScheduleError, match="0B0 needs what no row has"):
        timed(broken, lane, 1)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_blocking_messages_keep_both_ends(name, count, num_stages):
    """No rank does two things at once, and the step is no shorter than with messages beside the passes."""
    lane = chain(num_stages)
    edges = [(i, i + 1) for i in range(num_stages - 1)]
    durations = Durations(
        forward=(1.0,) * num_stages,
        backward=(2.0,) * num_stages,
        message={edge: 0.25 for a, b in edges for edge in ((a, b), (b, a))},
    )
    schedule = build_schedule(name, lane, count)
    beside, blocking = (
        simulate([LaneRun(lane=lane, schedule=schedule, durations=durations, is_blocking=is_it)])
        for is_it in (False, True)
    )
    assert len(blocking.spans) == len(beside.spans)
    assert blocking.seconds >= beside.seconds
    for rank in lane.ranks:
        mine = sorted((span.start, span.end) for span in blocking.spans if rank in span.ranks)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
