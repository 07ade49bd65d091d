"""Collectives on flat buffers with uneven parts: what every redistribute step is lowered to.

Each function starts one collective and returns a ``Pending``; calling that waits and returns the result,
so several can be in flight.

==================  =========================  ========================================================
function            even parts                 uneven parts
==================  =========================  ========================================================
``all_reduce``      allreduce                  (has no parts)
``all_gather``      all_gather_single          messages: as many bytes, no padding
``reduce_scatter``  reduce_scatter_single      all_to_all_single and a local reduction, in rank order
                    (gloo: as uneven)
``all_to_all``      all_to_all_single          all_to_all_single
==================  =========================  ========================================================

gloo's own reduce-scatter is an all-reduce of a copy, which sends twice as much.

Data that is only moved travels as bytes, so every dtype works. A reduction that the backends lack for
a dtype (int16, complex product, ...) gathers the terms and reduces them locally, in rank order. The
process group's methods are called, not the functions of ``torch.distributed`` around them: those cost
more than the rest together for a small tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceScatterOptions
from torch.distributed.tensor import Partial

from hdtensor.collectives.memory import new_buffer
from hdtensor.errors import RedistributeError
from hdtensor.placements.spec import HDSpec


#: Call it once to wait for the collective and get its flat result.
Pending: TypeAlias = Callable[[], Tensor]

#: Reductions by name, for process groups.
C10D_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

#: What gloo and NCCL both reduce natively; a bool goes as a byte.
NATIVE = frozenset(
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


def all_reduce(
    flat: Tensor, op: Partial, num_terms: int, group: dist.ProcessGroup, *, is_own: bool = False
) -> Pending:
    """Start reducing ``flat`` over a group; every rank gets the whole result.

    Args:
        flat: 1-D contribution; a rank without a term passes elements that change nothing.
        op: The pending reduction: sum, avg, max, min, product, or DTensor's p-norm.
        num_terms: What an average divides by; ranks without a term do not count.
        group: All its ranks call.
        is_own: Whether ``flat`` may be overwritten.

    Raises:
        RedistributeError: If the dtype has no such reduction (``check_reducible``).
    """
    check_reducible(op, flat.dtype)
    sent, name, restore = _encode(flat, op, num_terms)
    if sent.dtype not in NATIVE:
        terms = all_gather(sent, (sent.numel(),) * group.size(), group)
        return lambda: restore(reduce_terms(terms().view(group.size(), -1), name))
    if not is_own and sent.data_ptr() == flat.data_ptr():
        sent = new_buffer(sent, sent.shape).copy_(sent)
    work = group.allreduce([sent], C10D_OPS[name])

    def wait() -> Tensor:
        work.wait()
        return restore(sent)

    return wait


def all_gather(flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Pending:
    """Start gathering every rank's part; the result is the parts in group order.

    Args:
        flat: This rank's part, 1-D.
        sizes: Elements of each rank's part, in group order.
        group: All its ranks call.
    """
    out = new_buffer(flat, (sum(sizes),))
    if len(set(sizes)) == 1:
        works = [group.all_gather_single(as_bytes(out), as_bytes(flat))]
    else:
        parts, me = out.split(list(sizes)), group.rank()
        parts[me].copy_(flat)
        works = []
        sent = as_bytes(flat)
        # Each message at its place in the order that all ranks share.
        for distance in range(1, group.size()):
            to, source = (me + distance) % group.size(), (me - distance) % group.size()
            hops = [(me, to), (source, me)]
            for giver, taker in sorted(hops):
                if giver == me and flat.numel():
                    works.append(group.send([sent], taker, 0))
                elif taker == me and sizes[giver]:
                    works.append(group.recv([as_bytes(parts[giver])], giver, 0))

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return out

    return wait


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
    if len(set(sizes)) == 1 and sent.dtype in NATIVE and sent.device.type != "cpu":
        out = new_buffer(sent, (sent.numel() // world,))
        options = ReduceScatterOptions()
        options.reduceOp = C10D_OPS[name]
        work = group.reduce_scatter_single(out, sent, options)

        def wait() -> Tensor:
            work.wait()
            return restore(out)

        return wait
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
    out = new_buffer(flat, (sum(received_sizes),))
    work = group.all_to_all_single(
        as_bytes(out),
        as_bytes(flat),
        [size * width for size in received_sizes],
        [size * width for size in sent_sizes],
    )

    def wait() -> Tensor:
        work.wait()
        return out

    return wait


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


def check_terms(spec: HDSpec, dtype: torch.dtype) -> None:
    """Raise where a value of ``dtype`` cannot be made the spec's terms: averages of integers, ordered complex numbers.

    Dtypes without arithmetic may be made terms (one is the value, the others are zeros), and travel; only their
    reduction is refused.

    Raises:
        RedistributeError: As ``check_reducible``.
    """
    if spec.has_partial() and (dtype.is_complex or not dtype.is_floating_point):
        for placement in (spec.top, *(p for group in spec.subgroups for p in group.placements)):
            if isinstance(placement, Partial) and placement.reduce_op != "sum":
                check_reducible(placement, dtype)


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
