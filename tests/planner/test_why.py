"""What binds a plan, and what rejected ones lose: each statement is checked by simulating what it is about."""

import itertools
from dataclasses import replace

import pytest

from hdtensor.planner.cluster import Cluster
from hdtensor.planner.cluster_files import parse_cluster
from hdtensor.planner.emit import Planned, emit, read_planned
from hdtensor.planner.models import shape_of_config
from hdtensor.planner.planning import find_plan, make_costs, make_plan, predict
from hdtensor.planner.simulate import busiest_stage, simulate_strategy, slowest_lane
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.text_report import LANE_WORDS, seconds_text
from hdtensor.planner.whole_parts import find_whole_parts
from hdtensor.planner.why import find_why, other_schedules, why_of
from hdtensor.planner.workload import SCHEDULES, Workload


MODEL = shape_of_config(
    {"model_type": "llama", "vocab_size": 1000, "hidden_size": 2048, "num_hidden_layers": 12,
     "num_attention_heads": 16, "intermediate_size": 5504}
)  # fmt: skip
WORK = Workload(batch=16, context=2048, zero=0)
DEVICES = """
devices:
  fast: {{like: H800, memory: {memory} GB}}
  slow: {{like: H800, speed: 0.5}}
nodes: [1x fast, 1x slow]
network: 50 GB/s
"""


def chain(num_fast, num_slow, memory=80, batch=16):
    stages = (StageChoice((0,), num_fast, 1), StageChoice((1,), num_slow, 1))
    strategy = Strategy((LaneChoice(stages, batch, 1),))
    work = replace(WORK, batch=batch)
    planned = Planned(strategy, MODEL, parse_cluster(DEVICES.format(memory=memory)), work)
    costs = make_costs(planned.model, work, planned.cluster)
    return predict(planned, costs), costs


def parts_of(summary, costs):
    strategy, model, cluster, work = summary.planned
    space = make_space(cluster, costs, work, model.num_layers, SearchOptions(mbs=(1,)))
    return find_whole_parts(space, strategy, summary.prediction.seconds)


def steps_of_all_cuts():
    return {num: chain(num, 12 - num)[0].prediction.seconds for num in range(1, 12)}


@pytest.mark.parametrize(
    ("batch", "layers", "constraint"),
    [(16, 12, "fill and drain"), (512, 12, "whole layers"), (512, 6, "imbalance"), (1, 12, "fill and drain")],
)  # fmt: skip
def test_what_costs_most_binds(batch, layers, constraint):
    """At the best cut of many micro-batches whole layers cost most, at that of a few the turns of the pipeline."""
    steps = steps_of_all_cuts()
    best = min(steps, key=steps.get) if layers == 12 else 4
    summary, costs = chain(best, 12 - best, batch=batch)
    parts = parts_of(summary, costs)
    why = find_why(summary, costs, parts)
    assert why.constraint == constraint == next(iter(why.costs))
    step, lane = summary.prediction.seconds, summary.lane_seconds[0]
    assert list(why.costs.values()) == sorted(why.costs.values(), reverse=True)
    assert why.costs["fill and drain"] == lane.fill
    together = why.costs.get("whole layers", 0.0) + why.costs.get("imbalance", 0.0)
    assert together == pytest.approx(lane.imbalance)
    assert why.costs.get("whole layers", 0.0) == pytest.approx(min(parts.layers, lane.imbalance))
    assert sum(why.costs.values()) + lane.balanced == pytest.approx(step, rel=1e-3)


def test_moves_of_a_layer_are_the_cuts_beside():
    steps = steps_of_all_cuts()
    best = min(steps, key=steps.get)
    assert 1 < best < 11
    why = find_why(*chain(best, 12 - best))
    assert all(move.seconds > steps[best] for move in why.moves)
    neighbours = [steps[best - 1], steps[best + 1]]
    for move in why.moves:
        assert any(move.seconds == pytest.approx(near, rel=1e-12) for near in neighbours)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_schedules_take_what_the_events_say(schedule):
    summary, costs = chain(8, 4)
    planned = summary.planned
    work = replace(WORK, schedule=schedule)
    mine = predict(planned._replace(workload=work), costs)
    others = other_schedules(mine, costs)
    assert set(others) == set(SCHEDULES) - {schedule}
    for name, other in others.items():
        step = predict(planned._replace(workload=replace(WORK, schedule=name)), costs)
        assert other.seconds == pytest.approx(step.prediction.seconds)
        assert other.lacking == max(0.0, *(-stage.free for stage in step.stages))


