"""The harness itself: values, exceptions, hangs, dead ranks, and which processes stay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.world import WorldError, run_world


ROOT = Path(__file__).parent.parent


def _sum_of_ranks(rank, start):
    x = torch.tensor([float(rank + start)])
    dist.all_reduce(x)
    return rank, dist.get_world_size(), x


def _pid(rank):
    return os.getpid()


def _random(rank):
    return torch.rand(3)


def _raise_on_ranks(rank, ranks):
    if rank in ranks:
        print(f"about to fail on {rank}")
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def _hang_on_rank(rank, hanging):
    if rank == hanging:
        _wait_for_nobody()
    return rank


def _wait_for_nobody():
    dist.recv(torch.zeros(1), src=0)


def _end_on_rank(rank, ending, how):
    if rank == ending:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def _return_lambda(rank):
    return lambda: rank


@pytest.mark.dist(3)
def test_values_come_back_in_rank_order():
    values = run_world(_sum_of_ranks, 3, 10)

    assert [(rank, size) for rank, size, _ in values] == [(0, 3), (1, 3), (2, 3)]
    for _, _, total in values:
        torch.testing.assert_close(total, torch.tensor([33.0]))


@pytest.mark.dist(1)
def test_world_of_one():
    assert [rank for rank, _, _ in run_world(_sum_of_ranks, 1, 0)] == [0]


@pytest.mark.dist(2)
def test_no_process_group_in_the_parent():
    run_world(_pid, 2)

    assert not dist.is_initialized()


@pytest.mark.dist(3)
def test_worlds_of_other_sizes_stay_beside_each_other():
    first = run_world(_pid, 2), run_world(_pid, 3)
    again = run_world(_pid, 2), run_world(_pid, 3)

    assert again == first
    assert len({*first[0], *first[1], os.getpid()}) == 6


@pytest.mark.dist(2)
def test_every_job_starts_from_the_same_seed():
    first, again = run_world(_random, 2), run_world(_random, 2)

    for value in [*first, *again]:
        torch.testing.assert_close(value, first[0], rtol=0, atol=0)


@pytest.mark.dist(4)
def test_exceptions_of_all_ranks_are_shown():
    with pytest.raises(WorldError) as caught:
        run_world(_raise_on_ranks, 4, [1, 2])

    text = str(caught.value)
    assert "_raise_on_ranks failed on rank 0, 1, 2, 3 of 4" in text
    for rank in (1, 2):
        failure = caught.value.failures[rank]
        assert f"rank {rank} raised" in failure
        assert f"ValueError: no luck on {rank}" in failure
        assert "in _raise_on_ranks" in failure
        assert f"about to fail on {rank}" in failure
    for rank in (0, 3):  # the innocent: they wait in the barrier
        assert "in barrier" in caught.value.failures[rank]


@pytest.mark.dist(2)
def test_hung_rank_is_named_and_its_stack_shown():
    with pytest.raises(WorldError) as caught:
        run_world(_hang_on_rank, 2, 1, timeout=1.0)

    assert list(caught.value.failures) == [1]
    assert "rank 1 was still running after 1 s" in str(caught.value)
    assert "in _wait_for_nobody" in str(caught.value)


@pytest.mark.dist(3)
@pytest.mark.parametrize(("how", "end"), [("exit", "exit code 7"), ("abort", "signal SIGABRT")])
def test_dead_rank_is_reported_without_waiting_for_the_timeout(how, end):
    with pytest.raises(WorldError) as caught:
        run_world(_end_on_rank, 3, 1, how, timeout=3600.0)

    assert f"rank 1 ended: {end}" in caught.value.failures[1]


@pytest.mark.dist(2)
def test_rank_that_died_between_two_jobs_is_reported():
    pids = run_world(_pid, 2)
    os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(WorldError, match="rank 1 ended: signal SIGKILL"):
        run_world(_pid, 2)
    assert not set(run_world(_pid, 2)) & set(pids)


@pytest.mark.dist(2)
def test_ranks_are_kept_after_a_pass_and_replaced_after_a_failure():
    first = run_world(_pid, 2)
    assert run_world(_pid, 2) == first

    with pytest.raises(WorldError):
        run_world(_raise_on_ranks, 2, [0])

    assert not set(run_world(_pid, 2)) & set(first)
    assert not any(_is_running(pid) for pid in first)


@pytest.mark.dist(2)
def test_value_that_cannot_be_pickled_names_the_rank():
    with pytest.raises(WorldError, match=r"rank 1 raised[\s\S]*pickle"):
        run_world(_return_lambda, 2)


def test_closure_is_refused():
    with pytest.raises(TypeError, match="defined at the top of a module"):
        run_world(lambda rank: rank, 2)


@pytest.mark.dist(2)
def test_ranks_end_with_their_parent(tmp_path):
    script = (
        "import os, signal\n"
        "from tests.support.world import run_world\n"
        "from tests.test_world import _pid\n"
        "print(*run_world(_pid, 2), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # what the killed process leaves behind
        capture_output=True,
        text=True,
    )

    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
