"""Scaled dot-product attention on CPU, which DTensor has no rule for through 2.15 (case 52).

Batch and heads may be cut, and the sequence of the queries; keys and values are gathered inside the subgroup, and must be
whole at the top tier (``ops/attention``). torch's rules for its CUDA kernels gather a cut sequence of queries too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.errors import DeductionError
from hdtensor.ops.attention.distributed import How, backward, forward, mask_bound
from hdtensor.ops.attention.layout import SEQUENCE, attention_layout, cuts_sequence
from hdtensor.ops.calls import check_same_cut, check_same_subgroups, needs_communication
from hdtensor.ops.operand import make_call
from hdtensor.ops.propagate import operands, row_rule
from hdtensor.ops.registry import deduced, is_hdtensor, special
from hdtensor.placements import checks


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
    if func is _FLASH:
        return _shared(func, args, kwargs, first=0) or deduced(func, args, kwargs)
    return deduced(func, args, kwargs)


@special(_FLASH_BACKWARD, is_local=True)
def _without_dropout_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _shared(func, args, kwargs, first=1) or deduced(func, args, kwargs)


def _shared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: int) -> Any:
    """Return the run of an attention whose sequence is cut; None where none is, or deduction says what is wrong.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        first: Position of the queries.
    """
    tensors = args[first : first + 3]
    if len(tensors) < 3 or not all(map(is_hdtensor, tensors)):
        return None
    bounds = tuple(x._spec for x in tensors)
    if not cuts_sequence(*bounds):
        return None
    call = make_call(func, args, kwargs)
    check_same_subgroups(call)
    check_same_cut(call)
    layout = attention_layout(bounds[0], bounds[1], bounds[2], False)
    if layout is None:
        return None
    for path, bound in list(call.specs.items())[first + 1 : first + 3]:
        if checks.shard_dim(bound.spec.top) == SEQUENCE:
            raise needs_communication(call, path, Replicate())
    mask = call.specs.get(("attn_mask",))
    if mask is not None and checks.is_cut(mask.spec.top):
        wanted = mask_bound(mask, layout.q).spec.top
        if wanted != mask.spec.top:
            raise needs_communication(call, ("attn_mask",), wanted)
    return _forward_run(func) if first == 0 else _backward_run(func)


def _forward_run(func: Any) -> Any:
    def run(*args_and_kw: Any) -> Any:
        *args, kw = args_and_kw
        is_causal = args[4] if len(args) > 4 else (kw or {}).get("is_causal", False)
        q, k, v = args[:3]
        return forward(q, k, v, *_mask_and_how(func, is_causal, kw or {}))

    return run


def _backward_run(func: Any) -> Any:
    def run(*args_and_kw: Any) -> Any:
        (grad, q, k, v, out, lse, _, is_causal), kw = args_and_kw[:8], args_and_kw[8]
        return backward(grad, (q, k, v), (out, lse), *_mask_and_how(func, is_causal, kw or {}))

    return run


def _mask_and_how(func: Any, is_causal: bool, kw: dict[str, Any]) -> tuple[Any, How]:
    why = f"{func} (implicit)"
    return kw.get("attn_mask"), How(is_causal=is_causal, scale=kw.get("scale"), why=why)
