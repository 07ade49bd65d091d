"""``hdtensor profile`` under a launcher: the processes find one another and measure together."""

import json
import os
import subprocess
import sys

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.profile_world import agree, launched_world
from hdtensor.planner.profiles import Profile
from tests.planner.test_commands import TINY
from tests.planner.test_profile import LLAMA
from tests.support.world import run_world


FIELDS = ["--tp", "1", "--mbs", "1", "--context", "8", "--sizes", "64,4096", "--precision", "fp32"]


PROFILE = Profile(device="CPU", model=LLAMA, precision="float32")


def launch(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]  # fmt: skip
    return subprocess.run(
        [*command, "-m", "hdtensor", "profile", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.dist(2)
def test_two_processes_of_torchrun_profile_together(tmp_path):
    config, path = tmp_path / "config.json", tmp_path / "profile.json"
    config.write_text(json.dumps(TINY))
    # The number of ranks is the launcher's; a message is between two whatever it is.
    done = launch("--model", str(config), *FIELDS, "--ranks", "2,3", "-o", str(path))
    assert done.returncode == 0, done.stderr
    found = Profile.load(path)
    assert done.stdout.count("measurements of units") == 1  # the first rank speaks for both
    assert "left out" not in done.stdout
    assert {unit.unit for unit in found.units} == {"attention", "mlp", "embedding", "head"}
    kinds = [time.kind for time in found.transfers]
    assert sorted(kinds) == sorted(2 * ["all_reduce", "all_gather", "reduce_scatter", "send"])
    assert {time.num_ranks for time in found.transfers} == {2}


def _begin_on_the_first_rank(rank):
    def begin():
        assert rank == 0
        return PROFILE

    def fail():
        raise PlannerError("model: another one")

    assert agree(begin) == PROFILE
    with pytest.raises(PlannerError, match=r"^model: another one$"):
        agree(fail)


@pytest.mark.dist(2)
def test_all_ranks_have_what_the_first_one_read_or_its_error():
    run_world(_begin_on_the_first_rank, 2)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "'2', but RANK, MASTER_ADDR, MASTER_PORT is missing; start .* torchrun"),
        ({"WORLD_SIZE": "x", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "'x', but that is no number"),
    ],
)  # fmt: skip
def test_half_a_launcher_is_refused(environ, message):
    with pytest.raises(PlannerError, match=f"^WORLD_SIZE: is {message}"), launched_world(environ):
        pass


def test_one_process_needs_no_group():
    for environ in ({}, {"WORLD_SIZE": "1"}):
        with launched_world(environ) as rank:
            assert rank == 0
