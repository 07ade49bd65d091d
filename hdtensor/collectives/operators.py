"""The collectives and messages of redistribute as operators: what ``torch.compile`` keeps in its graph.

Eager code calls ``split`` and ``p2p`` themselves, which saves the operator's dispatch. Arguments are
plain (ranks, sizes, the name of a reduction), since a graph cannot hold a spec or a process group.

==================================  ====================================================================
operator                            gradient
==================================  ====================================================================
``hdtensor::split_all_reduce``      ``split_all_reduce``
``hdtensor::split_reduce_scatter``  ``split_all_gather``
``hdtensor::split_all_gather``      ``split_reduce_scatter``
``hdtensor::split_all_to_all``      ``split_all_to_all`` with its sizes exchanged
``hdtensor::send_recv``             ``send_recv`` the other way, on the channel of the other direction
``hdtensor::make_groups``           none
==================================  ====================================================================

A gradient here is that of the sum of all ranks' results, as in ``torch.distributed.nn.functional``: each
rank's copy counts. An ``HDTensor``'s gradient is that of the one logical tensor; it does not use these.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from hdtensor._torch_compilers import keep_effects_of_checkpoints, keep_in_order
from hdtensor.collectives import groups, observe, p2p, split
from hdtensor.collectives.groups import group_of
from hdtensor.errors import RedistributeError


_library = torch.library.Library("hdtensor", "FRAGMENT")
_ops: Any = torch.ops.hdtensor


def _operator(
    schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> Callable[..., Any]:
    """Define an operator; return the function that registers its gradient."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    # A rank that only gives uses no result; without its call the others would wait for ever.
    keep_in_order(f"hdtensor::{name}", _library, fake)

    def register(backward: Callable[..., Any], keep: Callable[..., Any]) -> None:
        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.kept = keep(*inputs)

        torch.library.register_autograd(
            f"hdtensor::{name}",
            lambda ctx, grad: backward(grad.contiguous(), *ctx.kept),
            setup_context=setup,
            lib=_library,
        )

    return register


_WHY = "compiled graph"


def _notify(
    kind: str, ranks: Sequence[int], flat: Tensor, sent: Sequence[int], received: Sequence[int]
) -> None:
    """Tell of a collective; the graph does not say which tier it belongs to, nor what asked for it."""
    if observe.listeners:
        with observe.because(_WHY):
            observe.notify(
                kind,
                tuple(ranks),
                flat.nbytes,
                tier="compiled",
                dtype=flat.dtype,
                sizes=(sent, received),
            )


def _all_reduce(flat: Tensor, op: str, num_terms: int, ranks: Sequence[int]) -> Tensor:
    _notify("all_reduce", ranks, flat, (flat.numel(),), (flat.numel(),))
    return split.all_reduce(flat, Partial(op), num_terms, group_of(ranks))()


def _all_reduce_back(
    grad: Tensor, op: str, num_terms: int, ranks: Sequence[int]
) -> tuple[Tensor, None, None, None]:
    _check_linear(op)
    return _ops.split_all_reduce(grad, op, num_terms, ranks), None, None, None


_operator(
    "split_all_reduce(Tensor flat, str op, int num_terms, int[] ranks) -> Tensor",
    _all_reduce,
    lambda flat, op, num_terms, ranks: torch.empty_like(flat),
)(_all_reduce_back, lambda flat, *rest: rest)


def _reduce_scatter(
    flat: Tensor, sizes: Sequence[int], place: int, op: str, num_terms: int, ranks: Sequence[int]
) -> Tensor:
    _notify("reduce_scatter", ranks, flat, sizes, (sizes[place],))
    return split.reduce_scatter(flat, sizes, Partial(op), num_terms, group_of(ranks))()


def _reduce_scatter_back(
    grad: Tensor, sizes: Sequence[int], place: int, op: str, num_terms: int, ranks: Sequence[int]
) -> tuple[Tensor | None, ...]:
    _check_linear(op)
    gathered = _ops.split_all_gather(grad, sizes, place, ranks)
    return gathered / num_terms if op == "avg" else gathered, None, None, None, None, None


# A rank's place in the group is an argument: ranks share the compiler's cache, which tells graphs apart by
# their arguments, and the size of the result depends on it.

_operator(
    "split_reduce_scatter(Tensor flat, SymInt[] sizes, int place, str op, int num_terms, int[] ranks) "
    "-> Tensor",
    _reduce_scatter,
    lambda flat, sizes, place, op, num_terms, ranks: flat.new_empty(sizes[place]),
)(_reduce_scatter_back, lambda flat, *rest: rest)


