"""The main job, run as a user runs it, but with a few tiny steps."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers

from examples import report
from hdtensor import AnnotationPlan


ROOT = Path(__file__).resolve().parent.parent.parent
PLANS = ROOT / "examples" / "plans"
SCRIPT = "examples/train_llama.py"
TINY = ["--steps", "6", "--batch", "8", "--context", "16"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]

pytestmark = pytest.mark.timeout(300)


def run(*arguments, launcher=()):
    # The variables of a launcher around the tests would make this a rank of that.
    around = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return subprocess.run(
        [sys.executable, *launcher, SCRIPT, *map(str, arguments)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in around},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def compared(output):
    """Return the table's ``(many processes, one process)`` of each step."""
    rows = re.findall(r"^ +\d+ +(\d\.\d+) +(\d\.\d+) +\d\.\de[+-]\d\d$", output, re.MULTILINE)
    return [tuple(map(float, row)) for row in rows]


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forked")
    return run(*TINY, "--output", folder / "new"), folder / "new" / "train_llama.svg"


@pytest.mark.slow
def test_four_unlike_processes_train_as_one_before_and_after_the_switch(forked):
    result, _ = forked
    assert (result.returncode, result.stderr) == (0, "")
    rows = compared(result.stdout)
    assert len(rows) == 5 + 3  # steps 1 to 5, then 4 to 6 from the state after step 3
    assert all(abs(ours - theirs) < 1e-5 * theirs for ours, theirs in rows)
    assert rows[0][0] == pytest.approx(math.log(258), abs=0.3)
    assert rows[4][0] < rows[0][0] - 0.3
    assert [ours for ours, _ in rows[3:5]] == [ours for ours, _ in rows[5:7]]
    assert result.stdout.count("equal: differences up to") == 2
    (away,) = re.findall(
        r"^one process from step 1 to step 6: .* up to (\S+)$", result.stdout, re.M
    )
    assert float(away) < 1e-5


