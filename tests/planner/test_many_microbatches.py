"""Steps of very many micro-batches: searched without events, or refused before the search."""

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner import exhaustive, planning, simulate as simulation
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.costs import RuntimeTraits
from hdtensor.planner.lane_times import LaneTimes
from hdtensor.planner.planning import find_plan
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import search
from hdtensor.planner.simulate import MAX_PASSES, end_of_passes, strategy_memory
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import SCHEDULES, Workload
from tests.planner.small import TableCosts, device


FAST, SLOW = device("a", 1e9), device("b", 1e9)
UNLIKE = Cluster(
    nodes=tuple(Node(device=d, num_devices=1, inside=Link(10.0, 0.0)) for d in (FAST, SLOW)),
    between=Link(5.0, 0.1),
)


def space(batch, schedule, costs=None, **options):
    return make_space(
        UNLIKE,
        costs or TableCosts(layer={"a": 1.0, "b": 2.5}),
        Workload(batch=batch, context=1, precision="float32", schedule=schedule),
        3,
        SearchOptions(**{"tp_degrees": (1,), "mbs": (8, 1), **options}),
    )


def refuse(*arguments, **options):
    raise AssertionError("this is for events, or for a search")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_search_asks_no_events(schedule, monkeypatch):
    monkeypatch.setattr(simulation, "simulate", refuse)
    monkeypatch.setattr(simulation, "build_schedule", refuse)
    found = search(space(1 << 17, schedule))
    assert found.seconds >= found.bound.seconds > 0
    passes = sum(lane.num_microbatches * len(lane.stages) for lane in found.strategy.lanes)
    assert passes <= MAX_PASSES
    memory = strategy_memory(found.strategy, UNLIKE, found.space.costs, found.space.workload)
    assert all(need.total < 1e9 for need in memory.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_nobody_can_simulate_is_refused_before_the_search(schedule, monkeypatch):
    monkeypatch.setattr(planning, "search", refuse)
    most = 8 * MAX_PASSES
    with pytest.raises(PlannerError, match=f"^batch: {most + 8} samples are .* up to {most}"):
        find_plan(None, space(most + 8, schedule))
    with pytest.raises(AssertionError, match="search"):
        find_plan(None, space(most, schedule))


def test_a_strategy_of_too_many_passes_is_none():
    lane = LaneChoice((StageChoice((0,), 1, 1), StageChoice((1,), 2, 1)), MAX_PASSES // 2 + 1, 1)
    batch = lane.num_microbatches
    scorer = Scorer(space(batch, "1F1B"))
    assert scorer.score(Strategy((lane,))) is None
    whole = LaneChoice((StageChoice((0,), 3, 1),), batch, 1)
    assert scorer.score(Strategy((whole,))) is not None


def test_all_numbers_of_microbatches_are_not_tried_one_by_one():
    """Two lanes make 200,000 samples in few ways, as neither does many more than its part in the time."""
    made = space(200_000, "GPipe", mbs=(4,), max_stages=1)
    found = search(made)
    again = exhaustive.search_all(made, Scorer(made), found.seconds * (1 + 1e-6))
    assert again.is_complete
    assert again.faster[-1][0].seconds == pytest.approx(found.seconds)


class Blocking(TableCosts):
    def runtime(self):
        return RuntimeTraits(is_blocking=True)


@pytest.mark.parametrize("schedule", ["GPipe", "ZB-H1"])
def test_messages_that_block_are_refused_earlier_as_only_events_know_them(schedule, monkeypatch):
    monkeypatch.setattr(planning, "search", refuse)
    costs = Blocking(layer={"a": 1.0, "b": 2.5})
    with pytest.raises(PlannerError, match=r"^batch: 10000 samples"):
        find_plan(None, space(10_000, schedule, costs))
    with pytest.raises(AssertionError, match="search"):
        find_plan(None, space(10_000, "1F1B", costs))


def test_the_ends_of_lanes_whose_messages_block_by_hand():
    """Stage 0: F 0-1, message 1-1.5, waits; stage 1: F 1.5-3.5, B 3.5-7.5, message 7.5-8.5; B 8.5-10.5."""
    times = LaneTimes((1.0, 2.0), (2.0, 4.0), (0.5,), (1.0,))
    for schedule in ("GPipe", "1F1B"):
        assert end_of_passes(times, 1, schedule, is_blocking=True) == (10.5, 8.5)
    assert end_of_passes(times, 1, "GPipe", is_blocking=False) == (10.5, 7.5)


def test_a_batch_that_fits_in_too_many_passes_only_is_told_so():
    """Memory holds small micro-batches only, and of these there are too many."""
    costs = TableCosts(layer={"a": 1.0, "b": 2.5}, held_per_layer=1e8)
    with pytest.raises(PlannerError, match="left out: a smaller batch helps too"):
        find_plan(None, space(1 << 19, "1F1B", costs))
