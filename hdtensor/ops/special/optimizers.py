"""Operators of optimizers that DTensor has no rule for: element by element, all laid out as the first operand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._rank import is_played
from hdtensor._torch_compat import DTensorSpec
from hdtensor.collectives import observe
from hdtensor.errors import GroupError
from hdtensor.ops.propagate import operands, row_rule
from hdtensor.ops.registry import is_hdtensor, special


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


@special(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unscale this rank's shards; what any rank finds that is not finite, all ranks find, as they skip a step together."""

    def run(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor, kw: Any) -> None:
        locals_ = [g._local_tensor if is_hdtensor(g) else g for g in grads]
        if is_played():
            raise GroupError(
                f"{func} asks all ranks for values that are not finite; as_rank has none."
            )
        func([t for t in locals_ if t.numel()], found_inf, inv_scale)
        if dist.is_initialized():
            ranks = tuple(range(dist.get_world_size()))
            observe.announce("unscaling of gradients", ranks)
            with observe.because("GradScaler"):
                observe.notify("all_reduce", ranks, found_inf.nbytes, tier="world")
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)

    return run


@row_rule(aten._weight_norm_interface.default)
def _weight_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Placement, ...]]:
    """``w = v * g / norm(v)``, one norm for each index of ``dim``: only that dim can be cut."""
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return [(p, p, p, p) for p in (Shard(dim), Replicate())]


@row_rule(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Placement, ...]]:
    """Gradients of ``v`` and ``g`` from that of ``w``, which they are linear in, with ``v``, ``g`` and the norms."""
    cut, whole, pending = Shard(args[4]), Replicate(), Partial()
    return [
        (cut,) * 6,
        (whole,) * 6,
        (pending, pending, pending, whole, whole, whole),
    ]
