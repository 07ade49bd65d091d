"""The bound: no strategy on any nodes beats it, and no lane does more than its set's limits say."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import numpy as np
import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner import bounds, priced_bounds
from hdtensor.planner.bounds import lower_bound
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.lane_bounds import LaneLimits, most_alone
from hdtensor.planner.lane_sets import LaneSets
from hdtensor.planner.lane_times import LaneTimes, end_times
from hdtensor.planner.models import find_model
from hdtensor.planner.planning import find_plan, with_tight_bound
from hdtensor.planner.priced_bounds import PricedLanes
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import search
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.stage_limits import StageLimits
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.tails import fastest_tails
from hdtensor.planner.whole_parts import find_whole_parts
from hdtensor.planner.workload import Workload
from tests.planner.small import TableCosts, all_placed_strategies, device, space_of_nodes


def steps_by_force(space):
    """Return the best step of each number of lanes that has one."""
    scorer, steps = Scorer(space), {}
    for strategy in all_placed_strategies(space):
        scored, num = scorer.score(strategy), len(strategy.lanes)
        if scored is not None:
            steps[num] = min(scored.seconds, steps.get(num, scored.seconds))
    return steps


@functools.cache
def small_space(seed):
    """Return a small random space and its steps by force."""
    space = space_of_nodes(seed)
    return space, steps_by_force(space)


def papers_space():
    work = Workload(batch=64, context=4096)
    costs = RooflineCosts(model=find_model("llama-32B"), workload=work)
    return make_space(cluster_of_text("16x H800 + 32x H20"), costs, work, costs.model.num_layers)


@pytest.mark.parametrize("seed", range(30))
def test_no_strategy_on_any_nodes_beats_the_bound(seed, monkeypatch):
    space, steps = small_space(seed)
    if not steps:
        return
    best = min(steps.values())
    found = [lower_bound(space), lower_bound(space, best)]
    found.append(lower_bound(space, best, whole_layers=False))
    # With thousands of sets, a time a little below the best step is asked first.
    monkeypatch.setattr(bounds, "_MANY_SETS", 0)
    monkeypatch.setattr(bounds, "_SOUGHT", 1.0 + 0.002 * (seed % 8))
    found.append(lower_bound(space, best))
    # As with many devices.
    monkeypatch.setattr(bounds, "_MOST_POINTS", 0)
    monkeypatch.setattr(priced_bounds, "_AT_A_TIME", 1 + seed % 7)
    monkeypatch.setattr(priced_bounds, "_FACTORS", (1.0, 1.01, 1.1, 1.3))
    found += [lower_bound(space, best), lower_bound(space, best, whole_layers=False)]
    found.append(lower_bound(space, best, is_tight=True))
    assert max(bound.seconds for bound in found) <= best * (1 + 1e-9)
    assert found[-1].seconds >= found[-3].seconds


@pytest.mark.parametrize("seed", range(30))
def test_no_number_of_lanes_does_the_batch_sooner_than_prices_allow(seed):
    space, steps = small_space(seed)
    lanes = PricedLanes(space)
    assert max(steps, default=0) <= lanes.most_lanes
    for num, seconds in steps.items():
        assert lanes.most_samples(seconds, num, num) >= space.workload.batch * (1 - 1e-9)
        assert lanes.most_samples(seconds, 1, num) >= space.workload.batch * (1 - 1e-9)


def test_lanes_that_share_an_optimizer_are_not_bounded_by_the_fewest():
    # Three lanes of one device each: with ZeRO each updates a third.
    cluster = Cluster(
        nodes=tuple(Node(device=device("a"), num_devices=1, inside=Link(1.0, 0.0)) for _ in "abc"),
        between=Link(1.0, 0.0),
    )
    work = Workload(batch=3, context=1, precision="float32", zero=1)
    costs = TableCosts(
        num_bytes=0.0, first=0.0, last=0.0, fixed=0.0, is_zero=True, num_bytes_sent=9.0
    )
    space = make_space(cluster, costs, work, 2, SearchOptions(tp_degrees=(1,), mbs=(1,)))
    best = min(steps_by_force(space).values())
    assert best == pytest.approx(2 + 0.01 * 4 / 3)  # two layers, and with them embedding and head
    assert lower_bound(space).seconds <= best
    assert lower_bound(space).seconds > 2


class WithoutTP1(TableCosts):
    """Costs of a profile that was not measured without TP."""

    def seconds(self, unit, group, mbs):
        if group.tp == 1:
            raise PlannerError("tp: 1 was not measured.")
        return super().seconds(unit, group, mbs)


def test_degrees_of_tp_that_nobody_measured_have_no_bound():
    nodes = tuple(Node(device=device("a"), num_devices=4, inside=Link(1.0, 0.0)) for _ in "ab")
    work = Workload(batch=4, context=1, precision="float32", zero=0)
    options = SearchOptions(tp_degrees=(1, 2, 4), mbs=(1,), max_stages=2)
    cluster = Cluster(nodes=nodes, between=Link(1.0, 0.0))
    space = make_space(cluster, WithoutTP1(), work, 2, options)
    found = search(space)
    assert 0 < lower_bound(space).seconds <= found.seconds


def random_lanes(rng):
    """Return a space of two nodes of eight devices, and its sets of kinds, for lanes of up to four stages."""
    nodes = tuple(
        Node(device=device(name), num_devices=8, inside=Link(rng.uniform(0.5, 50), 0.0))
        for name in "ab"
    )
    cluster = Cluster(nodes=nodes, between=Link(rng.uniform(0.2, 20), rng.choice([0, 0.01])))
    zero = rng.choice([0, 1])
    costs = TableCosts(
        layer={"a": 1.0, "b": rng.uniform(1, 6)},
        loss=rng.choice([0, rng.uniform(0, 0.5)]),
        forward=rng.choice([1 / 3, 0.45, 0.5, 0.6, 0.1]),
        first=rng.choice([0, 0.5]),
        last=rng.choice([0, 1.2]),
        fixed=0.0,
        num_bytes=rng.choice([0, 0.1, 1, 3]),
        memory_per_layer=0.0,
        held_per_layer=0.0,
        is_zero=bool(zero),
    )
    work = Workload(batch=64, context=1, precision="float32", zero=zero)
    options = SearchOptions(tp_degrees=(1, 2, 4), mbs=(1,), max_stages=4)
    space = make_space(cluster, costs, work, rng.randint(4, 24), options)
    return space, LaneSets(space, whole_layers=rng.random() < 0.7)


def lane_seconds(space, tails, kinds, layers, count):
    """Return when a lane ends by the simulator's times of 1F1B, without messages, and with these tails."""
    prices, k, n = space.prices, np.array(kinds), np.array(layers, dtype=float)
    forward, work = prices.layer_forward[k, 0] * n, prices.layer[k, 0] * n
    forward[0] += prices.first_forward[k[0], 0]
    work[0] += prices.first[k[0], 0]
    forward[-1] += prices.last_forward[k[-1], 0]
    work[-1] += prices.last[k[-1], 0]
    none = (0.0,) * (len(k) - 1)
    times = LaneTimes(tuple(forward), tuple(work - forward), none, none)
    after = tails.of(k[None], n[None])[0]
    return max(end + tail for end, tail in zip(end_times(times, count), after, strict=True))


