"""Scaled dot-product attention on CPU, which DTensor has no rule for through 2.15 (case 52).

Batch and heads may be cut; a cut sequence is gathered inside the subgroup and refused at the top tier.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.errors import DeductionError
from hdtensor.ops.propagate import operands, row_rule
from hdtensor.ops.registry import deduced, special


aten = torch.ops.aten

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_MAX_DIMS = 4


def _rows(
    num_outs: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Placement, ...]]:
    specs = [(path, s) for path, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    size = specs[0][1].mesh.size()
    rows: list[tuple[Placement, ...]] = [(Replicate(),) * (num_outs + len(specs))]
    for dim in (0, 1):
        tensors = [s for path, s in specs if path != ("attn_mask",)]
        # Query and key heads must be cut alike, or heads would pair wrongly.
        if dim == 1 and any(s.shape[1] % size for s in tensors if len(s.shape) == _MAX_DIMS):
            continue
        row: list[Placement] = [Shard(dim)] * num_outs
        for path, spec in specs:
            row.append(_mask_placement(spec, dim) if path == ("attn_mask",) else Shard(dim))
        rows.append(tuple(row))
    return rows


def _mask_placement(spec: DTensorSpec, dim: int) -> Placement:
    """A mask is cut with the operand where it has the dim, and kept whole where it broadcasts."""
    at = dim + len(spec.shape) - _MAX_DIMS
    return Shard(at) if at >= 0 and spec.shape[at] > 1 else Replicate()


@row_rule(_FLASH)
def _flash(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    return _rows(2, args, kwargs)


@row_rule(_FLASH_BACKWARD)
def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    return _rows(3, args, kwargs)


#: Fused attention operators and the position of their dropout probability.
_DROPOUT = {
    _FLASH: 3,
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
}


@special(*_DROPOUT, is_local=True)
def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Deduce as any operator: without dropout nothing is random here, though the operators are tagged so."""
    position = _DROPOUT[func]
    dropout = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
    if dropout:
        raise DeductionError(
            f"{func}: dropout inside fused attention draws by shard. Use the math path "
            f"(torch.nn.attention.sdpa_kernel(SDPBackend.MATH)), whose dropout hdtensor draws by element."
        )
    return deduced(func, args, kwargs)
