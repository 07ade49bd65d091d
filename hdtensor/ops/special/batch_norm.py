"""Batch and group norm: rules for their backwards, and the statistics that batch norm saves in evaluation.

DTensor has no rules for these backwards, and would try every combination of placements on seven operands. In evaluation the
saved statistics are empty on CPU, though the meta function says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.propagate import operands, row_rule
from hdtensor.ops.registry import deduced, is_hdtensor, special, wrap


aten = torch.ops.aten

#: Operator: position of its ``training`` argument; None where it never trains.
_TRAINING = {
    aten.native_batch_norm.default: 5,
    aten._native_batch_norm_legit.default: 5,
    aten._native_batch_norm_legit_no_training.default: None,
}


@special(*_TRAINING, is_local=True)
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position = _TRAINING[func]
    like = next(a for a in args if is_hdtensor(a))
    if (position is not None and args[position]) or like._local_tensor.device.type != "cpu":
        return None
    run = deduced(func, args, kwargs)
    whole = like._spec.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())

    def run_in_evaluation(*args_and_kwargs: Any) -> Any:
        out, *saved = run(*args_and_kwargs)
        empty = [x._local_tensor.new_empty(0) for x in saved]
        return (out, *(wrap(x, BoundSpec.of(whole, (0,), (1,), x.dtype, None)) for x in empty))

    return run_in_evaluation


@row_rule(aten.native_group_norm_backward.default)
def _group_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Placement, ...]]:
    """Samples are independent; the weights' gradients sum over them. Inputs: gradient, input, mean, rstd, weight?"""
    specs = [s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    weight = (Replicate(),) * (len(specs) - 4)
    by_sample = (Shard(0), Partial(), Partial(), *(Shard(0),) * 4, *weight)
    return [(Replicate(),) * len(by_sample), by_sample]


@row_rule(aten.batch_norm_backward.default)
def _batch_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Placement, ...]]:
    """Channels are independent. Inputs: gradient, input, statistics and weights by channel, and what cuDNN keeps."""
    specs = [s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    by_channel = [Shard(1) if len(s.shape) > 1 else Shard(0) for s in specs[:-1]]
    row = (Shard(1), Shard(0), Shard(0), *by_channel, Replicate())
    return [(Replicate(),) * len(row), row]
