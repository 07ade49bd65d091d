"""docs/pipelines.md says what the code does."""

import contextlib
import io
import re
from pathlib import Path

from hdtensor.pipeline import SCHEDULES
from tests.redistribute.test_cli import run


ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_shows():
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(pairs) == TEXT.count("```python") == 4
    for code, wanted in pairs:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "docs/pipelines.md", "exec"), {})
        assert out.getvalue() == wanted


def test_the_dry_run_prints_what_the_page_shows(capsys):
    (shown,) = re.findall(r"--trace step.json\n```\n\n```text\n(.*?)```", TEXT, flags=re.DOTALL)
    plans = str(ROOT / "tests" / "paper" / "data" / "plans.json")
    _, out, _ = run(capsys, "dry-run", plans, "--label", "C2", "--ranks-per-node", "8")
    position = 0
    for part in shown.split("...\n"):
        position = out.index(part, position) + len(part)
    assert position == len(out)


def test_the_tables_name_every_schedule_and_option(capsys):
    _, out, _ = run(capsys, "dry-run", "--help")
    options = set(re.findall(r"--[a-z-]+", out)) - {"--help"}
    assert options
    assert [name for name in (*options, *SCHEDULES) if f"`{name}`" not in TEXT] == []
