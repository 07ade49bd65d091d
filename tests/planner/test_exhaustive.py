"""Small clusters are searched to the end: no strategy is faster, whatever its lanes, placement and micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.bounds import Bound
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.exhaustive import search_all
from hdtensor.planner.replan import replan
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import Candidate, best_of, search
from hdtensor.planner.simulate import simulate_strategy
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import Workload
from tests.planner.small import TableCosts, compositions, device, random_space


def every_lane(space):
    """Return (lane with one micro-batch, as places; devices of each node) on every choice of nodes."""
    nodes, found = space.cluster.nodes, []
    longest = min(space.options.max_stages, space.num_layers)
    places = list(
        itertools.product(range(len(nodes)), space.options.tp_degrees, space.options.cp_degrees)
    )
    for length in range(1, longest + 1):
        for stages in itertools.product(places, repeat=length):
            taken = [
                sum(tp * cp for n, tp, cp in stages if n == node) for node in range(len(nodes))
            ]
            if all(t <= node.num_devices for t, node in zip(taken, nodes, strict=True)):
                for layers in compositions(space.num_layers, length):
                    found += [(stages, layers, mbs, taken) for mbs in space.prices.mbs]
    return found


def every_strategy(space):
    """Yield every strategy: all sets of lanes on all nodes, with all numbers of micro-batches."""
    lanes, batch = every_lane(space), space.workload.batch
    room = [node.num_devices for node in space.cluster.nodes]
    todo = [((), 0, room)]
    while todo:
        chosen, start, free = todo.pop()
        left = batch - sum(lane[2] for lane in chosen)
        for counts in itertools.product(*(range(left // lane[2] + 1) for lane in chosen)):
            if left == sum(c * lane[2] for c, lane in zip(counts, chosen, strict=True)):
                yield on_ranks(space, chosen, counts)
        for index in range(start, len(lanes)):
            rest = [have - take for have, take in zip(free, lanes[index][3], strict=True)]
            if min(rest) >= 0 and lanes[index][2] <= left:
                todo.append(((*chosen, lanes[index]), index, rest))


def on_ranks(space, chosen, counts):
    free = [list(space.cluster.ranks_of(node)) for node in range(len(space.cluster.nodes))]
    lanes = []
    for (stages, layers, mbs, _), more in zip(chosen, counts, strict=True):
        choices = []
        for (node, tp, cp), num_layers in zip(stages, layers, strict=True):
            ranks = tuple(free[node].pop(0) for _ in range(tp * cp))
            choices.append(StageChoice(ranks, num_layers, tp, cp))
        lanes.append(LaneChoice(tuple(choices), 1 + more, mbs))
    return Strategy(tuple(lanes))


def best_step(space):
    best, options = math.inf, space.options
    for strategy in every_strategy(space):
        if not options.min_lanes <= len(strategy.lanes) <= (options.max_lanes or math.inf):
            continue
        step = simulate_strategy(strategy, space.cluster, space.costs, space.workload)
        if step.seconds < best and not step.overfull(space.cluster):
            best = step.seconds
    return best


def tiny_space(seed, schedule="1F1B", **changes):
    space = random_space(seed, num_layers=3, batch=3, schedule=schedule)
    options = SearchOptions(**{"tp_degrees": (1, 2), "mbs": (1, 2), "max_stages": 2, **changes})
    nodes = space.cluster.nodes[:2]
    zones = [dataclasses.replace(node, zone=str(i)) for i, node in enumerate(nodes)]
    cluster = Cluster(
        nodes=tuple(zones), between=space.cluster.between, links={("0", "1"): Link(0.7, 0.05)}
    )
    return make_space(cluster, space.costs, space.workload, 3, options)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB-H1"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_the_search_finds_the_best_of_all_strategies(seed, schedule):
    space = tiny_space(seed, schedule)
    best = best_step(space)
    if best == math.inf:
        with pytest.raises(PlannerError, match=r"^memory: "):
            search(space)
        return
    found = search(space)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.bound.seconds == found.seconds  # all were gone through
    assert found.gap == 0


@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("limits", [{"min_lanes": 2}, {"max_lanes": 1}, {"cp_degrees": (1, 2)}])
def test_limits_hold_for_the_best_too(seed, limits):
    space = tiny_space(seed, **limits)
    best = best_step(space)
    if best == math.inf:
        with pytest.raises(PlannerError, match=r"^(memory|min_lanes): "):
            search(space)
        return
    assert search(space).seconds == pytest.approx(best, rel=1e-9)


def test_a_known_best_strategy_is_proven_without_a_faster_one():
    space = tiny_space(101)
    found = search(space)
    again = search_all(space, Scorer(space), found.seconds)
    assert again == ((), True)
    worse = search_all(space, Scorer(space), found.seconds * 1.3)
    assert worse.is_complete
    assert worse.faster[-1][0].seconds == pytest.approx(found.seconds, rel=1e-9)
    steps = [scored.seconds for scored, _ in worse.faster]
    assert steps == sorted(steps, reverse=True)


def test_what_is_too_large_or_stopped_proves_nothing():
    space = tiny_space(101)
    assert not search_all(space, Scorer(space), math.inf, lambda: True).is_complete
    nodes = tuple(Node(device=device("a"), num_devices=4, inside=Link(10.0, 0.0)) for _ in range(8))
    workload = Workload(batch=64, context=1, precision="float32")
    large = make_space(
        Cluster(nodes=nodes, between=Link(1.0, 0.0)), TableCosts(), workload, 60, SearchOptions()
    )
    assert search_all(large, Scorer(large), math.inf) == ((), False)


@pytest.mark.parametrize(("least", "most"), [(2, None), (3, 3), (1, 1), (1, 2), (5, None)])
def test_numbers_of_lanes_are_kept_on_large_clusters_too(least, most):
    nodes = tuple(
        Node(device=device("ab"[i % 2]), num_devices=4, inside=Link(10.0, 0.0)) for i in range(5)
    )
    costs = TableCosts(layer={"a": 1.0, "b": 2.0})
    options = SearchOptions(tp_degrees=(1, 2, 4), min_lanes=least, max_lanes=most)
    space = make_space(
        Cluster(nodes=nodes, between=Link(5.0, 0.0)),
        costs,
        Workload(batch=30, context=1, precision="float32"),
        24,
        options,
    )
    found = search(space)
    assert least <= len(found.strategy.lanes) <= (most or 20)
    for candidate in found.candidates:
        assert least <= len(candidate.strategy.lanes) <= (most or 20)


def test_more_lanes_than_devices_or_samples_are_an_error():
    space = tiny_space(101)
    for lanes in (4, 100):
        with pytest.raises(PlannerError, match=r"^min_lanes: .*got 4|^min_lanes: .*got 100"):
            search(
                dataclasses.replace(
                    space, options=dataclasses.replace(space.options, min_lanes=lanes)
                )
            )


def test_the_faster_of_two_placements_of_equal_lanes_is_kept():
    space = tiny_space(101)
    slow, fast = (Candidate(seconds, "1x [TP1 a]", Strategy(()), ()) for seconds in (2.0, 1.0))
    for candidates in ((slow, fast), (fast, slow)):
        found = best_of(space, candidates, None, Bound(0.5, 0.5), 2)
        assert found.seconds == 1.0
        assert found.candidates == (fast,)


@pytest.mark.parametrize("seed", [7, 17, 30, 42, 44, 50])
def test_re_plans_of_small_clusters_are_the_best_for_any_ranks_left(seed):
    """Also back on all ranks, where larger stages have room again."""
    space = random_space(seed)
    everything = range(space.cluster.num_ranks)
    try:
        before = search(space)
    except PlannerError:
        return
    for ranks in itertools.chain.from_iterable(
        itertools.combinations(everything, size) for size in everything[1:]
    ):
        fresh = make_space(
            space.cluster,
            space.costs,
            space.workload,
            space.num_layers,
            space.options,
            ranks=ranks,
        )
        try:
            best = search(fresh).seconds
        except PlannerError:
            with pytest.raises(PlannerError):
                replan(before, ranks)
            continue
        after = replan(before, ranks)
        assert after.seconds == pytest.approx(best, rel=1e-9)
        used = {rank for lane in after.strategy.lanes for s in lane.stages for rank in s.ranks}
        assert used <= set(ranks)
        assert replan(after, everything).seconds == pytest.approx(before.seconds, rel=1e-9)
