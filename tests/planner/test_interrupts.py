"""Ctrl-C at any moment of the real command: one line and exit code 130, whatever is being imported or done."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hdtensor._interrupts import in_order, is_command
from tests.planner.test_commands import TINY


MODULE = ["-m", "hdtensor"]
SCRIPT = [str(Path(sys.executable).with_name("hdtensor"))]


def press_at(words, moment, command):
    """Return (exit code, stdout, stderr without the lines of imports) of a command interrupted once a module is imported."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *words, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if line.rsplit("|", 1)[-1].strip() == moment:
            process.send_signal(signal.SIGINT)
            break
    else:
        raise AssertionError(f"{moment} was never imported")
    out, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines() if not line.startswith("import time:")]
    return process.returncode, out, lines


@pytest.mark.slow
@pytest.mark.parametrize("words", [MODULE, SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize(
    "moment",
    [
        "hdtensor._interrupts",
        "torch._C",
        "torch.nn",
        "hdtensor.errors",
        "hdtensor.planner.commands",
    ],
)
def test_ctrl_c_during_imports_is_a_line(words, moment):
    code, out, lines = press_at(words, moment, ["devices"])
    assert code in (130, 0)
    if code == 130:
        assert (out, lines) == ("", ["hdtensor: interrupted"])
    else:  # the last module came too late: all was printed, or printing was cut short
        assert moment == "hdtensor.planner.commands"
        assert lines == []


def _is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_that_measure(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    command = ["profile", "--model", str(tmp_path / "config.json"), "-o", str(tmp_path / "p.json"), "--tp", "1",
               "--context", "8", "--precision", "float32"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *MODULE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:  # two ranks, or one and a tracker of resources
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "hdtensor profile: interrupted\n")
    end = time.monotonic() + 20
    while _is_alive(process.pid) and time.monotonic() < end:
        time.sleep(0.05)  # multiprocessing's own process ends a little later
    assert not _is_alive(process.pid)


_STARTS_A_PROCESS = """
import multiprocessing, signal
from hdtensor._interrupts import withheld

def show():
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    with withheld():
        process = multiprocessing.get_context("spawn").Process(target=show)
        process.start()
    process.join()
    show()
"""


@pytest.mark.slow
def test_ctrl_c_is_withheld_from_the_first_process_too(tmp_path):
    (tmp_path / "program.py").write_text(_STARTS_A_PROCESS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")


def test_a_program_that_imports_the_package_keeps_its_ctrl_c(monkeypatch):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for words, name, expected in (
        (["python", "-m", "hdtensor", "plan"], "-m", True),
        (["python", "/usr/bin/hdtensor", "plan"], "/usr/bin/hdtensor", True),
        (["python", "train.py", "hdtensor"], "train.py", False),
        (["python", "-m", "pytest", "hdtensor"], "-m", False),
    ):
        monkeypatch.setattr(sys, "orig_argv", words)
        monkeypatch.setattr(sys, "argv", [name, *words[2:]])
        assert is_command() is expected
    with in_order():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
