"""Drawing by a key, on plain tensors: at once, or by operators that compiled programs keep.

A graph draws its keys when it runs. What a key gives is a pure function of it, so that a recomputed forward has the
values of the first one as long as it has its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hdtensor.triton_kernels.counter_random as counter_random
from hdtensor._rank import current_rank
from hdtensor._torch_compilers import keep_effects_of_checkpoints, keep_in_order
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements.layout import OwnedBox, contiguous_stride, owned_boxes
from hdtensor.placements.spec import HDSpec


#: A 64-bit integer; in a graph an int64 tensor of no dims that holds it.
Key = Any

_LOW, _HIGH = -(2**63), 2**63 - 1

_library = torch.library.Library("hdtensor", "FRAGMENT")
_ops: Any = torch.ops.hdtensor


def next_key(generator: torch.Generator | None = None) -> int:
    """Return the next key of a generator, by default of torch's default CPU generator."""
    return int(torch.randint(_LOW, _HIGH, (), generator=generator).item())


def draw_key(beside: Tensor) -> Tensor:
    """Return the next key of torch's default CPU generator, drawn when the graph runs."""
    keep_effects_of_checkpoints()
    return _ops.draw_key(beside)


class Owned(NamedTuple):
    """Stands for the places of all that a rank owns of a tensor whose sizes a compiler has not fixed.

    Attributes:
        bound: The tensor.
        offset: How much of dim 0 of a larger batch's tensor lies before it.
    """

    bound: BoundSpec
    offset: int


def fill(
    kind: str,
    out: Tensor,
    key: Key,
    start: tuple[int, ...] | Owned,
    strides: tuple[int, ...],
    low: float = 0,
    high: float = 0,
) -> None:
    """Fill a box of a global tensor by one of the functions of ``counter_random``.

    Args:
        kind: The function's name.
        out: The box, or all that the rank owns.
        key: As drawn.
        start: Global index of the box's first element, or ``Owned``.
        strides: Strides of the global tensor in elements.
        low: The function's first parameter after these.
        high: Its second one, if it has two.
    """
    if isinstance(start, Owned):
        bound = start.bound
        place = bound.spec.text, bound.shape, bound.top_sizes, start.offset
        out.copy_(_ops.counter_draw_owned(out, key, kind, *place, low, high))
    elif isinstance(key, Tensor):
        out.copy_(_ops.counter_draw(out, key, kind, start, strides, low, high))
    else:
        _fill(kind, out, key, start, strides, low, high)


#: How many parameters each function has.
_NUM_PARAMETERS = {
    "fill_uniform_": 2,
    "fill_normal_": 2,
    "fill_exponential_": 1,
    "fill_randint_": 2,
    "keep_mask": 1,
}


def _fill(
    kind: str, out: Tensor, key: int, start: Any, strides: Any, low: float, high: float
) -> None:
    given = (low, high)[: _NUM_PARAMETERS[kind]]
    if kind == "fill_randint_":
        given = tuple(map(int, given))
    getattr(counter_random, kind)(out, key, tuple(start), tuple(strides), *given)


def _counter_draw(
    like: Tensor, key: Tensor, kind: str, start: Any, strides: Any, low: float, high: float
) -> Tensor:
    out = _like(like)
    _fill(kind, out, int(key.item()), start, strides, low, high)
    return out


def _counter_draw_owned(like: Tensor, key: Tensor, kind: str, spec: str, *rest: Any) -> Tensor:
    shape, top_sizes, offset, low, high = rest
    out = _like(like)
    sizes = None if top_sizes is None else tuple(top_sizes)
    owned = owned_boxes(HDSpec.from_text(spec), tuple(shape), sizes, current_rank())
    number, strides = int(key.item()), contiguous_stride(shape)
    for view, start in places(out, owned, offset):
        _fill(kind, view, number, start, strides, low, high)
    return out


def places(
    local: Tensor, owned: Iterable[OwnedBox], offset: int
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield each box that a rank owns, with the global index of its first element, after ``offset`` along dim 0."""
    for each in owned:
        start = each.box.start
        if offset:
            start = (start[0] + offset, *start[1:])
        yield local[each.local_slices], start


def _like(like: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


# A key must be drawn as often, and in the order, that the program says: every rank's generator goes on alike.
_library.define("draw_key(Tensor beside) -> Tensor")
_library.impl("draw_key", lambda beside: torch.tensor(next_key()), "CompositeExplicitAutograd")
keep_in_order(
    "hdtensor::draw_key",
    _library,
    lambda beside: torch.empty((), dtype=torch.int64, device="cpu"),
)

_library.define(
    "counter_draw(Tensor like, Tensor key, str kind, SymInt[] start, SymInt[] strides, Scalar low, Scalar high) -> Tensor"
)
_library.impl("counter_draw", _counter_draw, "CompositeExplicitAutograd")
torch.library.register_fake("hdtensor::counter_draw", _like, lib=_library)

_library.define(
    "counter_draw_owned(Tensor like, Tensor key, str kind, str spec, SymInt[] shape, SymInt[]? top_sizes, SymInt offset, "
    "Scalar low, Scalar high) -> Tensor"
)
_library.impl("counter_draw_owned", _counter_draw_owned, "CompositeExplicitAutograd")
torch.library.register_fake("hdtensor::counter_draw_owned", _like, lib=_library)
