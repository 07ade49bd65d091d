"""Shapes of lanes: which kinds of stages follow one another, enumerated without any costs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from hdtensor.planner.space import Ints, Kind, Space


#: A lane's kinds, by their numbers, in the order of its stages.
Shape = tuple[int, ...]

#: While there are no more shapes than this, all are enumerated.
_COMPLETE = 2_000


def find_shapes(space: Space, most: int = _COMPLETE) -> tuple[list[Shape], bool]:
    """Return shapes of lanes, and whether those are all that there are.

    On small clusters they are all orders of all kinds that devices suffice for. On others each pool
    has one block of stages in the lane, all of one kind, perhaps with smaller ones behind it where nodes have
    odd numbers of devices; and the blocks stand in any order. Blocks lose little: stages of one pool with
    unlike TP differ only in how much of the bubble each sees.

    Args:
        space: What the search knows.
        most: Shapes up to which all are returned.
    """
    if _least_number(space) <= most:
        every = list(itertools.islice(_all_shapes(space), most + 1))
        if len(every) <= most:
            return every, True
    return list(_block_shapes(space)), False


def shapes_by_length(shapes: Sequence[Shape]) -> dict[int, Ints]:
    """Return shapes as arrays of shape (shapes, stages), by their numbers of stages."""
    found: defaultdict[int, list[Shape]] = defaultdict(list)
    for shape in shapes:
        found[len(shape)].append(shape)
    return {length: np.array(members, dtype=np.int64) for length, members in sorted(found.items())}


def fits(space: Space, kinds: Sequence[int]) -> bool:
    """Return whether nodes have room for groups of these kinds, each in one node.

    Sizes are powers of two, so a group of size t takes t / s places of size s of any smaller s, wherever it
    stands: counting the places of each size is enough (Coffman, Garey, Johnson 1987, divisible sizes).
    """
    for index, pool in enumerate(space.pools):
        sizes = [space.kinds[k].size for k in kinds if space.kinds[k].pool == index]
        for size in set(sizes):
            if sum(s // size for s in sizes if s >= size) > pool.room(size):
                return False
    return True


def _least_number(space: Space) -> int:
    """Return a number of shapes that there are at least: all of groups up to a size, while each pool has room for as many."""
    found, usable = 0, _usable(space)
    for size in {space.kinds[k].size for k in usable}:
        kinds = [k for k in usable if space.kinds[k].size <= size]
        room = min(space.pools[space.kinds[k].pool].room(size) for k in kinds)
        longest = min(space.options.max_stages, space.num_layers, room)
        found = max(found, sum(len(kinds) ** length for length in range(1, longest + 1)))
    return found


def _all_shapes(space: Space) -> Iterator[Shape]:
    """Yield every order of every set of kinds that fits."""
    longest = min(space.options.max_stages, space.num_layers)
    todo: list[Shape] = [()]
    while todo:
        shape = todo.pop()
        if shape:
            yield shape
        if len(shape) < longest:
            todo.extend(longer for kind in _usable(space) if fits(space, longer := (*shape, kind)))


def _usable(space: Space) -> list[int]:
    return [k for k in range(len(space.kinds)) if np.isfinite(space.prices.layer[k]).any()]


def _block_shapes(space: Space) -> Iterator[Shape]:
    longest = min(space.options.max_stages, space.num_layers)
    blocks: list[list[Shape]] = [
        [(), *_blocks(space, index, longest)] for index in range(len(space.pools))
    ]
    for chosen in itertools.product(*blocks):
        present = [block for block in chosen if block]
        if present and sum(map(len, present)) <= longest:
            for order in itertools.permutations(present):
                yield tuple(itertools.chain.from_iterable(order))


def _blocks(space: Space, pool: int, longest: int) -> Iterator[Shape]:
    """Yield the stages that a pool may have in a lane."""
    kinds = [k for k in _usable(space) if space.kinds[k].pool == pool]
    for kind in kinds:
        size = space.kinds[kind].size
        for count in range(1, min(longest, space.pools[pool].room(size)) + 1):
            block = (kind,) * count
            yield block
            for tail in _tails(space.kinds, kinds, kind):
                if (
                    count + len(tail) <= longest
                    and _is_odd(space, pool)
                    and fits(space, block + tail)
                ):
                    yield block + tail


def _tails(kinds: Sequence[Kind], mine: Sequence[int], kind: int) -> Iterator[Shape]:
    """Yield sets of one or more smaller kinds of the same context parallelism, the larger first."""
    smaller = [
        k
        for k in mine
        if kinds[k].size < kinds[kind].size and kinds[k].group.cp == kinds[kind].group.cp
    ]
    for length in range(1, len(smaller) + 1):
        yield from itertools.combinations(smaller, length)


def _is_odd(space: Space, pool: int) -> bool:
    """Return whether some node has a number of devices that is no power of two."""
    return any(len(ranks) & (len(ranks) - 1) for ranks in space.pools[pool].ranks)
