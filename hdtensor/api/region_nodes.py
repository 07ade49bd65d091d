"""Autograd nodes of regions: at their border, and in place of a skipped module."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hdtensor._torch_compat import new_wrapper, pytree, raw_apply
from hdtensor.api.points import Points
from hdtensor.api.shapes import LayoutRule
from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.generate import empty_like_local
from hdtensor.ops.special.move import gradient_bound, move
from hdtensor.ops.special.random import draw_key
from hdtensor.tensor import HDTensor


#: Makes a module's result of its tensors and Nones.
Rebuild = Callable[[tuple[Any, ...]], Any]


@dataclass(slots=True)
class Layout:
    """What is known of a module for one layout of its inputs."""

    state: str = "new"
    tries: int = 0
    rebuild: Rebuild = operator.itemgetter(0)
    points: Points = field(default_factory=Points)
    draws: int = 0
    shapes: LayoutRule = field(default_factory=LayoutRule)
    num_watched: int = 0
    watched: dict[Any, BoundSpec] = field(default_factory=dict)
    start_events: int = 0
    backward_events: int = 0
    sizes: dict[Any, tuple[BoundSpec | None, ...]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # parameters whose gradient was watched

    def unused(self) -> set[int]:
        """Return the parameters that the recorded pass's backward gave no gradient; none before it ended."""
        reached = {place for kind, place in self.watched if kind == "p"}
        return self.asked - reached if reached else set()


def _refuse_second_derivatives() -> None:
    """Refuse a backward that shall itself be differentiated: the nodes carry values, not their history.

    Raises:
        DeductionError: If autograd records.
    """
    if torch.is_grad_enabled():
        raise DeductionError(
            "second derivatives (create_graph=True) through a module that runs as a whole, because earlier passes "
            "took first ones only. Pass use_regions=False to parallelize()."
        )


class _EnterNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: HDTensor, grad_bound: BoundSpec) -> torch.Tensor:
        ctx.bound = BoundSpec.of(
            grad_bound.spec, x._spec.shape, x._spec.stride, x._spec.dtype, x._spec.top_sizes
        )
        return x._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[HDTensor, None]:
        _refuse_second_derivatives()
        return new_wrapper(HDTensor, grad, ctx.bound, False), None


class _LeaveNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, bound: BoundSpec, grad_bound: BoundSpec) -> HDTensor:
        ctx.spec = grad_bound.spec
        return new_wrapper(HDTensor, plain.detach(), bound, False)

    @staticmethod
    def backward(ctx: Any, grad: HDTensor) -> tuple[torch.Tensor, None, None]:
        _refuse_second_derivatives()
        if grad._spec.spec is not ctx.spec:
            grad = move(grad, ctx.spec, grad.top_sizes)
        return grad._local_tensor, None, None


