"""``context_parallel``: attention over a sequence that ranks share, by gathered or circulating keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hdtensor.errors import DeductionError, PlanError
from hdtensor.ops.attention.distributed import How, backward, forward
from hdtensor.ops.attention.layout import attention_layout, cuts_sequence
from hdtensor.ops.attention.shares import order_of
from hdtensor.ops.attention.tiles import Span, length_of
from hdtensor.ops.registry import accepts_plain, is_hdtensor
from hdtensor.placements.spec import HDSpec
from hdtensor.tensor import HDTensor


Method = Literal["all_gather", "ring"]

#: From the number of rows of the sequence to their positions; None where row i is at position i.
Order = Callable[[int], tuple[Span, ...] | None]

_NUM_DIMS = 4

#: Of a mask that says no more than "causal, by position"; torch has none of this dtype.
_NO_MASK = torch.int8


def without_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments for a compiler, which cannot see that an ``attention_mask`` hides nothing.

    Models of Hugging Face leave out such a mask, but while they are traced they make one for each row and key.
    """
    mask: Any = kwargs.get("attention_mask")
    if not getattr(mask, "_hides_nothing", False):
        return kwargs
    return {**kwargs, "attention_mask": mask.new_ones((1, 1, 1, 1), dtype=_NO_MASK)}


@dataclass(frozen=True)
class PlanOrder:
    """The order of a plan's rows. Compilers keep what it is made of, and ask it while they trace.

    Attributes:
        inputs: Spec of the plan's batch.
        kind: The plan's ``sequence_order``.
    """

    inputs: HDSpec
    kind: Literal["contiguous", "zigzag"]

    def __call__(self, length: int) -> tuple[Span, ...] | None:
        """Return the positions of the rows of a sequence."""
        return order_of(self.inputs, length, self.kind)


class context_parallel(TorchFunctionMode):
    """Have ``F.scaled_dot_product_attention`` inside share sequences that either tier cuts.

    Without it keys and values are gathered inside subgroups, and must be whole at the top tier. With it they come from
    other subgroups too, or go around as blocks. ``parallelize`` turns it on in the layers of a plan that shares sequences.

    Args:
        method: "all_gather": every rank gets all keys and values of its heads. "ring": blocks go around the axis of the
            subgroup that cuts queries, keys and values; a rank has two blocks at a time. Between subgroups keys are
            gathered in any case.
        order: Positions of the rows of a sequence of some length, where they are not in the sequence's order: ``is_causal``
            is by position then.

    Raises:
        PlanError: On an unknown method.
    """

    def __init__(self, method: Method = "all_gather", order: Order | None = None) -> None:
        super().__init__()
        if method not in get_args(Method):
            raise PlanError(
                f"context_parallel: must be one of {', '.join(get_args(Method))}, got {method!r}."
            )
        self.method = method
        self.order = order
        self.num_calls = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            # Compilers cannot follow the method's ``super()`` inside of a mode.
            func = torch.unflatten
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        call = _Call(*args, **(kwargs or {}))
        is_ordered = getattr(call.attn_mask, "_is_ordered", False)
        if not torch.compiler.is_compiling():
            return _attend(call, _Sharing(self.method, self.order, is_ordered))
        order = self.order
        if order is None:
            return _attend_in_graph(self.method, None, None, is_ordered, *call)
        if not isinstance(order, PlanOrder):
            raise DeductionError(
                "context_parallel(order=...) with a function of one's own cannot be compiled: call the attention outside of "
                "compiled functions, or take the order from a plan (sequence_order)."
            )
        return _attend_in_graph(self.method, order.inputs, order.kind, is_ordered, *call)


