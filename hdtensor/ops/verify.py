"""Whether an operator on shards gives the shards that a rule announces.

A rule that reads an argument wrongly (DTensor's ``logsumexp`` overlooks a positional ``keepdim``) or forgets one that holds
a size names a placement that the results do not have. That would be a silent fault, or a message of the wrong length. The
operator's own meta function tells: it is run on the shapes of the shards, once a decision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec, TensorMeta, abstract_mesh
from hdtensor.ops.calls import SHAPE_ARGS, SIZE_ARGS, Call, as_list, out_top_sizes, sizes_from
from hdtensor.ops.propagate import TierResult, map_operands, operands, output_metas
from hdtensor.placements import checks
from hdtensor.placements.layout import contiguous_stride, local_shape
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup


Shape = tuple[int, ...]


def fits_bottom(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: TierResult
) -> bool:
    """Return whether the shards of one subgroup's block are what ``result`` says.

    Args:
        func: The operator.
        args: Arguments with a ``DTensorSpec`` of its block for every tensor.
        kwargs: Likewise.
        result: What the tier's rule answered.
    """
    if _is_rewritten(func, result):
        return True
    specs = {path: s for path, s in operands(args, kwargs) if isinstance(s, DTensorSpec)}
    mesh_shape = tuple(next(iter(specs.values())).mesh.shape)
    wholes = _shapes_given(func, args, kwargs)
    if wholes is None:
        return True
    tried = set()
    for position in range(torch.Size(mesh_shape).numel()):
        shapes = {
            path: _shard(spec.shape, result.inputs.get(path, spec.placements), mesh_shape, position)
            for path, spec in specs.items()
        }
        key = tuple(shapes.values())
        if key in tried or any(0 in shape for shape in key):
            continue
        tried.add(key)
        announced = [
            None if whole is None or out is None else _shard(whole, out, mesh_shape, position)
            for whole, out in zip(wholes, result.outs, strict=False)
        ]
        if not _gives(func, args, kwargs, shapes, announced):
            return False
    return True


def fits_top(call: Call, metas: Any, result: TierResult) -> bool:
    """Return whether every subgroup's block of the results is what the top tier's rule says.

    Args:
        call: The call after its free conversions.
        metas: Its outputs' global metadata.
        result: What the rule answered.
    """
    path = sizes_from(call)
    if path is None or _is_rewritten(call.func, result):
        return True
    args, kwargs = call.tier(lambda bound: bound.top())
    for index in range(len(call.subgroups)):
        shapes = {p: tuple(bound.block_shape(index)) for p, bound in call.specs.items()}
        if any(0 in shape for shape in shapes.values()):
            continue
        announced = [
            None
            if out is None or meta is None
            else _block(call, path, tuple(meta.shape), out[0], index)
            for meta, out in zip(as_list(metas), result.outs, strict=False)
        ]
        if not _gives(call.func, args, kwargs, shapes, announced):
            return False
    return True


def _is_rewritten(func: Any, result: TierResult) -> bool:
    """Whether arguments are still to be replaced by a block's or a shard's."""
    return func in SHAPE_ARGS or func in SIZE_ARGS or result.op is not func or bool(result.literals)


def _gives(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: dict[Any, Shape],
    announced: list[Shape | None],
) -> bool:
    def local(path: Any, value: Any) -> Any:
        if not isinstance(value, DTensorSpec):
            return value
        meta = value.tensor_meta
        assert meta is not None, "deduction fills in every operand's metadata"
        shape = torch.Size(shapes[path])
        own = TensorMeta(shape, contiguous_stride(shape), meta.dtype)
        return DTensorSpec(abstract_mesh((1,), 0), (Replicate(),), own)

    given = _shapes_given(func, *map_operands(local, args, kwargs))
    return given is not None and all(
        a is None or a == g for a, g in zip(announced, given, strict=False)
    )


def _shapes_given(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Shape | None] | None:
    """Return the shapes of the results, None if the operator does not take the operands."""
    try:
        metas = as_list(output_metas(func, args, kwargs))
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
        return None
    return [tuple(m.shape) if isinstance(m, TensorMeta) else None for m in metas]


#: What no result is: a placement cuts a dim that the result does not have.
_NO_SHAPE: Shape = (-1,)


def _shard(
    shape: Shape, placements: tuple[Placement, ...], mesh_shape: Shape, position: int
) -> Shape:
    if any((checks.shard_dim(p) or 0) >= max(len(shape), 1) for p in placements):
        return _NO_SHAPE
    group = Subgroup(range(torch.Size(mesh_shape).numel()), placements, mesh_shape)
    return local_shape(HDSpec([group]), tuple(shape), None, position)


def _block(call: Call, path: Any, shape: Shape, top: Placement, index: int) -> Shape:
    dim = checks.shard_dim(top)
    if dim is None:
        return shape
    if dim >= len(shape):
        return _NO_SHAPE
    size = out_top_sizes(call, path, top, shape)[index]
    return (*shape[:dim], size, *shape[dim + 1 :])
