"""A strategy as a plan file and back; the plans of the paper as strategies."""

import json
from pathlib import Path

import pytest

from hdtensor import AnnotationPlan
from hdtensor.cli import main
from hdtensor.errors import PlannerError
from hdtensor.pipeline.dry_run import dry_run
from hdtensor.pipeline.plan_files import read_model
from hdtensor.plan import Pipeline, Stage, StrategyPlan, Uniform
from hdtensor.planner.cluster_files import parse_cluster
from hdtensor.planner.cluster_text import cluster_of_text
from hdtensor.planner.emit import Planned, cluster_of_plan, emit, read_planned, strategy_of_plan
from hdtensor.planner.models import find_model
from hdtensor.planner.strategy import LaneChoice, StageChoice, Strategy
from hdtensor.planner.workload import Workload
from tests.paper.test_plans_json import DATA


def two_lanes():
    fast = LaneChoice((StageChoice((0, 1), 10, 2), StageChoice((2, 3), 22, 1, 2)), 5, 2)
    slow = LaneChoice((StageChoice((4,), 32, 1),), 6, 1)
    return Planned(
        Strategy((fast, slow)),
        find_model("llama-7B"),
        cluster_of_text("4x H800 + 2x H20"),
        Workload(batch=16, context=2048, zero=0, recompute="full", precision="fp16"),
    )


def test_a_strategy_comes_back_from_its_file_with_all_that_it_is_for(tmp_path):
    planned = two_lanes()
    plan = emit(planned, label="mine", predicted={"step_seconds": 1.5})
    plan.save(tmp_path / "plan.json")
    loaded = AnnotationPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert read_planned(loaded) == planned
    value = json.loads((tmp_path / "plan.json").read_text())
    assert value["planned_for"]["predicted"] == {"step_seconds": 1.5}
    assert (value["model"], value["context"], value["cluster"]) == (
        "llama-7B",
        2048,
        {"H800": 4, "H20": 2},
    )
    assert [s["device"] for p in value["pipelines"] for s in p["stages"]] == ["H800", "H800", "H20"]
    assert plan.outside(6) == (5,)


