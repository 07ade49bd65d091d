"""Whole steps: by hand, the fast way beside the events, memory, and what a step's seconds go to."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Link
from hdtensor.planner.costs import LayerSpan, RuntimeTraits
from hdtensor.planner.decompose import find_shares, place_lanes, slowest_link
from hdtensor.planner.simulate import simulate_strategy, step_seconds, strategy_memory
from hdtensor.planner.workload import SCHEDULES, Workload
from tests.planner.costs import FAST, SLOW, TableCosts, cluster, lane, strategy


TWO = cluster((FAST, 2), (SLOW, 2))


def workload(batch, **others):
    return Workload(batch=batch, context=8, precision="float32", **others)


def test_one_lane_by_hand():
    """2 layers on a fast device take 1 + 2 s, 1 on a slow one 1 + 2 s; messages 0.5 s, the optimizer 0.1 s a layer.

    ::

        stage 0  F0 0-1, F1 1-2,             B0 5-7, F2 7-8, B1 8-10,                   B2 12-14, 14.2
        stage 1  F0 1.5-2.5, B0 2.5-4.5, F1 4.5-5.5, B1 5.5-7.5,  F2 8.5-9.5, B2 9.5-11.5
    """
    plan = strategy(lane(([0], 2), ([2], 1), count=3))
    costs = TableCosts(message_seconds=0.5, update_seconds=0.1)
    prediction = simulate_strategy(plan, TWO, costs, workload(3))
    assert prediction.seconds == pytest.approx(14.2)
    assert step_seconds(plan, TWO, costs, workload(3)) == pytest.approx(14.2)


def test_lanes_wait_for_one_another_layer_by_layer():
    """Lane 0: 2 + 1 layers on two fast devices; lane 1: 1 + 2 on two slow ones. Layer 1 lies in unlike stages.

    The passes of lane 0 end after 12.5 and 10 s, those of lane 1 after 15 and 13. What the lanes share are layers
    2, 1 and 0, synchronized in this order, each for 0.25 s; rank 3 does one after the other.
    """
    plan = strategy(lane(([0], 2), ([1], 1), count=4), lane(([2], 1), ([3], 2), count=2))
    costs = TableCosts(sync_seconds=0.25)
    step = simulate_strategy(plan, TWO, costs, workload(6, zero=0))
    sync = {
        span.ranks: (span.start, span.end) for span in step.timeline.spans if span.kind == "sync"
    }
    assert sync == {(1, 3): (13.0, 13.25), (0, 3): (13.25, 13.5), (0, 2): (15.0, 15.25)}
    assert step.seconds == step_seconds(plan, TWO, costs, workload(6, zero=0)) == 15.25


def test_zero_scatters_before_the_optimizer_and_gathers_after_it():
    """Two lanes of one stage, done after 9 and 6 s; 3 layers of 0.5 s to synchronize, 0.1 s to update."""
    plan = strategy(lane(([0], 3), count=2), lane(([2], 3), count=1))
    costs = TableCosts(sync_seconds=0.5, update_seconds=0.1)
    step = simulate_strategy(plan, TWO, costs, workload(3))
    after = [
        (span.kind, round(span.start, 9), round(span.end, 9))
        for span in step.timeline.spans
        if span.kind in ("sync", "optimizer", "gather")
    ]
    assert after == [
        ("sync", 9.0, 9.75),
        ("optimizer", 9.75, 10.05),
        ("optimizer", 9.75, 10.05),
        ("gather", 10.05, 10.8),
    ]
    assert step_seconds(plan, TWO, costs, workload(3)) == pytest.approx(10.8)


def test_shares_are_cut_where_any_lane_cuts():
    plan = strategy(lane(([0], 2), ([1], 3), count=1), lane(([2], 4), ([3], 1), count=1))
    shares = find_shares(place_lanes(plan, TWO))
    assert [share.layers for share in shares] == [
        LayerSpan(1, is_last=True),
        LayerSpan(2),
        LayerSpan(2, is_first=True),
    ]
    ranks = [tuple(stage.choice.ranks for stage in share.stages) for share in shares]
    assert ranks == [((1,), (3,)), ((1,), (2,)), ((0,), (2,))]


def test_a_stage_may_hold_the_embedding_alone():
    plan = strategy(lane(([0], 0), ([1], 3), count=1), lane(([2], 3), count=1))
    shares = find_shares(place_lanes(plan, TWO))
    assert [share.layers for share in shares] == [
        LayerSpan(3, is_last=True),
        LayerSpan(0, is_first=True),
    ]


@st.composite
def strategies(draw):
    """Return up to three lanes on eight ranks, each of up to three stages of one or two ranks, of six layers."""
    free, lanes = list(range(8)), []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, 5), max_size=2)))
        stages = []
        for a, b in zip((0, *cuts), (*cuts, 6), strict=True):
            take = draw(st.integers(1, 2)) if len(free) > 6 else 1
            if not free or (take == 2 and free[0] // 4 != free[1] // 4):
                take = 1
            ranks, free = free[:take], free[take:]
            stages.append((ranks, b - a))
        if all(ranks for ranks, _ in stages):
            lanes.append(lane(*stages, count=draw(st.integers(1, 9)), mbs=draw(st.integers(1, 3))))
    return strategy(*lanes)


@given(
    plan=strategies().filter(lambda plan: plan.lanes),
    numbers=st.tuples(*[st.floats(0, 2)] * 4),
    is_blocking=st.booleans(),
    zero=st.sampled_from([0, 1]),
    schedule=st.sampled_from(SCHEDULES),
)
@settings(max_examples=120, deadline=None)
def test_the_fast_step_is_the_events_step(plan, numbers, is_blocking, zero, schedule):
    message, sync, update, start = numbers
    costs = TableCosts(message, sync, update, 0.3, RuntimeTraits(is_blocking, start))
    batch = sum(each.num_microbatches * each.mbs for each in plan.lanes)
    work = workload(batch, zero=zero, schedule=schedule)
    nodes = cluster((FAST, 4), (SLOW, 4))
    step = simulate_strategy(plan, nodes, costs, work)
    assert step_seconds(plan, nodes, costs, work) == pytest.approx(step.seconds, rel=1e-9)
    assert strategy_memory(plan, nodes, costs, work) == step.memory
    for part in step.attribution():
        assert part.seconds == pytest.approx(step.seconds, rel=1e-9)
        assert min(*part[2:6], *part[7:]) >= -1e-9
        assert -1e-9 <= part.bubble <= 1
    path = step.critical_path()
    assert (path[0].start, path[-1].end) == (0, step.seconds)
    for before, after in itertools.pairwise(path):
        assert before.end == after.start
        assert not set(before.ranks).isdisjoint(after.ranks)


@pytest.mark.parametrize("schedule", ["GPipe", "ZB-H1"])
def test_other_schedules_by_hand(schedule):
    plan = strategy(lane(([0], 2), ([2], 1), count=3))
    costs, work = TableCosts(), workload(3, schedule=schedule)
    wanted = {"GPipe": 12.0, "ZB-H1": 10.0}[schedule]
    assert step_seconds(plan, TWO, costs, work) == wanted
    assert simulate_strategy(plan, TWO, costs, work).seconds == wanted


def test_a_start_delays_lanes_of_several_stages_only():
    costs = TableCosts(traits=RuntimeTraits(start=0.7))
    alone = strategy(lane(([2], 3), count=2))
    assert step_seconds(alone, TWO, costs, workload(2)) == 18.0
    pair = strategy(lane(([0], 2), ([2], 1), count=2))
    assert step_seconds(pair, TWO, costs, workload(2)) == pytest.approx(9.7)


def test_memory_counts_microbatches_in_flight_by_the_place_in_the_pipeline():
    """Of three stages with a layer each the first one holds 3 micro-batches, the last one 1."""
    plan = strategy(lane(([0], 1), ([1], 1), ([2], 1), count=5, mbs=2))
    memory = simulate_strategy(plan, TWO, TableCosts(), workload(10)).memory
    assert [memory[rank].activations for rank in range(3)] == [30, 20, 10]
    assert memory[0].total == 10 + 10 + 40 + 30 + 7
    held = simulate_strategy(plan, TWO, TableCosts(), workload(10, schedule="GPipe")).memory
    assert [held[rank].activations for rank in range(3)] == [50, 50, 50]


def test_zero_divides_optimizer_state_among_lanes():
    plan = strategy(lane(([0], 3), count=2), lane(([2], 3), count=1))
    for zero, wanted in ((0, 120), (1, 60)):
        memory = strategy_memory(plan, TWO, TableCosts(), workload(3, zero=zero))
        assert memory[0].optimizer == wanted


def test_overfull_ranks_are_named_with_the_bytes_that_lack():
    plan = strategy(lane(([0], 20), count=1))
    step = simulate_strategy(plan, TWO, TableCosts(), workload(1))
    assert step.overfull(TWO) == {0: 20 * 60 + 20 * 5 + 7 - 1000}


def test_devices_that_share_an_uplink_divide_it():
    nodes = cluster((FAST, 4), (SLOW, 4), uplink=12.0)
    alone = slowest_link(nodes, [0], [1], {})
    both = slowest_link(nodes, [0], [1], {0: 4, 1: 2})
    assert (alone, both) == (Link(10.0, 1.0), Link(3.0, 1.0))
    assert slowest_link(nodes, [0], [0], {0: 4}) == Link(100.0, 0.0)


def test_what_a_step_goes_to_by_hand():
    """Stages of 3 and 6 s a micro-batch, four of them; messages of half a second each way."""
    plan = strategy(lane(([0], 2), ([2], 2), count=4))
    step = simulate_strategy(plan, TWO, TableCosts(message_seconds=0.5), workload(4))
    (part,) = step.attribution()
    assert part.bottleneck == 1
    assert (part.balanced, part.imbalance) == ((12 + 24) / 2, 24 - 18)
    assert (part.messages, part.fill) == (
        1.0,
        3.0,
    )  # stage 0 before the first and after the last pass
    assert (part.seconds, step.seconds) == (28.0, 28.0)


@pytest.mark.parametrize(
    ("plan", "batch", "message"),
    [
        (strategy(), 1, "lanes: a strategy has one lane or more"),
        (strategy(lane(([0], 1), count=2)), 3, "batch: the lanes' micro-batches have 2 samples"),
        (strategy(lane(([9], 1), count=1)), 1, "stages: the stage of ranks 9 is not within"),
        (strategy(lane(([1, 2], 1), count=1)), 1, "unlike devices, fast, slow"),
        (
            strategy(lane(([0], 1), count=1), lane(([1], 2), count=1)),
            2,
            r"num_layers: lanes hold \[1, 2\] layers",
        ),
    ],
)
def test_strategies_that_fit_nothing_are_refused(plan, batch, message):
    for call in (simulate_strategy, step_seconds):
        with pytest.raises(PlannerError, match=message):
            call(plan, TWO, TableCosts(), workload(batch))
