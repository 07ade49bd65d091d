"""The end of a step: gradients that each lane summed are summed over lanes, and divided by what counted everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.gradients import gradient_plan
from hdtensor.collectives import observe
from hdtensor.ops.bound import BoundSpec
from hdtensor.pipeline.runtime.parameters import LaneParameters
from hdtensor.placements.layout import contiguous_stride
from hdtensor.redistribute.execute import execute_many
from hdtensor.tensor import HDTensor


class SilentSync:
    """What regions tell of gradients while a lane runs: nothing leaves a stage before the end of the step."""

    def note(self, parameter: torch.Tensor) -> None:
        """Do nothing."""

    def note_passed(self) -> None:
        """Do nothing."""


def bring_home(parameters: LaneParameters, scale: float) -> None:
    """Give every parameter the sum of all lanes' gradients, times a factor; every rank that holds one calls it.

    Args:
        parameters: The lane's leaves; their gradients are taken away.
        scale: One over the number of everything that counted.
    """
    work = [(p, leaves) for p, leaves in parameters.leaves if p.requires_grad and p.is_local]
    in_stage = [(leaf, leaf.grad) for _, leaves in work for leaf in leaves if leaf.is_local]
    found = [(leaf, grad) for leaf, grad in in_stage if grad is not None and grad.spec != leaf.spec]
    with observe.because("gradients"), observe.profiled("gradient_sync"):
        home = execute_many(
            [gradient_plan(grad._spec, leaf._spec) for leaf, grad in found],
            [grad._local_tensor for _, grad in found],
            donate=True,
        )
        local_of = {id(leaf): local for (leaf, _), local in zip(found, home, strict=True)}
        terms = [_term(p, leaves, local_of) for p, leaves in work]
        plans = [gradient_plan(_pending(p), p._spec) for p, _ in work]
        total = execute_many(plans, terms, donate=True)
    torch._foreach_mul_(total, scale)
    for (parameter, _), local in zip(work, total, strict=True):
        _add(parameter, local.to(parameter.dtype))
    parameters.drop_gradients()
    for parameter, _ in parameters.leaves:
        if parameter.requires_grad and not parameter.is_local:
            _add(parameter, parameter._local_tensor.detach())


def _term(parameter: HDTensor, leaves: list[HDTensor], local_of: dict[int, torch.Tensor]) -> Any:
    """Return this rank's term: what its uses of the parameter sum to; zeros without any."""
    total = None
    for leaf in leaves:
        if leaf.is_local and leaf.grad is not None:
            local = local_of.get(id(leaf))
            local = leaf.grad._local_tensor if local is None else local
            total = local if total is None else total + local
    if total is None:
        return torch.zeros_like(parameter._local_tensor, dtype=leaves[0].grad_dtype)
    return total.contiguous()


def _pending(parameter: HDTensor) -> BoundSpec:
    return parameter._spec.with_spec(parameter.spec.replace(top=Partial()))


def _add(parameter: HDTensor, local: torch.Tensor) -> None:
    shape = parameter._spec.shape
    bound = BoundSpec.of(
        parameter.spec, shape, contiguous_stride(shape), local.dtype, parameter.top_sizes
    )
    new = new_wrapper(HDTensor, local, bound, False)
    old = parameter.grad
    parameter.grad = new if old is None else old + new
