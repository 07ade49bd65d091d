"""Dry runs: the paper's plans beside counts by hand, other forms of plan, and the command line."""

import json

import pytest

from hdtensor.errors import PlanError, ScheduleError
from hdtensor.pipeline.dry_run import DryRunOptions, dry_run
from hdtensor.pipeline.plan_files import read_model, read_plan
from hdtensor.pipeline.report import dry_run_text
from hdtensor.plan import AnnotationPlan, StrategyPlan, Uniform
from hdtensor.redistribute.topology import Topology
from tests.paper.test_plans_json import DATA, MODELS, PIPELINED, UNIFORM, find, name
from tests.redistribute.test_cli import run


RUNNABLE = [p for p in UNIFORM if p["uniform"].get("sp", 1) == 1]
#: hidden size, MLP width, rows of k and v, vocabulary
SIZES = {"llama-32B": (6656, 17920, 6656, 50304), "llama-70B": (8192, 28672, 1024, 32000)}


def by_hand(model, num_layers, num_ranks, is_first, is_last):
    """Elements of a rank of a stage: projections are cut, norms and the vocabulary are not."""
    hidden, width, kv, vocab = SIZES[model]
    cut = 2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * width
    ends = is_first * vocab * hidden + is_last * (vocab * hidden + hidden)
    return num_layers * (cut // num_ranks + 2 * hidden) + ends


@pytest.mark.paper("Tables 9, 11, 12, 15, 16")
@pytest.mark.parametrize("document", PIPELINED, ids=name)
def test_the_papers_plans_equal_a_count_by_hand(document):
    plan = AnnotationPlan.from_dict(document)
    found = dry_run(
        plan,
        MODELS[document["model"]](),
        DryRunOptions(microbatches=6, topology=Topology.of_nodes(8, 48)),
    )
    hidden, context = SIZES[document["model"]][0], document.get("context") or 4096
    assert len(found.lanes) == len(document["pipelines"])
    for lane, pipeline in zip(found.lanes, document["pipelines"], strict=True):
        stages = pipeline["stages"]
        assert [list(layers) for layers in lane.layers] == [stage["layers"] for stage in stages]
        count = pipeline.get("microbatches") or 6
        assert lane.sizes == (pipeline.get("mbs") or 1,) * count
        for index, stage in enumerate(stages):
            first, last = stage["layers"]
            wanted = by_hand(
                document["model"],
                last - first + 1,
                len(stage["ranks"]),
                index == 0,
                index == len(stages) - 1,
            )
            assert {found.num_parameters[rank] for rank in stage["ranks"]} == {wanted}
        bubble = (len(stages) - 1) / (count + len(stages) - 1)
        number = found.lanes.index(lane)
        assert found.timeline.bubble_share(number) == pytest.approx(bubble)
        # Every rank of the receiving stage gets the whole of it, from one rank.
        wanted = [
            (edge, rank)
            for edge in [(i, i + 1) for i in range(len(stages) - 1)]
            for rank in stages[edge[1]]["ranks"]
        ]
        forward = [(m.edge, m.dst) for m in lane.messages if m.edge[0] < m.edge[1]]
        assert sorted(forward) == sorted(wanted)
        assert {m.num_bytes for m in lane.messages} <= {lane.sizes[0] * context * hidden * 2}
        assert all(
            m.link == ("nvlink" if m.src // 8 == m.dst // 8 else "ib") for m in lane.messages
        )


@pytest.mark.paper("Tables 8, 10, 13, 14")
def test_the_papers_uniform_plans():
    for document in RUNNABLE:
        degrees = document["uniform"]
        found = dry_run(AnnotationPlan.from_dict(document), MODELS[document["model"]]())
        num = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees.get("cp", 1)
        assert len(found.num_parameters) == num
        assert len(found.lanes) == degrees["dp"]
        bubble = (degrees["pp"] - 1) / (8 + degrees["pp"] - 1)
        assert found.timeline.bubble_share() == pytest.approx(bubble)


def test_context_parallel_ranks_send_their_part_of_the_sequence():
    stages = [
        {"ranks": [0, 1, 2, 3], "layers": [0, 29], "cp": 2},
        {"ranks": [4, 5], "layers": [30, 59], "cp": 2},
        {"ranks": [6], "layers": [30, 59]},
    ]
    pipelines = [{"share": 3, "microbatches": 2, "stages": stages[:2]}]
    plan = AnnotationPlan.from_dict({"pipelines": pipelines})
    (lane,) = dry_run(plan, MODELS["llama-32B"](), DryRunOptions(context=1000)).lanes
    assert (lane.sizes, str(lane.lane)) == ((2, 1), "0-3 -> 4,5")
    half = 2 * 500 * 6656 * 2
    assert [m[:2] for m in lane.messages if m.edge == (0, 1)] == [(0, 4), (2, 5)]
    assert {m.num_bytes for m in lane.messages} == {half}
    pipelines[0]["stages"] = [stages[0], stages[2]]
    (lane,) = dry_run(
        AnnotationPlan.from_dict({"pipelines": pipelines}), MODELS["llama-32B"]()
    ).lanes
    assert [m[:2] for m in lane.messages if m.edge == (0, 1)] == [(0, 6), (2, 6)]


def test_an_expanded_plan_says_the_same_but_for_micro_batches():
    plan, model = find(11, "C2"), MODELS["llama-32B"]()
    one, other = dry_run(plan, model), dry_run(plan.expand(model), model)
    assert one.num_parameters == other.num_parameters
    for a, b in zip(one.lanes, other.lanes, strict=True):
        assert (a.lane, a.layers) == (b.lane, b.layers)
        assert [m.src for m in a.messages] == [m.src for m in b.messages]
    assert [lane.sizes for lane in other.lanes] == [
        (5, 4, 4, 4, 4, 4, 4, 4),
        (4, 4, 4, 4, 4, 4, 4, 3),
    ]


def test_a_thousand_ranks():
    plan = StrategyPlan(uniform=Uniform(dp=32, tp=4, pp=8, mbs=1, microbatches=4))
    found = dry_run(plan, MODELS["llama-70B"]())
    assert len(found.num_parameters) == 1024
    assert found.timeline.bubble_share() == pytest.approx(7 / 11)
    assert len(dry_run_text(found).splitlines()) > 1024


def test_micro_batches_as_the_plan_says_them():
    def sizes(uniform=None, **fields):
        stages = [{"ranks": [0], "layers": [0, 59]}], [{"ranks": [1], "layers": [0, 59]}]
        pipelines = [{"stages": stages[0], **fields}, {"stages": stages[1], **fields}]
        document = {"uniform": uniform} if uniform else {"pipelines": pipelines}
        return dry_run(AnnotationPlan.from_dict(document), MODELS["llama-32B"]()).lanes[0].sizes

    assert sizes(share=5, microbatches=3) == (2, 2, 1)
    assert sizes(share=5, mbs=2) == (2, 2, 1)
    assert sizes(share=3) == (1, 1, 1)
    assert sizes() == (1,) * 8
    assert sizes(microbatches=3, mbs=2) == (2, 2, 2)
    assert sizes({"dp": 1, "tp": 1, "pp": 1, "mbs": 3}) == (3,) * 8
    assert sizes({"dp": 1, "tp": 1, "pp": 1}) == (1,) * 8


def test_the_command_prints_what_each_rank_does(capsys, tmp_path):
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(DATA))
    trace = tmp_path / "trace.json"
    code, out, err = run(
        capsys,
        *("dry-run", str(path), "--label", "C2", "--ranks-per-node", "8", "--trace", str(trace)),
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("dry run: 2 lanes, 31 ranks, ")
    assert "lane 1: 16-19 -> 20-23 -> 24-27 -> 28,29 -> 30" in lines
    assert "1F1B, 31 micro-batches of 1 sample, bubble 11.4%" in lines
    (last,) = (line for line in lines if line.startswith("  30 "))
    assert last.split(maxsplit=4)[1:] == [
        *("4", "56-59", "2,475,026,944", "gradients to 28, 29: 52 MiB each over nvlink")
    ]
    assert "  0       5F 26(BF) 5B  5" in lines
    assert lines[-1] == "all lanes: 108 units, bubble 11.0%"
    assert json.loads(trace.read_text())["traceEvents"]


def test_each_lane_may_have_a_schedule_of_its_own(capsys, tmp_path):
    find(11, "C2").save(tmp_path / "c2.json")
    config = {**dict(MODELS_JSON), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = run(
        capsys,
        *("dry-run", str(tmp_path / "c2.json"), "--model", str(tmp_path / "config.json")),
        *("--schedule", "ZB-H1", "--schedule", "gpipe"),
    )
    assert (code, err) == (0, "")
    assert "ZB-H1, 33 micro-batches of 1 sample, bubble 2.9%" in out
    assert "GPipe, 31 micro-batches of 1 sample, bubble 11.4%" in out
    assert "  4       31F 31B  31" in out


MODELS_JSON = {
    "num_hidden_layers": 60,
    "hidden_size": 6656,
    "intermediate_size": 17920,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "vocab_size": 50304,
}


def test_whatever_is_wrong_is_one_line(capsys, tmp_path):
    several, one, silent = (tmp_path / f"{n}.json" for n in ("several", "one", "silent"))
    several.write_text(json.dumps(DATA))
    find(11, "C2").save(one)
    StrategyPlan(uniform=Uniform(dp=1, tp=1, pp=2)).save(silent)
    for arguments, fault in [
        ([several], "label: there are several plans in"),
        ([several, "--label", "C"], "label: more than one plan fits 'C' in"),
        ([several, "--label", "C9"], "label: no plan fits 'C9' in"),
        ([several, "--label", "70B, 16 H800, 24"], None),
        ([one, "--label", "C2"], "is one plan; leave the label out"),
        ([silent], "model: the plan does not say its model; give one of llama-7B, llama-13B"),
        ([one, "--model", "bert"], "model: 'bert' is unknown; known are llama-7B, llama-13B"),
        ([one, "--model", "llama-70B"], "the plan covers 60 layers, but the model has 80"),
        ([one, "--schedule", "x"], "there is no schedule 'x'"),
        ([one, *["--schedule", "1f1b"] * 3], "3 schedules are given for 2 lanes"),
        ([one, "--topology", "nothing"], "cannot read the topology 'nothing'"),
        ([tmp_path / "none.json"], "cannot read the plan"),
    ]:
        code, out, err = run(capsys, "dry-run", *map(str, arguments))
        assert (code, out == "") == ((0, False) if fault is None else (2, True)), arguments
        assert err.count("\n") == (fault is not None)
        assert (fault or "") in err


def test_a_plan_without_hidden_size_or_layers(tmp_path):
    plan = find(11, "C2")
    with pytest.raises(PlanError, match="says no hidden_size"):
        dry_run(plan, MODELS["llama-32B"]().replace(hidden_size=None))
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "num_hidden_layers": 2}')
    with pytest.raises(PlanError, match="hidden_size: must be an integer, got None"):
        read_model(plan, str(tmp_path / "config.json"))
    with pytest.raises(
        ScheduleError, match="4 schedules are given for 2 lanes; give one for each, or one for all"
    ):
        dry_run(plan, MODELS["llama-32B"](), DryRunOptions(schedules=("1F1B",) * 4))
    with pytest.raises(PlanError, match="cannot read the plan"):
        read_plan(tmp_path / "no.json")
