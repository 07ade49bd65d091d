"""Whether all ranks go on together: one decision, kept where every rank can read it later.

A barrier alone does not tell a rank that gave up waiting what a slow rank will do: the slow one finds the
barrier passed. So the outcome is a value in the process group's store that is set once, to "go" by the
last rank to vote for it or to "stop" by the first that gives up, and that every rank obeys, however late.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from hdtensor.collectives import groups


_GO, _STOP = b"go", b"stop"

_next = [0]


def next_number() -> int:
    """Return a number for a switch; the ranks use the largest that one of them has."""
    return _next[0]


def advance(number: int) -> None:
    """Remember that a number was used."""
    _next[0] = number + 1


class Decisions:
    """The decisions of one switch.

    Args:
        number: The switch's number, the same on every rank.
        timeout: How long to wait for other ranks; None for the process group's timeout.
    """

    def __init__(self, number: int, timeout: timedelta | None) -> None:
        self.timeout = timeout
        self._keys: Iterator[str] = (f"hdtensor/switch/{number}/{i}" for i in itertools.count())
        self._key = next(self._keys)

    def agree(self) -> None:
        """Wait until every rank is here; return only if all go on.

        Raises:
            Exception: If another rank failed, or did not come in time: then no rank goes on.
        """
        key, self._key = self._key, next(self._keys)
        store = _store()
        # The last vote decides before its rank enters the barrier: behind it nobody waits for the store.
        if store.add(f"{key}/votes", 1) == dist.get_world_size():
            store.compare_set(key, "", _GO.decode())
        problem = None
        try:
            _barrier(self.timeout)
        except Exception as error:
            problem = error
        if store.compare_set(key, "", _STOP.decode()) != _GO:
            raise problem or RuntimeError("another rank failed, or did not come in time.")

    def give_up(self) -> None:
        """Tell the others that this rank does not go on."""
        _store().compare_set(self._key, "", _STOP.decode())


def _store() -> dist.Store:
    world = dist.group.WORLD
    assert world is not None, "decisions are made by ranks of a world"
    return world.get_group_store()


def _barrier(timeout: timedelta | None) -> None:
    work = dist.all_reduce(torch.zeros(1, device=groups.device_type()), async_op=True)
    assert work is not None, "this rank is in the default group"
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