class _Call(NamedTuple):
    """Arguments of ``F.scaled_dot_product_attention``, by their names."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@torch.compiler.allow_in_graph
def _attend_in_graph(
    method: Method, inputs: HDSpec | None, kind: Any, is_ordered: bool, *call: Any
) -> Any:
    """Attend; compilers run it while they trace, and keep what it does."""
    order = None if inputs is None else PlanOrder(inputs, kind)
    return _attend(_Call(*call), _Sharing(method, order, is_ordered))


class _Sharing(NamedTuple):
    """What is known of a sequence.

    Attributes:
        method: How keys come to the queries.
        order: Positions of the rows of a sequence of some length; None for their own.
        is_ordered: Whether the mask was made for that order.
    """

    method: Method
    order: Order | None
    is_ordered: bool


def _attend(call: _Call, sharing: _Sharing) -> Any:
    if call.attn_mask is not None and call.attn_mask.dtype == _NO_MASK:
        call = call._replace(attn_mask=None, is_causal=True)
    how = _how(call, sharing)
    if how is None:
        return F.scaled_dot_product_attention(
            *call[:6], scale=call.scale, enable_gqa=call.enable_gqa
        )
    call = _autocast(call)
    return _Attention.apply(call.query, call.key, call.value, call.attn_mask, how)


def _how(call: _Call, sharing: _Sharing) -> How | None:
    """Return how this call is shared; None where torch's own operator does it."""
    tensors = (call.query, call.key, call.value)
    if not all(isinstance(x, HDTensor) for x in tensors):
        return None
    bounds = tuple(x._spec for x in tensors)
    if not cuts_sequence(*bounds) or not _is_valid(call):
        return None
    method = sharing.method
    order = None if sharing.order is None else sharing.order(int(call.query.shape[-2]))
    mask = call.attn_mask
    is_masked_with_gradient = mask is not None and mask.requires_grad
    if call.query.ndim != _NUM_DIMS or call.dropout_p or is_masked_with_gradient:
        if order is None and method == "all_gather":
            return None
        raise DeductionError(
            f"scaled_dot_product_attention with dropout_p={call.dropout_p}, {call.query.ndim} dims and a mask "
            f"that {'needs' if is_masked_with_gradient else 'needs no'} gradient cannot share a "
            f"sequence by {method!r}{' in another order' if order else ''}. It takes 4 dims, dropout 0 and "
            f"masks without gradient; or use context_parallel='all_gather' and sequence_order='contiguous'."
        )
    if attention_layout(bounds[0], bounds[1], bounds[2], method == "ring") is None:
        return None
    if order is not None:
        _check_order(call, order, sharing.is_ordered)
    return How(
        is_causal=call.is_causal,
        scale=call.scale,
        order=order,
        is_ring=method == "ring",
        why=f"context parallel ({method})",
    )


def _is_valid(call: _Call) -> bool:
    """Whether the operator would take these operands; it says itself what is wrong with others."""
    q, k, v, mask = call.query, call.key, call.value, call.attn_mask
    if mask is not None and (call.is_causal or not (is_hdtensor(mask) or accepts_plain())):
        return False
    groups = [[(g.ranks, g.mesh_shape) for g in x.spec.subgroups] for x in (q, k, v)]
    if groups[0] != groups[1] or groups[0] != groups[2]:
        return False
    if q.ndim != _NUM_DIMS:
        return True
    same = q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    heads = q.shape[1] == k.shape[1] or (call.enable_gqa and q.shape[1] % k.shape[1] == 0)
    return same and heads and q.dtype == k.dtype == v.dtype


def _check_order(call: _Call, order: tuple[Span, ...], is_ordered: bool) -> None:
    """Raise unless rows and keys are in the order that was set, and the mask was made for it."""
    num_keys = call.key.shape[-2]
    if num_keys != length_of(order):
        raise DeductionError(
            f"scaled_dot_product_attention: {num_keys} keys beside {length_of(order)} rows in another order than the "
            f"sequence's; which positions the keys have is not known. Use sequence_order='contiguous'."
        )
    if call.attn_mask is not None and not is_ordered:
        raise DeductionError(
            "scaled_dot_product_attention: the mask was made by the model, which takes row i to be at position i, but "
            "the plan's sequence_order puts rows elsewhere. Pass the mask through distribute_batch, or use "
            "sequence_order='contiguous'."
        )


def _autocast(call: _Call) -> _Call:
    """Cast as autocast would cast the operator's arguments."""
    kind = call.query.device.type
    if not torch.is_autocast_enabled(kind):
        return call
    dtype = torch.get_autocast_dtype(kind)
    mask = call.attn_mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    q, k, v = (x.to(dtype) for x in (call.query, call.key, call.value))
    return call._replace(query=q, key=k, value=v, attn_mask=mask)


class _Attention(torch.autograd.Function):
    """Attention over a shared sequence; saves this rank's own blocks of keys only."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, how: How) -> Any:
        out, lse = forward(q, k, v, mask, how)
        ctx.how, ctx.has_mask = how, mask is not None
        ctx.save_for_backward(q, k, v, out, lse, *([mask] if ctx.has_mask else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, out, lse, *mask = ctx.saved_tensors
        grads = backward(grad, (q, k, v), (out, lse), mask[0] if ctx.has_mask else None, ctx.how)
        return *grads, None, None


def share_sequences(
    module: torch.nn.Module, method: Method, order: Order | None
) -> Callable[[], None]:
    """Have a module's attention share sequences, whoever calls it (a checkpoint that computes it again, too).

    Returns:
        A function that gives the module its own forward back.
    """
    own = module.forward

    @functools.wraps(own)
    def sharing(*args: Any, **kwargs: Any) -> Any:
        mode = context_parallel(method, order)  # compilers lose the name of ``as``
        with mode:
            result = own(*args, **kwargs)
        if order is not None and not mode.num_calls:
            raise PlanError(
                f"sequence_order: {type(module).__name__} did not call F.scaled_dot_product_attention, and other "
                f"attention takes row i to be at position i. Choose it (Hugging Face: attn_implementation='sdpa'), or "
                f"use sequence_order 'contiguous'."
            )
        return result

    module.forward = sharing

    def restore() -> None:
        module.forward = own

    return restore
