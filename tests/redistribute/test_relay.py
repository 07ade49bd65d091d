"""Relayed schemes: whole cover, legal hops, near the optimum of a linear programme and the bound."""

import itertools
import random
from collections import Counter, defaultdict

import pytest

from hdtensor.errors import RedistributeError, TopologyError
from hdtensor.placements import Box, HDSpec, default_top_sizes
from hdtensor.redistribute.fuse import Move, fuse
from hdtensor.redistribute.pour import Route
from hdtensor.redistribute.relay import relay
from hdtensor.redistribute.steps import (
    Layout,
)
from hdtensor.redistribute.topology import UNIFORM, Topology
from hdtensor.redistribute.topology_fields import RankBandwidth
from tests.paper.switches import moves_between
from tests.redistribute.relay_lp import least_makespan


def layout(text, shape):
    spec = HDSpec.from_text(text)
    return Layout(spec, shape, default_top_sizes(spec, shape))


def move(src, dst, shape=(64, 64), itemsize=2, name="w"):
    return Move(layout(src, shape), layout(dst, shape), itemsize, name)


def boxes_of(side, rank):
    if isinstance(side, Layout):
        return [owned.box for owned in side.boxes(rank)]
    return side.get(rank, [])


def ranks_of(side):
    return side.spec.ranks if isinstance(side, Layout) else tuple(side)


def check(scheme, moves, topology, excluded=()):
    """Assert that routes are legal, serve all needs once, and that their hops were counted.

    Returns:
        The makespan if copies of a cell for several nodes shared no hop.
    """
    sent, received = Counter(), Counter()
    sent_apart, received_apart = Counter(), Counter()
    for index, (tensor, routes) in enumerate(zip(moves, scheme.routes, strict=True)):
        got = defaultdict(list)
        hops, hops_apart = set(), set()
        for box, ranks in routes:
            assert not set(ranks) & set(excluded)
            assert len(set(ranks)) == len(ranks) <= 4
            assert any(held.contains(box) for held in boxes_of(tensor.src, ranks[0]))
            nodes = [topology.node(rank) for rank in ranks]
            crossings = [a != b for a, b in itertools.pairwise(nodes)]
            assert sum(crossings) <= 1
            assert crossings in ([], [0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0])
            got[ranks[-1]].append(box)
            hops.update((box, ranks[: k + 1]) for k in range(1, len(ranks)))
            hops_apart.update((box, ranks[: k + 1], nodes[-1]) for k in range(1, len(ranks)))
        for rank in ranks_of(tensor.dst):
            wanted = [] if rank in excluded else boxes_of(tensor.dst, rank)
            assert sum(b.numel for b in got[rank]) == sum(b.numel for b in wanted)
            assert all(any(w.contains(b) for w in wanted) for b in got[rank])
            assert_disjoint(got.pop(rank))
        assert not any(got.values())
        for box, ranks in hops:
            link = topology.link(*ranks[-2:])
            sent[ranks[-2], link] += box.numel * tensor.itemsize
            received[ranks[-1], link] += box.numel * tensor.itemsize
        for box, ranks, _ in hops_apart:
            link = topology.link(*ranks[-2:])
            sent_apart[ranks[-2], link] += box.numel * tensor.itemsize
            received_apart[ranks[-1], link] += box.numel * tensor.itemsize
        check_phases(scheme.phases(index), tensor, topology, hops)
    assert scheme.sent == sent
    assert scheme.received == received
    assert scheme.seconds == topology.makespan(sent, received)
    apart = topology.makespan(sent_apart, received_apart)
    assert apart >= scheme.bound_seconds * (1 - 1e-9)
    return apart


def assert_disjoint(boxes):
    boxes = sorted(boxes)
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if other.start[:1] >= box.stop[:1]:
                break
            assert box.intersect(other) is None


def check_phases(phases, tensor, topology, hops):
    """Assert that each hop stands once, and that its sender has the cell by then."""
    assert sum(map(len, phases)) == len(hops)
    has = defaultdict(set)
    for phase in phases:
        arrived = []
        for box, src, dst in phase:
            owns = any(held.contains(box) for held in boxes_of(tensor.src, src))
            assert owns or box in has[src]
            arrived.append((dst, box))
        for dst, box in arrived:
            has[dst].add(box)
    for phase in (phases.gather, phases.spread):
        assert all(topology.node(src) == topology.node(dst) for _, src, dst in phase)


