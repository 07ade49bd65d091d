"""``hdtensor::redistribute`` as an operator, run by the plan of ``resolve``.

Its arguments are plain (a spec's text, extents): graphs are kept on disk, and a text means the same in every process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from hdtensor._rank import is_played
from hdtensor._torch_compat import raw_apply
from hdtensor.collectives import groups, observe, operators
from hdtensor.collectives.split import check_reducible, check_terms
from hdtensor.ops.bound import BoundSpec, SymbolicBound
from hdtensor.ops.open_moves import move_between
from hdtensor.ops.registry import call, moves, special, wrap
from hdtensor.placements.layout import check_top_sizes, contiguous_stride
from hdtensor.placements.sizes import hints, is_symbolic, same
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.redistribute.execute import make_runner
from hdtensor.redistribute.program import compile_plan, partners
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import RedistributePlan
from hdtensor.redistribute.topology import topology_in_use


_library = torch.library.Library("hdtensor", "DEF")
_library.define("redistribute(Tensor x, str dst, SymInt[]? top_sizes, bool reverse) -> Tensor")


def _plain(x: torch.Tensor, dst: str, top_sizes: Any, reverse: bool) -> torch.Tensor:
    raise TypeError(
        f"hdtensor::redistribute got a plain torch.Tensor of shape {tuple(x.shape)}; use "
        f"hdtensor.distribute_tensor(tensor, spec) to cut one."
    )


_library.impl("redistribute", _plain, "CompositeExplicitAutograd")
torch.library.register_fake(
    "hdtensor::redistribute", lambda x, dst, top_sizes, reverse: torch.empty_like(x), lib=_library
)


def move(x: Any, spec: HDSpec, top_sizes: tuple[int, ...] | None, *, reverse: bool = False) -> Any:
    """Bring an ``HDTensor`` to another spec; differentiable.

    Args:
        x: The tensor.
        spec: The new spec, with non-negative dims.
        top_sizes: Exact top extents, or None for the spec's own cut.
        reverse: Whether a backward pass moves it: its messages have their own channel.
    """
    if torch.compiler.is_compiling() or type(x._local_tensor) is not torch.Tensor:
        return _OPERATOR(x, spec.text, top_sizes, reverse)  # traced: the operator is seen whole
    if observe.listeners and not is_played():
        _announce(x._spec, spec, top_sizes, reverse)
    return _move(x, spec, top_sizes, reverse)


def _move_back(grad: Any, bound: BoundSpec, reverse: bool) -> Any:
    """Bring a gradient to where its tensor came from."""
    return move(grad, gradient_spec(bound.spec), bound.top_sizes, reverse=not reverse)


@functools.lru_cache(maxsize=4096)
def gradient_spec(spec: HDSpec) -> HDSpec:
    """Return the spec of a gradient that comes back into a tensor: ``Partial`` becomes ``Replicate``."""
    spec = spec.map_bottom(lambda p: Replicate() if isinstance(p, Partial) else p)
    return spec.replace(top=Replicate()) if isinstance(spec.top, Partial) else spec


def gradient_bound(bound: BoundSpec) -> BoundSpec:
    """Return the layout of a gradient that comes back into a tensor: ``Partial`` becomes ``Replicate``."""
    spec = gradient_spec(bound.spec)
    if spec is bound.spec and not bound.is_copy:
        return bound
    return BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes)


class _Move(torch.autograd.Function):
    """The operator's autograd without the custom-op layers of ``torch.library``, 40 us a call."""

    @staticmethod
    def forward(ctx: Any, x: Any, spec: HDSpec, top_sizes: Any, reverse: bool) -> Any:
        ctx.bound, ctx.reverse = x._spec, reverse
        return call(_OPERATOR, x, spec.text, top_sizes, reverse)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _move_back(grad, ctx.bound, ctx.reverse), None, None, None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.bound, ctx.reverse = inputs[0]._spec, inputs[3]


def _backward(ctx: Any, grad: Any) -> Any:
    return _move_back(grad, ctx.bound, ctx.reverse), None, None, None


torch.library.register_autograd(
    "hdtensor::redistribute", _backward, setup_context=_setup, lib=_library
)


_OPERATOR = torch.ops.hdtensor.redistribute.default
_move = raw_apply(_Move)


