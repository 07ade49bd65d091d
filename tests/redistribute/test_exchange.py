"""Point-to-point steps: which one comes for which pair, and who sends what (Sec. 5.1 (I), 5.3)."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor.placements import HDSpec
from hdtensor.redistribute import resolve, simulate
from hdtensor.redistribute.exchange import constants, num_lacking
from hdtensor.redistribute.steps import (
    BatchedSendRecv,
    BatchedSendReduce,
    SendRecv,
)
from hdtensor.redistribute.topology import Topology
from tests.redistribute.oracle import cut, layout_of, take, value


def names(plan):
    return [type(step).__name__ for step in plan.steps]


def pairs_of(step):
    """(sender, receiver) -> elements, without what stays."""
    found = {}
    for box, src, dst in step.transfers:
        if src != dst:
            found[src, dst] = found.get((src, dst), 0) + box.numel
    return found


# Fig. 7: every cell of the table has a plan.
@pytest.mark.paper("Fig. 7")
@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        # same HSize, same HDim: another device group with the same sharding
        ("S0 / 0,1:S1 2:R", "S0 / 4,5:S1 2:R", ["SendRecv"]),
        ("R / 0,1:S0", "R / 2,3:S0", ["SendRecv"]),  # case 1
        ("R / 0-2:S0", "R / 1,2,0:S0", ["SendRecv"]),  # the same ranks in another order
        ("R / 0-3:S0", "R / 0-3(2x2):S0,R", ["BatchedSendRecv"]),  # in another mesh
        ("P / 0,1:S1 2:R", "P / 4,5:S1 6:R", ["SendRecv"]),  # terms travel as they are
        ("S0 / 0,1:P 2:R", "S0 / 4,5:P 2:R", ["SendRecv"]),
        # another device group and another sharding
        ("S0 / 0,1:S1 2:R", "S0 / 4,5:S0 2:R", ["BatchedSendRecv"]),
        ("P / 0,1:S1 2:R", "P / 4:R 5,6:S0", ["BatchedSendReduce"]),
        ("S0 / 0,1:P 2:R", "S0 / 4:R 2:R", ["BottomStep", "BatchedSendRecv"]),
        # one subgroup reduces where it is, while another moves
        ("S0 / 0,1:P 2:R", "S0 / 0,1:R 3:R", ["BottomStep", "SendRecv"]),
        # same HSize, another HDim, other ranks
        ("S0 / 0:R 1:R", "S1 / 2:R 3:R", ["BatchedSendRecv"]),
        ("S0 / 0:R 1:R", "R / 0:R 2:R", ["BatchedSendRecv"]),
        # another HSize: 3 -> 1, 2 -> 5
        ("S0 / 0:R 1:R 2:R", "R / 0-2:S1", ["BatchedSendRecv"]),
        ("S0 / 0,1:S1 2:R", "S0 / 0:R 1:R 2:R 3:R 4:R", ["BatchedSendRecv"]),
        # terms that two ranks hold and one wants: sent and added there
        ("P / 0:R 1:R", "R / 1:R", ["BatchedSendReduce"]),
        ("P / 0:R 1:R", "R / 2:R", ["BatchedSendReduce"]),
        # terms that everybody wants: reduced first, which moves less
        ("P / 0:R 1:R 2:R 3:R", "R / 0-3:R", ["SplitAllReduce"]),
    ],
)
def test_which_steps(src, dst, steps):
    plan = resolve(src, dst, (8, 6))

    assert names(plan) == steps
    layout = layout_of(dst, (8, 6))
    full = torch.arange(48.0).reshape(8, 6)
    got = simulate(plan, cut(full, layout_of(src, (8, 6))))
    torch.testing.assert_close(value(layout, got), full)


@pytest.mark.paper("Fig. 11")
def test_senders_are_fast_and_take_turns():
    nodes = Topology(nodes=(0, 0, 0, 0, 0, 0, 0, 0, 1, 1))
    plan = resolve("R / 1,2,9:R", "R / 0,8,3:S0", (6,), topology=nodes)

    (step,) = plan.steps
    assert pairs_of(step) == {(1, 0): 2, (9, 8): 2, (2, 3): 2}


def test_the_receiver_keeps_what_it_has():
    plan = resolve("R / 0-3:S0", "R / 0:R", (8,))

    (step,) = plan.steps
    assert pairs_of(step) == {(1, 0): 2, (2, 0): 2, (3, 0): 2}
    assert [t.box.start for t in step.transfers if t.src == t.dst] == [(0,)]


@pytest.mark.paper("cases 2, 7, 14")
@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("R / 0,1:S0", "R / 0-3:R", (8, 4)),
        ("R / 0-3:R", "R / 0,1:S0", (8, 4)),
        ("R / 0-2:S0", "R / 3,4:S1", (12, 4)),  # three trainers, two generators
        ("S0[2:3:0:5] / 0:R 1:R 2:R 3:R", "R / 3:R", (10, 3)),  # one rank takes all, as Muon wants
        ("R / 0-15(4x4):S0,S1", "R / 16-31(2x8):R,S1", (16, 16)),
        ("R / 0-7:S0x2", "S1 / 8-10:S0 11:R", (16, 5)),
        ("R / 0,1:S0", "R / 2:R", (0, 3)),
        ("R / 0:R", "R / 1:R", ()),
    ],
)
def test_only_what_is_lacking_is_sent(src, dst, shape):
    plan = resolve(src, dst, shape)
    start, end = layout_of(src, shape), layout_of(dst, shape)
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    got = simulate(plan, cut(full, start))

    assert plan.num_moved == num_lacking(start, end)
    for rank in end.spec.ranks:
        assert torch.equal(got[rank], take(full, end, rank))
    for rank in set(start.spec.ranks) - set(end.spec.ranks):
        assert got[rank].shape == (0,) or plan.steps == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("P / 0:R 1:R", {1: 0.0}),
        ("P(max) / 0:R 1:R", {}),
        ("P(product) / 0:R 1,2:P", {1: 1.0, 2: 0.0}),  # the innermost tier decides: 1 = 1 + 0
        ("R / 0-3(2x2):P,P(product)", {1: 1.0, 2: 0.0, 3: 1.0}),  # 0 = 0 * 1
    ],
)
def test_constants_of_a_value_made_partial(spec, expected):
    layout = layout_of(spec, (3,))

    assert constants(layout) == expected
    local = {rank: torch.full((3,), expected.get(rank, 5.0)) for rank in layout.spec.ranks}
    assert torch.equal(value(layout, local), torch.full((3,), 5.0))


def test_a_partial_destination_is_sent_once():
    plan = resolve("R / 0:R", "P / 1:R 2:P 3,4:S0", (6,))

    (step,) = plan.steps
    assert isinstance(step, BatchedSendRecv)
    assert pairs_of(step) == {(0, 1): 6}
    assert dict(step.fills) == {2: 0.0, 3: 0.0, 4: 0.0}


def test_mixed_reductions_reduce_inside_first():
    plan = resolve("P(max) / 0,1:P 2:R", "R / 3:R", (4,))

    assert names(plan) == ["BottomStep", "BatchedSendReduce"]
    assert plan.steps[1].op == Partial("max")
    assert plan.reductions == (Partial(), Partial("max"))


def test_terms_are_reduced_in_one_order_everywhere():
    plan = resolve("P / 2:R 0:R 1:R", "R / 3:R", (6,))

    (step,) = plan.steps
    assert isinstance(step, BatchedSendReduce)
    assert step.terms == ((2, 0), (0, 1), (1, 2))
    assert step.num_terms == 3


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_a_reduction_to_another_is_the_value(op):
    src, dst = layout_of(f"P({op}) / 0:R 1,2:S0", (4, 4)), layout_of("P / 3:R 4:R 0:R", (4, 4))
    full = torch.arange(16.0, dtype=torch.float64).reshape(4, 4) - 8
    plan = resolve(src.spec, dst.spec, (4, 4))

    torch.testing.assert_close(value(dst, simulate(plan, cut(full, src))), full)


def test_each_subgroup_decides_for_itself():
    plan = resolve("S0[1:1:1] / 0,1:S1 2,3:S1 4:R", "S0[1:1:1] / 0,1:R 6,7:S1 5:R", (6, 4))

    assert names(plan) == ["BottomStep", "SendRecv"]
    gather, send = plan.steps
    assert gather.index == 0
    assert isinstance(send, SendRecv)
    assert pairs_of(send) == {(2, 6): 4, (3, 7): 4, (4, 5): 8}


def test_subgroups_that_swap_ranks():
    spec = HDSpec.from_text("S0 / 0,1:S1 2,3:S1")
    swapped = HDSpec.from_text("S0 / 2,3:S1 0,1:S1")
    plan = resolve(spec, swapped, (4, 4))

    (step,) = plan.steps
    assert pairs_of(step) == {(0, 2): 4, (1, 3): 4, (2, 0): 4, (3, 1): 4}
    assert plan.dst.top != Replicate()


def test_terms_of_unlike_replicas_are_not_mixed():
    # Two rows replicate a value, each as a sum of other terms than the other.
    plan = resolve("R / 0,2,3,1(2x2):R,P", "R / 0:R 1:R 4:R", ())
    shards = {rank: torch.tensor(term) for rank, term in {0: 5.0, 2: 2.0, 3: 6.0, 1: 1.0}.items()}
    assert {r: x.item() for r, x in simulate(plan, shards).items() if x.numel()} == {
        0: 7.0,
        1: 7.0,
        4: 7.0,
    }
