"""Memory for activations: layers that compute again in the backward, and saved tensors that wait in host memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.region_nodes import tensors_in
from hdtensor.errors import PlanError
from hdtensor.pipeline.runtime.passage import running
from hdtensor.plan import ModelDescription
from hdtensor.tensor import HDTensor


class CheckpointedLayer:
    """Stands in for a layer's ``forward``: on chosen stages the layer keeps what it is called with, and nothing else.

    The hooks at the layer's stage point run around it, so that what comes from another stage is kept.
    """

    def __init__(self, module: nn.Module, stages: Collection[int]) -> None:
        """Take a layer's forward over.

        Args:
            module: The layer.
            stages: Numbers of the chosen stages in the lane.
        """
        self.module = module
        self.forward = module.forward
        self._stages = frozenset(stages)
        module.forward = self

    def remove(self) -> None:
        """Give the layer its own forward back."""
        self.module.forward = self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        passage = running()
        if passage is None or passage.stage not in self._stages or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if not (any(x.is_local for x in tensors) or (passage.is_plain and not tensors)):
            return self.forward(*args, **kwargs)
        return checkpoint(functools.partial(self.forward, *args, **kwargs), use_reentrant=False)


def checkpoint_layers(
    model: nn.Module, description: ModelDescription, stages: Collection[int]
) -> list[CheckpointedLayer]:
    """Have a model's layers be checkpointed on chosen stages.

    Raises:
        PlanError: If the model shows no layers.
    """
    if not stages:
        return []
    names = [name for names in description.layer_modules.values() for name in names]
    if not names:
        raise PlanError(
            "activation_checkpointing: the names of the model's parameters show no layers; use "
            "torch.utils.checkpoint inside the model."
        )
    return [CheckpointedLayer(model.get_submodule(name), stages) for name in names]


class Offload:
    """Keeps what autograd saves on chosen stages in host memory until the backward asks for it.

    Weights stay where they are. On CUDA devices host memory is pinned, and copies back do not block.
    """

    def __init__(self, stages: Collection[int], weights: Iterable[HDTensor]) -> None:
        """Prepare a step.

        Args:
            stages: Numbers of the chosen stages in the lane.
            weights: The lane's leaves.
        """
        self._stages = frozenset(stages)
        kept = weights if self._stages else ()
        self._weights = {w._local_tensor.untyped_storage().data_ptr() for w in kept}

    def around_call(self) -> contextlib.AbstractContextManager[object]:
        """Return what holds around a call of the model."""
        if not self._stages:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: torch.Tensor) -> Any:
        passage = running()
        local = x._local_tensor if isinstance(x, HDTensor) else x
        is_chosen = passage is not None and passage.stage in self._stages and local.numel() > 0
        if not is_chosen or local.untyped_storage().data_ptr() in self._weights:
            return x
        bound = x._spec if isinstance(x, HDTensor) else None
        return to_host(local.detach()), local.device, bound


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    host, device, bound = packed
    local = host.to(device, non_blocking=host.is_pinned())
    if bound is not None:
        local = new_wrapper(HDTensor, local, bound, False)
    assert isinstance(local, torch.Tensor), "what was packed was a tensor"
    return local


def to_host(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory; a tensor that is there already is returned itself."""
    if local.device.type == "cpu":
        return local
    host = torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")
    return host.copy_(local)
