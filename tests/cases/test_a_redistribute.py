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


def _refusals(rank):
    messages = []
    for src, dst in itertools.permutations(ELSEWHERE, 2):
        x = distribute_tensor(X, src)
        with pytest.raises(RedistributeError) as caught:
            x.redistribute(dst)
        messages.append(str(caught.value))
        # The source is as it was: not the silent answer "the source with the destination's name".
        assert str(x.spec) == src
        assert torch.equal(x.full_tensor(), X)
    return messages


@pytest.mark.dist(WORLD_SIZE)
def test_case_1_other_ranks_are_refused_everywhere():
    ranks = run_world(_refusals, WORLD_SIZE)
    assert all(messages == ranks[0] for messages in ranks)
    for message, (src, dst) in zip(ranks[0], itertools.permutations(ELSEWHERE, 2), strict=True):
        assert src in message
        assert dst in message
        assert "distribute_tensor" in message  # what to do next
