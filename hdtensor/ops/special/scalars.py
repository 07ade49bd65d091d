"""Reading values: ``item`` and ``bool`` answer only where the whole value is, ``equal`` and ``allclose`` everywhere."""

from __future__ import annotations

import functools
import numbers
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate

from hdtensor._rank import is_played
from hdtensor._torch_compat import in_backward, observe_conversion
from hdtensor.collectives import observe
from hdtensor.errors import DeductionError, NonLocalError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.registry import accepts_plain, deduced, is_hdtensor, moves, special, wrap
from hdtensor.ops.special.move import gradient_bound, move
from hdtensor.ops.special.pending import without_reductions


aten = torch.ops.aten


@special(aten._local_scalar_dense.default)
def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = args[0]._spec
    if bound.index is None:
        ranks = [list(g.ranks) for g in bound.spec.subgroups]

        def refuse(x: Any, kw: Any) -> Any:
            raise NonLocalError(
                f"rank {bound.rank} holds no part of {bound}; ranks {ranks} do. Every rank may call "
                f"hdtensor.item(t) or t.full_tensor() together."
            )

        return refuse
    if isinstance(bound.spec.top, Partial):

        def pending(x: Any, kw: Any) -> Any:
            raise DeductionError(
                f"reading a value whose reduction is pending: {bound}. Every rank may call hdtensor.item(t) "
                f"together, or redistribute it to Replicate() first."
            )

        return pending
    if bound.spec.has_partial():
        return functools.partial(_reduced_item, func, gradient_bound(bound))
    return lambda x, kw: x._local_tensor.item()


def _reduced_item(func: Any, whole: BoundSpec, x: Any, kw: Any) -> Any:
    """Read a value after the reductions inside its subgroups, which are implicit as DTensor's."""
    assert whole.index is not None, "only ranks that hold a part read"
    observe_conversion(
        x._spec.sub(whole.index), whole.sub(whole.index), lambda: f"implicit reduction of {x._spec}"
    )
    with observe.because(
        f"{func} (implicit, inside {list(whole.spec.subgroups[whole.index].ranks)})"
    ):
        return move(x, whole.spec, whole.top_sizes)._local_tensor.item()


@special(aten.equal.default, aten.allclose.default)
def _compare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer for the whole tensors, on every rank; every rank of the world calls it.

    Each rank compares its shards, after the other tensor was brought to the layout of the first that has one.
    """
    a, b = args[:2]
    if not (is_hdtensor(a) and is_hdtensor(b)) and not accepts_plain():
        raise DeductionError(
            f"{func}: one of the tensors is plain. Compare with t.full_tensor(), which every rank calls, distribute the "
            f"other one too, or call it inside implicit_replication()."
        )
    if a.shape != b.shape and func is aten.equal.default:
        return lambda *_: False
    if a.shape != b.shape:
        raise DeductionError(
            f"{func}: shapes {tuple(a.shape)} and {tuple(b.shape)} differ. Expand one to the other's."
        )
    layout = without_reductions((a if is_hdtensor(a) else b)._spec)

    def run(*args_and_kwargs: Any) -> bool:
        a, b, *given, kw = args_and_kwargs
        same = True
        shards = [_as(layout, x)._local_tensor for x in (a, b)]
        if layout.index is not None:
            same = bool(func(*shards, *given, **(kw or {})))
        return everywhere(str(func), same)

    return run


def _as(layout: BoundSpec, x: Any) -> Any:
    """Return a tensor in a layout; a plain one counts as replicated."""
    if not is_hdtensor(x):
        spec = layout.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
        whole = BoundSpec.of(spec, x.shape, x.stride(), x.dtype, None)
        x = wrap(x.new_empty(0) if layout.index is None else x, whole)
    if x._spec.spec is layout.spec and x._spec.top_sizes == layout.top_sizes:
        return x
    return move(x, layout.spec, layout.top_sizes)


def everywhere(why: str, flag: bool) -> bool:
    """Return whether the flag is true on every rank of the world, all of which call it.

    Args:
        why: What asks, for who watches communication.
        flag: What this rank says.
    """
    if not dist.is_initialized() or is_played():
        return flag
    moves[0] += 1  # no rank may skip the module around it
    said = [True] * dist.get_world_size()
    if observe.listeners:
        with observe.because(f"{why} (answers on every rank)"):
            observe.announce(why, range(len(said)))
            observe.notify("all_gather", tuple(range(len(said))), 1, tier="world", dtype=torch.bool)
    dist.all_gather_object(said, flag)
    return all(said)


def contains(tensor: Any, element: Any) -> bool:
    """Return whether one of the tensor's elements equals a number or a tensor, on every rank; all of them call it.

    Args:
        tensor: The ``HDTensor``; a pending reduction of it is done.
        element: What to look for; a tensor is compared element by element, with broadcasting.

    Raises:
        TypeError: If the element is neither.
    """
    if not isinstance(element, numbers.Number | torch.Tensor):
        raise TypeError(
            f"'in' on an HDTensor looks for a number or a tensor, got a {type(element).__name__}."
        )
    with torch.no_grad():
        flags = element == _as(without_reductions(tensor._spec), tensor)
        flags = _as(without_reductions(flags._spec), flags)
    is_found = flags._spec.index is not None and bool(flags._local_tensor.any())
    return not everywhere("in", not is_found)


@special(aten.is_same_size.default, is_local=True)
def _is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare global shapes, which every rank knows."""
    return lambda a, b, kw: a.shape == b.shape


@special(aten._has_same_storage_numel.default, is_local=True)
def _has_same_storage_numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare global sizes: what a tensor of forward derivatives is laid out like."""
    return lambda a, b, kw: a.numel() == b.numel()


@special(aten.is_pinned.default, is_local=True)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask about this rank's memory."""
    return lambda x, *rest: x._local_tensor.is_pinned()


@special(aten.isnan.default, is_local=True)
def _is_nan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look at this rank's term of a gradient whose reduction is pending, where ``detect_anomaly`` asks."""
    if not args[0]._spec.spec.has_partial():
        return None

    def run(x: Any, kw: Any) -> Any:
        if in_backward() and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            return func(x._local_tensor)
        return deduced(func, (x,), kw or {})(x, kw)

    return run


@special(aten._is_any_true.default, aten._is_all_true.default, is_local=True)
def _is_true(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask about this rank's elements: ``detect_anomaly`` looks for nan after each node, which not all ranks have."""
    return lambda x, kw: func(x._local_tensor)
