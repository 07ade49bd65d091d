"""Computing again what a micro-batch computed before, in its backward: nothing crosses between stages a second time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

import torch

from hdtensor.errors import PlanError
from hdtensor.ops.special.move import move
from hdtensor.pipeline.runtime.feed import MicroBatch
from hdtensor.pipeline.runtime.passage import Passage
from hdtensor.tensor import HDTensor


#: Gives a tensor behind a stage point for one before it.
Again = Callable[[torch.Tensor], torch.Tensor]

#: The micro-batch whose call goes on, or whose backward runs; it may be on a thread of its own.
_forward: list[MicroBatch] = []
_backward: list[MicroBatch] = []


class _Now:
    """Has a micro-batch be the one that stage points mean."""

    __slots__ = ("_part", "_stack")

    def __init__(self, stack: list[MicroBatch], part: MicroBatch) -> None:
        self._stack, self._part = stack, part

    def __enter__(self) -> None:
        self._stack.append(self._part)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


def recording(part: MicroBatch) -> contextlib.AbstractContextManager[None]:
    """Have stage points tell a micro-batch what came through them."""
    return _Now(_forward, part)


def replaying(part: MicroBatch) -> contextlib.AbstractContextManager[None]:
    """Have stage points that are called again give what they gave a micro-batch at first."""
    return _Now(_backward, part)


def note(
    point: object,
    passage: Passage,
    given: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> None:
    """Note what a micro-batch that runs found behind a stage point."""
    if _forward:
        leaves = {id(a.leaf) for segment in passage.segments for a in segment.arrivals}
        again = [_again(x, y, id(y) in leaves) for x, y in zip(given, results, strict=True)]
        _forward[-1].behind.setdefault(point, []).append(again)


def is_replaying() -> bool:
    """Return whether a call of a module now computes something again."""
    return bool(_backward)


def has_passed(point: object) -> bool:
    """Return whether the micro-batch whose backward runs found anything of other stages at a point."""
    return point in _backward[-1].behind


def again(point: object, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what the micro-batch whose backward runs found behind a stage point.

    Raises:
        PlanError: If its call passed the point several times.
    """
    passed = _backward[-1].behind.get(point, [])
    if len(passed) != 1 or len(passed[0]) != len(given):
        raise PlanError(
            f"a module that begins a stage is computed again, but was called {len(passed)} times in the model's call: "
            f"which call is meant is not known. Checkpoint what is inside the module, or Runner's "
            f"activation_checkpointing, which begins behind the stage's beginning."
        )
    return [make(x) for make, x in zip(passed[0], given, strict=True)]


def _again(before: torch.Tensor, behind: torch.Tensor, has_arrived: bool) -> Again:
    if behind is before:
        return lambda x: x
    if has_arrived:
        leaf = weakref.ref(behind)  # it lives as long as its stage's backward may need it

        def arrived(_: torch.Tensor) -> torch.Tensor:
            found = leaf()
            assert found is not None, "a stage keeps what came to it until its backward ended"
            return found

        return arrived
    if (
        isinstance(before, HDTensor)
        and isinstance(behind, HDTensor)
        and (behind.is_local or (before.is_local and not behind.is_leaf))
    ):
        spec = behind.spec
        return lambda x: move(x, spec, None)
    return lambda _: behind
