"""Redistribute points: where a plan brings hidden states to another layout inside subgroups.

Tensor parallelism needs two kinds, Megatron's g and f: reduce a module's output in forward and pass gradients through, or the
other way at its input. With sequence parallelism they are a reduce-scatter and an all-gather along the sequence. Op by op they
are ``redistribute`` calls on ``HDTensor``s. In a module that runs on plain local tensors (see ``regions``) the same collective
runs on the local tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import raw_apply
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.special.move import gradient_spec, move
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec
from hdtensor.plan import ExpandedPlan, RedistributePoint
from hdtensor.redistribute.execute import make_converter
from hdtensor.tensor import HDTensor


Reduce = Callable[[torch.Tensor], torch.Tensor]

#: Where an argument stands: ``(i,)`` or ``("name",)``; ``()`` for an output.
Path = tuple[Any, ...]

#: Hidden states are (batch, sequence, features); the sequence is the dim that sequence parallelism cuts.
_HIDDEN_DIMS = 3
_SEQUENCE = Shard(1)

#: Collectives kept; past it the table starts anew.
_MAX_REDUCERS = 4096

_reducers: dict[Any, Reduce | None] = {}


@dataclass(slots=True)
class Crossing:
    """One tensor at one point of a recorded pass.

    Attributes:
        path: Where it stands among the module's arguments.
        before: Its layout on arrival.
        after: Its layout on leaving.
        gradient: The spec in which its gradient came to the point; None where none came yet.
        needs_gradient: Whether one will come.
    """

    path: Path
    before: BoundSpec
    after: HDSpec
    gradient: HDSpec | None = None
    needs_gradient: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether dims are cut on one side, so that a local tensor's shape does not tell the block's."""
        group = self.before.spec.subgroups, self.after.subgroups
        return any(
            checks.is_cut(p) or checks.is_cut(q)
            for old, new in zip(*group, strict=True)
            for p, q in zip(old.placements, new.placements, strict=True)
            if p != q
        )


@dataclass(slots=True)
class Points:
    """The points of one module's pass, in order of the hook calls that make them.

    Attributes:
        entries: For each hook call the tensors that were redistributed.
        results: Local results of the calls that reduce in forward. In the checking pass they stand in for
            communication: a plain run that fails on one rank must not leave the others waiting.
        position: Next entry of the running pass.
        is_checking: Whether results stand in for collectives.
    """

    entries: list[list[Crossing]] = field(default_factory=list)
    results: list[torch.Tensor | None] = field(default_factory=list)
    position: int = 0
    is_checking: bool = False

    @property
    def num_redistributes(self) -> int:
        """How many ``redistribute`` calls the pass made at its points."""
        return sum(map(len, self.entries))

    @property
    def can_be_plain(self) -> bool:
        """Whether the same collectives can run on plain tensors, whose shapes must tell the block's."""
        crossings = [c for entry in self.entries for c in entry]
        return not any(c.is_cut for c in crossings)

    def knows_gradients(self) -> bool:
        """Whether a gradient came back to every point."""
        crossings = [c for entry in self.entries for c in entry]
        return not any(c.needs_gradient and c.gradient is None for c in crossings)


#: Passes that are being recorded, and plain passes that are running, innermost last.
recording: list[Points] = []
running: list[Points] = []


class PlacedPoint:
    """A point that was hooked into a model, and may be taken out and put back.

    Put back it is the same hook under the same number, so that what was compiled with it is found again.
    """

    def __init__(self, model: nn.Module, point: RedistributePoint) -> None:
        """Hook a point inside subgroups into a model."""
        self._module = model.get_submodule(point.module)
        self._is_output = point.side == "output"
        self._hook: Any
        if self._is_output:
            self._hook = OutputPoint(point.spec)
            self._handle = self._module.register_forward_hook(self._hook)
        else:
            self._hook = InputPoint(point.spec)
            self._handle = self._module.register_forward_pre_hook(self._hook, with_kwargs=True)

    def remove(self) -> None:
        """Take the point out."""
        self._handle.remove()

    def put_back(self) -> None:
        """Hook the point in again, after what was hooked in since."""
        number = self._handle.id
        if self._is_output:
            self._module._forward_hooks[number] = self._hook
        else:
            self._module._forward_pre_hooks[number] = self._hook
            self._module._forward_pre_hooks_with_kwargs[number] = True


