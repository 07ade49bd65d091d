"""Random operators that give the same values under every plan.

An element's value is a function of a 64-bit key and its index in the global tensor. The key of a call is drawn from
torch's default CPU generator, by every rank, also where the call is pruned. So ``torch.manual_seed`` sets it, activation
checkpointing restores it, and neither the plan nor the rank enters. Every rank must have seeded alike, as all programs
that build one model on many ranks do.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from hdtensor.errors import DeductionError
from hdtensor.ops import drawing
from hdtensor.ops.binding import check_writable
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.drawing import Key
from hdtensor.ops.generate import empty_beside
from hdtensor.ops.registry import call, special, wrap
from hdtensor.ops.special.move import gradient_spec
from hdtensor.placements.layout import contiguous_stride, owned_boxes


aten = torch.ops.aten

#: Keys drawn so far: a module that is skipped as a whole still draws as many (``api.regions``).
num_draws = [0]

#: Draws so far for tensors that have samples by their shape, and have none since they follow from weights.
num_weight_draws = [0]

#: (first, number) of the samples that run now, where they are a part of a larger batch; None: a batch is whole.
_rows: list[tuple[int, int] | None] = [None]

#: ``fill(view, key, start, strides)`` fills one owned box.
Fill = Callable[[torch.Tensor, Key, Any, tuple[int, ...]], object]


def draw_key(generator: torch.Generator | None = None, beside: torch.Tensor | None = None) -> Key:
    """Return the next call's key and advance the generator, the same on every rank.

    Args:
        generator: Default: torch's default CPU generator.
        beside: A local tensor of the call. While it is traced the key is drawn in the graph, also by a rank that has no
            use for it.
    """
    num_draws[0] += 1
    if beside is not None and type(beside) is not torch.Tensor and not beside.is_meta:
        if generator is not None:
            raise DeductionError(
                "a compiled program draws random numbers from torch's default generator only; call it without generator=."
            )
        return drawing.draw_key(beside)
    return drawing.next_key(generator)


def rows_of_batch(first: int, num: int) -> contextlib.AbstractContextManager[None]:
    """Draw as for some samples of a larger batch: the values that the whole batch would have there.

    Tensors whose dim 0 is the samples, alone or joined with what follows, count from sample ``first`` on. A tensor whose
    dim 0 is no multiple of ``num`` has no samples, nor has a parameter or what is marked to follow from parameters
    (``is_of_weights``): they have the same values for every part of the batch.

    Args:
        first: Number of the first sample in the larger batch.
        num: Number of samples that run.
    """
    return _Rows((first, num))


class _Rows:
    """Puts samples in their place for a while; a class, since every action of a schedule enters one."""

    __slots__ = ("_before", "_rows")

    def __init__(self, rows: tuple[int, int]) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        self._before, _rows[0] = _rows[0], self._rows

    def __exit__(self, *_: object) -> None:
        _rows[0] = self._before


def fill_owned(
    local: torch.Tensor, bound: BoundSpec, key: Key, fill: Fill, *, of_weights: bool = False
) -> torch.Tensor:
    """Fill every box that this rank owns of a tensor."""
    strides = contiguous_stride(bound.shape)
    offset = _rows_before(bound.shape, of_weights)
    if bound.is_symbolic:
        fill(local, key, drawing.Owned(bound, offset), strides)
        return local
    owned = owned_boxes(bound.spec, tuple(bound.shape), bound.top_sizes, bound.rank)
    for view, start in drawing.places(local, owned, offset):
        fill(view, key, start, strides)
    return local


def _rows_before(shape: Sequence[int], of_weights: bool) -> int:
    """Return how much of dim 0 of the larger batch's tensor lies before a tensor of this shape."""
    if _rows[0] is None or not shape:
        return 0
    first, num = _rows[0]
    per_sample, rest = divmod(shape[0], num)
    num_weight_draws[0] += of_weights and not rest
    return 0 if rest or of_weights else first * per_sample


def is_of_weights(x: Any) -> bool:
    """Return whether a tensor is a parameter, or is marked as following from parameters alone."""
    return isinstance(x, torch.nn.Parameter) or getattr(x, "is_of_weights", False)


def _check(func: Any, bound: BoundSpec) -> None:
    if bound.spec.has_partial():
        raise DeductionError(
            f"{func}: random values for a tensor whose reduction is pending ({bound}) would be summed. "
            f"Redistribute it to Replicate() or Shard(d) first."
        )


def _in_place(func: Any, args: tuple[Any, ...], fill_of: Callable[..., Fill]) -> Any:
    bound = args[0]._spec
    _check(func, bound)
    check_writable(func, "self", bound)

    def run(x: Any, *rest: Any) -> Any:
        *given, kw = rest
        key = draw_key((kw or {}).get("generator"), x._local_tensor)
        if bound.index is not None:
            named = {k: v for k, v in (kw or {}).items() if k != "generator"}
            fill = fill_of(*given, **named)
            fill_owned(x._local_tensor, bound, key, fill, of_weights=is_of_weights(x))
        return x

    return run


def _uniform(
    low: float = 0.0, high: float = 1.0, *, to: float | None = None, **from_: float
) -> Fill:
    low, high = from_.get("from", low), high if to is None else to
    return functools.partial(drawing.fill, "fill_uniform_", low=low, high=high)