@pytest.mark.slow
def test_the_output_says_who_holds_what_under_both_plans_and_what_moved(forked):
    output = forked[0].stdout
    before, after = output.split("after step 3 switched in place to other_pairs.json: ")
    assert re.search(r"rank 1 +4 of 8 +429,696 of 792,192, with rank 0\n", before)
    assert re.search(r"rank 3 +2 of 8 +792,192 of 792,192\n", before)
    assert re.search(r"rank 1 +2 of 8 +792,192 of 792,192\n", after)
    assert re.search(r"rank 3 +3 of 8 +429,696 of 792,192, with rank 2\n", after)
    # Cut are 7 weights in each of 4 layers; each has two tensors of AdamW's state.
    assert "moved: 28 parameters, 56 tensors of AdamW's state, 8.3 MiB between ranks" in after
    moves = re.findall(r"rank \d +sent +(\S+) bytes, received +(\S+) bytes\n", after)
    sent, received = ([int(n.replace(",", "")) for n in side] for side in zip(*moves, strict=True))
    lacking = 3 * 4 * (792_192 - 429_696)  # of ranks 0 and 1 each; ranks 2 and 3 hold all they need
    assert received == [lacking, lacking, 0, 0]
    assert sum(sent) == 2 * lacking
    assert max(sent) < 1.1 * min(sent)
    steps = re.findall(r"^step +(\d+)/6  loss \S+ +\S+ tokens/s  work by rank .* %$", output, re.M)
    assert list(map(int, steps)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_picture_shows_the_curve_the_switch_and_who_owns_what(forked):
    result, path = forked
    assert f"picture: {path}" in result.stdout
    texts = [node.text for node in ElementTree.parse(path).iter() if node.tag.endswith("text")]
    assert {"loss", "switch", "rank 3", "input_ids", "lm_head.weight"} <= set(texts)
    assert {"Who owns what, steps 1 to 3", "Who owns what, steps 4 to 6"} <= set(texts)


@pytest.mark.slow
def test_torchrun_does_the_same_with_its_own_processes_and_a_rank_joins(forked, tmp_path):
    plan = tmp_path / "my_plan.json"
    plan.write_text(AnnotationPlan.load(PLANS / "two_unlike.json").to_json())
    arguments = ["--plan", plan, "--switch-to", PLANS / "three_subgroups.json", "--switch-at", "4"]
    result = run(*TINY, "--output", tmp_path, *arguments, launcher=TORCHRUN)
    assert result.returncode == 0, result.stderr
    rows = compared(result.stdout)
    assert len(rows) == 5 + 2
    torch.testing.assert_close(rows[:5], compared(forked[0].stdout)[:5], rtol=1e-6, atol=0)
    before, after = result.stdout.split("after step 4 switched in place")
    assert re.search(r"rank 3 +outside\n", before)
    assert re.search(r"rank 3 +2 of 8 +792,192 of 792,192\n", after)
    assert re.search(r"rank 3 +sent +0 bytes, received +9,506,304 bytes\n", after)
    assert result.stdout.count("step    6/6") == 1
    assert (tmp_path / "train_llama.svg").exists()


@pytest.mark.slow
def test_check_and_switch_can_be_left_out_and_an_outside_rank_sees_the_loss(tmp_path):
    result = run(*TINY, "--no-check", "--output", tmp_path, "--plan", PLANS / "two_unlike.json")
    assert (result.returncode, result.stderr) == (0, "")
    assert compared(result.stdout) == []
    assert "switched" not in result.stdout
    steps = re.findall(r"^step +\d+/6  loss (\S+) .* work by rank (.*) %$", result.stdout, re.M)
    assert [shares.split()[3] for _, shares in steps] == ["0"] * 6
    (seen,) = re.findall(r"^rank 3 holds nothing and sees loss (\S+)$", result.stdout, re.M)
    assert f"{float(seen):.3f}" == steps[-1][0]


def stage(*ranks, layers=(0, 3)):
    return {"stages": [{"ranks": ranks, "layers": layers}]}


TWO_STAGES = {"stages": [{"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [2, 3]}]}


BAD_PLANS = {
    "layers": ({"pipelines": [stage(0, layers=(0, 2))]}, r"pipelines\[0\].stages\[0\].layers: "),
    "world": ({"pipelines": [stage(0, 7)]}, r"pipelines\[0\].stages\[0\].ranks: rank 7 beyond"),
    "heads": ({"pipelines": [stage(0, 1, 2)]}, r"pipelines\[0\].stages\[0\].tp: 3 does not divide"),
    "zero": ({"pipelines": [stage(0)], "zero": 1}, "zero: .*train_pipelines.py"),
    "stages": ({"pipelines": [TWO_STAGES]}, "stages: .*train_pipelines.py"),
}


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Return the program's ``main`` as a function of command line arguments."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    program = importlib.import_module("train_llama")

    def call(*arguments):
        words = [SCRIPT, "--output", tmp_path / "out", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        return program.main()

    return call


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_is_one_line_and_status_2(name, main, tmp_path, capsys):
    plan, message = BAD_PLANS[name]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    for option in ("--plan", "--switch-to"):
        assert main(option, path) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert re.fullmatch(f"PlanError: {message}.*\n", errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--lr", "nan"], "--lr: must be above 0 and finite"),
        (["--context", "1"], "--context: must be at least 2"),
        (["--output", ROOT / SCRIPT], "--output: cannot make"),
        (["--switch-at", "100"], "--switch-at: must be below --steps, 100"),
        (["--switch-at", "0"], "--switch-at: must be at least 1"),
        (["--switch-at", "3", "--no-switch"], "--switch-at: say to which plan, with --switch-to"),
        (["--switch-at", "3", "--plan", PLANS / "tp2.json"], "--switch-at: say to which plan"),
        (["--no-switch", "--switch-to", PLANS / "tp2.json"], "--switch-to: not allowed with"),
        (["--steps", "1"], "--steps: must be at least 2 to switch"),
    ],
)
def test_bad_options_are_refused(arguments, message, main, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(*arguments)
    assert f"error: argument {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_process_ends_with_status_2_after_a_bad_plan(tmp_path):
    result = run("--plan", tmp_path / "none.json", "--output", tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch("PlanError: cannot read the plan .*\n", result.stderr)


@pytest.mark.slow
def test_under_torchrun_a_bad_plan_is_said_once(tmp_path):
    result = run("--plan", tmp_path / "none.json", "--output", tmp_path, launcher=TORCHRUN)
    assert result.returncode != 0
    assert result.stdout == ""
    assert len(re.findall("^PlanError: cannot read the plan", result.stderr, re.MULTILINE)) == 1
    assert 'train_llama.py", line' not in result.stderr  # no stack of ours


def test_steps_after_a_switch_are_compared_with_their_own():
    losses = [1.0, 9.0, 3.0, 4.0]
    is_equal, text = report.compare(losses, [3.0, 4.0], 4, 1e-5, after=2)
    assert is_equal
    assert re.findall(r"^ +(\d+) +\d\.\d{7}", text, re.MULTILINE) == ["3", "4"]
    assert not report.compare(losses, [3.0, 4.0], 4, 1e-5)[0]


@pytest.mark.parametrize("bad", [1.1, math.nan])
def test_losses_that_differ_are_not_equal(bad):
    assert report.compare([1.0, 2.0, 9.0], [1.0, 2.0], 4, 1e-5)[0]
    is_equal, text = report.compare([1.0, bad, 9.0], [1.0, 1.0], 4, 1e-5)
    assert not is_equal
    assert f"NOT EQUAL: differences up to {abs(bad - 1):.1e}" in text


def test_work_is_by_tokens_that_count_and_parameters_held():
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan = AnnotationPlan.load(PLANS / "two_unlike.json").expand(model)
    layout = report.Layout(plan, model, (8, 4), num_ranks=4)
    labels = torch.full((8, 4), report.IGNORED)
    labels[0, :3] = 1  # ranks 0, 1: two tokens are predicted
    labels[5:, 0] = 1  # a row's first token is not
    labels[7] = 1  # rank 2: three
    assert layout.work(labels) == pytest.approx({0: 0.2, 1: 0.2, 2: 0.6, 3: 0.0})
    assert layout.held[2] == sum(p.numel() for p in model.parameters())
    assert layout.held[0] == layout.held[1] < layout.held[2]
    assert layout.held[3] == 0
