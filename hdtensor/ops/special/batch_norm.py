"""Batch norm in evaluation, whose saved statistics are empty on CPU, though its meta function says otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate

from hdtensor.ops.bound import BoundSpec
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