def test_a_cluster_and_a_model_of_one_s_own_come_back(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
              "vocab_size": 96, "intermediate_size": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    lanes = (LaneChoice((StageChoice((0, 1), 3, 2), StageChoice((2,), 1, 1)), 4, 2),)
    planned = Planned(
        Strategy(lanes),
        find_model(tmp_path / "config.json"),
        parse_cluster("devices: {fast: {like: CPU, speed: 2}}\nnodes: [2x fast @ a, 3x CPU @ b]"),
        Workload(batch=8, context=32, precision="float32"),
    )
    assert read_planned(emit(planned)) == planned


def test_the_emitted_plan_is_accepted_by_the_dry_run_and_the_command_line(tmp_path, capsys):
    plan = emit(two_lanes())
    found = dry_run(plan, read_model(plan))
    assert [run.layers for run in found.lanes] == [((0, 9), (10, 31)), ((0, 31),)]
    assert [run.sizes for run in found.lanes] == [(2,) * 5, (1,) * 6]
    plan.save(tmp_path / "plan.json")
    assert main(["dry-run", str(tmp_path / "plan.json")]) == 0
    assert "llama-7B" not in capsys.readouterr().err


@pytest.mark.paper("Tables 9, 11, 12")
@pytest.mark.parametrize(
    "value", DATA["plans"][:13], ids=lambda value: f"{value['source_table']} {value['label']}"
)
def test_a_plan_of_the_paper_is_a_strategy(value):
    plan = AnnotationPlan.from_dict(value)
    planned = read_planned(plan)
    assert planned.workload.batch == 64
    assert planned.workload.context == 4096
    assert planned.workload.zero == plan.zero
    kinds = [device.name for device in planned.cluster.devices()]
    counts = {kind: sum(kinds[rank] == kind for rank in plan.ranks) for kind in set(kinds)}
    assert counts == dict(plan.about.cluster)
    again = emit(planned)
    assert [p.stages for p in again.pipelines] == [p.stages for p in plan.pipelines]
    assert again.shares == plan.shares


def test_a_uniform_plan_is_a_strategy_once_the_batch_is_known():
    plan = StrategyPlan(uniform=Uniform(dp=2, tp=4, pp=3, mbs=2), zero=1)
    cluster = cluster_of_text("24x H20")
    changes = {"context": 4096, "batch": 64}
    planned = read_planned(plan, model="llama-32B", cluster=cluster, changes=changes)
    assert [(lane.num_microbatches, lane.mbs) for lane in planned.strategy.lanes] == [(16, 2)] * 2
    assert [s.num_layers for s in planned.strategy.lanes[1].stages] == [20, 20, 20]
    with pytest.raises(PlannerError, match=r"^batch: the plan says which part"):
        read_planned(plan, model="llama-32B", cluster=cluster, changes={"context": 4096})
    with pytest.raises(PlannerError, match=r"^batch: 63 samples cannot be dealt"):
        read_planned(plan, model="llama-32B", cluster=cluster, changes={**changes, "batch": 63})
    with pytest.raises(PlannerError, match=r"^pipelines\[0\]: 33 samples are no whole number"):
        read_planned(plan, model="llama-32B", cluster=cluster, changes={**changes, "batch": 66})


def test_a_share_of_nothing_is_no_lane_and_shares_follow_the_batch():
    def lane(rank, **part):
        return Pipeline(stages=(Stage(ranks=(rank,), layers=(0, 31), device="H20"),), **part)

    plan = StrategyPlan(
        pipelines=(lane(0, share=3, mbs=2), lane(1, share=0), lane(2, share=1, microbatches=4))
    )
    strategy = strategy_of_plan(plan, 16)
    assert [(lane.num_microbatches, lane.mbs) for lane in strategy.lanes] == [(6, 2), (4, 1)]


def test_ranks_that_a_plan_leaves_out_are_like_those_of_their_node():
    stages = (
        Stage(ranks=(1, 2), layers=(0, 1), device="H800"),
        Stage(ranks=(17,), layers=(2, 3), device="H20"),
    )
    plan = StrategyPlan(pipelines=(Pipeline(stages=stages, microbatches=1, mbs=1),))
    cluster = cluster_of_plan(plan)
    assert [(node.device.name, node.num_devices) for node in cluster.nodes] == [
        ("H800", 8),
        ("H800", 8),
        ("H20", 2),
    ]


def test_what_does_not_fit_is_named():
    planned = two_lanes()
    lanes = planned.strategy.lanes

    def refused(message, **changes):
        with pytest.raises(PlannerError, match=f"^{message}"):
            emit(planned._replace(**changes))

    first = lanes[0].stages[0]

    def with_stage(**changes):
        stages = (first._replace(**changes), lanes[0].stages[1])
        return Strategy((lanes[0]._replace(stages=stages), lanes[1]))

    refused("lanes: a strategy has one lane or more", strategy=Strategy(()))
    refused(r"lanes\[0\]: holds 32 layers, but llama-13B has 40", model=find_model("llama-13B"))
    refused(
        r"batch: the lanes take 16 samples, but a step has 17",
        workload=Workload(batch=17, context=1),
    )
    refused(r"lanes\[1\].stages\[0\]: ranks 4 are beyond", cluster=cluster_of_text("4x H20"))
    refused(
        r"lanes\[0\].stages\[0\]: its ranks are of unlike kinds",
        cluster=cluster_of_text("1x H20 + 4x H800"),
    )
    refused(r"lanes\[0\].stages\[0\]: needs a layer and tp \* cp = 4", strategy=with_stage(tp=4))
    refused(r"lanes\[0\].stages\[1\]: a rank is in two", strategy=with_stage(ranks=(1, 2)))


def test_a_plan_that_says_too_little_asks_for_it():
    stage = Stage(ranks=(0,), layers=(0, 31))
    plan = StrategyPlan(pipelines=(Pipeline(stages=(stage,), microbatches=4, mbs=1),))
    with pytest.raises(PlannerError, match=r"^model: the plan does not say its model; give one of"):
        read_planned(plan)
    with pytest.raises(
        PlannerError, match=r"^cluster: pipelines\[0\].stages\[0\] does not name its device"
    ):
        read_planned(plan, model="llama-7B")
    with pytest.raises(PlannerError, match=r"^context: the plan does not say"):
        read_planned(plan, model="llama-7B", cluster=cluster_of_text("1x H20"))


@pytest.mark.parametrize(
    "purpose",
    [{"model": 7}, {"model": {"name": "x"}}, {"cluster": 7}, {"workload": [1]}, {"workload": {"lr": 1}},
     {"workload": {"batch": "many", "context": 1}}],
)  # fmt: skip
def test_a_mangled_purpose_is_our_error(purpose):
    value = emit(two_lanes()).to_dict()
    value["planned_for"] = {**value["planned_for"], **purpose}
    if "model" in purpose:
        del value["model"]
    plan = AnnotationPlan.from_dict(value)
    if purpose.get("workload") == {"batch": "many", "context": 1}:
        assert read_planned(plan).workload.batch == 16  # the plan's micro-batches say it
    else:
        with pytest.raises(PlannerError):
            read_planned(plan)


def test_the_examples_are_read_where_they_say_enough():
    folder = Path(__file__).resolve().parent.parent.parent / "examples" / "plans"
    plan = AnnotationPlan.load(folder / "two_lanes.json")
    cluster = cluster_of_text("5x CPU")
    assert isinstance(plan, StrategyPlan)
    with pytest.raises(PlannerError, match=r"^lanes\[0\]: holds 4 layers, but llama-7B has 32"):
        read_planned(plan, model="llama-7B", cluster=cluster, changes={"context": 8})
