"""The search, its bound and its re-plans, on small random clusters against every strategy that there is."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.bounds import lower_bound, work_bound
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.models import find_model
from hdtensor.planner.replan import replan
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import search
from hdtensor.planner.simulate import simulate_strategy
from hdtensor.planner.space import SearchOptions, can_deal, make_space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import Workload
from tests.planner.small import TableCosts, all_strategies, random_space


def best_by_force(space):
    scorer = Scorer(space)
    scored = [scorer.score(strategy) for strategy in all_strategies(space)]
    return min((s.seconds for s in scored if s is not None), default=None)


def ranks_of(strategy):
    return [r for lane in strategy.lanes for stage in lane.stages for r in stage.ranks]


def planned(text, model="llama-32B", batch=64, options=None, ranks=None, **workload):
    cluster = cluster_of_text(text)
    work = Workload(batch=batch, context=4096, **workload)
    costs = RooflineCosts(model=find_model(model), workload=work)
    space = make_space(cluster, costs, work, costs.model.num_layers, options, ranks=ranks)
    return search(space)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB-H1"])
@pytest.mark.parametrize("seed", range(24))
def test_no_strategy_beats_the_bound(seed, schedule):
    space = random_space(seed, schedule=schedule, batch=4 if schedule != "1F1B" else None)
    if schedule != "1F1B":  # the events of other schedules take longer: fewer strategies
        space = dataclasses.replace(space, options=dataclasses.replace(space.options, max_stages=2))
    best = best_by_force(space)
    if best is None:
        with pytest.raises(PlannerError, match=r"^memory: "):
            search(space)
        return
    bound = lower_bound(space)
    assert 0 < bound.work <= bound.seconds * (1 + 1e-9)
    assert bound.seconds <= best * (1 + 1e-9)
    assert bound.work == pytest.approx(work_bound(space))


@pytest.mark.parametrize("seed", range(12))
def test_no_strategy_beats_the_bound_where_synchronization_is_long(seed):
    space = random_space(seed, batch=(4, 5, 6)[seed % 3])
    costs = dataclasses.replace(space.costs, num_bytes=20.0, num_bytes_sent=0.1)
    space = make_space(space.cluster, costs, space.workload, space.num_layers, space.options)
    best = best_by_force(space)
    if best is not None:
        assert lower_bound(space, best).seconds <= best * (1 + 1e-9)
        assert lower_bound(space).seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_layers_only_lower_the_bound(seed):
    space = random_space(seed)
    best = best_by_force(space)
    if best is None:
        return
    whole = lower_bound(space, best).seconds
    parts = lower_bound(space, best, whole_layers=False).seconds
    assert parts <= whole * 1.01  # both end within a small width
    assert whole <= best * (1 + 1e-9)


def test_whole_layers_cost_what_the_bound_says():
    # One lane of two like devices, TP 1: three layers go 2 + 1, parts of them 1.5 + 1.5.
    cluster = cluster_of_text("2x H20")
    work = Workload(batch=8, context=1)
    costs = TableCosts(layer={"H20": 1.0}, first=0.0, last=0.0, num_bytes=0.0, memory_per_layer=0.0)
    options = SearchOptions(tp_degrees=(1,), mbs=(1,), max_lanes=1)
    space = make_space(cluster, costs, work, 3, options)
    whole = lower_bound(space).seconds
    parts = lower_bound(space, whole_layers=False).seconds
    assert parts < 0.9 * whole
    assert whole <= search(space).seconds


@pytest.mark.parametrize("seed", range(40))
def test_the_search_comes_near_brute_force(seed):
    space = random_space(seed)
    best = best_by_force(space)
    if best is None:
        return
    found = search(space)
    assert found.seconds <= best * 1.2
    assert found.seconds >= found.bound.seconds * (1 - 1e-9)
    again = simulate_strategy(found.strategy, space.cluster, space.costs, space.workload)
    assert again.seconds == pytest.approx(found.seconds, rel=1e-9)
    assert not again.overfull(space.cluster)


def test_the_search_mostly_finds_the_best():
    hits = 0
    for seed in range(40, 70):
        space = random_space(seed)
        best = best_by_force(space)
        if best is None or search(space).seconds <= best * 1.005:
            hits += 1
    assert hits >= 26


def test_a_plan_of_the_papers_cluster_uses_each_rank_once_and_beats_uniform_ones(papers_plan):
    found = papers_plan
    ranks = ranks_of(found.strategy)
    assert len(ranks) == len(set(ranks))
    assert set(ranks) <= set(range(48))
    assert found.uniform is not None
    assert found.seconds < 0.9 * found.uniform.seconds
    assert found.bound.seconds < found.seconds < 1.02 * found.bound.seconds
    assert found.candidates[0].seconds == found.seconds
    assert [c.seconds for c in found.candidates] == sorted(c.seconds for c in found.candidates)


def test_min_lanes_keeps_a_second_copy_and_max_lanes_bounds_them():
    one = planned("8x H20", options=SearchOptions(max_lanes=1))
    assert len(one.strategy.lanes) == 1
    two = planned("16x H20", options=SearchOptions(min_lanes=2))
    assert len(two.strategy.lanes) >= 2


def test_equal_lanes_have_equal_layers_and_shares():
    found = planned("8x H800 + 16x H20", options=SearchOptions(equal_lanes=True))
    shapes = {tuple(s.num_layers for s in lane.stages) for lane in found.strategy.lanes}
    shares = {(lane.num_microbatches, lane.mbs) for lane in found.strategy.lanes}
    assert len(shapes) == len(shares) == 1


def test_stopping_returns_the_best_so_far(papers_plan):
    seen = []
    cluster = cluster_of_text("16x H800 + 32x H20")
    work = Workload(batch=64, context=4096)
    costs = RooflineCosts(model=find_model("llama-32B"), workload=work)
    space = make_space(cluster, costs, work, 60)
    found = search(space, report=seen.append, should_stop=lambda: len(seen) > 1)
    assert not found.is_complete
    assert len(seen) == 2
    assert found.seconds == min(seen[-1].seconds, found.seconds)
    assert len(found.candidates) < len(papers_plan.candidates)


def test_what_does_not_fit_says_what_binds():
    with pytest.raises(PlannerError, match=r"^memory: no strategy fits.*more devices"):
        planned("2x V100", precision="float16")


def test_wrong_options_name_the_field():
    with pytest.raises(PlannerError, match=r"^tp_degrees: 3 is no power of two"):
        SearchOptions(tp_degrees=(1, 3))
    with pytest.raises(PlannerError, match=r"^mbs: needs numbers of 1 or more"):
        SearchOptions(mbs=())
    with pytest.raises(PlannerError, match=r"^max_stages, min_lanes, max_lanes: "):
        SearchOptions(min_lanes=3, max_lanes=2)
    with pytest.raises(PlannerError, match=r"^ranks: "):
        planned("8x H20", ranks=[])


@pytest.fixture(scope="module")
def papers_plan():
    return planned("16x H800 + 32x H20")


@pytest.mark.parametrize("lost", [{0}, {15}, {16}, {47}, {3, 20, 21}, set(range(8, 24))], ids=str)
def test_a_re_plan_uses_only_what_is_left(lost, papers_plan):
    left = set(range(48)) - lost
    after = replan(papers_plan, left)
    ranks = ranks_of(after.strategy)
    assert len(ranks) == len(set(ranks))
    assert set(ranks) <= left
    again = simulate_strategy(
        after.strategy, after.space.cluster, after.space.costs, after.space.workload
    )
    assert again.seconds == pytest.approx(after.seconds, rel=1e-9)
    assert not again.overfull(after.space.cluster)
    assert papers_plan.seconds * 0.999 <= after.seconds <= 2 * papers_plan.seconds


def test_re_plans_follow_one_another_and_come_back():
    before = planned("8x H800 + 16x H20", batch=16)
    fewer = replan(before, set(range(24)) - {3})
    fewest = replan(fewer, set(range(24)) - {3, *range(16, 24)})
    back = replan(fewest, range(24))
    assert set(ranks_of(fewest.strategy)) <= set(range(16)) - {3}
    assert max(back.seconds, fewer.seconds) <= fewest.seconds


def test_a_re_plan_without_a_kind_of_device_is_a_new_plan():
    before = planned("8x H800 + 8x H20")
    after = replan(before, range(8))
    assert after.seconds == pytest.approx(planned("8x H800 + 8x H20", ranks=range(8)).seconds)


def test_unlike_lanes_are_scored_as_the_events_say():
    found = planned("8x H800 + 8x H20", batch=16)
    scorer = Scorer(found.space)
    stages = (StageChoice(tuple(range(8)), 60, 8),)
    heavy = Strategy((LaneChoice(stages, 16, 1),))
    scored = scorer.score(heavy)
    assert scored is None or scored.seconds >= found.seconds
    assert scorer.score(heavy) is scored


def test_a_batch_is_dealt_if_some_lanes_can():
    def by_force(batch, sizes, lanes):
        return any(
            sum(c * s for c, s in zip(counts, some, strict=True)) == batch
            for some in itertools.combinations_with_replacement(sizes, lanes)
            for counts in itertools.product(*(range(1, batch // s + 1) for s in some))
        )

    for sizes in [(1,), (2, 4), (3, 5), (4, 6, 9), (2, 3, 7)]:
        for batch, least, more in itertools.product(range(1, 15), (1, 2, 3), (0, 1)):
            wanted = any(by_force(batch, sizes, n) for n in range(least, least + more + 1))
            assert can_deal(batch, sizes, least, least + more) == wanted, (
                sizes,
                batch,
                least,
                more,
            )


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (33, {"mbs": (4,)}, "mbs: 33 samples cannot be dealt to 1 to 8 lanes in micro-batches of 4, one size"),
        (33, {"mbs": (4, 5), "max_lanes": 1}, "mbs: 33 samples cannot be dealt to 1 to 1 lanes"),
        (3, {"min_lanes": 4}, "min_lanes: 8 devices and 3 samples make at most 3 lanes, got 4"),
        (64, {"min_lanes": 9}, "min_lanes: 8 devices and 64 samples make at most 8 lanes, got 9"),
        (14, {"mbs": (2,), "equal_lanes": True, "min_lanes": 2, "max_lanes": 6}, "batch: 14 samples are not the same whole"),
        (64, {"mbs": (128,)}, "mbs: 64 samples cannot be dealt"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_dealt_is_not_called_a_want_of_memory(batch, options, message):
    with pytest.raises(PlannerError, match=f"^{message}"):
        planned("8x H20", "llama-7b", batch, SearchOptions(**options))