def improved(rng, seconds, kinds, layers):
    """Return about the fastest order and layers, by chance moves, and their time."""
    best = seconds(kinds, layers)
    for _ in range(30):
        a, b = rng.randrange(len(kinds)), rng.randrange(len(kinds))
        new_kinds, new_layers = list(kinds), list(layers)
        if rng.random() < 0.3:
            new_kinds[a], new_kinds[b] = new_kinds[b], new_kinds[a]
        elif layers[a] > 1:
            new_layers[a] -= 1
            new_layers[b] += 1
        now = seconds(new_kinds, new_layers)
        if now <= best:
            kinds, layers, best = new_kinds, new_layers, now
    return best


@pytest.mark.parametrize("seed", range(16))
def test_no_lane_does_more_than_the_limits_of_its_set(seed):
    rng = random.Random(seed)
    space, sets = random_lanes(rng)
    num_lanes = rng.choice([1, 2, 4, 8])
    tails = fastest_tails(space, num_lanes, num_lanes)
    limits, stages = LaneLimits(sets, tails, 0), StageLimits(sets, tails, 0)
    for _ in range(12):
        row = rng.randrange(len(sets.counts))
        kinds = np.repeat(np.arange(len(space.kinds)), sets.counts[row]).tolist()
        rng.shuffle(kinds)
        length = len(kinds)
        count = rng.choice([1, 2, length, length + 1, length + 2, rng.randint(1, 40)])
        layers = [1] * length
        for _ in range(space.num_layers - length):
            layers[rng.randrange(length)] += 1
        best = improved(
            rng, lambda k, n, c=count: lane_seconds(space, tails, k, n, c), kinds, layers
        )
        assert stages.may_hold(np.array([row]), np.array([count]), best)[0]
        assert limits.most(best)[row] >= count
        assert most_alone(sets, best, 0)[row] >= count


