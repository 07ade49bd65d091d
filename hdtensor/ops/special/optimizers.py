"""Fused optimizer steps that DTensor has no rule for: each element of all operands by itself, laid out as the parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.propagate import operands, row_rule


aten = torch.ops.aten


@row_rule(
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adagrad_.default,
    aten._fused_adagrad_.tensor_lr,
)
def _fused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    parameter = args[0][0]
    specs = [s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    kept = {p for p in parameter.placements if not isinstance(p, Partial)} or {Replicate()}
    return [
        tuple(p if s.shape == parameter.shape else Replicate() for s in specs)
        for p in sorted(kept, key=repr)
    ]
