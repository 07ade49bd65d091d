"""Redistributing does not deadlock where messages have no tags and every operation blocks."""

from collections import defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from hdtensor.collectives.p2p import place
from hdtensor.redistribute import resolve
from hdtensor.redistribute.program import compile_plan
from tests.redistribute.strategies import any_pairs, layout_pairs, moved_pairs
from tests.support.fifo import Collective, DeadlockError, Receive, Send, run_fifo


NUM_RANKS = 6
PAIRS = any_pairs(NUM_RANKS) | moved_pairs(NUM_RANKS) | layout_pairs(NUM_RANKS)


def operations(plans, rank):
    """What ``execute_many`` does on one rank, in its order: per round collectives, then messages."""
    rounds = defaultdict(lambda: (set(), defaultdict(int)))
    for plan in plans:
        for number, step in compile_plan(plan, rank).steps:
            collectives, messages = rounds[number]
            collectives.update((type(j.collective).__name__, j.collective.ranks) for j in step.jobs)
            for message in step.sent:
                messages[rank, message.peer] += message.num_elements
            for message in step.received:
                messages[message.peer, rank] += message.num_elements
    todo = []
    for number in sorted(rounds):
        collectives, messages = rounds[number]
        todo += [Collective(ranks, (number[0], kind)) for kind, ranks in sorted(collectives)]
        for src, dst in sorted(messages, key=lambda pair: place(*pair, NUM_RANKS)):
            size = messages[src, dst]
            todo.append(Send(dst, size) if src == rank else Receive(src, size))
    return todo


@settings(max_examples=300)
@given(st.lists(PAIRS, min_size=1, max_size=5))
def test_every_batch_ends(pairs):
    plans = [
        resolve(
            src.spec, dst.spec, src.shape, src_top_sizes=src.top_sizes, dst_top_sizes=dst.top_sizes
        )
        for src, dst in pairs
    ]
    programs = {rank: operations(plans, rank) for rank in range(NUM_RANKS)}

    passed = run_fifo(programs)

    assert all(num > 0 for _, _, num in passed)
    assert sum(isinstance(op, Send) for todo in programs.values() for op in todo) == len(passed)


def test_the_emulation_finds_a_deadlock():
    with pytest.raises(DeadlockError, match="every rank waits"):
        run_fifo({0: [Send(1, 4), Receive(1, 4)], 1: [Send(0, 4), Receive(0, 4)]})
    with pytest.raises(AssertionError, match="meets"):
        run_fifo({0: [Send(1, 4)], 1: [Receive(0, 8)]})
    assert run_fifo({0: [Send(1, 4), Receive(1, 4)], 1: [Receive(0, 4), Send(0, 4)]}) == [
        (0, 1, 4),
        (1, 0, 4),
    ]