# ---- small cases by hand ----


WHOLE = Box((0,), (80,))


def routed(moves, topology, **options):
    scheme = relay(moves, topology=topology, **options)
    check(scheme, moves, topology, options.get("exclude_ranks", ()))
    return scheme


def test_what_a_rank_holds_stays():
    scheme = routed([Move({0: [WHOLE]}, {0: [WHOLE]})], UNIFORM)
    assert scheme.routes == ((Route(WHOLE, (0,)),),)
    assert scheme.seconds == scheme.bound_seconds == 0
    assert scheme.num_bytes == 0


def test_an_idle_neighbour_at_each_end_halves_the_time():
    topology = Topology.of_nodes(2, 4)
    scheme = routed([Move({0: [WHOLE]}, {2: [WHOLE]})], topology)
    assert scheme.routes[0] == (
        Route(Box((0,), (40,)), (0, 2)),
        Route(Box((40,), (80,)), (0, 1, 3, 2)),
    )
    assert scheme.seconds == pytest.approx(40 / 50e9)


def test_without_nodes_nobody_relays():
    moves = [Move({0: [WHOLE]}, {1: [WHOLE], 2: [WHOLE]})]
    scheme = routed(moves, UNIFORM)
    assert sorted(route.hops for route in scheme.routes[0]) == [(0, 1), (0, 2)]


def test_left_out_ranks_do_not_relay():
    topology = Topology.of_nodes(3, 6)
    moves = [Move({0: [WHOLE]}, {3: [WHOLE], 1: [WHOLE]})]
    scheme = routed(moves, topology, exclude_ranks=[1, 4])
    used = {rank for route in scheme.routes[0] for rank in route.hops}
    assert used == {0, 2, 3, 5}


def test_what_two_ranks_of_a_node_lack_crosses_once():
    topology = Topology.of_nodes(2, 4)
    moves = [Move({0: [WHOLE]}, {2: [WHOLE], 3: [WHOLE]})]
    scheme = routed(moves, topology)
    assert sum(n for (_, link), n in scheme.sent.items() if link == 1) == WHOLE.numel
    assert fuse(moves, topology=topology).seconds == pytest.approx(4 * scheme.seconds, rel=0.05)


def test_one_owner_hands_pieces_to_many_needers_of_its_node():
    topology = Topology.of_nodes(8, 8)
    whole = Box((0,), (7000,))
    moves = [Move({0: [whole]}, {rank: [whole] for rank in range(1, 8)})]
    scheme = routed(moves, topology)
    assert fuse(moves, topology=topology).seconds > 6 * scheme.seconds


def test_no_detour_where_another_link_is_the_slowest():
    usual = RankBandwidth(50e9, 50e9, 400e9, 400e9)
    slow = usual._replace(nic_out=1e9)
    topology = Topology(nodes=(0, 0, 1, 1, 2, 2), ranks=(usual, usual, usual, usual, slow, slow))
    moves = [Move({4: [WHOLE]}, {3: [WHOLE]}), Move({0: [WHOLE]}, {2: [WHOLE]})]
    scheme = routed(moves, topology)
    assert scheme.seconds == pytest.approx(40 / 1e9)
    assert [route.hops for route in scheme.routes[1]] == [(0, 2)]


def test_a_faster_link_is_worth_a_detour_inside_a_node():
    topology = Topology(
        nodes=(0, 0, 0),
        links=("nvlink", "sys", "ib"),
        bytes_per_s=(100.0, 1.0, 1.0),
        inside=(((0, 0, 1), (0, 0, 0), (1, 0, 0)),),
    )
    scheme = routed([Move({0: [WHOLE]}, {2: [WHOLE]})], topology)
    assert [route.hops for route in scheme.routes[0]][-1] == (0, 1, 2)
    assert scheme.seconds < 1.0


def test_scalars_and_tiny_tensors_are_not_cut():
    topology = Topology.of_nodes(2, 4)
    moves = [
        move("R / 0:R", "R / 2:R 1:R", shape=(1 << 16,)),
        move("R / 0:R", "R / 2:R 3:R", shape=(), name="scale"),
        move("R / 0:R", "R / 2:R 1:R", shape=(0, 4), name="empty"),
    ]
    scheme = routed(moves, topology)
    assert sorted(route.hops[-1] for route in scheme.routes[1]) == [2, 3]
    assert scheme.routes[2] == ()