def test_stages_limits_see_what_the_slowest_stage_does_not():
    # Two stages of H800 with four small ones of H20: by the slowest stage alone the lane does one micro-batch more.
    space = papers_space()
    tails = fastest_tails(space, 4, 4)
    kinds = [(kind.group.device.name, kind.group.tp) for kind in space.kinds]
    counts = np.array([[2 * (k == ("H800", 2)) + 4 * (k == ("H20", 1)) for k in kinds]])
    sets, row = LaneSets(space, counts), np.array([0])
    stages, limits = StageLimits(sets, tails, 0), LaneLimits(sets, tails, 0)
    held = [m for m in range(1, 20) if stages.may_hold(row, np.array([m]), 5.2)[0]]
    assert held == list(range(1, len(held) + 1))  # fewer micro-batches are no harder
    assert len(held) < limits.most(5.2)[0]


def test_whole_layers_and_micro_batches_cost_what_they_cost():
    # One lane of two like devices has 2 and 1 of 3 layers: 1.5 and 1.5 would make (8 + 1) times 1.5 of (8 + 1) times 2 seconds.
    costs = TableCosts(
        layer={"H20": 1.0}, first=0.0, last=0.0, fixed=0.0, num_bytes=0.0, memory_per_layer=0.0
    )
    work = Workload(batch=8, context=1)
    options = SearchOptions(tp_degrees=(1,), mbs=(1,), max_lanes=1)
    space = make_space(cluster_of_text("2x H20"), costs, work, 3, options)
    found = search(space)
    parts = found.bound.parts
    assert parts is not None
    assert parts.seconds <= found.seconds * (1 + 1e-9)
    assert 0.15 * found.seconds < parts.layers < 0.3 * found.seconds
    assert parts.microbatches == pytest.approx(0.0, abs=1e-3 * found.seconds)
    # Two lanes do three micro-batches, one of them two: parts of one would save half of one's two seconds.
    work = Workload(batch=3, context=1, zero=0)
    options = SearchOptions(tp_degrees=(1,), mbs=(1,), max_stages=1)
    space = make_space(cluster_of_text("2x H20"), costs, work, 2, options)
    lanes = tuple(
        LaneChoice((StageChoice((rank,), 2, 1),), count, 1) for rank, count in enumerate((2, 1))
    )
    parts = find_whole_parts(space, Strategy(lanes), 5.0)
    assert parts is not None
    assert parts.microbatches == pytest.approx(1.0, rel=2e-3)
    assert parts.layers == pytest.approx(0.0, abs=1e-3)


def test_stages_of_other_devices_have_no_parts():
    costs = TableCosts(layer={"H20": 1.0}, memory_per_layer=0.0)
    cluster, work = cluster_of_text("2x H20"), Workload(batch=3, context=1)
    space = make_space(cluster, costs, work, 2, SearchOptions(tp_degrees=(1,), mbs=(1,)), ranks=[0])
    lane = LaneChoice((StageChoice((0, 1), 2, 2),), 3, 1)
    assert find_whole_parts(space, Strategy((lane,)), 9.0) is None


def test_the_plan_of_the_papers_cluster_is_within_two_percent_of_the_bound():
    found = search(papers_space())
    assert found.bound.seconds < found.seconds <= 1.02 * found.bound.seconds
    parts = found.bound.parts
    assert parts is not None
    assert 0.99 * found.seconds < parts.seconds <= found.seconds


def test_prices_of_devices_bound_a_large_cluster():
    work = Workload(batch=256, context=4096)
    costs = RooflineCosts(model=find_model("llama-32B"), workload=work)
    cluster = cluster_of_text("64x H800 + 64x H20")
    found = search(make_space(cluster, costs, work, costs.model.num_layers))
    assert found.gap < 0.13
    assert found.bound.seconds > 1.2 * found.bound.work


def test_a_tight_bound_proves_more_and_stops_when_told():
    work = Workload(batch=64, context=2048)
    costs = RooflineCosts(model=find_model("llama-7b"), workload=work)
    space = make_space(
        cluster_of_text("64x H800 + 64x H20"), costs, work, costs.model.num_layers,
        SearchOptions(tp_degrees=(1, 2), mbs=(1,), max_stages=4),
    )  # fmt: skip
    _, usual = find_plan(costs.model, space)
    options = replace(space.options, tight_bound=True)
    _, tight = find_plan(costs.model, replace(space, options=options))
    assert tight.seconds == usual.seconds
    assert usual.bound.seconds < tight.bound.seconds <= tight.seconds
    asked = []
    stopped = with_tight_bound(usual, lambda: len(asked) > 2 or asked.append(1))
    assert usual.bound.seconds <= stopped.bound.seconds < tight.bound.seconds
    assert len(asked) == 3
    done = replace(usual, bound=usual.bound._replace(seconds=usual.seconds))
    assert with_tight_bound(done) is done
