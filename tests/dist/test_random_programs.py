"""Random programs over random unlike subgroups: the values and gradients of one device, or one error on every rank.

``HDTENSOR_TEST_EXAMPLES=50 pytest tests/dist/test_random_programs.py`` searches for minutes.
"""

import itertools
import warnings

import pytest

from tests.support.examples import num_examples
from tests.support.world import run_world
from tests.tensor.program_run import run_program
from tests.tensor.programs import GROUP_SEEDS, WORLD_SIZE, draw_program


#: Seeds in one batch share their subgroups, so that process groups are made once.
NUM_BATCHES = num_examples(4)


def _run_programs(rank, programs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of degenerate sizes, on one device too
        return [run_program(rank, program) for program in programs]


@pytest.mark.dist(WORLD_SIZE)
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_programs_equal_one_device(batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seeds = range(batch * GROUP_SEEDS, (batch + 1) * GROUP_SEEDS)
        programs = [p for p in map(draw_program, seeds) if p is not None]
    ranks = run_world(_run_programs, WORLD_SIZE, programs, timeout=100)
    for outcomes, program in zip(zip(*ranks, strict=True), programs, strict=True):
        for a, b in itertools.pairwise(outcomes):
            assert a == b, f"ranks end unlike\n{program}"
    refused = sum(len(notes) for notes in ranks[0])
    called = sum(len(program.steps) for program in programs)
    assert refused < called / 2, f"{refused} of {called} calls were refused: nothing is tested"
