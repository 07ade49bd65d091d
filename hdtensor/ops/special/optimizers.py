"""Operators of optimizers that DTensor has no rule for: element by element, all laid out as the first operand."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.propagate import operands, row_rule


aten = torch.ops.aten

_IN_PLACE = (
    aten._foreach_copy_.default,
    aten._foreach_maximum_.Scalar,
    aten._foreach_maximum_.ScalarList,
    aten._foreach_minimum_.Scalar,
    aten._foreach_minimum_.ScalarList,
    aten._fused_adagrad_.default,
    aten._fused_adagrad_.tensor_lr,
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
)
_OUT_OF_PLACE = (
    aten._foreach_addcdiv.Scalar,
    aten._foreach_addcdiv.ScalarList,
    aten._foreach_addcdiv.Tensor,
    aten._foreach_addcmul.ScalarList,
    aten._foreach_addcmul.Tensor,
    aten._foreach_maximum.Scalar,
    aten._foreach_maximum.ScalarList,
    aten._foreach_minimum.Scalar,
    aten._foreach_minimum.ScalarList,
)


@row_rule(*_IN_PLACE)
def _step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    return [row[1:] for row in _result(args, kwargs)]


@row_rule(*_OUT_OF_PLACE)
def _result(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    first = args[0][0]
    specs = [s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    kept = {p for p in first.placements if not isinstance(p, Partial)} or {Replicate()}
    return [
        (p, *(p if s.shape == first.shape else Replicate() for s in specs))
        for p in sorted(kept, key=repr)
    ]
