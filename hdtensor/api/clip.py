"""Gradient clipping over tensors of any subgroups: one total norm, alike on every rank.

Each rank takes the norm of what it counts: of an element that several ranks hold, only the first of them. One small
all-gather brings these norms together, also those of ranks that hold nothing, and every rank combines them in the same
order. So the lists may hold parameters of any subgroups, pipeline stages among them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hdtensor._rank import current_rank
from hdtensor._torch_compat import StridedShard
from hdtensor.api.agreement import attempt, communicates
from hdtensor.collectives import groups, observe
from hdtensor.errors import DeductionError, DisagreementError, GroupError, SpecError
from hdtensor.placements.spec import HDSpec
from hdtensor.tensor import HDTensor


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``, as ``torch.nn.utils`` does.

    Every rank of the world calls it, with the same parameters. Without ``HDTensor``s it is torch's own function.

    Args:
        parameters: Any mixture of subgroups, meshes and cuts. Plain tensors among them count once: they must be the same
            on every rank.
        max_norm: Largest total norm.
        norm_type: Order of the norm; any number, ``inf`` or ``-inf``.
        error_if_nonfinite: Raise where the total norm is no finite number, before anything is scaled.
        foreach: False takes tensors one by one.

    Returns:
        The total norm before scaling: a plain tensor, the same on every rank.

    Raises:
        DeductionError: If a gradient's reduction is pending, as ``no_sync`` leaves it.
        DisagreementError: If another rank cannot go on.
        RuntimeError: With ``error_if_nonfinite``, on every rank.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not any(isinstance(p, HDTensor) for p in given):
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    grads = [g for g in (p.grad for p in given) if g is not None]
    total = _total_norm("clip_grad_norm_", grads, norm_type, error_if_nonfinite, foreach)
    _scale(grads, max_norm, total, foreach)
    return total


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the norm of all elements of all tensors, the same plain tensor on every rank.

    Every rank of the world calls it, with the same tensors; see ``clip_grad_norm_``. Order 0 counts the elements that are
    not zero (torch's function counts the tensors that have any).

    Raises:
        DeductionError: If a tensor's reduction is pending.
        DisagreementError: If another rank cannot go on.
        RuntimeError: With ``error_if_nonfinite``, on every rank.
    """
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not any(isinstance(t, HDTensor) for t in given):
        return nn.utils.get_total_norm(given, norm_type, error_if_nonfinite, foreach)
    return _total_norm("get_total_norm", given, norm_type, error_if_nonfinite, foreach)


def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by ``max_norm / total_norm`` where that is below 1; nothing is communicated.

    Args:
        parameters: See ``clip_grad_norm_``.
        max_norm: Largest total norm.
        total_norm: What ``get_total_norm`` returned, on every rank.
        foreach: False takes tensors one by one.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [g for g in (p.grad for p in given) if g is not None]
    _scale(grads, max_norm, total_norm, foreach)


# -- the norm ------------------------------------------------------------------------------------------------------


