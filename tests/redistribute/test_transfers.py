"""The BSR table and the choice of senders (Sec. 5.3, Fig. 11)."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from hdtensor.errors import RedistributeError, TopologyError
from hdtensor.placements import Box
from hdtensor.redistribute.topology import UNIFORM, Topology
from hdtensor.redistribute.transfers import (
    LOWEST_RANK,
    Row,
    SenderRules,
    SendLoad,
    Transfer,
    choose_senders,
    transfer_table,
)


WHOLE = Box((0,), (8,))


def row(owners, needers, cell=WHOLE):
    return Row(cell, tuple(owners), tuple(needers))


def senders(*rows, **options):
    return [transfer.src for transfer in choose_senders(rows, **options)]


def test_cells_are_intersections_never_common_multiples():
    src = {0: [Box((0,), (6,))], 1: [Box((6,), (12,))]}
    dst = {2: [Box((0,), (4,))], 3: [Box((4,), (8,))], 4: [Box((8,), (12,))]}
    assert [
        (r.cell.start[0], r.cell.stop[0], r.owners, r.needers) for r in transfer_table(src, dst)
    ] == [
        (0, 4, (0,), (2,)),
        (4, 6, (0,), (3,)),
        (6, 8, (1,), (3,)),
        (8, 12, (1,), (4,)),
    ]


def test_cells_that_nobody_wants_are_left_out():
    assert transfer_table({0: [WHOLE]}, {1: [Box((2,), (3,))]}) == (row([0], [1], Box((2,), (3,))),)


def test_a_scalar_is_one_cell():
    assert transfer_table({0: [Box((), ())]}, {1: [Box((), ())]}) == (row([0], [1], Box((), ())),)


def test_a_wanted_cell_that_nobody_holds_raises():
    with pytest.raises(RedistributeError, match=r"ranks .*1.* need .*4.*8.*which no rank holds"):
        transfer_table({0: [Box((0,), (4,))]}, {1: [WHOLE]})


@st.composite
def sides(draw):
    cuts = st.lists(st.integers(0, 12), max_size=4).map(lambda c: sorted({0, 12, *c}))
    dims = [draw(cuts) for _ in range(draw(st.integers(1, 2)))]
    pieces = [
        Box(tuple(a for a, _ in corner), tuple(b for _, b in corner))
        for corner in itertools.product(*(list(itertools.pairwise(cut)) for cut in dims))
    ]
    holders = {rank: [] for rank in range(draw(st.integers(1, 5)))}
    for piece in pieces:
        for rank in draw(st.sets(st.sampled_from(list(holders)), min_size=1)):
            holders[rank].append(piece)
    return len(dims), holders


@settings(deadline=None)
@given(sides(), sides())
def test_each_rank_gets_each_wanted_element_once_from_an_owner(src, dst):
    if src[0] != dst[0]:
        return
    load = SendLoad()
    transfers = choose_senders(transfer_table(src[1], dst[1]), load=load, itemsize=2)
    for transfer in transfers:
        assert any(box.contains(transfer.box) for box in src[1][transfer.src])
        if any(box.contains(transfer.box) for box in src[1].get(transfer.dst, [])):
            assert transfer.src == transfer.dst
    for rank, boxes in dst[1].items():
        got = [t.box for t in transfers if t.dst == rank]
        assert sum(box.numel for box in got) == sum(box.numel for box in boxes)
        assert all(a.intersect(b) is None for a, b in itertools.combinations(got, 2))
    assert sum(load.sent.values()) == sum(2 * t.box.numel for t in transfers if t.src != t.dst)


def test_rule_1_an_owner_keeps_its_own():
    assert choose_senders([row([0, 1], [1])]) == (Transfer(WHOLE, 1, 1),)


def test_rule_2_a_near_owner_before_a_far_one():
    topology = Topology.of_nodes(2, 4)
    load = SendLoad()
    load.add(2, 0, 1000)
    assert senders(row([0, 2], [3]), topology=topology, load=load) == [2]
    assert senders(row([0, 2], [3]), topology=topology, rules=LOWEST_RANK) == [0]


def test_rule_2_links_inside_a_node_differ():
    topology = Topology(
        nodes=(0, 0, 0),
        links=("nvlink", "pcie", "ib"),
        bytes_per_s=(3.0, 2.0, 1.0),
        inside=(((0, 0, 1), (0, 0, 0), (1, 0, 0)),),
    )
    assert senders(row([0, 1], [2]), topology=topology) == [1]


def test_rule_3_senders_take_turns():
    assert senders(*[row([4, 1], [2])] * 4) == [4, 1, 4, 1]


def test_rule_3_counts_each_class_by_itself():
    topology = Topology.of_nodes(2, 6)
    load = SendLoad()
    load.add(0, 0, 100)
    load.add(2, 1, 1)
    assert senders(row([0, 2], [4]), topology=topology, load=load) == [0]
    assert load.sent[0, 1] == 8


def test_ties_go_to_the_first_or_to_the_lowest():
    assert senders(row([4, 1], [2])) == [4]
    assert senders(row([4, 1], [2]), rules=SenderRules(tie="lowest")) == [1]
    assert senders(*[row([4, 1], [2])] * 3, rules=LOWEST_RANK) == [1, 1, 1]


def test_itemsize_weighs_tensors_of_unlike_types():
    load = SendLoad()
    choose_senders([row([0, 1], [2])], load=load, itemsize=8)
    for _ in range(4):
        choose_senders([row([0, 1], [2])], load=load, itemsize=2)
    assert load.sent == {(0, 0): 64, (1, 0): 64}


def test_ranks_beyond_the_topology_raise():
    with pytest.raises(TopologyError, match="not 7"):
        choose_senders([row([0, 1], [7])], topology=Topology.of_nodes(2, 4))
    assert senders(row([0, 1], [7]), topology=UNIFORM) == [0]
