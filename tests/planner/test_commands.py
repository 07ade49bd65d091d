"""The planner's commands, as a user types them."""

import io
import json
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from hdtensor import AnnotationPlan, cli
from hdtensor.pipeline import Timeline
from hdtensor.planner import commands
from hdtensor.planner.emit import read_planned
from hdtensor.planner.library import DEVICES
from hdtensor.planner.planning import explained
from hdtensor.planner.profiles import Profile
from hdtensor.planner.progress import Interrupt, ProgressBar
from tests.paper.test_plans_json import DATA


SMALL = [
    "--model",
    "llama-7b",
    "--cluster",
    "4x H800 + 4x H20",
    "--batch",
    "16",
    "--context",
    "2048",
]
TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def run(capsys, *arguments):
    """Return (exit code, stdout, stderr)."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    code, out, err = run(capsys, "plan", *SMALL, "-o", str(path))
    assert (code, err) == (0, "")
    assert "lower bound" in out
    return path


def test_what_no_profile_measured_is_told(tmp_path, capsys):
    model, cluster, profile = (str(tmp_path / n) for n in ("config.json", "cluster.yaml", "p.json"))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "cluster.yaml").write_text(
        "devices:\n  fast: {like: CPU}\n  slow: {like: CPU, speed: 0.4}\nnodes: [2x fast, 3x slow]\n"
    )
    size = ["--context", "16", "--precision", "float32"]
    measure = ["profile", "--model", model, "-o", profile, "--mbs", "1", "--ranks", "1", *size]
    assert run(capsys, *measure, "--tp", "1", "--device", "fast")[0] == 0
    found = Profile.load(profile)
    assert found.device == "fast"
    # So fast that every plan uses it, whatever this machine was busy with.
    units = (unit._replace(forward=1e-6, backward=1e-6, update=1e-6) for unit in found.units)
    replace(found, units=tuple(units)).save(profile)
    plan = ["plan", "--model", model, "--cluster", cluster, "--batch", "16", *size]
    assert run(capsys, *plan)[2] == ""  # all of it by datasheets, as was asked for
    given = [*plan, "--profile", profile, "--mbs", "2", "--tp", "1"]
    code, _, err = run(capsys, *given)
    assert code == 0
    assert err == (
        "hdtensor plan: warning: not measured: slow (no profile; its seconds are its datasheet's), "
        "fast at tp 1 with micro-batches of 32 tokens (up to 16 were)\n"
    )
    code, _, err = run(capsys, *measure, "--tp", "1", "--device", "slow")
    assert code == 2
    assert "is of fast, not of slow" in err
    (tmp_path / "cluster.yaml").write_text("4x CPU\n")
    code, _, err = run(capsys, *given)
    assert code == 2
    assert "measured by `hdtensor profile --device NAME`" in err


def test_a_tight_bound_is_told(capsys):
    usual = json.loads(run(capsys, "plan", *SMALL, "--json")[1])
    code, out, err = run(capsys, "plan", *SMALL, "--json", "--tight-bound")
    assert (code, err) == (0, "")
    tight = json.loads(out)
    assert tight["why"]["bound_seconds"] >= usual["why"]["bound_seconds"]
    assert tight["why"]["gap"] <= usual["why"]["gap"]


def test_a_plan_can_be_explained_simulated_and_run_dry_from_its_file_alone(plan, capsys):
    code, explained, err = run(capsys, "explain", str(plan))
    assert (code, err) == (0, "")
    assert "gap" in explained
    assert "rejected" in explained
    code, simulated, _ = run(capsys, "simulate", str(plan))
    assert simulated == explained
    code, out, err = run(capsys, "dry-run", str(plan))
    assert (code, err) == (0, "")
    assert "llama" in out.lower() or "lane 0" in out


def test_json_says_what_the_text_says(plan, capsys, tmp_path):
    code, out, _ = run(capsys, "explain", str(plan), "--json")
    value = json.loads(out)
    assert code == 0
    assert value["fits"] is True
    assert value["step_seconds"] >= value["why"]["bound_seconds"]
    assert value["step_seconds"] <= value["why"]["uniform_seconds"]
    planned = read_planned(AnnotationPlan.load(plan))
    used = sorted(rank for stage in value["stages"] for rank in stage["ranks"])
    assert sorted(used + value["idle_ranks"]) == list(range(planned.cluster.num_ranks))
    for stage in value["stages"]:
        parts = ("busy", "waiting", "sync", "optimizer", "gather")
        assert sum(stage[part] for part in parts) <= value["step_seconds"] * (1 + 1e-9)
        assert all(stage[part] >= 0 for part in parts)
    ends = [sum(stage[part] for part in parts) for stage in value["stages"]]
    assert max(ends) == pytest.approx(value["step_seconds"])  # some stage ends last
    code, out, _ = run(capsys, "plan", *SMALL, "--json", "--uniform")
    again = json.loads(out)
    assert again["step_seconds"] == value["step_seconds"]
    assert again["uniform"]["step_seconds"] == value["why"]["uniform_seconds"]
    assert AnnotationPlan.from_dict(again["plan"]) == AnnotationPlan.load(plan)


def test_the_trace_and_the_page_are_written(plan, capsys, tmp_path):
    trace, page = tmp_path / "t.json", tmp_path / "r.html"
    code, _, err = run(capsys, "simulate", str(plan), "--trace", str(trace), "--html", str(page))
    assert (code, err) == (0, "")
    timeline = Timeline.from_trace(json.loads(trace.read_text()))
    value = json.loads(run(capsys, "simulate", str(plan), "--json")[1])
    assert timeline.seconds == pytest.approx(value["step_seconds"])
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, None),
        ({"max_position_embeddings": 2047}, 2047),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1024),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4}}, None),
        ({"max_position_embeddings": 1000, "rope_parameters": {"factor": 40, "original_max_position_embeddings": 25}}, 1000),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": None}}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
    ],
)  # fmt: skip
def test_a_context_beyond_the_models_positions_is_warned_of(more, most, capsys, tmp_path):
    config, path = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps({**TINY, **more}))
    code, _, err = run(capsys, "plan", "--model", str(config), "--cluster", "1x H20", "--batch", "1", "--context",
                       "2048", "-o", str(path))  # fmt: skip
    assert code == 0
    words = f"warning: context: 2048 tokens are more than the {most} positions of {tmp_path.name} (max_position_embeddings); "
    assert (words in err) == (most is not None)
    assert err.count("\n") == (most is not None)
    assert run(capsys, "explain", str(path))[2] == err.replace(
        "hdtensor plan:", "hdtensor explain:"
    )


def test_uniform_shows_the_best_uniform_plan(capsys):
    code, out, _ = run(capsys, "plan", *SMALL, "--uniform")
    assert code == 0
    assert "\nbest uniform plan: llama-7B on 4x H800" in out


def test_lost_ranks_are_not_used(capsys):
    code, out, _ = run(capsys, "plan", *SMALL, "--without", "0,5-6", "--json")
    assert code == 0
    value = json.loads(out)
    assert {0, 5, 6} <= set(value["idle_ranks"])


@pytest.mark.paper("Tables 9, 11, 12")
def test_plans_of_the_paper_are_explained(tmp_path, capsys):
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(DATA))
    for label in ("32B, 16 H800, 32 H20", "C2", "C6", "70B, 16 H800, 24 H20"):
        code, out, err = run(capsys, "explain", str(path), "--label", label)
        assert (code, err) == (0, "")
        assert "lower bound" not in out  # nobody searched


def test_an_edited_plan_is_not_said_to_be_near_a_bound_of_another(plan, capsys):
    value = json.loads(plan.read_text())
    value["pipelines"][0]["microbatches"] += 1
    plan.write_text(json.dumps(value))
    code, out, _ = run(capsys, "explain", str(plan))
    assert code == 0
    assert "lower bound" not in out
    code, out, _ = run(capsys, "explain", str(plan), "--cluster", "8x H20")
    assert code == 0
    assert "on 8x H20" in out


WRONG = [
    (["plan", *SMALL, "--model", "llama-8b"], "model: 'llama-8b' is unknown"),
    (["plan", *SMALL, "--cluster", "8x H21"], "cluster: 'H21' is unknown"),
    (["plan", *SMALL, "--cluster", "8x V100"], "precision: V100-16 has no rate for bfloat16"),
    (["plan", *SMALL, "--cluster", "nowhere.yaml"], "cluster: there is no file 'nowhere.yaml'"),
    (["plan", *SMALL, "--batch", "0"], "argument --batch: '0' is not a positive number"),
    (["plan", *SMALL, "--optimizer", "lion"], "optimizer: must be one of adamw"),
    (["plan", *SMALL, "--without", "0-7"], "without: the cluster has ranks 0 to 7, and some must be left"),
    (["plan", *SMALL, "--without", "9"], "without: the cluster has ranks 0 to 7, and some must be left; got 9"),
    (["plan", *SMALL, "--batch", "7", "--mbs", "2,4"], "mbs: 7 samples cannot be dealt"),
    (["plan", *SMALL, "-o", "no/such/plan.json"], "output: there is no folder 'no/such'"),
    (["plan", *SMALL, "--html", "."], "html: '.' is a folder"),
    (["plan", *SMALL, "--without", "3-1"], "argument --without: '3-1' is no list of ranks"),
    (["plan", *SMALL, "--seconds", "nan"], "argument --seconds: 'nan' is not a positive number of seconds"),
    (["plan", *SMALL, "--tp", "3"], "error: --tp: 3 is no power of two"),
    (["plan", *SMALL, "--model", "llama-70b", "--cluster", "1x RTX-3090"], "memory: no strategy fits"),
    (["plan", *SMALL, "-o", "/dev/null/plan.json"], "/dev/null/plan.json"),
    (["plan", "--batch", "8"], "the following arguments are required: --model"),
    (["plan", *SMALL, "--model", "llama-70b", "--cluster", "1x RTX-3090", "--zero", "0", "--schedule", "gpipe", "--precision",
      "fp32", "--min-lanes", "1"], "all devices have 25.8 GB. Take more devices or devices with more memory."),
    (["plan", *SMALL, "--schedule", "gpipe", "--precision", "fp32", "--batch", "4096", "--zero", "0"],
     "of 4096 samples; buffers take 1.21 GB of each device. Take more devices, a shorter context, --schedule 1F1B, "
     "--recompute full, a smaller batch, --precision bfloat16 or --zero 1."),
    (["plan", *SMALL, "--tp", "16"], "error: --tp: a stage stays in its node, and the largest node has 4 devices, got TP 16. "
     "Allow up to 4; lanes go over several nodes by stages."),
    (["plan", *SMALL, "--cluster", "2x 8x A100-80, 3x 8x RTX-4090"], "error: --cluster: groups of devices are joined by +, "
     "not by a comma: write '2x 8x A100-80 + 3x 8x RTX-4090'."),
    (["plan", *SMALL, "--min-lanes", "9"], "error: --min-lanes: 8 devices and 16 samples make at most 8 lanes, got 9"),
    (["plan", *SMALL, "--cluster", "8x V100"], "error: --precision: V100-16 has no rate"),
    (["plan", *SMALL, "--batch", "10000000"], "batch: must be"),
    (["explain", "nowhere.json"], "cannot read the plan 'nowhere.json'"),
    (["explain", "nowhere.json", "--src", "R / 0:R"], "argument --src: not allowed with PLAN"),
    (["explain", "--model", "llama-7b"], "argument --model: needs PLAN, a file"),
    (["explain"], "the following arguments are required: --src, --dst, --shape; or PLAN, a file"),
    (["simulate", __file__], "the plan is not JSON"),
    (["devices", "H21"], "device: 'H21' is unknown"),
    (["profile", "--model", "llama-7b", "-o", "p", "--tp", "3,5"], "tp: none of 3, 5 divides"),
    (["profile", "--model", "llama-7b", "-o", "p", "--precision", "int4"], "precision: must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[-50:])
def test_whatever_is_wrong_is_one_line_and_code_2(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("hdtensor")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_the_best_plan_so_far(capsys, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    calls = []

    class Pressed(ProgressBar):
        def update(self, done, total, text):
            calls.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(commands, "ProgressBar", Pressed)
    code, out, err = run(capsys, "plan", *SMALL, "-o", str(path), "--json")
    assert code == 130
    assert err == "hdtensor plan: interrupted; this is the best plan so far\n"
    assert len(calls) == 1
    value = json.loads(out)
    assert value["why"]["is_complete"] is False
    assert read_planned(AnnotationPlan.load(path)).workload.batch == 16
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_the_plan_is_explained_does_not_lose_it(capsys, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"

    def pressed(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return explained(*arguments)

    monkeypatch.setattr(commands, "explained", pressed)
    code, _, err = run(capsys, "plan", *SMALL, "-o", str(path))
    assert (code, err) == (130, "hdtensor plan: interrupted; this is the best plan so far\n")
    assert read_planned(AnnotationPlan.load(path)).workload.batch == 16


def test_a_second_ctrl_c_ends_at_once():
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_profile_that_is_interrupted_is_code_130(capsys, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "profile", interrupted)
    code, _, err = run(capsys, "profile", "--model", "llama-7b", "-o", str(tmp_path / "p.json"))
    assert (code, err) == (130, "hdtensor profile: interrupted\n")


def test_a_bar_is_shown_on_a_terminal_after_a_second():
    now, screen = [0.0], io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with ProgressBar("working", lambda: now[0], console) as bar:
        bar.update(1, 10, "early")
        assert not bar.is_shown
        now[0] = 1.5
        bar.update(2, 10, "late")
        assert bar.is_shown
    assert "early" not in screen.getvalue()
    assert all(text in screen.getvalue() for text in ("working", "20%", "late"))


def test_a_file_gets_no_bar():
    now, file = [0.0], io.StringIO()
    with ProgressBar("working", lambda: now[0], Console(file=file)) as bar:
        now[0] = 9.0
        bar.update(2, 10, "late")
        assert not bar.is_shown
    assert file.getvalue() == ""


@pytest.mark.slow
def test_profile_measures_this_machine_and_plans_use_it(capsys, tmp_path):
    config, path = tmp_path / "config.json", tmp_path / "p.json"
    config.write_text(json.dumps(TINY))
    arguments = ["profile", "--model", str(config), "-o", str(path), "--tp", "1,2", "--mbs", "1,2",
                 "--context", "8,16", "--precision", "float32", "--sizes", "1024,65536"]  # fmt: skip
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert out == f"CPU: 32 measurements of units and 8 of transfers in {path}\n"
    found = Profile.load(path)
    assert {time.kind for time in found.transfers} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "send",
    }
    fast = ["plan", "--model", str(config), "--cluster", "4x CPU", "--batch", "8", "--context", "16",
            "--precision", "float32", "--json"]  # fmt: skip
    by_datasheet = json.loads(run(capsys, *fast)[1])["step_seconds"]
    by_profile = json.loads(run(capsys, *fast, "--profile", str(path))[1])["step_seconds"]
    assert by_profile != by_datasheet
    code, _, err = run(capsys, *fast, "--profile", str(path), "--profile", str(path))
    assert (code, "two are of CPU" in err) == (2, True)


def test_devices_are_listed_with_their_sources(capsys):
    code, out, _ = run(capsys, "devices")
    assert code == 0
    assert all(f"\n{name} " in out and device.source in out for name, device in DEVICES.items())
    code, out, _ = run(capsys, "devices", "h20", "A100", "--json")
    assert code == 0
    assert list(json.loads(out)) == ["H20", "A100-40"]


@pytest.mark.parametrize("command", ["explain", "simulate", "dry-run"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (TINY, "it is the configuration of a model, which goes to --model"),
        ({"cluster": "8x H20"}, "it is the description of a cluster, which goes to --cluster"),
        ({"units": []}, "it is a profile, which goes to --profile"),
        ({"a": 1}, "it has none of pipelines, uniform, tensors or plans"),
    ],
)
def test_a_file_of_another_kind_is_said_to_be_no_plan(command, value, words, capsys, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(value))
    code, out, err = run(capsys, command, str(path))
    assert (code, out) == (2, "")
    assert err == (
        f"hdtensor {command}: error: plan: {str(path)!r} is no plan: {words}. Give a plan as `hdtensor plan -o "
        f"plan.json` writes it.\n"
    )