def most_bytes(planned, costs):
    need = predict(planned, costs).prediction.memory.values()
    return max(each.total for each in need)


def test_a_faster_schedule_that_fits_is_offered_and_no_other():
    """ZB-H1 is faster here and needs more memory, GPipe is as fast as 1F1B."""
    node = parse_cluster("nodes: [2x H800]").nodes[0]
    options = SearchOptions(tp_degrees=(1,), mbs=(1,), max_lanes=1)

    def found_with(memory):
        device = replace(node.device, memory_bytes=memory)
        cluster = Cluster(nodes=(replace(node, device=device),), between=node.inside)
        return make_plan(MODEL, cluster, WORK, options=options)

    large = found_with(node.device.memory_bytes)
    zb = large.planned._replace(workload=replace(WORK, schedule="ZB-H1"))
    small = found_with(
        int((most_bytes(zb, large.costs) + most_bytes(large.planned, large.costs)) / 2)
    )
    assert small.planned.strategy == large.planned.strategy
    for found, lacks in ((large, False), (small, True)):
        other = other_schedules(found.summary, found.costs)["ZB-H1"]
        assert found.summary.why["schedules"]["ZB-H1"] == other._asdict()
        assert other.seconds < found.seconds * 0.99
        assert (other.lacking > 0) == lacks
        offers = [reason for reason in found.reasons if reason.startswith("With ")]
        words = f"With ZB-H1 these lanes would take {seconds_text(other.seconds)}, "
        assert [offer.startswith(words) for offer in offers] == ([] if lacks else [True])


def test_where_a_device_is_full_its_memory_binds():
    steps = steps_of_all_cuts()
    best = min(steps, key=steps.get)
    need = {num: chain(num, 12 - num)[0].prediction.memory[0].total for num in (best - 1, best)}
    memory = (need[best - 1] + need[best]) / 2e9
    summary, costs = chain(best - 1, 13 - best, memory)
    why = find_why(summary, costs)
    assert why.constraint == "memory"
    (move,) = [move for move in why.moves if move.lacking]
    assert move.seconds == pytest.approx(steps[best], rel=1e-12)
    assert move.seconds < summary.prediction.seconds
    assert move.lacking == pytest.approx(need[best] - memory * 1e9)
    assert move.where == "rank 0"


def test_one_stage_has_nothing_to_move_and_two_lanes_have_micro_batches():
    """What remains are the optimizer and gradients; where they take less than a hundredth it is the work itself."""
    one = Strategy((LaneChoice((StageChoice((0,), 12, 1),), 16, 1),))
    two = Strategy(tuple(LaneChoice((StageChoice((rank,), 12, 1),), 8, 1) for rank in (0, 1)))
    cluster = parse_cluster("cluster: 2x H800")
    costs = make_costs(MODEL, WORK, cluster)
    for strategy, names, num_moves in (
        (one, {"optimizer"}, 0),
        (two, {"optimizer", "gradients"}, 1),
    ):
        summary = predict(Planned(strategy, MODEL, cluster, WORK), costs)
        why = find_why(summary, costs)
        assert (set(why.costs), len(why.moves)) == (names, num_moves)
        most = max(why.costs.values()) / summary.prediction.seconds
        assert why.constraint == (next(iter(why.costs)) if most >= 0.01 else "work")
    assert find_why(*chain(8, 4)).constraint != "work"


