"""``examples/launch.py`` when something goes wrong on a rank: the run ends, and says why."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
PROGRAM = f"""
import os, signal, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import torch, torch.distributed as dist
import launch

def job(kind):
    rank = dist.get_rank()
    os.write(1, b"pid %d\\n" % os.getpid())  # in one piece: four ranks write
    if rank == 2:
        match kind:
            case "raise": raise ValueError("one line")
            case "kill": os.kill(os.getpid(), signal.SIGKILL)
            case "exit": sys.exit(7)
            case "hang": time.sleep(1000)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads()

expected = (ValueError,) if sys.argv[2] == "expected" else ()
try:
    print(launch.run(job, sys.argv[1], num_ranks=4, time_limit=float(sys.argv[3]), expected=expected))
except launch.RanksFailedError as error:
    print("FAILED", error)
except ValueError as error:
    print("EXPECTED", error)
"""


def start(kind, expected="none", time_limit=60):
    around = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, expected, str(time_limit)],
        env={name: value for name, value in os.environ.items() if name not in around},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(process):
    """Return what the program printed after its ranks' pids, and the pids."""
    output, errors = process.communicate(timeout=100)
    pids = [int(pid) for pid in re.findall(r"^pid (\d+)\n", output, re.MULTILINE)]
    return re.sub(r"^pid \d+\n", "", output, flags=re.MULTILINE), errors, pids


def alive(pids):
    """Return those that still run; a parent that ended has reaped its ranks."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_rank_0_answers_and_every_rank_has_one_thread():
    output, errors, pids = outcome(start("fine"))
    assert (output, errors) == ("(6, 1)\n", "")
    assert len(pids) == 4
    assert alive(pids) == []


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("raise", r"FAILED rank 2 raised:\nTraceback [^\x00]*ValueError: one line\n"),
        ("kill", r"FAILED rank 2 was ended by signal SIGKILL\.\n"),
        ("exit", r"FAILED rank 2 ended with exit status 7"),
    ],
)
def test_one_failing_rank_ends_all_and_is_named(kind, cause):
    output, _, pids = outcome(start(kind))
    assert re.match(cause, output)
    assert alive(pids) == []


def test_an_expected_error_comes_back_as_it_was():
    output, errors, pids = outcome(start("raise", "expected"))
    assert (output, errors) == ("EXPECTED one line\n", "")
    assert alive(pids) == []


def test_a_hanging_rank_shows_its_stack_and_the_run_ends():
    output, errors, pids = outcome(start("hang", time_limit=8))
    assert re.match("FAILED rank . ended with exit status 1", output)
    assert "Timeout (0:00:08)!" in errors
    assert " in job\n" in errors
    assert alive(pids) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_ranks_too(number):
    process = start("hang")
    pids = [int(process.stdout.readline().split()[1]) for _ in range(4)]
    # Ctrl-C reaches every process of the terminal's group, other signals the parent alone.
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.communicate(timeout=60)
    assert alive(pids) == []
    assert process.returncode not in (0, None)
