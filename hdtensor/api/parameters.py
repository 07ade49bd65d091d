"""A model's parameters as shards: cut from what is there, or made and initialised where there is nothing yet."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.nn.utils.parametrize import ParametrizationList

from hdtensor._torch_compat import new_wrapper
from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.steps import note_replaced
from hdtensor.errors import PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shard import shard_of
from hdtensor.placements.spec import HDSpec
from hdtensor.plan import ExpandedPlan
from hdtensor.tensor import HDTensor


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def device_of(device: torch.device | str | None) -> torch.device:
    """Return where shards are made that have no device yet."""
    if device is not None:
        return torch.device(device)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def distribute_parameters(
    model: nn.Module, plan: ExpandedPlan, device: torch.device, src_data_rank: int | None
) -> bool:
    """Replace every parameter by its shard; return whether the model was on the meta device."""
    replaced: dict[int, nn.Parameter] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    was_meta = False
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            new = replaced.get(id(parameter))
            if new is None:
                spec = plan.tensors[names[id(parameter)]]
                new = _distribute_parameter(parameter, spec, device, src_data_rank)
                note_replaced(parameter, names[id(parameter)])
                replaced[id(parameter)] = new
                was_meta |= parameter.is_meta
            module._parameters[key] = new
    _distribute_companions(model, src_data_rank)
    return was_meta


def _distribute_companions(model: nn.Module, src_data_rank: int | None) -> None:
    """Put buffers that go with a parameter where it is, whole on each rank.

    These are what a parametrization computes with (``spectral_norm``'s vectors), and the running statistics of a batch norm,
    which a rank outside would keep as they began.
    """
    for module in model.modules():
        is_parametrization = isinstance(module, ParametrizationList)
        if not is_parametrization and not isinstance(module, _BATCH_NORMS):
            continue
        inside = list(module.modules())
        parameter: Any = module._parameters.get("original" if is_parametrization else "weight")
        if not isinstance(parameter, HDTensor):
            continue
        whole = parameter.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
        for inner in inside:
            for key, buffer in inner._buffers.items():
                if buffer is None or isinstance(buffer, HDTensor) or buffer.is_meta:
                    continue
                if buffer.is_floating_point():
                    inner._buffers[key] = distribute_tensor(
                        buffer, whole, src_data_rank=src_data_rank
                    )


def _distribute_parameter(
    parameter: nn.Parameter, spec: HDSpec, device: torch.device, src_data_rank: int | None
) -> nn.Parameter:
    bound = BoundSpec.bind(spec, parameter.shape, None, parameter.dtype)
    if parameter.is_meta:
        local = torch.empty(bound.local_shape(), dtype=parameter.dtype, device=device)
        tensor = new_wrapper(HDTensor, local, bound, False)
    elif src_data_rank is None:
        tensor = new_wrapper(HDTensor, shard_of(parameter, bound), bound, False)
    else:
        tensor = distribute_tensor(parameter.detach(), spec, src_data_rank=src_data_rank)
    return nn.Parameter(tensor, parameter.requires_grad)


def initialize(model: nn.Module, device: torch.device) -> None:
    """Fill parameters and buffers of a model that was built on the meta device."""
    for module in model.modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
    init_weights = getattr(model, "init_weights", None)
    if init_weights is not None:
        init_weights()
        return
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        elif own:
            raise PlanError(
                f"the model is on the meta device and {type(module).__name__} has parameters but no "
                f"reset_parameters(); give it one, or the model an init_weights()."
            )
