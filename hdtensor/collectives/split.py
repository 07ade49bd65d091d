"""Collectives on flat buffers with uneven parts: what every redistribute step is lowered to.

Each function starts one collective and returns a ``Pending``; calling that waits and returns the result,
so several can be in flight. All are built on torch's functional collectives, which ``torch.compile``
keeps in its graph.

==================  ==========================  ========================================================
function            even parts                  uneven parts
==================  ==========================  ========================================================
``all_reduce``      all_reduce                  (has no parts)
``all_gather``      all_gather_into_tensor      all_to_all_single: as many bytes, no padding
``reduce_scatter``  reduce_scatter_tensor       all_to_all_single and a local reduction, in rank order
``all_to_all``      all_to_all_single           all_to_all_single
==================  ==========================  ========================================================

Data that is only moved travels as bytes, so every dtype works. A reduction that the backends lack for
a dtype (int16, complex product, ...) gathers the terms and reduces them locally, in rank order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial

from hdtensor.errors import RedistributeError


#: Call it once to wait for the collective and get its flat result.
Pending: TypeAlias = Callable[[], Tensor]

_c10d = torch.ops._c10d_functional

# What gloo and NCCL both reduce natively; a bool goes as a byte.
_NATIVE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)
#: Reductions of two tensors.
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
_BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def all_reduce(flat: Tensor, op: Partial, num_terms: int, group: dist.ProcessGroup) -> Pending:
    """Start reducing ``flat`` over a group; every rank gets the whole result.

    Args:
        flat: 1-D contribution; a rank without a term passes elements that change nothing.
        op: The pending reduction: sum, avg, max, min, product, or DTensor's p-norm.
        num_terms: What an average divides by; ranks without a term do not count.
        group: All its ranks call.

    Raises:
        RedistributeError: If the dtype has no such reduction (``check_reducible``).
    """
    check_reducible(op, flat.dtype)
    sent, name, restore = _encode(flat, op, num_terms)
    if sent.dtype in _NATIVE:
        reduced = _c10d.all_reduce(sent, name, group.group_name)
        return lambda: restore(_c10d.wait_tensor(reduced))
    terms = all_gather(sent, (sent.numel(),) * group.size(), group)
    return lambda: restore(reduce_terms(terms().view(group.size(), -1), name))


def all_gather(flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Pending:
    """Start gathering every rank's part; the result is the parts in group order.

    Args:
        flat: This rank's part, 1-D.
        sizes: Elements of each rank's part, in group order.
        group: All its ranks call.
    """
    world, sent = len(sizes), as_bytes(flat)
    if len(set(sizes)) == 1:
        gathered = _c10d.all_gather_into_tensor(sent, world, group.group_name)
    else:
        bytes_per_element = flat.element_size()
        gathered = _c10d.all_to_all_single(
            sent.repeat(world),
            [size * bytes_per_element for size in sizes],
            [sent.numel()] * world,
            group.group_name,
        )
    return lambda: _c10d.wait_tensor(gathered).view(flat.dtype)


def reduce_scatter(
    flat: Tensor, sizes: Sequence[int], op: Partial, num_terms: int, group: dist.ProcessGroup
) -> Pending:
    """Start reducing over a group; every rank gets its own part of the result.

    Args:
        flat: 1-D contribution: the parts for each rank, in group order.
        sizes: Elements of each rank's part.
        op: The pending reduction.
        num_terms: What an average divides by.
        group: All its ranks call.

    Raises:
        RedistributeError: If the dtype has no such reduction (``check_reducible``).
    """
    check_reducible(op, flat.dtype)
    sent, name, restore = _encode(flat, op, num_terms)
    world = len(sizes)
    if len(set(sizes)) == 1 and sent.dtype in _NATIVE:
        reduced = _c10d.reduce_scatter_tensor(sent, name, world, group.group_name)
        return lambda: restore(_c10d.wait_tensor(reduced))
    if sent.dtype != flat.dtype and flat.is_complex():
        sizes = [2 * size for size in sizes]
    mine = sizes[group.rank()]
    terms = all_to_all(sent, sizes, [mine] * world, group)
    return lambda: restore(reduce_terms(terms().view(world, mine), name))


def all_to_all(
    flat: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    """Start sending a part to every rank and receiving one from every rank, in group order.

    Args:
        flat: 1-D, the parts for each rank joined.
        sent_sizes: Elements of the part for each rank.
        received_sizes: Elements of the part from each rank.
        group: All its ranks call.
    """
    width = flat.element_size()
    received = _c10d.all_to_all_single(
        as_bytes(flat),
        [size * width for size in received_sizes],
        [size * width for size in sent_sizes],
        group.group_name,
    )
    return lambda: _c10d.wait_tensor(received).view(flat.dtype)


def check_reducible(op: Partial, dtype: torch.dtype) -> None:
    """Raise unless ``op`` is defined on ``dtype``; the same on every rank, before anything is sent.

    Raises:
        RedistributeError: On an average or norm of integers, a maximum of complex numbers, and dtypes without
            arithmetic.
    """
    if (op.reduce_op == "avg" or is_norm(op)) and not (dtype.is_floating_point or dtype.is_complex):
        raise RedistributeError(
            f"{op} of {dtype} has no exact result. Use Partial('sum'), or a floating-point tensor."
        )
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise RedistributeError(f"{op} of {dtype}: no arithmetic. Convert to bfloat16 first.")
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise RedistributeError(f"{op} of {dtype}: no arithmetic. Convert to int64 first.")
    if dtype.is_complex and (op.reduce_op in ("max", "min") or is_norm(op)):
        raise RedistributeError(f"{op} of {dtype}: complex numbers have no order. Use Partial().")


def is_norm(op: Partial) -> bool:
    """Return whether this is DTensor's p-norm, whose terms combine as ``(sum x**p) ** (1/p)``."""
    return hasattr(op, "norm_type")


def as_bytes(flat: Tensor) -> Tensor:
    """View a 1-D contiguous tensor as bytes."""
    if flat.stride(0) != 1:  # fewer than two elements count as contiguous whatever their stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def reduce_terms(terms: Tensor, name: str) -> Tensor:
    """Reduce ``terms`` [num_terms, n] over the first dim, in order, in their own dtype."""
    first, *others = terms.unbind(0)
    return functools.reduce(COMBINE[name], others, first.clone())


def _encode(
    flat: Tensor, op: Partial, num_terms: int
) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
    """Return what to send, with which plain reduction, and how to turn the result back."""
    if is_norm(op):
        p = op.norm_type  # type: ignore[attr-defined]
        return flat**p, "sum", lambda reduced: reduced ** (1 / p)
    name = op.reduce_op
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8), _BOOL_OPS[name], lambda reduced: reduced.view(torch.bool)
    if name == "avg":
        sent, _, restore = _encode(flat, Partial(), num_terms)
        return sent, "sum", lambda reduced: restore(reduced).div_(num_terms)
    if flat.is_complex() and name == "sum":
        real = torch.view_as_real(flat).view(-1)
        return real, name, lambda reduced: torch.view_as_complex(reduced.view(-1, 2))
    return flat, name, lambda reduced: reduced
