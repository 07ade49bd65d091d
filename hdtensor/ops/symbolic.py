"""Calls whose sizes a compiler has not fixed: decided by the sizes that stand for them, bound to the symbols.

Placements are decided once and hold for all sizes of one kind. What tells kinds apart is asked of the symbols, so that it
guards the program: of each tier that cuts an open dim, whether it divides evenly. Every rank asks for all subgroups, and a
decision is kept for the next trace: ranks that trace again at different moments must decide alike.
"""

from __future__ import annotations

from typing import Any

import torch

from hdtensor._torch_compat import TensorMeta
from hdtensor.ops.bound import BoundSpec, SymbolicBound
from hdtensor.ops.calls import Call
from hdtensor.ops.exact_metas import exact_metas
from hdtensor.ops.propagate import map_operands, operands, output_metas
from hdtensor.placements import checks
from hdtensor.placements.layout import contiguous_stride
from hdtensor.placements.sizes import hint, is_open, same


def has_open_sizes(call: Call) -> bool:
    """Return whether a size among a call's operands or arguments is not fixed."""
    return any(
        value.is_symbolic if isinstance(value, BoundSpec) else is_open(value)
        for _, value in operands(call.args, call.kwargs)
    )


def hinted(call: Call) -> Call:
    """Return the call of the sizes that stand for the symbols."""

    def known(_: Any, value: Any) -> Any:
        if isinstance(value, BoundSpec):
            return value.hinted() if isinstance(value, SymbolicBound) else value
        return hint(value)

    args, kwargs = map_operands(known, call.args, call.kwargs)
    return Call(call.func, args, kwargs, call.plain)


def open_metas(call: Call, known: Any) -> Any:
    """Return the metadata of a call's results in symbols.

    Args:
        call: The call.
        known: The metadata for the sizes that stand for them.
    """
    if known is None:
        return None
    exact = exact_metas(call)
    if exact is not None:
        return exact
    bounds = list(call.specs.values())
    first = bounds[0]
    if isinstance(known, TensorMeta) and _is_alike(call, bounds):
        return TensorMeta(first.shape, first.stride, known.dtype)
    args, kwargs = call.tier(lambda b: b.top())
    return output_metas(call.func, args, kwargs)


def _is_alike(call: Call, bounds: list[BoundSpec]) -> bool:
    """Whether this is a pointwise operator on contiguous tensors of one shape."""
    if torch.Tag.pointwise not in call.func.tags or call.kwargs.get("memory_format") is not None:
        return False
    first = bounds[0]
    return all(
        len(b.shape) == len(first.shape)
        and all(map(same, b.shape, first.shape))
        and all(map(same, b.stride, contiguous_stride(b.shape)))
        for b in bounds
    )


def open_kinds(bound: BoundSpec) -> tuple[Any, ...]:
    """Return what placement rules look at of open sizes, as ``record`` keeps it of fixed ones; each is a guard.

    Nothing is asked of an open dim that no tier cuts: whatever is decided for it holds for all lengths.
    """
    kinds: list[Any] = [2 if is_open(n) and n > 1 else min(n, 2) for n in bound.shape]
    sizes = bound.top_sizes or ()
    kinds.append(any(size == 0 for size in sizes))
    for index, group in enumerate(bound.spec.subgroups):
        block = bound.block_shape(index)
        for size, placement in zip(group.mesh_shape, group.placements, strict=True):
            dim = checks.shard_dim(placement)
            if dim is not None:
                length = block[dim]
                kinds.append(
                    (bool(length % size == 0), bool(length >= size), bool(length >= 2 * size))
                )
            elif size > 1:
                kinds.append(
                    tuple(None if is_open(n) else (n % size == 0, n >= size) for n in block)
                )
    return tuple(kinds)