def test_what_a_search_says_is_true_of_what_it_rejected():
    cluster = parse_cluster("nodes: [2x H800, 4x H20]\nnetwork: 50 GB/s")
    costs = make_costs(MODEL, WORK, cluster)
    space = make_space(cluster, costs, WORK, MODEL.num_layers, SearchOptions(mbs=(1, 2)))
    planned, result = find_plan(MODEL, space)
    summary = predict(planned, costs)
    why = why_of(result, summary, costs)
    assert why["work_seconds"] <= why["bound_seconds"] <= summary.prediction.seconds
    assert (
        0 <= why["whole_layers_seconds"] < why["lanes_bound_seconds"] <= summary.prediction.seconds
    )
    assert 0 <= why["whole_microbatches_seconds"] < why["lanes_bound_seconds"]
    assert any("whole micro-batches" in reason for reason in why["reasons"])
    assert summary.prediction.seconds <= why["uniform_seconds"]
    seconds = [each["seconds"] for each in why["alternatives"]]
    assert seconds == sorted(seconds)
    assert len(seconds) >= 2
    known = {candidate.what: candidate for candidate in result.candidates}
    for each in why["alternatives"]:
        strategy = known[each["what"]].strategy
        again = simulate_strategy(strategy, cluster, costs, WORK).seconds
        assert again == pytest.approx(each["seconds"])
        assert each["reason"].startswith(f"{again / summary.prediction.seconds - 1:.2%} slower: ")
        part = each["reason"].split(": ", 1)[1]
        assert part == "as long in every part, by other ranks or layers" or part.startswith(
            tuple(LANE_WORDS.values())
        )
    # No single move that fits is left that makes the step shorter: the last part of planning took them all.
    assert all(
        move.lacking or move.seconds >= summary.prediction.seconds * (1 - 1e-6)
        for move in find_why(summary, costs).moves
    )
    assert all(a != b for a, b in itertools.pairwise(why["reasons"]))
    assert f"What binds: {why['constraint']}." in " ".join(why["reasons"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_slowest_lane_without_events_is_that_of_the_events(schedule):
    cluster = parse_cluster("nodes: [2x H800, 4x H20]\nnetwork: 5 GB/s")
    work = replace(WORK, zero=1, schedule=schedule)
    costs = make_costs(MODEL, work, cluster)
    space = make_space(cluster, costs, work, MODEL.num_layers, SearchOptions(mbs=(1, 2)))
    result = find_plan(MODEL, space)[1]
    assert len(result.candidates) >= 2
    for candidate in result.candidates[:6]:
        fast = slowest_lane(candidate.strategy, cluster, costs, work)
        step = simulate_strategy(candidate.strategy, cluster, costs, work)
        lane = step.attribution()[fast.lane]
        assert fast.seconds == pytest.approx(step.seconds) == pytest.approx(lane.seconds)
        for part in ("bottleneck", "balanced", "imbalance", "start", "messages", "fill"):
            assert getattr(fast, part) == pytest.approx(getattr(lane, part), abs=1e-9)
        rest = fast.sync + fast.optimizer
        assert rest == pytest.approx(lane.wait + lane.sync + lane.optimizer)


def test_a_plan_comes_in_one_call_with_its_bound_bottleneck_constraint_and_rejected_ones():
    cluster = parse_cluster("nodes: [2x H800, 4x H20]\nnetwork: 50 GB/s")
    found = make_plan(MODEL, cluster, WORK, options=SearchOptions(mbs=(1, 2)))
    assert 0 < found.bound_seconds <= found.seconds
    assert found.gap == pytest.approx(found.seconds / found.bound_seconds - 1)
    busiest = max(found.summary.stages, key=lambda stage: stage.busy)
    assert found.bottleneck == busiest
    assert busiest_stage(found.planned.strategy, cluster, found.costs) == (
        busiest.lane,
        busiest.stage,
    )
    why = find_why(found.summary, found.costs, found.result.bound.parts)
    assert (found.constraint, found.summary.why["costs"]) == (why.constraint, why.costs)
    assert any(
        f"What binds: {found.constraint}. Costs of the step: {found.constraint} " in r
        and f" The bottleneck is lane {busiest.lane} stage" in r
        for r in found.reasons
    )
    assert len(found.alternatives) >= 2
    assert all(
        each["seconds"] >= found.seconds and "slower" in each["reason"]
        for each in found.alternatives
    )
    again = read_planned(emit(found.planned, predicted=found.summary.why))
    assert again == found.planned
