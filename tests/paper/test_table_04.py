"""Table 4: who sends how much when C1 becomes C2, and the same rules on the paper's other switches."""

from collections import Counter

import numpy as np
import pytest

from hdtensor.elastic import plan_switch
from hdtensor.plan import AnnotationPlan
from hdtensor.redistribute.fuse import fuse
from hdtensor.redistribute.topology import Topology
from hdtensor.redistribute.transfers import LOWEST_RANK, SenderRules
from tests.paper.switches import DOCUMENTS, PATTERNS, llama_32b, moves_between


#: Rank -> (NVLink, InfiniBand) in the paper's MB: parameters x 6 bytes / 2^30 x 1000.
FUSED = {
    **dict.fromkeys(range(8, 12), (0, 747)),
    15: (0, 11496),
    **dict.fromkeys(range(20, 24), (748, 0)),
    **dict.fromkeys(range(24, 28), (0, 748)),
    28: (5517, 0),
    29: (11496, 0),
    30: (8222, 0),
}
BASELINE = {
    4: (0, 748),
    **dict.fromkeys(range(5, 8), (0, 747)),
    **dict.fromkeys(range(8, 12), (0, 1495)),
    12: (0, 5517),
    13: (0, 11496),
    14: (0, 8222),
    15: (0, 11496),
}


def table(scheme, num_ranks=32):
    rows = {rank: scheme.sent_by(rank) for rank in range(num_ranks)}
    return {
        rank: tuple(round(num_bytes / 2**30 * 1000) for num_bytes in row)
        for rank, row in rows.items()
        if any(row)
    }


@pytest.mark.paper("Table 4")
@pytest.mark.parametrize(
    ("rules", "entries"), [(SenderRules(), FUSED), (LOWEST_RANK, BASELINE)], ids=["fused", "lowest"]
)
def test_table_4_to_the_megabyte(rules, entries):
    scheme = fuse(
        moves_between("C1", "C2"),
        topology=Topology.of_nodes(8, 32),
        rules=rules,
        exclude_ranks=[31],
    )
    assert (len(FUSED), len(BASELINE)) == (16, 12)
    assert table(scheme) == entries


@pytest.mark.paper("Table 4")
def test_plan_switch_says_the_same():
    model = llama_32b()
    before, after = (
        AnnotationPlan.from_dict(DOCUMENTS[label]).expand(model, PATTERNS) for label in ("C1", "C2")
    )
    plan = plan_switch(
        before,
        after,
        model,
        Topology.of_nodes(8, 32),
        exclude_ranks=[31],
        bytes_per_element=6,
    )
    found = {
        rank: tuple(round(links.get(link, 0) / 2**30 * 1000) for link in ("nvlink", "ib"))
        for rank, links in plan.sent_bytes.items()
    }
    assert found == FUSED
    received = sum(sum(links.values()) for links in plan.received_bytes.values())
    assert received == plan.num_bytes
    assert plan.table().splitlines()[0].split() == [
        "rank", "sent", "nvlink", "sent", "ib", "received", "nvlink", "received", "ib",
    ]  # fmt: skip
    relayed = plan_switch(
        before,
        after,
        model,
        Topology.of_nodes(8, 32),
        exclude_ranks=[31],
        rules="relay",
        bytes_per_element=6,
    )
    assert relayed.seconds <= plan.seconds / 5


@pytest.mark.paper("Table 4")
def test_both_schemes_move_the_same_volume():
    moves = moves_between("C1", "C2")
    totals = {
        fuse(moves, topology=Topology.of_nodes(8, 32), rules=rules, exclude_ranks=[31]).num_bytes
        for rules in (SenderRules(), LOWEST_RANK)
    }
    assert len(totals) == 1


# ---- an independent count: index sets read off the strategy tables, one element at a time ----


HIDDEN, WIDTH, VOCAB, LAYERS = 16, 24, 32, 60


def model_rows():
    """(part, layer, length of the cut dim, elements per index, whether TP cuts it), registered order."""
    yield "first", 0, 1, VOCAB * HIDDEN, False
    for layer in range(LAYERS):
        yield from ((layer, layer, HIDDEN, HIDDEN, True) for _ in range(4))
        yield from ((layer, layer, WIDTH, HIDDEN, True) for _ in range(3))
        yield from ((layer, layer, 1, HIDDEN, False) for _ in range(2))
    yield "last", LAYERS - 1, 1, HIDDEN, False
    yield "last", LAYERS - 1, VOCAB, HIDDEN, True


def holders(document, layer, length, is_cut):
    """Rank -> the indices that it holds, in the order (pipeline, place in the stage)."""
    found = {}
    for pipeline in document["pipelines"]:
        for stage in pipeline["stages"]:
            first, last = stage["layers"]
            if first <= layer <= last:
                ranks = stage["ranks"]
                parts = np.array_split(np.arange(length), len(ranks))
                for rank, part in zip(ranks, parts, strict=True):
                    found[rank] = set(part.tolist() if is_cut else range(length))
    return found


def count_by_hand(src, dst, dead=()):
    """(rank, crosses nodes) -> elements sent."""
    sent = Counter()
    for _, layer, length, numel, is_cut in reversed(list(model_rows())):
        held = holders(DOCUMENTS[src], layer, length, is_cut)
        wanted = holders(DOCUMENTS[dst], layer, length, is_cut)
        groups = {}
        for index in range(length):
            owners = tuple(r for r, part in held.items() if index in part and r not in dead)
            needers = tuple(r for r, part in wanted.items() if index in part)
            groups.setdefault((owners, needers), []).append(index)
        for (owners, needers), indices in groups.items():
            for needer in needers:
                if needer in owners:
                    continue
                candidates = [o for o in owners if o // 8 == needer // 8] or list(owners)
                best = candidates[0]
                for owner in candidates[1:]:
                    crosses = owner // 8 != needer // 8
                    if sent[owner, crosses] < sent[best, crosses]:
                        best = owner
                sent[best, best // 8 != needer // 8] += len(indices) * numel
    return dict(sent)


@pytest.mark.paper("Sec. 5.3", "Tables 11, 12")
@pytest.mark.parametrize(
    ("src", "dst", "dead"),
    [
        ("C1", "C2", (31,)),
        ("C2", "C3", ()),
        ("C3", "C2", ()),
        ("C4", "C5", ()),
        ("C5", "C6", (15,)),
        ("C6", "C7", ()),
        ("C7", "C4", ()),
    ],
)
def test_other_switches_equal_a_count_by_hand(src, dst, dead):
    model = llama_32b(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCAB,
    )
    scheme = fuse(
        moves_between(src, dst, model, itemsize=1),
        topology=Topology.of_nodes(8, 48),
        exclude_ranks=dead,
    )
    by_hand = count_by_hand(src, dst, dead)
    assert {(rank, bool(link)): n for (rank, link), n in scheme.sent.items()} == by_hand
    assert sum(scheme.received.values()) == sum(by_hand.values()) > 0
