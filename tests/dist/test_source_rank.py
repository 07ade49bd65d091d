"""Whose values ``distribute_tensor`` takes."""

import pytest
import torch

import hdtensor as hd
from hdtensor.collectives import groups
from tests.support.world import run_world


def _sources(rank):
    mine = torch.full((4,), float(rank))
    by_spec = [hd.distribute_tensor(mine, "S0 / 1:R 2:R", src_data_rank=r) for r in (0, 1, 3)]
    pair = hd.Subgroup((2, 3), (hd.Shard(0),))
    groups.ensure_groups([], [pair])
    by_mesh = [
        hd.distribute_tensor(mine, groups.mesh_of(pair), [hd.Shard(0)], src_data_rank=r)
        for r in (0, 1)
    ]
    return [float(t.full_tensor()[0]) for t in (*by_spec, *by_mesh)]


@pytest.mark.dist(4)
def test_ranks_are_global_but_with_a_mesh_positions_in_it():
    for values in run_world(_sources, 4):
        assert values == [0.0, 1.0, 3.0, 2.0, 3.0]