def place(model: nn.Module, plan: ExpandedPlan) -> list[PlacedPoint]:
    """Hook a plan's points into a model."""
    return [hook_in(model, point) for point in plan.points]


def hook_in(model: nn.Module, point: RedistributePoint) -> PlacedPoint:
    """Hook one point inside subgroups into a model."""
    return PlacedPoint(model, point)


def is_point(hook: Any) -> bool:
    """Whether a module hook is one of the plan's redistribute points."""
    return isinstance(hook, OutputPoint | InputPoint)


def is_own_hook(hook: Any) -> bool:
    """Whether a module hook is one of the plan's redistribute points, or only looks at when a module runs."""
    return is_point(hook) or getattr(hook, "only_observes", False)


class OutputPoint:
    """Reduces what is pending of a module's (first) output: Megatron's g."""

    def __init__(self, spec: HDSpec) -> None:
        self.spec = spec

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the module's output in the point's layout."""
        if isinstance(output, tuple):
            return (self._cross(output[0]), *output[1:])
        return self._cross(output)

    def _cross(self, output: Any) -> Any:
        if isinstance(output, HDTensor):
            if torch.compiler.is_compiling():
                return _cross_in_graph(output, self.spec, True)
            wanted = _wanted(output.spec, output.ndim, self.spec, True)
            result, crossing = _cross(output, wanted, ())
            note([crossing], result._local_tensor)
            return result
        if not running or not isinstance(output, torch.Tensor):
            return output
        points = running[-1]
        (crossing,) = points.entries[points.position]
        points.position += 1
        if points.is_checking:
            return points.results[points.position - 1]
        return _cross_plain(output, crossing)


class InputPoint:
    """Reduces the gradients of a module's inputs, and gathers inputs that are cut on the sequence: Megatron's f."""

    def __init__(self, spec: HDSpec) -> None:
        self.spec = spec

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the module's arguments, those that are hidden states in the point's layout."""
        if running:
            return _cross_plain_inputs(args, kwargs)
        entry: list[Crossing] = []

        def mark(path: Path, value: Any) -> Any:
            if not isinstance(value, HDTensor) or not value.is_floating_point():
                return value
            if torch.compiler.is_compiling():
                return _cross_in_graph(value, self.spec, False)
            wanted = _wanted(value.spec, value.ndim, self.spec, False)
            if wanted is value.spec and not value.requires_grad:
                return value
            result, crossing = _cross(value, wanted, path)
            entry.append(crossing)
            return result

        new_args = tuple(mark((i,), a) for i, a in enumerate(args))
        new_kwargs = {name: mark((name,), a) for name, a in kwargs.items()}
        if recording:
            note(entry, None)
        return new_args, new_kwargs


@torch.compiler.allow_in_graph
def _cross_in_graph(x: HDTensor, point: HDSpec, is_output: bool) -> torch.Tensor:
    """Return a tensor in a point's layout; compilers run it while they trace, and keep what it does."""
    wanted = _wanted(x.spec, x.ndim, point, is_output)
    if wanted is x.spec and (is_output or not x.requires_grad):
        return x.view_as(x)
    return move(x, wanted, x.top_sizes)


@functools.lru_cache(maxsize=4096)
def _wanted(spec: HDSpec, num_dims: int, point: HDSpec, is_output: bool) -> HDSpec:
    """Return the spec that a tensor has behind a point.

    The point's own placements are meant for hidden states; of other tensors only what is pending is reduced.
    """

    def along(have: Placement, want: Placement) -> Placement:
        if isinstance(have, Partial):
            return want if is_output else have
        if isinstance(have, Replicate) or (have == _SEQUENCE and isinstance(want, Replicate)):
            return want
        return have

    groups = []
    is_hidden = num_dims == _HIDDEN_DIMS and [(g.ranks, g.mesh_shape) for g in spec.subgroups] == [
        (g.ranks, g.mesh_shape) for g in point.subgroups
    ]
    for index, group in enumerate(spec.subgroups):
        whole = (Replicate(),) * len(group.placements)
        wanted = point.subgroups[index].placements if is_hidden else whole
        if not is_hidden and not is_output:
            wanted = group.placements
        placements = [along(p, q) for p, q in zip(group.placements, wanted, strict=True)]
        groups.append(group.with_placements(placements))
    return spec.replace(subgroups=tuple(groups))


