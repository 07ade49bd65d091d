"""The README's programs print what it says they print."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hdtensor import cli


ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Programs that are followed by what they print.
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL
)


def test_the_first_program_runs_without_processes(capsys):
    program, printed = PROGRAMS[0]
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_second_program_runs_under_torchrun(tmp_path):
    program, printed = PROGRAMS[1]
    (tmp_path / "first.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "first.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == printed.splitlines()


def test_the_command_line_explains(capsys):
    (command,) = re.findall(r"`python -m hdtensor (explain .*?)`", README)
    assert cli.main(shlex.split(command)) == 0
    assert "messages, 16 elements sent by all ranks together" in capsys.readouterr().out


def test_every_file_that_it_names_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    code = re.findall(r"`((?:hdtensor|examples|docs)/[\w/]+\.\w+)`", README)
    missing = [name for name in links + code if not (ROOT / name).exists()]
    assert len(links) > 5
    assert missing == []
