"""Gradient clipping over tensors of any subgroups: one total norm, alike on every rank.

Each rank takes the norm of what it counts: of an element that several ranks hold, only the first of them. One all-reduce
of one number over all ranks brings these norms together, also for ranks that hold nothing. So the lists may hold
parameters of any subgroups, pipeline stages among them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hdtensor._rank import current_rank
from hdtensor.api.agreement import attempt, communicates, exchange
from hdtensor.collectives import groups, observe
from hdtensor.errors import (
    DeductionError,
    GroupError,
    HDTensorError,
    SpecError,
)
from hdtensor.placements.checks import is_cut
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
    with torch.no_grad():
        grads = [g for g in (p.grad for p in given) if g is not None]
        lots = _lots("clip_grad_norm_", grads)
        total = _total_norm("clip_grad_norm_", lots, norm_type, error_if_nonfinite, foreach)
        _scale(lots, max_norm, total, foreach)
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
    with torch.no_grad():
        lots = _lots("get_total_norm", given)
        return _total_norm("get_total_norm", lots, norm_type, error_if_nonfinite, foreach)


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
    with torch.no_grad():
        grads = [g for g in (p.grad for p in given) if g is not None]
        _scale(_lots("clip_grads_with_norm_", grads), max_norm, total_norm, foreach)


# -- what a rank takes part with -----------------------------------------------------------------------------------


class _Lot:
    """This rank's tensors of one device and dtype, as fused kernels take them.

    Attributes:
        tensors: As they were given, to tell autograd that they changed.
        locals: What this rank holds of each.
        counted: Those whose elements no rank before this one holds.
        problem: What keeps this rank from taking their norm.
    """

    __slots__ = ("counted", "locals", "problem", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.locals: list[torch.Tensor] = []
        self.counted: list[torch.Tensor] = []
        self.problem: Exception | None = None


_Lots = dict[tuple[torch.device, torch.dtype], _Lot]


def _lots(function: str, tensors: Sequence[torch.Tensor]) -> _Lots:
    """Sort tensors by device and dtype, in one pass: this is all Python's time there is."""
    found: _Lots = {}
    is_counted: dict[Any, bool] = {}
    hd = HDTensor
    for tensor in tensors:
        spec: Any  # a spec, or the type of another tensor
        if type(tensor) is hd:
            local, spec = tensor._local_tensor, tensor._spec.spec
        else:
            local, spec = tensor, type(tensor)
        key = (local.device, local.dtype)
        lot = found.get(key)
        if lot is None:
            lot = found[key] = _Lot()
        counts = is_counted.get(spec)
        if counts is None:
            try:
                counts = counts_elements(function, spec, current_rank(), not communicates())
            except HDTensorError as error:  # told to all ranks, then raised
                lot.problem, counts = error, False
            is_counted[spec] = counts
        lot.tensors.append(tensor)
        lot.locals.append(local)
        if counts:
            lot.counted.append(local)
    return found


def counts_elements(function: str, spec: Any, rank: int, is_alone: bool) -> bool:
    """Return whether a rank is the first of those that hold the same elements.

    Args:
        function: Who asks.
        spec: A spec, or the type of another tensor.
        rank: The rank.
        is_alone: Whether other ranks cannot be asked.

    Raises:
        DeductionError: If a reduction is pending.
        SpecError: For a ``DTensor``.
        GroupError: If other ranks hold a part and cannot be asked.
    """
    if not isinstance(spec, HDSpec):
        if issubclass(spec, DTensor):
            raise SpecError(
                f"{function} got a DTensor beside HDTensors; pass hdtensor.from_dtensor(t) instead."
            )
        return rank == 0 or is_alone
    if spec.has_partial():
        raise DeductionError(
            f"{function}: a tensor's reduction is pending ({spec}), so its norm is not known. After no_sync call "
            f"hdtensor.sync_gradients(model) first, or redistribute it to Replicate() or Shard(d)."
        )
    if is_alone and spec.ranks != (rank,):
        raise GroupError(
            f"{function} communicates, which needs all processes and works outside of as_rank only: rank {rank} "
            f"does not hold all of {spec}."
        )
    index = spec.index_of(rank)
    if index is None or (index and not is_cut(spec.top)):
        return False
    group = spec.subgroups[index]
    return not any(
        position
        for placement, position in zip(group.placements, group.coordinate(rank), strict=True)
        if not is_cut(placement)
    )