def _cross(x: HDTensor, wanted: HDSpec, path: Path) -> tuple[HDTensor, Crossing]:
    crossing = Crossing(path, x._spec, wanted)
    result = move(x, wanted, x.top_sizes)
    crossing.needs_gradient = result.requires_grad
    if recording and crossing.needs_gradient:
        result = _NoteGradient.apply(result, crossing)
    return result, crossing


class _NoteGradient(torch.autograd.Function):
    """Notes in which spec a gradient comes to a point: that is what the plain pass must reduce."""

    @staticmethod
    def forward(ctx: Any, x: HDTensor, crossing: Crossing) -> HDTensor:
        ctx.crossing = crossing
        return HDTensor(x._local_tensor.detach(), x._spec, False)

    @staticmethod
    def backward(ctx: Any, grad: HDTensor) -> tuple[HDTensor, None]:
        ctx.crossing.gradient = grad.spec
        return grad, None


def note(entry: list[Crossing], result: torch.Tensor | None) -> None:
    """Remember a point's hook call, where a pass is being recorded."""
    for points in recording:
        points.entries.append(entry)
        points.results.append(result)


# -- on plain tensors ----------------------------------------------------------------------------------------------


def _cross_plain_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    points = running[-1]
    entry = points.entries[points.position]
    points.position += 1
    if points.is_checking or not entry:
        return args, kwargs
    new_args, new_kwargs = list(args), dict(kwargs)
    for crossing in entry:
        (where,) = crossing.path
        home: Any = new_kwargs if isinstance(where, str) else new_args
        home[where] = _cross_plain(home[where], crossing)
    return tuple(new_args), new_kwargs


def _cross_plain(x: torch.Tensor, crossing: Crossing) -> torch.Tensor:
    before = crossing.before
    forward = _reducer(before, before.spec, crossing.after, x.shape)
    backward = None
    if crossing.gradient is not None:
        backward = _reducer(before, crossing.gradient, gradient_spec(before.spec), x.shape)
    if forward is None and backward is None:
        return x
    return _cross_node(x, forward, backward)


def _reducer(bound: BoundSpec, before: HDSpec, after: HDSpec, shape: torch.Size) -> Reduce | None:
    """Return the conversion inside this rank's subgroup between two specs; None where nothing changes.

    Nothing is cut along the axes that change (``Crossing.is_cut``), so that the block has the local shape there.
    """
    key = (bound.spec, bound.index, bound.rank, before, after, shape)
    if key in _reducers:
        return _reducers[key]
    assert bound.index is not None, "plain passes run on local ranks only"
    old, new = before.subgroups[bound.index], after.subgroups[bound.index]
    reduce = None
    if old.placements != new.placements and len(old) > 1:
        reduce = make_converter(old, old.placements, new.placements, tuple(shape))
    if len(_reducers) >= _MAX_REDUCERS:
        _reducers.clear()
    _reducers[key] = reduce
    return reduce


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: Reduce | None, backward: Reduce | None
    ) -> torch.Tensor:
        ctx.forward_reduce, ctx.backward_reduce = forward, backward
        return x.view_as(x) if forward is None else forward(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        reduce = ctx.backward_reduce
        if (
            torch.is_grad_enabled()
        ):  # both only change how a value is laid out: each is the other's backward
            return _cross_node(grad, reduce, ctx.forward_reduce), None, None
        return grad if reduce is None else reduce(grad.contiguous()), None, None


_cross_node = raw_apply(_Cross)
