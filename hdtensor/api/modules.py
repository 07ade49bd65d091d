"""``distribute_module``: a module's parameters by a function of the user's, as DTensor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.factories import spec_of
from hdtensor.errors import SpecError
from hdtensor.placements.forms import SpecLike, also_named
from hdtensor.placements.spec import HDSpec
from hdtensor.tensor import HDTensor


@also_named(device_mesh="spec")
def distribute_module(
    module: torch.nn.Module,
    spec: SpecLike | None = None,
    partition_fn: Callable[[str, torch.nn.Module, Any], object] | None = None,
    input_fn: Callable[[torch.nn.Module, Any, Any], Any] | None = None,
    output_fn: Callable[[torch.nn.Module, Any, Any], Any] | None = None,
) -> torch.nn.Module:
    """Distribute a module's parameters and buffers in place, and return it; every rank of the world calls it.

    What ``partition_fn`` leaves plain is replicated. A parameter that several modules share stays one. A plan and
    ``parallelize`` do more: redistribute points, gradient synchronisation, regions.

    Args:
        module: The module.
        spec: Where: a ``DeviceMesh`` as for DTensor, or any form that ``distribute_tensor`` takes. The three functions get
            it as they were given it.
        partition_fn: ``(name, submodule, spec)``, called for every submodule: registers parameters made by
            ``distribute_tensor``.
        input_fn: ``(module, inputs, spec)``, a forward pre-hook of the module.
        output_fn: ``(module, outputs, spec)``, a forward hook of it.

    Raises:
        SpecError: If the module is none, or the spec says no ranks.
    """
    if not isinstance(module, torch.nn.Module):
        raise SpecError(f"distribute_module takes a torch.nn.Module, got {type(module).__name__}.")
    whole: HDSpec = spec_of(spec, None).map_bottom(lambda _: Replicate())
    whole = whole.replace(top=Replicate())
    made: dict[torch.Tensor, Any] = {}
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, spec)
        _replicate(submodule, whole, made)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, spec))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, _, outputs: output_fn(mod, outputs, spec))
    return module


def _replicate(module: torch.nn.Module, whole: HDSpec, made: dict[torch.Tensor, Any]) -> None:
    """Replicate a module's own plain parameters and buffers."""
    for own in (module._parameters, module._buffers):
        for name, tensor in list(own.items()):
            if tensor is None or isinstance(tensor, HDTensor):
                continue
            if tensor not in made:
                made[tensor] = distribute_tensor(tensor.detach(), whole)
                if isinstance(tensor, torch.nn.Parameter):
                    made[tensor] = torch.nn.Parameter(made[tensor], tensor.requires_grad)
            own[name] = made[tensor]