def test_layouts_of_all_kinds():
    topology = Topology.of_nodes([3, 2, 3])
    moves = [
        move("R / 0,1:S0 4:R", "S1 / 2,3:S0 5,6:S1", (60, 33)),
        move("S0[3:1] / 0,1:S1 7:R", "R / 5,6,7:S0 0:R", (40, 30)),
        move("R / 0,1:R", "R / 2:R 3:R 4:R 5:R", (999,)),
        move("S0 / 0:R 1:R 2:R", "S0 / 2:R 1:R 0:R", (30, 20)),
    ]
    routed(moves, topology)


def test_the_scheme_is_the_same_each_time():
    topology = Topology.of_nodes([3, 2, 3])
    moves = [move("R / 0,1:S0 4:R", "S1 / 2,3:S0 5,6:S1", (60, 33))] * 3
    assert relay(moves, topology=topology) == relay(moves, topology=topology)


def test_lost_cells_and_unknown_ranks_raise():
    with pytest.raises(RedistributeError, match=r"tensor 'w': .* left-out ranks"):
        relay([move("R / 0:R", "R / 1:R")], exclude_ranks=[0])
    with pytest.raises(TopologyError, match="not 5"):
        relay([move("R / 0:R", "R / 5:R")], topology=Topology.of_nodes(2, 4))
    assert relay([]).routes == ()


def random_layout(random_, shape, num_ranks):
    ranks = random_.sample(range(num_ranks), random_.randint(1, num_ranks))
    groups = []
    while ranks:
        size = random_.randint(1, min(4, len(ranks)))
        group, ranks = ranks[:size], ranks[size:]
        cut = random_.choice(["S0", "S1", "R"])
        groups.append(f"{','.join(map(str, group))}:{cut}")
    top = random_.choice(["R", "R", "S0", "S1"])
    return layout(f"{top} / {' '.join(groups)}", shape)


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_random_layouts_are_served_whole(first_seed):
    for seed in range(first_seed, first_seed + 25):
        random_ = random.Random(seed)
        sizes = [random_.randint(1, 4) for _ in range(random_.randint(1, 4))]
        topology = random_topology(random_, sizes)
        moves = []
        for _ in range(random_.randint(1, 4)):
            shape = (random_.randint(0, 200), random_.randint(1, 50))
            sides = [random_layout(random_, shape, sum(sizes)) for _ in range(2)]
            moves.append(Move(*sides, random_.choice([1, 2, 8]), "w"))
        dead = set(random_.sample(range(sum(sizes)), random_.randint(0, 1)))
        try:
            scheme = relay(moves, topology=topology, exclude_ranks=dead)
        except RedistributeError:
            with pytest.raises(RedistributeError):
                fuse(moves, topology=topology, exclude_ranks=dead)
            continue
        check(scheme, moves, topology, dead)


# ---- near the optimum ----


def random_topology(random_, sizes):
    num_ranks = sum(sizes)
    fast = random_.choice([1.0, 2.0, 8.0])
    fields = {"links": ("fast", "slow"), "bytes_per_s": (fast, 1.0)}
    if random_.random() < 0.5:
        fields["ranks"] = tuple(
            RankBandwidth(*random_.choices([0.5, 1, 2], k=2), *random_.choices([1, 2, 4, 8], k=2))
            for _ in range(num_ranks)
        )
    if random_.random() < 0.3:
        fields["links"] = ("fast", "middle", "slow")
        fields["bytes_per_s"] = (fast, fast / random_.choice([2, 3, 10]), 1.0)
        matrices = []
        for size in sizes:
            matrix = [[0] * size for _ in range(size)]
            for i, j in itertools.combinations(range(size), 2):
                matrix[i][j] = matrix[j][i] = random_.randint(0, 1)
            matrices.append(tuple(map(tuple, matrix)))
        fields["inside"] = tuple(matrices)
    return Topology.of_nodes(sizes, **fields)


