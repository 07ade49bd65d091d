"""Redistribute points inside a module that runs on plain local tensors (see ``regions``).

A plan places two kinds of point inside subgroups, Megatron's g and f: reduce in forward and pass gradients through, or the
other way. Op by op they are ``redistribute`` calls on ``HDTensor``s. In a region the same collective runs on the local tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor._torch_compat import raw_apply
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.special.move import move
from hdtensor.placements.spec import HDSpec
from hdtensor.redistribute.execute import make_converter
from hdtensor.tensor import HDTensor


Reduce = Callable[[torch.Tensor], torch.Tensor]

#: Where an argument stands: ``(i,)`` or ``("name",)``; ``()`` for an output.
Path = tuple[Any, ...]

#: Collectives kept; past it the table starts anew.
_MAX_REDUCERS = 4096

_reducers: dict[Any, Reduce | None] = {}


@dataclass(slots=True)
class Points:
    """The points of one module's pass, in order of the hook calls that make them.

    Attributes:
        entries: For each hook call, ``(argument path, bound spec it had)`` of the tensors that were redistributed.
        results: Local results of the calls that reduce in forward. In the checking pass they stand in for
            communication: a plain run that fails on one rank must not leave the others waiting.
        position: Next entry of the running pass.
        is_checking: Whether results stand in for collectives.
    """

    entries: list[list[tuple[Path, BoundSpec]]] = field(default_factory=list)
    results: list[torch.Tensor | None] = field(default_factory=list)
    position: int = 0
    is_checking: bool = False

    @property
    def num_redistributes(self) -> int:
        """How many ``redistribute`` calls the pass made at its points."""
        return sum(map(len, self.entries))


#: Passes that are being recorded, and plain passes that are running, innermost last.
recording: list[Points] = []
running: list[Points] = []


def note(entry: list[tuple[Path, BoundSpec]], result: torch.Tensor | None) -> None:
    """Remember a point's hook call, where a pass is being recorded."""
    for points in recording:
        points.entries.append(entry)
        points.results.append(result)


@functools.lru_cache(maxsize=4096)
def _reduced(spec: HDSpec) -> HDSpec:
    return spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)


def reduce_output(output: Any) -> Any:
    """Reduce what is pending of a module's (first) output inside each subgroup: Megatron's g."""
    if isinstance(output, tuple):
        return (reduce_output(output[0]), *output[1:])
    if isinstance(output, HDTensor):
        wanted = _reduced(output.spec)
        result = move(output, wanted, output.top_sizes)
        note([((), output._spec)], result._local_tensor)
        return result
    if not running:
        return output
    points = running[-1]
    ((_, bound),) = points.entries[points.position]
    points.position += 1
    if points.is_checking:
        return points.results[points.position - 1]
    reduce = _reducer(bound, output.shape, is_forward=True)
    return output if reduce is None else _reduce_forward(output, reduce)


def reduce_input_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Reduce the gradients of a module's inputs inside each subgroup, and nothing in forward: Megatron's f."""
    if running:
        return _reduce_plain_gradients(args, kwargs)
    entry: list[tuple[Path, BoundSpec]] = []

    def mark(path: Path, value: Any) -> Any:
        if not (isinstance(value, HDTensor) and value.requires_grad):
            return value
        entry.append((path, value._spec))
        return move(value, value.spec, value.top_sizes)

    new_args = tuple(mark((i,), a) for i, a in enumerate(args))
    new_kwargs = {name: mark((name,), a) for name, a in kwargs.items()}
    if recording:
        note(entry, None)
    return new_args, new_kwargs


def _reduce_plain_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    points = running[-1]
    entry = points.entries[points.position]
    points.position += 1
    if points.is_checking or not entry:
        return args, kwargs
    new_args, new_kwargs = list(args), dict(kwargs)
    for (where,), bound in entry:
        home: Any = new_kwargs if isinstance(where, str) else new_args
        reduce = _reducer(bound, home[where].shape, is_forward=False)
        if reduce is not None:
            home[where] = _reduce_backward(home[where], reduce)
    return tuple(new_args), new_kwargs


def _reducer(bound: BoundSpec, shape: torch.Size, is_forward: bool) -> Reduce | None:
    """Return the sum along the axes where the tensor, or its gradient, is pending; None where none is.

    Nothing is cut along those axes, so that the block has the local shape there.
    """
    key = (bound.spec, bound.index, bound.rank, shape, is_forward)
    if key in _reducers:
        return _reducers[key]
    assert bound.index is not None, "plain passes run on local ranks only"
    group = bound.spec.subgroups[bound.index]
    if is_forward:
        before = group.placements
        after = tuple(Replicate() if isinstance(p, Partial) else p for p in before)
    else:
        before = tuple(Partial() if isinstance(p, Replicate) else p for p in group.placements)
        after = group.placements
    reduce = None
    if before != after and len(group) > 1:
        reduce = make_converter(group, before, after, tuple(shape))
    if len(_reducers) >= _MAX_REDUCERS:
        _reducers.clear()
    _reducers[key] = reduce
    return reduce


class _ForwardSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        return reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _BackwardSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        ctx.reduce = reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.reduce(grad.contiguous()), None


_reduce_forward = raw_apply(_ForwardSum)
_reduce_backward = raw_apply(_BackwardSum)
