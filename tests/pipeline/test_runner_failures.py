"""A rank that fails in a step ends the step on all ranks, with the name of the rank that was first."""

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
