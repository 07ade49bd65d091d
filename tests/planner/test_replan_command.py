"""``hdtensor plan --replan``: a plan that is only known by its file, after ranks were lost and came back."""

import json

import pytest

from hdtensor import AnnotationPlan
from hdtensor.errors import PlannerError
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.emit import read_planned
from hdtensor.planner.models import find_model
from hdtensor.planner.replan import replan
from hdtensor.planner.resume import kept_lanes, options_for, replan_strategy, resume
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.score import Scorer
from hdtensor.planner.search import search
from hdtensor.planner.space import SearchOptions, make_space
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import Workload
from tests.planner.test_commands import run


ARGUMENTS = ["--model", "llama-7b", "--cluster", "8x H800 + 8x H20", "--batch", "32", "--context", "2048",
             "--min-lanes", "3"]  # fmt: skip


@pytest.fixture(scope="module")
def found():
    model, work = find_model("llama-7b"), Workload(batch=32, context=2048)
    costs = RooflineCosts(model=model, workload=work)
    cluster = cluster_of_text("32x H20")
    return search(make_space(cluster, costs, work, 32, SearchOptions(min_lanes=3)))


def ranks_of(strategy):
    return {rank for lane in strategy.lanes for stage in lane.stages for rank in stage.ranks}


def test_a_file_is_replanned_as_well_as_the_search_that_it_came_from(found):
    for lost in ({0}, {31}, {3, 9}):
        left = set(range(32)) - lost
        again = replan_strategy(found.space, found.strategy, left)
        assert not ranks_of(again.strategy) & lost
        assert again.seconds == Scorer(found.space).score(again.strategy).seconds
        assert again.seconds <= replan(found, left).seconds * 1.03


def test_lanes_that_lost_nothing_stay(found):
    """Where stages are whole nodes, nothing better can be made of the node that lost a rank."""
    old = found.space
    options = SearchOptions(tp_degrees=(8,), max_stages=1, min_lanes=2)
    before = search(make_space(old.cluster, old.costs, old.workload, old.num_layers, options))
    once = replan_strategy(before.space, before.strategy, set(range(1, 32)))
    same = kept_lanes(before.strategy, once.strategy)
    assert len(same) == len(before.strategy.lanes) - 1 == 3
    assert all(
        once.strategy.lanes[n].stages in [x.stages for x in before.strategy.lanes] for n in same
    )


def test_a_resumed_search_knows_the_step(found):
    result = resume(found.space, found.strategy)
    assert result.seconds == pytest.approx(found.seconds, rel=1e-12)
    assert result.bound.seconds == pytest.approx(found.bound.work)


def test_what_a_file_has_is_allowed_and_what_no_search_finds_is_refused(found):
    stages = (StageChoice(tuple(range(4, 12)), 16, 8), StageChoice((0,), 16, 1))
    odd = Strategy((LaneChoice(stages, 2, 16),))
    options = options_for(odd, SearchOptions(tp_degrees=(1,), max_stages=1))
    assert options.tp_degrees == (1, 8)
    assert options.mbs == (1, 2, 4, 8, 16)
    assert options.max_stages == 2
    with pytest.raises(
        PlannerError, match=r"^lanes\[0\].stages\[0\]: 8 ranks with tp 8 that leave"
    ):
        resume(found.space, odd)


def test_ranks_are_lost_and_come_back_on_the_command_line(tmp_path, capsys):
    first, second, third = (str(tmp_path / f"{name}.json") for name in "abc")
    assert run(capsys, "plan", *ARGUMENTS, "-o", first)[0] == 0
    code, out, err = run(capsys, "plan", "--replan", first, "--without", "7", "-o", second)
    assert (code, err) == (0, "")
    assert "\nre-planned in " in out
    assert "without ranks 7: " in out
    assert (
        "\nthe running job cannot switch to this plan without a checkpoint: only lost ranks had"
        in out
    )
    code, out, _ = run(capsys, "plan", "--replan", second, "--without", "8", "-o", third, "--json")
    value = json.loads(out)
    assert code == 0
    assert value["replan"]["lost"] == [7, 8]
    before, after = (read_planned(AnnotationPlan.load(path)).strategy for path in (second, third))
    assert not {7, 8} & ranks_of(after)
    assert value["replan"]["lanes_kept"] == len(kept_lanes(before, after))
    assert value["why"]["bound_seconds"] <= value["step_seconds"]
    # The file says what was lost, and what it is for; another plan of it has all ranks again.
    code, out, _ = run(capsys, "plan", "--replan", third, "--back", "7-8", "--json")
    back = json.loads(out)
    assert back["replan"]["lost"] == []
    assert back["step_seconds"] <= value["step_seconds"]
    for arguments, message in (
        (["--replan", third], "without: the plan already does without ranks 7,8"),
        (["--replan", third, "--without", "16"], "without: the cluster has ranks 0 to 15"),
        (["--replan", third, "--without", "0-15"], "without: the cluster has ranks 0 to 15"),
        (["--replan", third, "--without", "1", "--batch", "3"], "batch: not allowed with --replan"),
        (["--replan", third, "--without", "1", "--uniform"], "uniform: not allowed with --replan"),
        (["--back", "1", *ARGUMENTS], "argument --back: needs --replan"),
    ):
        code, out, err = run(capsys, "plan", *arguments)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
