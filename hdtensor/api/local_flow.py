"""The way of gradients through a function of local tensors (``local_map``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.shards import term_gradient
from hdtensor.errors import SpecError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import local_graphs
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.tensor import HDTensor


Results = TypeVar("Results")


class Flow:
    """The way of gradients through one call: one node before the function, one behind it.

    Both stand on every rank, also where the function does not run, and the second always leads to the first: so
    gradients exist on all ranks or on none.
    """

    def __init__(self, tensors: list[HDTensor]) -> None:
        self.tensors = list({id(t): t for t in tensors}.values())
        self.gradients: list[BoundSpec] = []
        self._anchor: torch.Tensor | None = None

    def enter(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with local tensors in place of ``HDTensor``s."""
        local: dict[int, torch.Tensor] = {}
        if self.tensors:
            self._anchor, *entered = _Enter.apply(self, *self.tensors)
            local = {id(t): x for t, x in zip(self.tensors, entered, strict=True)}
        return tuple(
            local.get(id(a), a._local_tensor) if isinstance(a, HDTensor) else a for a in args
        )

    def leave(self, bounds: list[BoundSpec | None], results: list[Any]) -> list[Any]:
        """Return the results, those with a layout as ``HDTensor``s."""
        wrapped = [k for k, bound in enumerate(bounds) if bound is not None]
        declared = [bounds[k] for k in wrapped]
        if self._anchor is None:
            outs = tuple(
                new_wrapper(HDTensor, results[k].detach(), b, False)
                for k, b in zip(wrapped, declared, strict=True)
            )
        else:
            outs = _Leave.apply(declared, self._anchor, *[results[k] for k in wrapped])
        results = list(results)
        for k, out in zip(wrapped, outs, strict=True):
            results[k] = out
        return results


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flow: Flow, *tensors: HDTensor) -> tuple[torch.Tensor, ...]:
        ctx.flow = flow
        local_graphs[0] += 1
        anchor = tensors[0]._local_tensor.new_empty(0)
        return anchor, *[t._local_tensor.view_as(t._local_tensor) for t in tensors]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: torch.Tensor, *grads: torch.Tensor) -> tuple[Any, ...]:
        wrapped = zip(grads, ctx.flow.gradients, strict=True)
        return None, *[new_wrapper(HDTensor, grad, bound, False) for grad, bound in wrapped]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bounds: list[BoundSpec], anchor: torch.Tensor, *results: torch.Tensor
    ) -> tuple[HDTensor, ...]:
        ctx.bounds = bounds
        ctx.save_for_backward(anchor)
        ctx.set_materialize_grads(False)
        outs = tuple(
            new_wrapper(HDTensor, result.detach(), bound, False)
            for result, bound in zip(results, bounds, strict=True)
        )
        ctx.mark_non_differentiable(*[o for o in outs if not is_differentiable(o.dtype)])
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: HDTensor | None) -> tuple[Any, ...]:
        terms = [
            None if grad is None else term_gradient(grad, bound)
            for grad, bound in zip(grads, ctx.bounds, strict=True)
        ]
        return None, torch.zeros_like(ctx.saved_tensors[0]), *terms


def is_differentiable(dtype: torch.dtype) -> bool:
    """Return whether tensors of the dtype have gradients."""
    return dtype.is_floating_point or dtype.is_complex


def writes_seen(args: tuple[Any, ...], run: Callable[[], Results]) -> Callable[[], Results]:
    """Return ``run`` such that autograd learns what it writes into the local tensors of ``HDTensor``s among ``args``.

    Autograd counts writes into the ``HDTensor`` itself; uncounted, a backward that needs the old values would silently take
    the new ones.
    """

    local_graphs[0] += 1

    def seen() -> Results:
        tensors = [a for a in args if isinstance(a, HDTensor) and not a.is_inference()]
        before = [t._local_tensor._version for t in tensors]
        results = run()
        for tensor, version in zip(tensors, before, strict=True):
            if tensor._local_tensor._version != version:
                torch.autograd.graph.increment_version(tensor)
        return results

    return seen


def gradient_spec(i: int, bound: BoundSpec, outs: list[HDSpec]) -> HDSpec:
    """Return how the local gradients of an argument make the whole one.

    Args:
        i: The argument's position, for the error.
        bound: Its layout.
        outs: The results' specs.

    Raises:
        SpecError: If the layouts do not tell.
    """
    spec = bound.spec
    top = spec.top
    if spec.num_subgroups > 1:
        top = _gradient_placement(i, bound, top, [o.top for o in outs])
    groups = []
    for index, group in enumerate(spec.subgroups):
        placements = [
            placement
            if size == 1
            else _gradient_placement(
                i, bound, placement, [o.subgroups[index].placements[axis] for o in outs]
            )
            for axis, (placement, size) in enumerate(
                zip(group.placements, group.mesh_shape, strict=True)
            )
        ]
        groups.append(Subgroup(group.ranks, placements, group.mesh_shape))
    return HDSpec(groups, top, spec.top_ratio if checks.is_cut(top) else None)


def _gradient_placement(
    i: int, bound: BoundSpec, placement: Placement, outs: list[Placement]
) -> Placement:
    if isinstance(placement, Partial):
        return Replicate()
    are_whole = {isinstance(out, Replicate) for out in outs}
    if checks.is_cut(placement) or are_whole <= {True}:
        return placement
    if are_whole == {False}:
        return Partial()
    raise SpecError(
        f"local_map: argument {i} ({bound}) is replicated where some results are whole and others cut or pending, so "
        f"that its local gradients are neither whole nor terms. Pass in_grad_specs, or map the results one by one."
    )
