"""Emulation of a transport of untagged, blocking FIFO channels: what NCCL guarantees, and no more.

Each ordered pair of ranks has one channel. A send blocks until the peer's next receive on that channel
takes it, a receive until a send brings it, a collective until all its ranks have arrived. Each rank does
its operations strictly one after another.
"""

from typing import NamedTuple


class Send(NamedTuple):
    dst: int
    num_bytes: int


class Receive(NamedTuple):
    src: int
    num_bytes: int


class Collective(NamedTuple):
    ranks: tuple[int, ...]
    what: object


class DeadlockError(Exception):
    """No rank can go on; the message shows what each waits for."""


def run_fifo(programs):
    """Run each rank's list of operations; return the messages (src, dst, num_bytes) as they passed.

    Args:
        programs: Rank -> operations in order.

    Raises:
        DeadlockError: If no rank can go on.
        AssertionError: If two ends of a message, or of a collective, do not agree.
    """
    position = dict.fromkeys(programs, 0)
    passed = []

    def current(rank):
        todo = programs.get(rank, ())
        return todo[position[rank]] if rank in position and position[rank] < len(todo) else None

    def step(rank):
        here = current(rank)
        match here:
            case Send(dst=peer):
                there = current(peer)
                if not isinstance(there, Receive) or there.src != rank:
                    return False
                assert here.num_bytes == there.num_bytes, f"{rank} -> {peer}: {here} meets {there}"
                passed.append((rank, peer, here.num_bytes))
                position[rank] += 1
                position[peer] += 1
                return True
            case Collective(ranks=ranks):
                if any(current(member) != here for member in ranks):
                    return False
                for member in ranks:
                    position[member] += 1
                return True
        return False

    while any(current(rank) is not None for rank in programs):
        advanced = [step(rank) for rank in programs]
        if not any(advanced):
            waiting = {r: current(r) for r in programs if current(r) is not None}
            raise DeadlockError(f"every rank waits: {waiting}")
    return passed
