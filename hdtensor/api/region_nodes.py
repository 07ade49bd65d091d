"""Autograd nodes at the border of regions.

They can be differentiated any number of times. A gradient of ``x`` is laid out as the recorded pass showed; the cotangent of
this gradient is a direction in which ``x`` may change, so that it is laid out as ``x`` itself. What the plain operators make
of both has the first layout again: it is a derivative of the gradient along that direction, and what holds of a function
for all values (rows of this rank, terms of one sum, the same on all) holds of its derivatives. So a node's backward is the
other node with the two layouts in exchange.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hdtensor._torch_compat import keeps_graph, new_wrapper, pytree, raw_apply, use_count
from hdtensor.api.points import Points
from hdtensor.api.region_leaf import Places, local_of
from hdtensor.api.shapes import LayoutRule
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import LocalGraph
from hdtensor.ops.special.move import gradient_bound, move
from hdtensor.placements.spec import HDSpec
from hdtensor.tensor import HDTensor


#: Makes a module's result of its tensors and Nones.
Rebuild = Callable[[tuple[Any, ...]], Any]


#: Exact sizes a layout remembers; past it the table starts anew.
MAX_SIZES = 4096

#: ``plain_leaf(parameter, spec)``: a plain leaf that collects the parameter's gradients of a spec by itself, or None.
PlainLeaf = Callable[[HDTensor, HDSpec], torch.Tensor | None]


class Flow:
    """Parameters whose gradients leave a module together.

    Attributes:
        numbers: Their places among the module's parameters.
    """

    __slots__ = ("_bounds", "_layouts", "_specs", "numbers")

    def __init__(self, numbers: list[int], specs: list[HDSpec]) -> None:
        self.numbers = numbers
        self._specs = specs
        self._layouts: list[BoundSpec] = []
        self._bounds: tuple[BoundSpec, ...] = ()

    def leaves(
        self, parameters: Sequence[HDTensor], plain_leaf: PlainLeaf
    ) -> list[torch.Tensor] | None:
        """Return the parameters' plain leaves, if each has one."""
        found = []
        for i, spec in zip(self.numbers, self._specs, strict=True):
            leaf = plain_leaf(parameters[i], spec)
            if leaf is None:
                return None
            found.append(leaf)
        return found

    def bounds_of(self, tensors: Sequence[HDTensor]) -> tuple[BoundSpec, ...]:
        """Return the layouts of the parameters' gradients."""
        layouts = [x._spec for x in tensors]
        if layouts != self._layouts:
            pairs = zip(layouts, self._specs, strict=True)
            self._layouts, self._bounds = layouts, tuple([_bound_as(b, spec) for b, spec in pairs])
        return self._bounds


@dataclass(slots=True)
class Layout:
    """What is known of a module for one layout of its inputs."""

    state: str = "new"
    tries: int = 0
    has_kept: bool = False  # a recorded pass changed what the module keeps
    rebuild: Rebuild = operator.itemgetter(0)
    points: Points = field(default_factory=Points)
    draws: int = 0
    shapes: LayoutRule = field(default_factory=LayoutRule)
    num_watched: int = 0
    watched: dict[Any, BoundSpec] = field(default_factory=dict)
    start_events: int = 0
    backward_events: int = 0
    sizes: dict[Any, tuple[BoundSpec | None, ...]] = field(default_factory=dict)
    needs_grad: list[bool] = field(default_factory=list)  # of the parameters, when it was checked
    asked: set[int] = field(default_factory=set)  # parameters whose gradient was watched
    flows: list[Flow] | None = None  # see enter_parameters

    def unused(self) -> set[int]:
        """Return the parameters that the recorded pass's backward gave no gradient; none before it ended."""
        reached = {place for kind, place in self.watched if kind == "p"}
        return self.asked - reached if reached else set()

    def observe(self, inputs: Sequence[HDTensor], result: Any) -> None:
        """Note what sizes come out where these go in."""
        outs, _ = flatten_result(result)
        bounds = tuple(o._spec if isinstance(o, HDTensor) else None for o in outs)
        self.shapes.observe([x._spec for x in inputs], bounds)
        self._remember(inputs, bounds)

    def derive(self, inputs: Sequence[HDTensor]) -> tuple[BoundSpec | None, ...] | None:
        """Return the layouts of what comes out, None if that is not known."""
        outs = self.sizes.get(tuple([x._spec for x in inputs]))
        if outs is None:
            outs = self.shapes.derive([x._spec for x in inputs])
            if outs is not None:
                self._remember(inputs, outs)
        return outs

    def _remember(self, inputs: Sequence[HDTensor], outs: Any) -> None:
        if len(self.sizes) >= MAX_SIZES:
            self.sizes.clear()
        self.sizes[tuple([x._spec for x in inputs])] = outs


