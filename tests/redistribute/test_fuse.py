"""The fused batch of many tensors (Sec. 7, Fig. 14)."""

import pytest

from hdtensor.errors import RedistributeError, TopologyError
from hdtensor.placements import Box, HDSpec, default_top_sizes
from hdtensor.redistribute.fuse import Move, fuse
from hdtensor.redistribute.steps import (
    Layout,
)
from hdtensor.redistribute.topology import Topology
from hdtensor.redistribute.transfers import (
    LOWEST_RANK,
    SenderRules,
    SendLoad,
    choose_senders,
    transfer_table,
)


def layout(text, shape=(8, 8)):
    spec = HDSpec.from_text(text)
    return Layout(spec, shape, default_top_sizes(spec, shape))


def move(src, dst, itemsize=1, name="w", shape=(8, 8)):
    return Move(layout(src, shape), layout(dst, shape), itemsize, name)


def sources(scheme):
    return [[transfer.src for transfer in tensor] for tensor in scheme.transfers]


def test_one_count_over_all_tensors_where_each_alone_would_use_the_first_owner():
    moves = [move("R / 0:R 1:R 2:R", "R / 3:R")] * 6
    assert sources(fuse(moves)) == [[2], [1], [0], [2], [1], [0]]
    assert sources(fuse(moves, rules=SenderRules(scan="registered"))) == [[0], [1], [2]] * 2
    assert sources(fuse(moves, rules=LOWEST_RANK)) == [[0]] * 6


def test_it_equals_choosing_tensor_by_tensor_with_one_load():
    topology = Topology.of_nodes([2, 3])
    moves = [
        move("R / 0,1:S0 2,3:S0", "S1 / 4:R 1,2:S0", 4),
        move("S0 / 0:R 3,1:S1", "R / 2,4:S0", 2),
        move("R / 0:R 1:R", "R / 2:R 3:R", 2, shape=()),
        move("R / 0,1:S0 2,3:S0", "S1 / 4:R 1,2:S0", 4),
    ]
    for rules in (SenderRules(), SenderRules(scan="registered", tie="lowest"), LOWEST_RANK):
        load = SendLoad()
        expected = [()] * len(moves)
        order = range(len(moves)) if rules.scan == "registered" else range(len(moves))[::-1]
        for i in order:
            sides = [
                {rank: [owned.box for owned in side.boxes(rank)] for rank in side.spec.ranks}
                for side in moves[i][:2]
            ]
            expected[i] = choose_senders(
                transfer_table(*sides),
                topology=topology,
                load=load,
                itemsize=moves[i].itemsize,
                rules=rules,
            )
        scheme = fuse(moves, topology=topology, rules=rules)
        assert scheme.transfers == tuple(expected)
        assert scheme.sent == load.sent


def test_boxes_may_stand_for_layouts():
    spec = layout("R / 0,1:S0")
    boxes = {rank: [owned.box for owned in spec.boxes(rank)] for rank in (0, 1)}
    by_boxes = fuse([Move(boxes, layout("R / 2:R"), 2)])
    assert by_boxes == fuse([Move(spec, layout("R / 2:R"), 2)])


def test_bytes_by_rank_and_class():
    scheme = fuse([move("R / 0:R", "R / 1:R 2,3:S0", 4)], topology=Topology.of_nodes(2, 4))
    assert scheme.sent_by(0) == (256, 256)
    assert [scheme.received_by(rank) for rank in range(4)] == [(0, 0), (256, 0), (0, 128), (0, 128)]
    assert scheme.num_bytes == 512


def test_a_load_from_before_counts_but_is_not_reported():
    load = SendLoad()
    load.add(0, 0, 1000)
    scheme = fuse([move("R / 0:R 1:R", "R / 2:R")], load=load)
    assert scheme.sent == {(1, 0): 64}
    assert load.sent == {(0, 0): 1000, (1, 0): 64}


def test_left_out_ranks_neither_hold_nor_send_nor_want():
    scheme = fuse([move("R / 0:R 1:R", "R / 1:R 2:R 3:R")] * 4, exclude_ranks=[0, 3])
    assert {(t.src, t.dst) for tensor in scheme.transfers for t in tensor} == {(1, 1), (1, 2)}


def test_cells_that_only_left_out_ranks_held_raise():
    moves = [move("R / 0:R", "R / 1:R"), move("R / 0,1:S0 2,3:S0", "R / 4,3:S1", name="head")]
    fuse(moves, exclude_ranks=[1])
    with pytest.raises(
        RedistributeError,
        match=r"tensor 'head': \[\(0, 0\) to \(4, 4\)\), \[\(0, 4\) to \(4, 8\)\) were held by none "
        r"but the left-out ranks \[0, 2\]. Restore",
    ):
        fuse(moves[1:], exclude_ranks=[2, 0])


def test_cells_that_nobody_held_raise_with_the_name():
    with pytest.raises(RedistributeError, match=r"tensor 'w': ranks .* which no rank holds"):
        fuse([Move({0: [Box((0,), (4,))]}, {1: [Box((0,), (8,))]}, 1, "w")])


def test_ranks_beyond_the_topology_raise():
    with pytest.raises(TopologyError, match="not 5"):
        fuse([move("R / 0:R", "R / 5:R")], topology=Topology.of_nodes(2, 4))


def test_an_empty_batch_moves_nothing():
    scheme = fuse([])
    assert scheme.transfers == ()
    assert scheme.num_bytes == 0
