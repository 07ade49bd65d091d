"""Users' cases A: a tensor that should move to other ranks must move, or say that it does not."""

import itertools

import pytest
import torch

from hdtensor import RedistributeError, distribute_tensor
from tests.support.world import run_world


WORLD_SIZE = 4
X = torch.arange(32.0).reshape(8, 4)

#: Specs whose subgroups have other ranks than those of any other spec here.
ELSEWHERE = [
    "R / 0,1:S0",
    "R / 2,3:S0",
    "R / 0-3:S0",
    "S0 / 0:R 1:R",
    "S0[3:1] / 0,1:S1 3:R",
    "R / 1:R",
]


def _outcomes(rank):
    outcomes = []
    for src, dst in itertools.permutations(ELSEWHERE, 2):
        x = distribute_tensor(X, src)
        try:
            y = x.redistribute(dst)
        except RedistributeError as error:
            outcomes.append(str(error))
        else:  # every rank holds already what it should have
            outcomes.append(None)
            assert str(y.spec) == dst
            assert torch.equal(y.full_tensor(), X)
        # The source is as it was: not the silent answer "the source with the destination's name".
        assert str(x.spec) == src
        assert torch.equal(x.full_tensor(), X)
    return outcomes


@pytest.mark.dist(WORLD_SIZE)
def test_case_1_other_ranks_get_the_data_or_an_error_everywhere():
    ranks = run_world(_outcomes, WORLD_SIZE)
    assert all(outcomes == ranks[0] for outcomes in ranks)
    pairs = list(itertools.permutations(ELSEWHERE, 2))
    for message, (src, dst) in zip(ranks[0], pairs, strict=True):
        for part in (src, dst, "distribute_tensor") if message is not None else ():
            assert part in message
    refused = {pair for pair, message in zip(pairs, ranks[0], strict=True) if message is not None}
    assert ("R / 0,1:S0", "R / 2,3:S0") in refused
    assert len(refused) > len(pairs) / 2