# -- the norm ------------------------------------------------------------------------------------------------------


def _total_norm(
    function: str, lots: _Lots, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    order = float(norm_type)
    problem = next((lot.problem for lot in lots.values() if lot.problem), None)
    mine = None
    if problem is None:
        mine, problem = attempt(lambda: _own_norm(lots, order, foreach))
    value = _everywhere(function, mine, order, problem)
    dtype = functools.reduce(
        torch.promote_types, [dtype.to_real() for _, dtype in lots] or [torch.float32]
    )
    total = torch.tensor(value, device=next(iter(lots), ("cpu",))[0], dtype=dtype)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {order} is {total.item()}, so nothing is clipped. Pass "
            f"error_if_nonfinite=False to scale by it all the same."
        )
    return total


def _own_norm(lots: _Lots, order: float, foreach: bool | None) -> float | None:
    """Return the norm of what this rank counts; None without elements, of which not every order has a norm."""
    norms = []
    for lot in lots.values():
        counted = [t for t in lot.counted if t.numel()]
        if counted:
            norms.append(_combined(torch.stack(_norms(counted, order, foreach)), order))
    return _combined(torch.tensor(norms, dtype=torch.float64), order) if norms else None


def _norms(tensors: list[torch.Tensor], order: float, foreach: bool | None) -> Any:
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    if foreach is False:
        return [torch.linalg.vector_norm(t, order, dtype=wide) for t in tensors]
    return torch._foreach_norm(tensors, order, dtype=wide)


def _combined(norms: torch.Tensor, order: float) -> float:
    """Return the norm of elements from the norms of their parts."""
    norms = norms.double()
    return (norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)).item()


def _everywhere(
    function: str, mine: float | None, order: float, problem: Exception | None
) -> float:
    """Return the norm over all ranks from each rank's own.

    One number is reduced. A rank that has no number to add, since it met a problem or a norm that is not finite, makes the
    result infinite, and so all ranks know to look at one another's norms and problems.
    """
    if not communicates():
        if problem is not None:
            raise problem
        return mine or 0.0
    term = torch.tensor(
        [math.inf if problem is not None else _term(mine, order)], dtype=torch.float64
    ).to(groups.device_type())
    ranks = tuple(range(dist.get_world_size()))
    observe.announce(function, ranks, f"norms of order {order:g}")
    with observe.because(function):
        observe.notify("all_reduce", ranks, term.nbytes, tier="world")
    dist.all_reduce(term, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM)
    found = term.item()
    if math.isfinite(found):
        return _root(found, order)
    norms = [n for n in exchange(function, mine, problem) if n is not None]
    return _combined(torch.tensor(norms, dtype=torch.float64), order) if norms else 0.0


def _term(norm: float | None, order: float) -> float:
    """Return what a rank's norm adds to the reduction; infinity where that is no finite number."""
    if norm is None:
        return -math.inf if order == -math.inf else 0.0
    if not math.isfinite(norm):
        return math.inf
    if order == 0 or math.isinf(order):
        return -norm if order < 0 else norm
    try:
        return math.pow(norm, order)
    except (OverflowError, ValueError):  # too large, or a negative power of 0
        return math.inf


def _root(reduced: float, order: float) -> float:
    if order == 0 or math.isinf(order):
        return -reduced if order < 0 else reduced
    return math.pow(reduced, 1.0 / order) if reduced else 0.0


# -- scaling -------------------------------------------------------------------------------------------------------


def _scale(lots: _Lots, max_norm: float, total: torch.Tensor, foreach: bool | None) -> None:
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if factor == 1.0:
        return
    for (device, _), lot in lots.items():
        by = factor.to(device)
        if foreach is False:
            for tensor in lot.locals:
                tensor.mul_(by)
        else:
            torch._foreach_mul_(lot.locals, by)
        # What is written to inside a wrapper counts as written to the wrapper.
        torch.autograd.graph.increment_version(lot.tensors)
