"""Bringing gradients home: after ``backward()`` each is in its parameter's spec, without a call by the user.

Backward leaves the gradient of a parameter that subgroups share as top ``Partial``: each has its own batch's term. When
the engine ends, all terms are summed together, bucket by bucket in registration order, so that
``loss.backward(); optimizer.step()`` works as with DDP or FSDP.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from hdtensor._torch_compat import at_backward_end, backward_id
from hdtensor.collectives import observe
from hdtensor.errors import PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import wrap
from hdtensor.ops.special.move import move
from hdtensor.placements import HDSpec, checks
from hdtensor.placements.layout import contiguous_stride
from hdtensor.redistribute.execute import execute_many
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import (
    RedistributePlan,
)
from hdtensor.tensor import HDTensor, accumulated_grad


class GradientSync:
    """Watches parameters and redistributes their gradients once a backward ends.

    Attributes:
        parameters: In registration order, the order in which collectives are launched on every rank.
        enabled: False inside ``no_sync``.
        is_deferred: Whether the last backward was inside of it, and nobody asked for the gradients since.
        ends_graphs: Whether no backward of a rank passes a module that it skips.
        is_plain: Whether plain tensors stand in for the parameters that this rank has a part of.
    """

    ends_graphs = False
    is_plain = False

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters: list[torch.Tensor] = []
        self.enabled = True
        self.is_deferred = False
        self._pending: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, torch.Tensor] = {}
        self._backward: int | None = None  # the backward at whose end ``flush`` is called
        self._order: dict[int, int] = {}
        self._watched: list[HDTensor] = []
        self._identities: list[int] = []
        self._accumulators: list[Any] = []
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these parameters from now on, in this order; other tensors among them are left alone."""
        self.parameters = list(parameters)
        self._order = {id(p): i for i, p in enumerate(self.parameters)}
        self._accumulators = []  # first of all: torch poisons those of tensors that it swaps
        self._watched = [
            p
            for p in self.parameters
            if isinstance(p, HDTensor) and (p.is_floating_point() or p.is_complex())
        ]
        self._accumulators = [self._watch(p) for p in self._watched]
        self._identities = [p._cdata for p in self._watched]

    def is_current(self) -> bool:
        """Return whether no parameter's inside was swapped (``torch.utils.swap_tensors``), which takes its hooks away."""
        return [p._cdata for p in self._watched] == self._identities

    def __reduce__(self) -> Any:
        """Refuse: copies would still watch this model's parameters.

        Raises:
            PlanError: Always; it names what to do.
        """
        raise PlanError(
            "a parallelized model cannot be pickled as a whole, nor a part of it copied. Copy all of it with "
            "copy.deepcopy(model); save its state_dict()."
        )

    def _watch(self, parameter: torch.Tensor) -> Any:
        """Have the engine call this object around accumulation, also if a frozen parameter thaws later."""
        needs_grad = parameter.requires_grad
        parameter.requires_grad_()
        hooks: Any = parameter._post_accumulate_grad_hooks
        if hooks is not None:
            # What was swapped in has them, but does not call them until they are set again.
            parameter._post_accumulate_grad_hooks = hooks
        if hooks is None or self.note not in hooks.values():
            parameter.register_post_accumulate_grad_hook(self.note)
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
        accumulator.register_prehook(functools.partial(self._make_way, parameter))
        parameter.requires_grad_(needs_grad)
        return accumulator  # its hook lives as long as it is referred to

    def _make_way(self, parameter: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> None:
        """Set aside a gradient that the next one cannot be added to in place: it is home, the next one pending."""
        old, new = parameter.grad, grads[0]
        if old is None or new is None or old._spec.spec is new._spec.spec:  # type: ignore[attr-defined]
            return
        self._waiting[id(parameter)] = old
        parameter.grad = None

    def note(self, parameter: torch.Tensor) -> None:
        """Remember that a parameter's gradient changed; called by the engine."""
        old = self._waiting.pop(id(parameter), None)
        if old is not None and parameter.grad is not None:
            parameter.grad = old + parameter.grad
        grad = accumulated_grad(parameter)
        if grad is None:  # the engine calls hooks, too, where no gradient came
            return
        assert isinstance(grad, HDTensor), f"the gradient of an HDTensor is one, got {type(grad)}"
        if grad._spec.spec is not parameter._spec.spec:  # type: ignore[attr-defined]
            self._pending[id(parameter)] = parameter
        self.note_passed()

    def note_passed(self) -> None:
        """Have what is pending brought home by this backward, which may bring no more of it to this rank: one that skips
        a module now may have earlier taken its part in it, inside of ``no_sync``.
        """
        self.is_deferred = not self.enabled
        if self.enabled and self._pending:
            self._queue()

    def _queue(self) -> None:
        """Have ``flush`` called once at the end of this backward; one that failed before does not count."""
        if self._backward != backward_id():
            self._backward = backward_id()
            at_backward_end(self.flush)

    def flush(self) -> None:
        """Redistribute all noted gradients; every rank that holds one of them takes part."""
        self._backward = None
        if not self.enabled:
            return
        self.is_deferred = False
        pending: list[Any] = [
            self._pending[i] for i in sorted(self._pending, key=lambda i: self._order.get(i, -1))
        ]
        self._pending.clear()
        work = []
        with observe.because("gradients"), observe.profiled("gradient_sync"):
            for parameter in pending:
                grad = parameter.grad
                if grad is None:
                    continue
                if not grad.requires_grad:
                    work.append((parameter, gradient_plan(grad._spec, parameter._spec)))
                    continue
                with torch.enable_grad():  # backward(create_graph=True): the sum has a history too
                    parameter.grad = move(grad, parameter.spec, parameter.top_sizes, reverse=True)
            moved = execute_many(
                [plan for _, plan in work],
                [p.grad._local_tensor for p, _ in work],
                donate=True,
            )
        for (parameter, _), local in zip(work, moved, strict=True):
            parameter.grad = wrap(local, _home(parameter._spec, parameter.grad.dtype))


def gradient_plan(grad: BoundSpec, parameter: BoundSpec) -> RedistributePlan:
    """Return the plan that brings a gradient to its parameter's spec."""
    return resolve(
        grad.spec,
        parameter.spec,
        tuple(grad.shape),
        src_top_sizes=grad.top_sizes,
        dst_top_sizes=parameter.top_sizes,
    )


def pending_spec(parameter: HDSpec, inputs: HDSpec) -> HDSpec:
    """Return the spec in which a parameter's gradient comes: a term of every rank that has its own part of the inputs."""
    cut = {
        (group.ranks, axis)
        for group in inputs.subgroups
        for axis, placement in enumerate(group.placements)
        if checks.is_cut(placement)
    }
    groups_ = [
        g.with_placements(
            [Partial() if (g.ranks, i) in cut else p for i, p in enumerate(g.placements)]
        )
        for g in parameter.subgroups
    ]
    return parameter.replace(subgroups=tuple(groups_), top=Partial())


def _home(parameter: BoundSpec, dtype: torch.dtype) -> BoundSpec:
    shape = parameter.shape
    return BoundSpec.of(parameter.spec, shape, contiguous_stride(shape), dtype, parameter.top_sizes)


@contextlib.contextmanager
def paused(sync: GradientSync) -> Iterator[None]:
    """Leave gradients where backward puts them; the first backward outside brings all of them home."""
    before = sync.enabled
    sync.enabled = False
    try:
        yield
    finally:
        sync.enabled = before
