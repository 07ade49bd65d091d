"""Two unlike lanes, run as a user runs them, but with a few tiny steps."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hdtensor import AnnotationPlan
from hdtensor.pipeline import Timeline
from hdtensor.pipeline.dry_run import DryRunOptions, dry_run
from hdtensor.plan import ModelDescription
from tests.pipeline.tiny import llama


ROOT = Path(__file__).resolve().parent.parent.parent
PLAN = ROOT / "examples" / "plans" / "two_lanes.json"
SCRIPT = "examples/train_pipelines.py"
TINY = ["--steps", "5", "--context", "16"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lanes")
    around = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    done = subprocess.run(
        [sys.executable, SCRIPT, *TINY, "--output", str(folder)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in around},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done, folder


@pytest.mark.slow
def test_two_unlike_lanes_train_as_one_process(result):
    done, _ = result
    assert (done.returncode, done.stderr) == (0, "")
    table = re.findall(r"^ +\d+ +(\d\.\d{7}) +(\d\.\d{7}) +\S+$", done.stdout, re.MULTILINE)
    rows = [tuple(map(float, row)) for row in table]
    assert len(rows) == 5
    assert all(abs(ours - theirs) < 1e-5 * theirs for ours, theirs in rows)
    assert rows[4][0] < rows[0][0] - 0.3
    assert "\nequal: differences up to" in done.stdout


@pytest.mark.slow
def test_states_are_cut_over_all_ranks_that_hold_a_parameter(result):
    lines = re.findall(r"^  (?:rank \d|all) +(\S+) +(\S+) +(\S+)$", result[0].stdout, re.M)
    *ranks, together = [tuple(int(word.replace(",", "")) for word in line) for line in lines]
    assert len(ranks) == 5
    assert together == tuple(map(sum, zip(*ranks, strict=True)))
    num_parameters = 792_192
    assert together[1] == 2 * 4 * num_parameters  # once, however many copies there are
    # Each rank's part by hand: layer 0 is on ranks 0, 1 and 3, layers 1 and 2 on 0, 1 and 4, and so on.
    layer, norm = 181_760 + 256, 128
    embeddings = 258 * 128
    assert ranks[2][1] == pytest.approx(8 * (layer + norm + embeddings) / 2, rel=0.01)
    assert ranks[3][1] == pytest.approx(8 * (layer + embeddings) / 3, rel=0.01)
    for held, kept, without in ranks:
        assert without == 8 * held
        assert kept < 0.65 * without


@pytest.mark.slow
def test_the_trace_has_every_rank_and_action_of_the_last_step(result):
    done, folder = result
    path = folder / "train_pipelines.json"
    assert f"\ntrace: {path}," in done.stdout
    timeline = Timeline.from_trace(json.loads(path.read_text()))
    found = Counter((s.ranks, s.lane, s.kind) for s in timeline.spans if s.kind in "FB")
    assert found == {
        ((rank,), lane, kind): count
        for lane, ranks, count in ((0, (0, 1, 2), 5), (1, (3, 4), 3))
        for rank in ranks
        for kind in "FB"
    }
    assert timeline.peak_activations() == {(0, 0): 2, (0, 1): 1, (1, 0): 2, (1, 1): 1}


@pytest.fixture
def modules(monkeypatch):
    """Return the example's modules by name."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


BOXES = """\
lane 0: 1F1B, 5 micro-batches of 2 rows, bubble 17%
  +------------+    +---------+
  | ranks 0,1  | -> | rank 2  |
  | TP 2       |    | TP 1    |
  | layers 0-2 |    | layer 3 |
  +------------+    +---------+

lane 1: 1F1B, 3 micro-batches of 2 rows, bubble 25%
  +---------+    +------------+
  | rank 3  | -> | rank 4     |
"""


def test_the_picture_shows_stages_and_the_clock_of_all_lanes(modules):
    plan = AnnotationPlan.load(PLAN)
    run = dry_run(plan, description(), DryRunOptions(context=8))
    text = modules("lane_picture").draw_lanes(plan, run, (10, 6))
    assert text.startswith(BOXES)
    grid = [line.split() for line in text[text.index("step ") :].splitlines()]
    assert " ".join(grid[0]) == "step lane 0: 0,1 lane 0: 2 lane 1: 3 lane 1: 4"
    assert [line[1:] for line in grid[1:4]] == [
        ["0F0", ".", "0F0", "."],
        ["0F1", "1F0", "0F1", "1F0"],
        [".", "1B0", ".", "1B0"],
    ]
    assert grid[-1] == ["11", "0B4", ".", ".", "."]


def test_a_backward_in_two_parts_is_two_steps(modules):
    plan = AnnotationPlan.load(PLAN)
    run = dry_run(plan, description(), DryRunOptions(context=8, schedules=("ZB-H1", "1F1B")))
    lines = modules("lane_picture").draw_clock(run).splitlines()[1:]
    columns = list(zip(*(line.split()[1:] for line in lines), strict=True))
    places = [row for lane in run.lanes for row in lane.schedule.rows]
    for column, row in zip(columns, places, strict=True):
        assert [cell for cell in column if cell != "."] == list(map(str, row))


def description():
    return ModelDescription.from_module(llama(4))


@pytest.fixture
def main(modules, monkeypatch, tmp_path):
    """Return the program's ``main`` as a function of command line arguments."""
    program = modules("train_pipelines")

    def call(*arguments):
        words = [SCRIPT, "--output", tmp_path / "out", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        return program.main()

    return call


def without_layer_3(plan):
    plan["pipelines"][1]["stages"][1]["layers"] = [1, 2]


def beyond_the_world(plan):
    plan["pipelines"][1]["stages"][1]["ranks"] = [7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_layer_3, r"pipelines\[1\].*layer"),
        (beyond_the_world, r"pipelines\[1\]\.stages\[1\]\.ranks: rank 7 beyond"),
    ],
)
def test_a_bad_plan_is_one_line_and_status_2(change, message, main, tmp_path, capsys):
    plan = json.loads(PLAN.read_text())
    change(plan)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert main("--plan", path) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(f"PlanError: {message}.*\n", errors)


def test_a_schedule_that_is_not_known_is_one_line_and_status_2(main, capsys):
    assert main("--schedule", "2F2B") == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.match("ScheduleError: .*2F2B.*\n", errors)
