"""A rank that fails in a step ends the step on all ranks, with the name of the rank that was first."""

import os
import signal
import time

import pytest

from hdtensor.errors import PipelineError
from hdtensor.pipeline import Runner
from tests.pipeline import tiny
from tests.support.world import run_world


_PLAN = tiny.plan(([tiny.stage([0, 1], 0, 1), tiny.stage([2], 2, 2)], 3, 2))


def _check_the_first_is_named(rank, error, where):
    runner = Runner(tiny.llama(), _PLAN)
    runner.step(tiny.batch(6))

    def fail(*_):
        raise error

    if rank == 2 and where == "forward":
        runner.model.model.layers[2].mlp.register_forward_pre_hook(fail)
    if rank == 2 and where == "backward":
        hook = lambda _, __, output: output.register_hook(fail) and None  # noqa: E731
        runner.model.model.layers[2].mlp.register_forward_hook(hook)
    expected = type(error) if rank == 2 else PipelineError
    text = None if rank == 2 else f"rank 2 failed in 1.0 .*{where}.*{type(error).__name__}"
    with pytest.raises(expected, match=text) as raised:
        runner.step(tiny.batch(6))
    if rank == 2:
        assert "rank 2, the first that failed" in "".join(raised.value.__notes__)


@pytest.mark.dist(3)
@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_all_ranks_hear_of_what_one_rank_raises(error):
    run_world(_check_the_first_is_named, 3, error, "forward")


@pytest.mark.dist(3)
def test_all_ranks_hear_of_a_failing_backward():
    run_world(_check_the_first_is_named, 3, ValueError("bad"), "backward")


_TURNS = tiny.plan(
    ([tiny.stage([r], i, i) for i, r in enumerate([0, 1, 0, 1])], 2, 2),
    ([tiny.stage([2], 0, 3)], 2, 1),
)


def _check_another_lane_hears(rank, who, error):
    runner = Runner(tiny.llama(4), _TURNS, schedule="interleaved1f1b")
    runner.step(tiny.batch(6))

    def fail(*_):
        raise error

    if rank == who:
        for layer in runner.model.model.layers:
            layer.mlp.register_forward_pre_hook(fail)
    expected = type(error) if rank == who else PipelineError
    where = " in the sum of losses" if (rank == 2) != (who == 2) else ""
    told = f"rank {who} failed in .*{type(error).__name__}.* This is rank {rank}{where}"
    with pytest.raises(expected, match=None if rank == who else told):
        runner.step(tiny.batch(6))


@pytest.mark.dist(3)
@pytest.mark.parametrize(
    ("who", "error"), [(0, ValueError("bad")), (1, KeyboardInterrupt()), (2, ValueError("bad"))]
)
def test_ranks_of_another_lane_that_wait_for_its_losses_hear_of_it(who, error):
    run_world(_check_another_lane_hears, 3, who, error)


def _check_an_interrupt(rank, who):
    runner = Runner(tiny.llama(4), _TURNS, schedule="interleaved1f1b")
    runner.step(tiny.batch(6))

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # a stage runs in a thread of its own, and is in the middle of it

    if rank == who:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        runner.model.model.layers[rank].mlp.register_forward_pre_hook(interrupt)
    expected = KeyboardInterrupt if rank == who else PipelineError
    text = None if rank == who else f"rank {who} failed in .*KeyboardInterrupt"
    with pytest.raises(expected, match=text):
        runner.step(tiny.batch(6))


@pytest.mark.dist(3)
def test_an_interrupt_of_a_rank_with_several_stages_ends_all():
    run_world(_check_an_interrupt, 3, 1)
