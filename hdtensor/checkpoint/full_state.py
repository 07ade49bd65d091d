"""``full_state_dict=True`` of torch's getters and setters of state dicts: whole tensors out of cut ones, and back.

torch's own code knows ``DTensor`` only. Importing this module puts these functions before three of torch's; a state dict
without an ``HDTensor`` goes straight to them, and so does all else that a state dict with one has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hdtensor._rank import current_rank
from hdtensor._torch_compat import extend_state_dicts, new_wrapper
from hdtensor.api.distribute import scatter
from hdtensor.checkpoint.checks import listed
from hdtensor.checkpoint.gather import gathered
from hdtensor.errors import CheckpointError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shard import shard_of
from hdtensor.tensor import HDTensor


def gather(
    original: Callable[..., dict[str, Any]],
    state_dict: dict[str, Any],
    *,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """Return a state dict of whole tensors, on all ranks or some; tensor by tensor, so that each is moved to the host at once."""
    whole = _whole(state_dict, cpu_offload, ranks_only) if _has_cut(state_dict) else state_dict
    return original(whole, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)


def distribute(
    original: Callable[..., None],
    full: dict[str, Any],
    local: dict[str, Any],
    *args: Any,
    **options: Any,
) -> None:
    """Cut what every rank has whole as a state dict's tensors are cut; nothing is sent.

    Raises:
        CheckpointError: Listing tensors of another shape.
    """
    names = [n for n in local if isinstance(local[n], HDTensor) and n in full]
    _check({n: _told(full[n]) for n in names}, local)
    for name in names:
        bound = _bound(local[name], full[name].dtype)
        shard = shard_of(full[name], bound).to(_device(local[name]))
        local[name] = new_wrapper(HDTensor, shard, bound, False)
    rest = {name: value for name, value in full.items() if name not in set(names)}
    original(rest, local, *args, **options)


def broadcast(
    original: Callable[..., None],
    full: dict[str, Any],
    local: dict[str, Any],
    device: torch.device,
    pg: Any = None,
    strict: bool = False,
    cpu_offload: bool = False,
) -> None:
    """Cut what rank 0 has whole as a state dict's tensors are cut; each rank is sent its shards.

    Raises:
        CheckpointError: On every rank, listing tensors of another shape.
    """
    names = [n for n in local if isinstance(local[n], HDTensor)]
    if not names:
        original(full, local, device, pg=pg, strict=strict, cpu_offload=cpu_offload)
        return
    told: list[Any] = [{n: _told(full[n]) for n in names if n in full}]
    dist.broadcast_object_list(told, src=0, group=pg)
    _check(told[0], local)
    done = {}
    for name, (_, dtype) in told[0].items():
        value = full[name] if current_rank() == 0 else torch.empty(0, dtype=dtype)
        bound = _bound(local[name], dtype)
        shard = scatter(value.detach().to(device), bound, 0)
        done[name] = new_wrapper(HDTensor, shard.cpu() if cpu_offload else shard, bound, False)
    kept = {n: local[n] for n in names if n not in done and not strict}
    for name in names:
        del local[name]
    rest = {name: value for name, value in full.items() if name not in set(names)}
    original(rest, local, device, pg=pg, strict=strict, cpu_offload=cpu_offload)
    local.update(done | kept)


def _whole(value: Any, cpu_offload: bool, ranks: tuple[int, ...]) -> Any:
    if isinstance(value, HDTensor):
        with torch.no_grad():
            whole = gathered(value, ranks[0]) if len(ranks) == 1 else value.full_tensor()
        return whole.cpu() if cpu_offload and whole is not None else whole
    if isinstance(value, dict):
        return {key: _whole(inner, cpu_offload, ranks) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_whole(inner, cpu_offload, ranks) for inner in value])
    return value


def _has_cut(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_cut(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_has_cut(inner) for inner in value)
    return isinstance(value, HDTensor)


def _told(value: Any) -> tuple[Any, Any]:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, HDTensor)
    return (tuple(value.shape), value.dtype) if is_plain else (type(value).__name__, None)


def _check(told: Mapping[str, tuple[Any, Any]], local: Mapping[str, Any]) -> None:
    unlike = [
        f"{name} ({shape}, {tuple(local[name].shape)})"
        for name, (shape, _) in told.items()
        if shape != tuple(local[name].shape)
    ]
    if unlike:
        raise CheckpointError(
            f"full_state_dict=True takes whole plain tensors of the shapes that the model and its optimizer have, not "
            f"{listed(unlike)}."
        )


def _bound(like: HDTensor, dtype: torch.dtype) -> BoundSpec:
    return BoundSpec.bind(like.spec, like.shape, None, dtype, like.top_sizes)


def _device(like: HDTensor) -> torch.device:
    return like._local_tensor.device


extend_state_dicts(gather, distribute, broadcast)
