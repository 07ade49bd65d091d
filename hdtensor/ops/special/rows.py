"""Rows of placements by kind of operator, for operators that DTensor has no rule for, or a wrong one.

======================  =========================================================================
kind                    what may be cut
======================  =========================================================================
pointwise               every dim, alike in all operands that have it
windows of last dims    every dim before the last ``n`` (pooling, padding, folding)
======================  =========================================================================

All are linear in their first operand (a backward in its gradient), which may therefore be pending: so is the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.propagate import operands, row_rule


aten = torch.ops.aten

Row = tuple[Placement, ...]


def _specs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensorSpec]:
    return [s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]


def _whole(num_outs: int, specs: Sequence[DTensorSpec]) -> list[Row]:
    """Nothing cut; or the first operand pending, in which all operators here are linear."""
    return [
        (Replicate(),) * (num_outs + len(specs)),
        (Partial(),) * (num_outs + 1) + (Replicate(),) * (len(specs) - 1),
    ]


# -- pointwise ----------------------------------------------------------------------------------------

#: Operator: number of results.
_POINTWISE_BACKWARDS = {
    aten.hardshrink_backward.default: 1,
    aten.hardsigmoid_backward.default: 1,
    aten.hardswish_backward.default: 1,
    aten.hardtanh_backward.default: 1,
    aten.log_sigmoid_backward.default: 1,
    aten.rrelu_with_noise_backward.default: 1,
    aten.softshrink_backward.default: 1,
    aten._prelu_kernel_backward.default: 2,
}


def pointwise(num_outs: int, specs: Sequence[DTensorSpec]) -> list[Row]:
    """Return the rows of an operator that treats elements alike: every dim may be cut in all operands that have it."""
    # On CUDA the buffer of log_sigmoid is an empty tensor, which broadcasts with nothing.
    shapes = [tuple(s.shape) for s in specs]
    shape = torch.broadcast_shapes(*(s for s in shapes if s != (0,) or len(set(shapes)) == 1))
    rows: list[Row] = []
    for dim in range(len(shape)):
        from_end = dim - len(shape)
        row: list[Placement] = [Shard(dim)] * num_outs
        for own in shapes:
            has = len(own) >= -from_end and own[from_end] == shape[dim]
            row.append(Shard(len(own) + from_end) if has else Replicate())
        rows.append(tuple(row))
    return rows


def _pointwise_backward(num_outs: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    specs = _specs(args, kwargs)
    return _whole(num_outs, specs) + pointwise(num_outs, specs)


for _op, _num_outs in _POINTWISE_BACKWARDS.items():
    row_rule(_op)(functools.partial(_pointwise_backward, _num_outs))


# -- windows of the last dims -------------------------------------------------------------------------

#: Operator: number of last dims of its first operand that belong together. The dims before are independent problems:
#: batch and channels, or channels alone where the operand has no batch (DTensor's rules for the operators marked *
#: take the second dim of any operand for its channels). All are linear in their first operand.
_WINDOWS = {
    aten._adaptive_avg_pool2d_backward.default: 2,  # *
    aten._adaptive_avg_pool3d_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
    aten.col2im.default: 2,
    aten.fractional_max_pool2d_backward.default: 2,
    aten.fractional_max_pool3d_backward.default: 3,
    aten.im2col.default: 3,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.max_unpool2d.default: 2,  # *
    aten.max_unpool3d.default: 3,  # *
    aten.reflection_pad1d.default: 1,
    aten.reflection_pad1d_backward.default: 1,
    aten.reflection_pad2d.default: 2,
    aten.reflection_pad2d_backward.default: 2,
    aten.reflection_pad3d.default: 3,
    aten.reflection_pad3d_backward.default: 3,
    aten.replication_pad1d.default: 1,
    aten.replication_pad1d_backward.default: 1,
    aten.replication_pad2d.default: 2,
    aten.replication_pad2d_backward.default: 2,
    aten.replication_pad3d.default: 3,
    aten.replication_pad3d_backward.default: 3,
}


def _windows(num_last: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    specs = _specs(args, kwargs)
    free = range(len(specs[0].shape) - num_last)
    return _whole(1, specs) + [(Shard(dim),) * (1 + len(specs)) for dim in free]


for _op, _num_last in _WINDOWS.items():
    row_rule(_op)(functools.partial(_windows, _num_last))


@row_rule(aten.unfold.default, aten.unfold_copy.default)
def _unfold(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    specs, num_dims = _specs(args, kwargs), len(args[0].shape)
    free = [dim for dim in range(num_dims) if num_dims and dim != args[1] % num_dims]
    return _whole(1, specs) + [(Shard(dim), Shard(dim)) for dim in free]


@row_rule(aten.unfold_backward.default)
def _unfold_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    specs, num_dims = _specs(args, kwargs), len(args[1])
    free = [dim for dim in range(num_dims) if dim != args[2] % num_dims]
    return _whole(1, specs) + [(Shard(dim), Shard(dim)) for dim in free]


@row_rule(aten.addbmm.default)
def _addbmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    """``np,bnm,bmp->np``: rows and columns may be cut, what is summed over gives terms; the first operand broadcasts."""
    added, first, second = (tuple(s.shape) for s in args[:3])
    has_rows = len(added) > 1 and added[0] == first[1]
    has_columns = bool(added) and added[-1] == second[2]
    return [
        (Replicate(),) * 4,
        (Shard(0), Shard(0) if has_rows else Replicate(), Shard(1), Replicate()),
        (Shard(1), Shard(len(added) - 1) if has_columns else Replicate(), Replicate(), Shard(2)),
        (Partial(), Partial(), Shard(0), Shard(0)),
        (Partial(), Partial(), Shard(2), Shard(1)),
    ]
