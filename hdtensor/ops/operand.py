"""From the arguments of an operator call to what deduction sees: a ``BoundSpec`` for every tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from hdtensor.errors import DeductionError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import Call
from hdtensor.ops.propagate import map_operands, operands
from hdtensor.ops.registry import accepts_plain, is_hdtensor


def make_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call as deduction sees it; plain tensors become replicated operands.

    Raises:
        DeductionError: On a plain tensor of more than one element outside ``implicit_replication``, or a
            ``DTensor`` beside an ``HDTensor``.
    """
    like = next(v for _, v in operands(args, kwargs) if is_hdtensor(v))._spec
    plain = set()

    def to_spec(path: Any, value: Any) -> Any:
        if is_hdtensor(value):
            return value._spec
        if not isinstance(value, torch.Tensor):
            return value
        is_number = value.ndim <= 1 and value.numel() == 1
        if isinstance(value, DTensor) or not (accepts_plain() or is_number):
            raise _refuse_plain(func, args, kwargs, path, value, like)
        plain.add(path)
        whole = like.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
        return BoundSpec.of(whole, value.shape, value.stride(), value.dtype, None)

    new_args, new_kwargs = map_operands(to_spec, args, kwargs)
    return Call(func, new_args, new_kwargs, frozenset(plain))


def _refuse_plain(
    func: Any, args: Any, kwargs: Any, path: Any, value: torch.Tensor, like: BoundSpec
) -> DeductionError:
    called = Call(func, (), {}, frozenset())
    name = called.name_of(path)
    others = [
        f"{called.name_of(p)}: {v._spec}" for p, v in operands(args, kwargs) if is_hdtensor(v)
    ]
    if isinstance(value, DTensor):
        return DeductionError(
            f"{func}: operand {name!r} is a DTensor of shape {tuple(value.shape)} beside HDTensors "
            f"({'; '.join(others)}). Turn it into one: HDTensor.from_dtensor(t, spec)."
        )
    return DeductionError(
        f"{func}: operand {name!r} is a plain torch.Tensor of shape {tuple(value.shape)} beside HDTensors "
        f"({'; '.join(others)}). If it is the same on every rank, call under "
        f"hdtensor.implicit_replication(); else distribute_tensor(t, spec) on "
        f"{[list(g.ranks) for g in like.spec.subgroups]}."
    )