def _total_norm(
    function: str,
    tensors: Sequence[torch.Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    order = float(norm_type)
    with torch.no_grad():
        mine, problem = attempt(lambda: _own_norm(function, tensors, order, foreach))
        norms = _gather(function, mine, order, problem)
        dtype = functools.reduce(
            torch.promote_types, {_norm_dtype(t.dtype) for t in tensors} or {torch.float32}
        )
        wide = torch.tensor(norms, dtype=torch.float64)
        total = wide.sum() if order == 0 or not norms else torch.linalg.vector_norm(wide, order)
        total = total.to(tensors[0].device if tensors else "cpu", dtype)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {order} is {total.item()}, so nothing is clipped. Pass "
            f"error_if_nonfinite=False to scale by it all the same."
        )
    return total


def _own_norm(
    function: str, tensors: Sequence[torch.Tensor], order: float, foreach: bool | None
) -> float | None:
    """Return the norm of what this rank counts; None without elements, of which not every order has a norm."""
    rank, is_alone = current_rank(), not communicates()
    counted = []
    for tensor in tensors:
        if type(tensor) is HDTensor:
            spec = tensor._spec.spec
            if is_alone and spec.ranks != (rank,):
                raise GroupError(
                    f"{function} communicates, which needs all processes and works outside of as_rank only: "
                    f"rank {rank} does not hold all of {spec}."
                )
            if _counts(function, spec, rank) and tensor._local_tensor.numel():
                counted.append(tensor._local_tensor)
        elif isinstance(tensor, DTensor):
            raise SpecError(
                f"{function} got a DTensor of shape {tuple(tensor.shape)} beside HDTensors; pass "
                f"hdtensor.from_dtensor(t) instead."
            )
        elif rank == 0 and tensor.numel():
            counted.append(tensor)
    if not counted:
        return None
    norms = [n for group in _alike(counted) for n in _norms(group, order, foreach)]
    device = norms[0].device
    each = torch.stack([n.to(device, torch.float64) for n in norms])
    return (each.sum() if order == 0 else torch.linalg.vector_norm(each, order)).item()


@functools.lru_cache(maxsize=4096)
def _counts(function: str, spec: HDSpec, rank: int) -> bool:
    """Return whether a rank is the first of those that hold the same elements.

    Raises:
        DeductionError: If a reduction is pending.
    """
    if spec.has_partial():
        raise DeductionError(
            f"{function}: a tensor's reduction is pending ({spec}), so its norm is not known. After no_sync call "
            f"hdtensor.sync_gradients(model) first, or redistribute it to Replicate() or Shard(d)."
        )
    index = spec.index_of(rank)
    if index is None or (index and not isinstance(spec.top, Shard | StridedShard)):
        return False
    group = spec.subgroups[index]
    return not any(
        position
        for placement, position in zip(group.placements, group.coordinate(rank), strict=True)
        if placement.is_replicate()
    )


def _norms(group: list[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    wide = torch.float32 if group[0].dtype in (torch.bfloat16, torch.float16) else None
    if foreach is False:
        return [torch.linalg.vector_norm(t, order, dtype=wide) for t in group]
    return list(torch._foreach_norm(group, order, dtype=wide))


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real()


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors by device and dtype, as fused kernels take them."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())


def _gather(
    function: str, mine: float | None, order: float, problem: Exception | None
) -> list[float]:
    """Return all ranks' norms, in rank order, of those that have one.

    A rank with a problem takes part, so that none waits for it.
    """
    if not communicates():
        if problem is not None:
            raise problem
        return [] if mine is None else [mine]
    size = dist.get_world_size()
    with observe.because(function):
        observe.notify("all_gather", tuple(range(size)), 4 * 8)
    said = torch.tensor(
        [mine or 0.0, mine is not None, problem is not None, order], dtype=torch.float64
    ).to(groups.device_type())
    everyone = [torch.empty_like(said) for _ in range(size)]
    dist.all_gather(everyone, said)
    if problem is not None:
        raise problem
    rows = torch.stack(everyone).tolist()
    for rank, (_, _, failed, other) in enumerate(rows):
        if failed or other != order:
            what = f"asks for order {other}" if not failed else "fails; see its own error"
            raise DisagreementError(
                f"{function} of order {order} cannot go on: rank {rank} {what}. Every rank passes the same "
                f"tensors and the same order."
            )
    return [norm for norm, has_norm, _, _ in rows if has_norm]


# -- scaling -------------------------------------------------------------------------------------------------------


def _scale(
    grads: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor, foreach: bool | None
) -> None:
    with torch.no_grad():
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        if factor == 1.0:
            return
        locals_ = [g._local_tensor if type(g) is HDTensor else g for g in grads]
        for group in _alike(locals_):
            by = factor.to(group[0].device)
            if foreach is False:
                for tensor in group:
                    tensor.mul_(by)
            else:
                torch._foreach_mul_(group, by)
        torch.autograd.graph.increment_version([g for g in grads if type(g) is HDTensor])
