"""Steps that really ran: constants fitted on one half of them predict the other half."""

import statistics
from pathlib import Path

import pytest

from hdtensor.errors import PlannerError
from hdtensor.planner.calibrate import fit_runtime, step_errors
from hdtensor.planner.sailor_files import SailorFolder, training_system


FOLDER = SailorFolder(Path(__file__).parents[2] / "benchmarks" / "data" / "sailor")
#: The measured memory of two plans is less than what their parameters and activations need.
STEPS = FOLDER.measured(without_memory=["mit_N2"])
FIRST = training_system({"GH-96": 4e9, "RTX-2080": 3e9, "RTX-3090": 3e9, "Titan-RTX": 3e9})


def mean_errors(steps, constants):
    """Return the mean absolute relative errors of seconds and of memory."""
    errors = [step_errors(step, constants) for step in steps]
    seconds = statistics.fmean(abs(error.seconds) for error in errors)
    return seconds, statistics.fmean(abs(e.memory) for e in errors if e.memory is not None)


@pytest.fixture(scope="module")
def halves():
    """Return the steps of both halves, every other one by name, and the constants that each half gives."""
    steps = [STEPS[name] for name in sorted(STEPS)]
    return [(half, fit_runtime(half, FIRST)) for half in (steps[::2], steps[1::2])]


def test_there_are_all_nineteen():
    assert len(STEPS) == 19
    assert sum(step.memory_bytes is None for step in STEPS.values()) == 2


def test_half_of_the_steps_predict_the_other_half(halves):
    (mine, constants), (others, _) = halves
    for steps in (mine, others, [*mine, *others]):
        seconds, memory = mean_errors(steps, constants)
        assert seconds <= 0.06
        assert memory <= 0.08


def test_the_other_half_has_no_short_step_and_still_comes_near(halves):
    """No step of it tells what a pipeline's start takes, which is a third of the only step of one micro-batch."""
    (others, _), (mine, constants) = halves
    seconds, memory = mean_errors([*mine, *others], constants)
    assert constants.start < 0.01
    assert seconds <= 0.07
    assert memory <= 0.08


def test_both_halves_find_nearly_the_same_constants(halves):
    (_, one), (_, other) = halves
    assert one.message == pytest.approx(other.message, rel=0.3)
    assert one.reserved_bytes["GH200"] == pytest.approx(other.reserved_bytes["GH200"], rel=0.15)
    assert one.reserved_bytes["RTX-2080"] == pytest.approx(
        other.reserved_bytes["RTX-2080"], rel=0.1
    )


def test_too_few_steps_are_refused():
    with pytest.raises(PlannerError, match="steps: three measured steps or more"):
        fit_runtime(list(STEPS.values())[:2], FIRST)


def test_steps_without_seconds_are_refused():
    steps = [step._replace(seconds=float("nan")) for step in STEPS.values()]
    with pytest.raises(PlannerError, match="steps: each must have measured seconds"):
        fit_runtime(steps, FIRST)