@special(_OPERATOR)
def _redistribute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    spec = HDSpec.from_text(args[1])
    if bound.is_symbolic or is_symbolic(args[2] or ()):
        return _open(bound, spec, args[2])
    plan, sizes = _plan(bound, spec, args[2])
    if not plan.steps:
        same = BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, sizes)
        if bound.index is None:
            return lambda x, *_: wrap(x._local_tensor, same)
        return lambda x, *_: wrap(x._local_tensor.view_as(x._local_tensor), same)
    prepare = _Groups(plan, (*bound.spec.subgroups, *spec.subgroups))
    out = BoundSpec.of(spec, bound.shape, contiguous_stride(bound.shape), bound.dtype, sizes)
    for op in compile_plan(plan, bound.rank).reductions:
        check_reducible(op, bound.dtype)
    execute = make_runner(plan, reverse=args[3])
    is_between = spec.top != bound.spec.top or spec.ranks != bound.spec.ranks
    shape = out.local_shape()

    def run(x: Any, dst: str, top_sizes: Any, reverse: bool, kw: Any) -> Any:
        moves[0] += is_between
        if type(x._local_tensor) is torch.Tensor and x._local_tensor.is_meta:
            return wrap(x._local_tensor.new_empty(shape), out)  # no values: nothing to send
        prepare(x._local_tensor)
        with observe.profiled("redistribute"):
            return wrap(execute(x._local_tensor), out)

    return run


def _open(bound: BoundSpec, spec: HDSpec, top_sizes: Any) -> Any:
    """Return what moves a tensor whose sizes a compiler has not fixed."""
    known = bound
    if isinstance(bound, SymbolicBound):
        bound.close_strided()
        known = bound.hinted()
    plan, _ = _plan(known, spec, None if top_sizes is None else hints(top_sizes))
    for op in compile_plan(plan, bound.rank).reductions:
        check_reducible(op, bound.dtype)
    sizes = check_top_sizes(spec, bound.shape, top_sizes)
    if spec is bound.spec and all(map(same, sizes or (), bound.top_sizes or ())):
        return lambda x, *_: wrap(x._local_tensor.view_as(x._local_tensor), bound)
    out = BoundSpec.of(spec, bound.shape, contiguous_stride(bound.shape), bound.dtype, sizes)
    return lambda x, dst, top_sizes, reverse, kw: wrap(
        move_between(x._local_tensor, bound, out, reverse=reverse), out
    )


class _Groups:
    """Has the groups of a plan made before it runs for the first time."""

    __slots__ = ("_are_made", "_plan", "_subgroups")

    def __init__(self, plan: RedistributePlan, subgroups: tuple[Subgroup, ...]) -> None:
        self._plan, self._subgroups, self._are_made = plan, subgroups, False

    def __call__(self, local: torch.Tensor) -> None:
        """Make the groups. Ranks may trace at different moments: where one does, the graph makes those that are missing."""
        if self._are_made or is_played():
            return
        wanted = groups.with_axes(self._plan.rank_sets(), self._subgroups)
        if type(local) is not torch.Tensor:
            operators.make_groups_in_graph(local, wanted, channels=self._plan.has_messages)
            return
        groups.ensure_groups(wanted)
        if self._plan.has_messages:
            groups.ensure_channels()
        self._are_made = True


def _announce(bound: BoundSpec, spec: HDSpec, top_sizes: Any, reverse: bool) -> None:
    """Tell who listens of a redistribute, before any group is made for it."""
    plan, sizes = _plan(bound, spec, top_sizes)
    ranks = partners(plan, bound.rank)
    if ranks:
        cut = "" if sizes is None else f" top_sizes={sizes}"
        observe.announce(
            "redistribute (backward)" if reverse else "redistribute",
            ranks,
            f"{bound!r} -> {spec}{cut}",
        )


def _plan(
    bound: BoundSpec, spec: HDSpec, top_sizes: Any
) -> tuple[RedistributePlan, tuple[int, ...] | None]:
    sizes = check_top_sizes(spec, bound.shape, top_sizes)
    check_terms(spec, bound.dtype)
    plan = resolve(
        bound.spec,
        spec,
        tuple(bound.shape),
        src_top_sizes=bound.top_sizes,
        dst_top_sizes=sizes,
        topology=topology_in_use(),
    )
    return plan, sizes
