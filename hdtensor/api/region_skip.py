"""The autograd node in place of a module that this rank holds no part of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hdtensor._torch_compat import backward_reaches, new_wrapper, raw_apply
from hdtensor.api.implicit import implicit_replication
from hdtensor.api.region_leaf import Places
from hdtensor.api.region_nodes import Layout, flatten_result, replace_tensors
from hdtensor.api.region_watch import op_by_op
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.generate import empty_like_local
from hdtensor.ops.special.move import gradient_bound
from hdtensor.ops.special.random import draw_key
from hdtensor.tensor import HDTensor


def stand_ins(
    layout: Layout,
    inputs: Sequence[HDTensor],
    places: Places,
    outs: tuple[BoundSpec | None, ...],
) -> tuple[HDTensor | None, ...]:
    """Return what a skipped module gives, without a node: for programs in which no backward of this rank passes it.

    Args:
        layout: What is known of the module for these inputs.
        inputs: The ``HDTensor``s among its arguments.
        places: Its parameters.
        outs: Layout of each result, None for one that is None.
    """
    for _ in range(layout.draws):
        draw_key()
    needs_grad = torch.is_grad_enabled() and (
        any(x.requires_grad for x in inputs) or any(p.requires_grad for p in places.parameters)
    )
    device = inputs[0]._local_tensor.device
    return tuple(
        [
            None
            if out is None
            else new_wrapper(
                HDTensor,
                empty_like_local(out.dtype, device),
                out,
                needs_grad and out.dtype.is_floating_point,
            )
            for out in outs
        ]
    )


@dataclass(slots=True)
class Skipped:
    """One call of a module that is skipped.

    Attributes:
        layout: What is known of the module for these inputs.
        forward: The module's own.
        args: Its arguments.
        kwargs: Its named arguments.
        inputs: The ``HDTensor``s among both.
        places: The module's parameters.
        note: Called when a backward that accumulates all gradients passes the module.
    """

    layout: Layout
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[HDTensor]
    places: Places
    note: Callable[[], None]

    def run(self, outs: tuple[BoundSpec | None, ...]) -> Any:
        """Return empty results.

        Args:
            outs: Layout of each result, None for one that is None.
        """
        for _ in range(self.layout.draws):
            draw_key()
        held = tuple([out for out in outs if out is not None])
        tensors = (*self.inputs, *self.places.parameters)
        anchor = _anchor()[0] if any(x.requires_grad for x in tensors) else None
        made = _skip_node(self, held, _autocasts(), len(self.inputs), anchor, *tensors)
        following = iter(made if isinstance(made, tuple) else (made,))
        return self.layout.rebuild(
            tuple([None if out is None else next(following) for out in outs])
        )

    def empty_gradients(self, needed: Sequence[bool]) -> list[HDTensor | None]:
        """Return gradients of inputs and parameters, those that are needed."""
        keys = [("i", k) for k in range(len(self.inputs))]
        keys += [("p", i) for i in range(len(self.places.parameters))]
        unused = self.layout.unused()
        given: list[HDTensor | None] = []
        for (kind, k), x, is_needed in zip(
            keys, (*self.inputs, *self.places.parameters), needed, strict=True
        ):
            if not is_needed or (kind == "p" and k in unused):
                given.append(None)
                continue
            given.append(empty_gradient(x, self.layout.watched.get((kind, k))))
        return given

    def differentiate(
        self, grads: Sequence[HDTensor | None], needed: Sequence[bool], autocasts: Sequence[Any]
    ) -> list[HDTensor | None]:
        """Return gradients that have a history: what depends on what is seen by calling the module op by op.

        Nothing is computed, as this rank holds no part of it, and nothing is sent.
        """
        aliases = [
            x.view_as(x) if n else x
            for x, n in zip((*self.inputs, *self.places.parameters), needed, strict=True)
        ]
        num_inputs = len(self.inputs)
        following = iter(aliases[:num_inputs])
        args = replace_tensors(self.args, lambda _: next(following))
        kwargs = replace_tensors(self.kwargs, lambda _: next(following))
        with contextlib.ExitStack() as stack:
            for context in (*autocasts, implicit_replication(), op_by_op(), _kept_generator()):
                stack.enter_context(context)
            stack.enter_context(self.places.filled(aliases[num_inputs:]))
            outs = flatten_result(self.forward(*args, **kwargs))[0]
        pairs = zip([o for o in outs if o is not None], grads, strict=True)
        begun = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
        asked = [i for i, n in enumerate(needed) if n]
        found = torch.autograd.grad(
            [o for o, _ in begun],
            [aliases[i] for i in asked],
            [g for _, g in begun],
            create_graph=True,
            allow_unused=True,
        )
        given: list[Any] = [None] * len(aliases)
        for i, grad in zip(asked, found, strict=True):
            given[i] = grad
        return given


class _SkipNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        skipped: Skipped,
        outs: tuple[BoundSpec, ...],
        autocasts: Sequence[Any],
        num_inputs: int,
        anchor: torch.Tensor | None,
        *tensors: HDTensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.skipped, ctx.autocasts, ctx.num_inputs = skipped, autocasts, num_inputs
        device = tensors[0]._local_tensor.device
        if len(outs) == 1:
            return _empty(outs[0], device)
        return tuple(_empty(bound, device) for bound in outs)

    @staticmethod
    def backward(ctx: Any, *grads: HDTensor | None) -> Any:
        skipped, needed = ctx.skipped, list(ctx.needs_input_grad[5:])
        if torch.is_grad_enabled():
            return (*[None] * 5, *skipped.differentiate(grads, needed, ctx.autocasts))
        if backward_reaches(_anchor()[1]):
            # Parameters get their empty gradients when somebody looks at them.
            skipped.note()
            needed[ctx.num_inputs :] = [False] * (len(needed) - ctx.num_inputs)
        return (*[None] * 5, *skipped.empty_gradients(needed))


_skip_node = raw_apply(_SkipNode)


@functools.cache
def _anchor() -> tuple[torch.Tensor, Any]:
    """Return a leaf that nobody can ask the gradient of, and its node; it never receives one."""
    leaf = torch.empty(0, requires_grad=True)
    return leaf, torch.autograd.graph.get_gradient_edge(leaf).node


def _empty(bound: BoundSpec, device: torch.device) -> HDTensor:
    return new_wrapper(HDTensor, empty_like_local(bound.dtype, device), bound, False)


def empty_gradient(x: HDTensor, seen: BoundSpec | None) -> HDTensor:
    """Return the empty gradient of a tensor that this rank holds no part of.

    Args:
        x: The tensor.
        seen: The layout in which another gradient of it came; None for that of the tensor.
    """
    bound = gradient_bound(x._spec)
    if seen is not None:
        bound = BoundSpec.of(seen.spec, bound.shape, bound.stride, bound.dtype, bound.top_sizes)
    return _empty(bound, x._local_tensor.device)


def give_gradient(parameter: HDTensor) -> None:
    """Give a parameter that this rank holds no part of the empty gradient that is due, if it has none."""
    if parameter.requires_grad and parameter.grad is None:
        parameter.grad = empty_gradient(parameter, None)


def _autocasts() -> list[Any]:
    """Return what brings the present state of autocast back."""
    return [
        torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]


@contextlib.contextmanager
def _kept_generator() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
