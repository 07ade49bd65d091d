"""A plan for the ranks that are left, numbered as a restart numbers them."""

import json

import pytest

from hdtensor import AnnotationPlan, cli
from hdtensor.errors import PlannerError
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.emit import Planned, read_planned
from hdtensor.planner.models import find_model
from hdtensor.planner.renumber import renumber, smaller
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import Workload


PLAN = ["plan", "--model", "llama-7b", "--cluster", "2x 4x H800 + 2x 4x H20", "--batch", "16", "--context", "1024"]  # fmt: skip


def test_nodes_lose_devices_and_links_stay():
    cluster = cluster_of_text("2x 4x H800 + 2x 4x H20")
    left = smaller(cluster, [0, 1, 2, 3, 6, 13])
    assert [node.num_devices for node in left.nodes] == [3, 4, 3]
    assert [node.device.name for node in left.nodes] == ["H800", "H20", "H20"]
    old = [rank for rank in range(16) if rank not in (0, 1, 2, 3, 6, 13)]
    for a in range(10):
        for b in range(10):
            assert left.link(a, b) == cluster.link(old[a], old[b])
    with pytest.raises(PlannerError, match="one node or more"):
        smaller(cluster, range(16))


def test_a_plan_on_lost_ranks_or_on_all_is_refused():
    lane = LaneChoice((StageChoice((4, 5), 32, 2),), 16, 1)
    cluster = cluster_of_text("2x 4x H800")
    planned = Planned(
        Strategy((lane,)), find_model("llama-7b"), cluster, Workload(batch=16, context=8)
    )
    assert renumber(planned, [0, 3, 7]).strategy.lanes[0].stages[0].ranks == (2, 3)
    with pytest.raises(PlannerError, match="renumber: the plan uses ranks 5, which are lost"):
        renumber(planned, [5])
    with pytest.raises(PlannerError, match=r"renumber: all ranks .* \(without\)"):
        renumber(planned, [])


def run(capsys, *arguments):
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_restart_plan_is_for_as_many_processes_as_are_left(tmp_path, capsys):
    before, kept, new = (str(tmp_path / name) for name in ("a.json", "b.json", "c.json"))
    assert run(capsys, *PLAN, "-o", before)[0] == 0
    lost = ["plan", "--replan", before, "--without", "0-3", "--json"]
    code, out, err = run(capsys, *lost, "-o", kept)
    assert (code, err) == (0, "")
    code, again, err = run(capsys, *lost, "--renumber", "-o", new)
    assert (code, err) == (0, "")
    assert json.loads(again)["step_seconds"] == pytest.approx(json.loads(out)["step_seconds"])
    AnnotationPlan.load(new).check(world_size=12)
    old, now = (read_planned(AnnotationPlan.load(path)) for path in (kept, new))
    assert now.cluster.num_ranks == 12
    assert old.cluster.num_ranks == 16
    ranks = [[s.ranks for s in lane.stages] for lane in now.strategy.lanes]
    assert ranks == [
        [tuple(r - 4 for r in s.ranks) for s in lane.stages] for lane in old.strategy.lanes
    ]
    code, _, err = run(capsys, *PLAN, "--renumber")
    assert code == 2
    assert "--renumber: all ranks of the cluster are there" in err
    code, out, err = run(capsys, *PLAN, "--without", "2", "--renumber", "--uniform")
    assert (code, err) == (0, "")
    assert "best uniform plan" in out