def _normal(mean: float = 0.0, std: float = 1.0) -> Fill:
    return functools.partial(drawing.fill, "fill_normal_", low=mean, high=std)


def _exponential(lambd: float = 1.0) -> Fill:
    return functools.partial(drawing.fill, "fill_exponential_", low=lambd)


def _bernoulli(p: float = 0.5) -> Fill:
    def fill(v: torch.Tensor, key: Key, start: Any, strides: tuple[int, ...]) -> None:
        mask = (
            v if v.dtype == torch.bool else torch.empty(v.shape, dtype=torch.bool, device=v.device)
        )
        drawing.fill("keep_mask", mask, key, start, strides, low=p)
        if mask is not v:
            v.copy_(mask)

    return fill


def _randint(low: int, high: int) -> Fill:
    def fill(v: torch.Tensor, key: Key, start: Any, strides: tuple[int, ...]) -> None:
        whole = v
        if v.dtype.is_floating_point or v.dtype == torch.bool:
            whole = torch.empty(v.shape, dtype=torch.int64, device=v.device)
        drawing.fill("fill_randint_", whole, key, start, strides, low=low, high=high)
        if whole is not v:
            v.copy_(whole)

    return fill


def _transformed(base: Fill, transform: Callable[[torch.Tensor], torch.Tensor]) -> Fill:
    """Return a fill with a function of another's values, computed in a floating dtype."""

    def fill(v: torch.Tensor, key: Key, start: Any, strides: tuple[int, ...]) -> None:
        dtype = v.dtype if v.dtype.is_floating_point else torch.float64
        drawn = torch.empty(v.shape, dtype=dtype, device=v.device)
        base(drawn, key, start, strides)
        v.copy_(transform(drawn))

    return fill


def _log_normal(mean: float = 1.0, std: float = 2.0) -> Fill:
    return _transformed(_normal(mean, std), torch.exp)


def _cauchy(median: float = 0.0, sigma: float = 1.0) -> Fill:
    return _transformed(_uniform(), lambda u: (math.pi * (u - 0.5)).tan() * sigma + median)


def _geometric(p: float) -> Fill:
    """Count trials up to the first success: an exponential's whole part."""
    return _transformed(_exponential(), lambda e: (e / -math.log1p(-p)).ceil())


_IN_PLACE: dict[Any, Callable[..., Fill]] = {
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.exponential_.default: _exponential,
    aten.bernoulli_.float: _bernoulli,
    getattr(aten.random_, "from"): _randint,
    aten.random_.to: lambda high: _randint(0, high),
    aten.log_normal_.default: _log_normal,
    aten.cauchy_.default: _cauchy,
    aten.geometric_.default: _geometric,
}


@special(*_IN_PLACE)
def _fill_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _in_place(func, args, _IN_PLACE[func])


_LIKE: dict[Any, Callable[..., Fill]] = {
    aten.rand_like.default: lambda: _uniform(),
    aten.randn_like.default: lambda: _normal(),
    aten.randint_like.default: lambda high: _randint(0, high),
    aten.randint_like.low_dtype: _randint,
    aten.bernoulli.p: _bernoulli,
}


@special(*_LIKE)
def _new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fill_of = _LIKE[func]

    def run(x: Any, *rest: Any) -> Any:
        *given, kw = rest
        options = {k: v for k, v in (kw or {}).items() if k != "generator"}
        out = call(aten.empty_like.default, x, **options)
        bound = out._spec
        key = draw_key((kw or {}).get("generator"), x._local_tensor)
        if bound.index is not None:
            fill = fill_of(*given)
            fill_owned(out._local_tensor, bound, key, fill, of_weights=is_of_weights(x))
        return out

    return run


@special(aten.bernoulli.default, aten.bernoulli_.Tensor)
def _bernoulli_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw each element with its own probability."""

    def run(x: Any, *rest: Any) -> Any:
        *given, kw = rest
        probability = given[0] if given else x
        uniform = call(aten.rand_like.default, probability, **(kw or {}))
        drawn = call(aten.lt.Tensor, uniform, probability)
        if given:
            return call(aten.copy_.default, x, drawn)
        return call(aten._to_copy.default, drawn, dtype=x.dtype)

    return run


@special(aten.native_dropout.default)
def _native_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    tiers = (bound.spec.top, *(p for g in bound.spec.subgroups for p in g.placements))
    if not {p.reduce_op for p in tiers if isinstance(p, Partial)} <= {"sum", "avg"}:
        _check(func, bound)
    # The terms of a sum are dropped together.
    specs = ((bound.spec, bound.dtype), (gradient_spec(bound.spec), torch.bool))
    bound, mask_bound = (
        BoundSpec.of(spec, bound.shape, bound.stride, dtype, bound.top_sizes)
        for spec, dtype in specs
    )

    def run(x: Any, p: float, train: bool | None = True, kw: Any = None) -> Any:
        key = draw_key(beside=x._local_tensor)
        if bound.index is None:
            empty = empty_beside(x._local_tensor, torch.bool)
            return wrap(x._local_tensor, bound), wrap(empty, mask_bound)
        local = x._local_tensor
        mask = torch.ones_like(local, dtype=torch.bool)
        if train is not False:
            fill_owned(mask, mask_bound, key, _bernoulli(1.0 - p), of_weights=is_of_weights(x))
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        out = local * mask * scale if train is not False else local.clone()
        return wrap(out, bound), wrap(mask, mask_bound)

    return run