def _all_gather(flat: Tensor, sizes: Sequence[int], place: int, ranks: Sequence[int]) -> Tensor:
    _notify("all_gather", ranks, flat, (flat.numel(),), sizes)
    return split.all_gather(flat, sizes, group_of(ranks))()


_operator(
    "split_all_gather(Tensor flat, SymInt[] sizes, int place, int[] ranks) -> Tensor",
    _all_gather,
    lambda flat, sizes, place, ranks: flat.new_empty(sum(sizes)),
)(
    lambda grad, sizes, place, ranks: (
        _ops.split_reduce_scatter(grad, sizes, place, "sum", len(ranks), ranks),
        None,
        None,
        None,
    ),
    lambda flat, *rest: rest,
)


def _all_to_all(
    flat: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Sequence[int]
) -> Tensor:
    _notify("all_to_all", ranks, flat, sent, received)
    return split.all_to_all(flat, sent, received, group_of(ranks))()


_operator(
    "split_all_to_all(Tensor flat, SymInt[] sent, SymInt[] received, int[] ranks) -> Tensor",
    _all_to_all,
    lambda flat, sent, received, ranks: flat.new_empty(sum(received)),
)(
    lambda grad, sent, received, ranks: (
        _ops.split_all_to_all(grad, received, sent, ranks),
        None,
        None,
        None,
    ),
    lambda flat, *rest: rest,
)


def _send_recv(
    flat: Tensor,
    send_to: Sequence[int],
    sent: Sequence[int],
    receive_from: Sequence[int],
    received: Sequence[int],
    reverse: bool,
) -> Tensor:
    out = flat.new_empty(sum(received))
    sends = dict(zip(send_to, flat.contiguous().split(list(sent)), strict=True))
    recvs = dict(zip(receive_from, out.split(list(received)), strict=True))
    if observe.listeners:
        with observe.because(_WHY):
            observe.notify_messages(sends, recvs, "compiled")
    p2p.start(sends, recvs, reverse=reverse)()
    return out


def _send_recv_back(
    grad: Tensor,
    send_to: Sequence[int],
    sent: Sequence[int],
    receive_from: Sequence[int],
    received: Sequence[int],
    reverse: bool,
) -> tuple[Tensor | None, ...]:
    back = _ops.send_recv(grad, receive_from, received, send_to, sent, not reverse)
    return back, None, None, None, None, None


_operator(
    "send_recv(Tensor flat, int[] send_to, SymInt[] sent, int[] receive_from, SymInt[] received, "
    "bool reverse) -> Tensor",
    _send_recv,
    lambda flat, send_to, sent, receive_from, received, reverse: flat.new_empty(sum(received)),
)(_send_recv_back, lambda flat, *rest: rest)


def _make_groups(
    like: Tensor, sizes: Sequence[int], ranks: Sequence[int], channels: bool
) -> Tensor:
    flat = iter(ranks)
    groups.ensure_groups([tuple(itertools.islice(flat, size)) for size in sizes])
    if channels:
        groups.ensure_channels()
    return like.new_empty(0)


_library.define("make_groups(Tensor like, int[] sizes, int[] ranks, bool channels) -> Tensor")
_library.impl("make_groups", _make_groups, "CompositeExplicitAutograd")
keep_in_order("hdtensor::make_groups", _library, lambda like, *rest: like.new_empty(0))


def make_groups_in_graph(like: Tensor, wanted: set[tuple[int, ...]], *, channels: bool) -> None:
    """Have what is being traced make those groups that are missing when it runs: every rank's program does so at this place.

    Args:
        like: A tensor of the graph.
        wanted: Global ranks of each group.
        channels: Whether to make the channel of backward messages.
    """
    if groups.are_known(wanted, channels=channels):
        return
    in_order = sorted(wanted)
    _ops.make_groups(like, [*map(len, in_order)], [*itertools.chain(*in_order)], channels)


def start(name: str, flat: Tensor, *args: Any) -> Tensor:
    """Call an operator of this module by its name: what is traced has no other way to communicate."""
    keep_effects_of_checkpoints()
    return getattr(_ops, name)(flat, *args)


def _check_linear(op: str) -> None:
    if op not in ("sum", "avg"):
        raise RedistributeError(
            f"autograd through a pending {op} is not defined: {op} is not linear, and the terms are not "
            f"kept. Reduce with Partial('sum') or 'avg', or call it under torch.no_grad()."
        )
