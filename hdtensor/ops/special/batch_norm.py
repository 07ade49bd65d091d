"""Batch and group norm: rules for their backwards, and the statistics that batch norm saves in evaluation.

DTensor has no rules for these backwards, and would try every combination of placements on seven operands. In evaluation the
saved statistics are empty on CPU, though the meta function says otherwise.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.propagate import operands, row_rule
from hdtensor.ops.registry import call, deduced, is_hdtensor, special, wrap
from hdtensor.ops.special.batch_statistics import (
    by_running_statistics,
    cuts_samples,
    over_the_whole_batch,
)
from hdtensor.ops.special.conversions import convert_inside
from hdtensor.ops.writes import copy_into
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec


aten = torch.ops.aten

#: Operator: position of its ``training`` argument; None where it never trains.
_TRAINING = {
    aten.native_batch_norm.default: 5,
    aten._native_batch_norm_legit.default: 5,
    aten._native_batch_norm_legit_no_training.default: None,
}


#: Where the running statistics stand, which training writes to.
_RUNNING = (3, 4)


@special(*_TRAINING, aten._batch_norm_with_update.default, is_local=True)
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position = _TRAINING.get(func)
    like = next(a for a in args if is_hdtensor(a))
    trains = func not in _TRAINING or (position is not None and args[position])
    if trains and func in _TRAINING and cuts_samples(args[0]):
        return over_the_whole_batch
    if not trains and cuts_samples(args[0]):
        return by_running_statistics
    if trains or func._schema.is_mutable:  # what may write keeps its layouts in evaluation too
        run = _by_channels(func, args)
        if run is not None or trains:
            return run
    if like._local_tensor.device.type != "cpu":
        return None
    run = deduced(func, args, kwargs)
    whole = like._spec.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())

    def run_in_evaluation(*args_and_kwargs: Any) -> Any:
        out, *saved = run(*args_and_kwargs)
        empty = [x._local_tensor.new_empty(0) for x in saved]
        return (out, *(wrap(x, BoundSpec.of(whole, (0,), (1,), x.dtype, None)) for x in empty))

    return run_in_evaluation


@special(aten._native_batch_norm_legit.no_stats, is_local=True)
def _batch_norm_without_running(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without running statistics; what a compiler makes of ``native_batch_norm`` then."""
    if not cuts_samples(args[0]):
        return None

    def run(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return over_the_whole_batch(x, weight, bias, None, None, *rest)

    return run


def _by_channels(func: Any, args: tuple[Any, ...]) -> Any:
    """Cut all operands by channel wherever one is cut, and bring the running statistics back behind it.

    The operator writes to them, so that a conversion in passing would lose what it writes.
    """
    x = args[0]
    if not is_hdtensor(x) or len(x.shape) < 2 or not any(is_hdtensor(args[i]) for i in _RUNNING):
        return None
    cut = _by_channel(x._spec, x._spec.spec, Shard(1))
    wanted = {0: cut} | {
        i: _by_channel(x._spec, args[i]._spec.spec, Shard(0))
        for i in range(1, _RUNNING[-1] + 1)
        if is_hdtensor(args[i])
    }
    wanted = {i: spec for i, spec in wanted.items() if spec is not args[i]._spec.spec}
    if not wanted:
        return None

    def run(*args_and_kwargs: Any) -> Any:
        *given, kw = args_and_kwargs
        changed = list(given)
        for i, spec in wanted.items():
            changed[i] = convert_inside(func, given[i], spec)
        out = call(func, *changed, **(kw or {}))
        for i in _RUNNING:
            if i in wanted:
                copy_into(func, given[i], changed[i])
        return out

    return run


def _by_channel(x: BoundSpec, own: HDSpec, channels: Shard) -> HDSpec:
    """Return an operand's spec with its channels cut inside the subgroups wherever ``x`` is.

    Where there are fewer channels than ranks, which DTensor's rule does not cut, they are whole.
    """
    if [g.mesh_shape for g in x.spec.subgroups] != [g.mesh_shape for g in own.subgroups]:
        return own
    groups = []
    for index, (group, of_x) in enumerate(zip(own.subgroups, x.spec.subgroups, strict=True)):
        cuts = [checks.is_cut(p) for p in of_x.placements]
        parts = math.prod(itertools.compress(of_x.mesh_shape, cuts))
        are_cut = x.block_shape(index)[1] >= parts
        groups.append(
            group.with_placements(channels if cut and are_cut else Replicate() for cut in cuts)
        )
    return own.replace(subgroups=tuple(groups))


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