class _SkipNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outs: tuple[BoundSpec, ...],
        note: Callable[[], None],
        anchor: torch.Tensor | None,
        *inputs: HDTensor,
    ) -> Any:
        ctx.note, ctx.bounds = note, [x._spec for x in inputs]
        ctx.device = device = inputs[0]._local_tensor.device
        if len(outs) == 1:
            return _empty(outs[0], device)
        return tuple(_empty(bound, device) for bound in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_second_derivatives()
        ctx.note()
        needed, device = ctx.needs_input_grad, ctx.device
        given = [
            _empty(gradient_bound(bound), device) if needed[i + 3] else None
            for i, bound in enumerate(ctx.bounds)
        ]
        return (None, None, None, *given)


def _empty(bound: BoundSpec, device: torch.device) -> HDTensor:
    return new_wrapper(HDTensor, empty_like_local(bound.dtype, device), bound, False)


def give_gradient(parameter: HDTensor) -> None:
    """Give a parameter that this rank holds no part of the empty gradient that is due, if it has none."""
    if parameter.requires_grad and parameter.grad is None:
        parameter.grad = _empty(gradient_bound(parameter._spec), parameter._local_tensor.device)


_enter = raw_apply(_EnterNode)


_leave_node = raw_apply(_LeaveNode)


_skip_node = raw_apply(_SkipNode)


class Enter:
    """Takes inputs from ``HDTensor``s to plain tensors, with a node where a gradient flows."""

    __slots__ = ("layout", "position")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.position = -1

    def __call__(self, x: HDTensor) -> torch.Tensor:
        self.position += 1
        if not x.requires_grad:
            return x._local_tensor
        return _enter(x, self.layout.watched["i", self.position])


def local_of(x: HDTensor) -> torch.Tensor:
    """Return the local tensor, outside autograd."""
    return x._local_tensor


def leave(plain: torch.Tensor, bound: Any, grad_bound: BoundSpec | None) -> HDTensor:
    """Wrap a plain result again, with a node where a gradient flows."""
    if grad_bound is not None and plain.requires_grad:
        return _leave_node(plain, bound, grad_bound)
    return new_wrapper(HDTensor, plain, bound, False)


def skip(
    layout: Layout,
    inputs: list[HDTensor],
    outs: tuple[BoundSpec | None, ...],
    parameters: Sequence[torch.Tensor],
    note: Callable[[], None],
) -> Any:
    """Stand in for a module that this rank holds no part of.

    Args:
        layout: What is known of the module for these inputs.
        inputs: The ``HDTensor``s among its arguments.
        outs: Layout of each result, None for one that is None.
        parameters: The module's; they are no inputs of the node.
        note: Called when backward passes the module.
    """
    for _ in range(layout.draws):
        draw_key()
    anchor = None
    if not any(x.requires_grad for x in inputs) and any(p.requires_grad for p in parameters):
        anchor = _anchor()
    held = tuple([out for out in outs if out is not None])
    made = _skip_node(held, note, anchor, *inputs)
    following = iter(made if isinstance(made, tuple) else (made,))
    return layout.rebuild(tuple([None if out is None else next(following) for out in outs]))


@functools.cache
def _anchor() -> torch.Tensor:
    """A leaf that makes a node require grad; it never receives one."""
    return torch.empty(0, requires_grad=True)


def key_of(value: Any, inputs: list[HDTensor]) -> Any:
    """Return an argument's part of a layout's key; collect the ``HDTensor``s.

    Sizes are left out of ``HDTensor``s; other tensors count by type and number of dims, constants by value.
    """
    kind = type(value)
    if kind is HDTensor:
        inputs.append(value)
        return (value._spec.spec, len(value._spec.shape), value._spec.dtype, value.requires_grad)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is tuple or kind is list:
        return (kind, *[key_of(v, inputs) for v in value])
    if kind is dict:
        return tuple([(k, key_of(v, inputs)) for k, v in value.items()])
    if isinstance(value, torch.Tensor):
        return (
            kind,
            value.ndim,
            value.dtype,
            value.requires_grad,
            tuple(n == 1 for n in value.shape),
        )
    if isinstance(value, torch.dtype | torch.device | slice):
        return str(value)
    return [value]  # unhashable on purpose: an object that may change or be changed


def tensors_in(value: Any) -> list[HDTensor]:
    """Return the tensors in what a module is called with, in the order in which ``replace_tensors`` meets them."""
    found: list[HDTensor] = []

    def note(x: HDTensor) -> HDTensor:
        found.append(x)
        return x

    replace_tensors(value, note)
    return found


def replace_tensors(value: Any, change: Any) -> Any:
    """Return the arguments with ``change(x)`` for every ``HDTensor``."""
    kind = type(value)
    if kind is HDTensor:
        return change(value)
    if kind is tuple or kind is list:
        return kind([replace_tensors(v, change) for v in value])
    if kind is dict:
        return {k: replace_tensors(v, change) for k, v in value.items()}
    return value


def flatten_result(result: Any) -> tuple[tuple[Any, ...], Rebuild]:
    """Return the leaves of a module's result, and what makes such a result of leaves again.

    Tensors and tuples are the common ones; Hugging Face models return mappings, which they register with torch's pytree.
    """
    kind = type(result)
    if result is None or isinstance(result, torch.Tensor):
        return (result,), operator.itemgetter(0)
    if kind is tuple and not any(isinstance(r, tuple | list | dict) for r in result):
        return result, tuple
    leaves, structure = pytree.tree_flatten(result)
    return tuple(leaves), functools.partial(_unflatten, structure)


def _unflatten(structure: pytree.TreeSpec, leaves: tuple[Any, ...]) -> Any:
    return pytree.tree_unflatten(leaves, structure)