class _EnterNode(torch.autograd.Function):
    """From ``HDTensor``s to plain local tensors. The gradients come in layouts that are known."""

    @staticmethod
    def forward(ctx: Any, bounds: tuple[BoundSpec, ...], *tensors: HDTensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.bounds = bounds
        ctx.homes = [x._spec.spec for x in tensors]
        ctx.is_leaf = tensors[0].is_leaf
        ctx.graph = LocalGraph()
        plain = tuple([x._local_tensor.detach() for x in tensors])
        return plain if len(plain) > 1 else plain[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.is_leaf:
            grads = _own(grads)
        if not keeps_graph():  # what was saved is freed
            ctx.graph = None
        records = torch.is_grad_enabled()
        wrapped = [None]
        for grad, bound, home in zip(grads, ctx.bounds, ctx.homes, strict=True):
            if grad is None:
                wrapped.append(None)
            elif records and grad.requires_grad:
                wrapped.append(_leave_node(grad, bound, home))
            else:
                wrapped.append(new_wrapper(HDTensor, grad, bound, False))
        return tuple(wrapped)


class _LeaveNode(torch.autograd.Function):
    """From a plain local tensor to an ``HDTensor``. The gradient is brought to a known layout."""

    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, bound: BoundSpec, spec: HDSpec) -> HDTensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.home = spec, bound.spec
        return new_wrapper(HDTensor, plain.detach(), bound, False)

    @staticmethod
    def backward(ctx: Any, grad: HDTensor | None) -> tuple[torch.Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        if grad._spec.spec is not ctx.spec:
            grad = move(grad, ctx.spec, grad.top_sizes)
        if torch.is_grad_enabled() and grad.requires_grad:
            return _enter_node((_bound_as(grad._spec, ctx.home),), grad), None, None
        return grad._local_tensor, None, None


def _bound_as(bound: BoundSpec, spec: HDSpec) -> BoundSpec:
    """Return the layout of a gradient in this spec."""
    return BoundSpec.of(spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes)


def _own(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Return gradients that nothing else refers to, as what keeps them may write into them."""
    seen: set[int] = set()
    owned = []
    for grad in grads:
        if grad is not None:
            if use_count(grad) > 1 or id(grad) in seen or not grad.is_contiguous():
                grad = grad.clone(memory_format=torch.contiguous_format)
            seen.add(id(grad))
        owned.append(grad)
    return tuple(owned)


_enter_node = raw_apply(_EnterNode)


_leave_node = raw_apply(_LeaveNode)


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
        spec = self.layout.watched["i", self.position].spec
        return _enter_node((_bound_as(x._spec, spec),), x)


def enter(x: HDTensor) -> torch.Tensor:
    """Return a tensor's plain local tensor, with a node where a gradient flows: it comes back in the tensor's layout."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x._local_tensor
    plain: torch.Tensor = _enter_node((gradient_bound(x._spec),), x)
    return plain


def enter_parameters(
    layout: Layout, places: Places, plain_leaf: PlainLeaf | None
) -> list[torch.Tensor]:
    """Return parameters' plain local tensors, with a node for each group of them where gradients flow.

    Args:
        layout: What the module was recorded to do.
        places: Its parameters.
        plain_leaf: Gives leaves that need no node.
    """
    plain = list(map(local_of, places.parameters))
    if not torch.is_grad_enabled():
        return plain
    if layout.flows is None:
        layout.flows = []
        for group in places.groups:
            flowing = [i for i in group if places.parameters[i].requires_grad]
            if flowing:
                layout.flows.append(Flow(flowing, [layout.watched["p", i].spec for i in flowing]))
    for flow in layout.flows:
        if plain_leaf is not None:
            leaves = flow.leaves(places.parameters, plain_leaf)
            if leaves is not None:
                for i, leaf in zip(flow.numbers, leaves, strict=True):
                    plain[i] = leaf
                continue
        tensors = [places.parameters[i] for i in flow.numbers]
        entered = _enter_node(flow.bounds_of(tensors), *tensors)
        for i, x in zip(flow.numbers, entered if len(tensors) > 1 else (entered,), strict=True):
            plain[i] = x
    return plain


def leave(plain: torch.Tensor, bound: Any, grad_bound: BoundSpec | None) -> HDTensor:
    """Wrap a plain result again, with a node where a gradient flows."""
    if grad_bound is not None and plain.requires_grad:
        return _leave_node(plain, bound, grad_bound.spec)
    return new_wrapper(HDTensor, plain, bound, False)


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