def random_problem(seed):
    """A topology, moves of one dim long enough to be cut at will, needs, and dead ranks."""
    random_ = random.Random(seed)
    sizes = [random_.randint(1, 4) for _ in range(random_.randint(2, 3))]
    topology = random_topology(random_, sizes)
    dead = {random_.randrange(sum(sizes))} if sum(sizes) > 3 and random_.random() < 0.3 else set()
    alive = [rank for rank in range(sum(sizes)) if rank not in dead]
    moves, needs = [], []
    for _ in range(random_.randint(1, 5)):
        box = Box((0,), (random_.choice([2000, 10000, 30000]),))
        owners = random_.sample(alive, random_.randint(1, min(3, len(alive))))
        needers = random_.sample(alive, random_.randint(1, len(alive)))
        moves.append(Move({r: [box] for r in owners}, {r: [box] for r in needers}))
        by_node = defaultdict(list)
        for rank in needers:
            if rank not in owners:
                by_node[topology.node(rank)].append(rank)
        needs += [(tuple(owners), tuple(ranks), box.numel) for ranks in by_node.values()]
    return topology, moves, needs, dead, set(alive)


@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_within_five_percent_of_the_linear_programme(first_seed):
    for seed in range(first_seed, first_seed + 20):
        topology, moves, needs, dead, alive = random_problem(seed)
        scheme = relay(moves, topology=topology, exclude_ranks=dead)
        makespan = check(scheme, moves, topology, dead)
        if needs:
            optimum = least_makespan(needs, topology, alive)
            assert scheme.bound_seconds <= optimum * (1 + 1e-6), seed
            assert scheme.seconds <= makespan <= 1.05 * optimum, seed
            assert optimum * (1 - 1e-6) <= makespan <= 1.05 * scheme.bound_seconds, seed


@pytest.mark.paper("Table 4", "Tables 11, 12")
@pytest.mark.parametrize(
    ("src", "dst", "num_ranks", "dead", "most"),
    [
        ("C1", "C2", 32, [31], 1 / 5),
        ("C2", "C3", 32, [], 0.7),
        ("C4", "C5", 48, [], 0.7),
        ("C5", "C6", 48, [15], 1 / 5),
        ("C6", "C7", 48, [], 0.7),
    ],
)
def test_the_papers_switches(src, dst, num_ranks, dead, most):
    moves = moves_between(src, dst)
    topology = Topology.of_nodes(8, num_ranks)
    scheme = relay(moves, topology=topology, exclude_ranks=dead)
    check(scheme, moves, topology, dead)
    fused = fuse(moves, topology=topology, exclude_ranks=dead)
    assert scheme.seconds <= most * fused.seconds
    assert scheme.seconds <= 1.05 * scheme.bound_seconds
    assert scheme.bound_seconds <= fused.seconds


@pytest.mark.paper("Table 4")
def test_c1_to_c2_is_bound_by_seven_nics_for_what_rank_15_alone_holds():
    """11,496 MB leave rank 15; the node that wants them has seven live ranks, so seven NICs."""
    moves = moves_between("C1", "C2")
    topology = Topology.of_nodes(8, 32)
    fused = fuse(moves, topology=topology, exclude_ranks=[31])
    scheme = relay(moves, topology=topology, exclude_ranks=[31])
    least = fused.sent[15, 1] / 7 / 50e9
    assert scheme.bound_seconds <= least * (1 + 1e-9) <= scheme.seconds * (1 + 1e-9)
    assert scheme.seconds <= 1.05 * least


def test_a_thousand_ranks():
    """32 pipelines of 8 stages of 4 ranks; every stage hands a layer to a neighbour, all pipelines alike."""
    stages = [[[(32 * p + 4 * s + r) for r in range(4)] for s in range(8)] for p in range(32)]

    def of_stage(s):
        groups = " ".join(f"{','.join(map(str, pipeline[s]))}:S0" for pipeline in stages)
        return f"R / {groups}"

    moves = [
        move(of_stage(s), of_stage((s + 1) % 8), (6656, 64), name=f"{s}.{i}")
        for s in range(8)
        for i in range(4)
    ]
    topology = Topology.of_nodes(8, 1024)
    scheme = relay(moves, topology=topology)
    check(scheme, moves, topology)
    assert scheme.seconds <= 1.05 * scheme.bound_seconds
    assert scheme.seconds <= 0.55 * fuse(moves, topology=topology).seconds
