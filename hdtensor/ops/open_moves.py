"""Redistribution of tensors whose sizes a compiler has not fixed.

A plan depends on sizes, so what stands in the program is one operator on the local tensor. It finds its plan when it runs,
and a plan that was found is kept. Arguments are plain, as those of ``collectives.operators``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hdtensor._rank import current_rank
from hdtensor._torch_compilers import keep_effects_of_checkpoints, keep_in_order
from hdtensor.collectives import groups, observe
from hdtensor.placements.layout import local_shape
from hdtensor.placements.spec import HDSpec
from hdtensor.placements.subgroup import Subgroup
from hdtensor.redistribute.execute import make_runner
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.topology import Topology, topology_in_use


_library = torch.library.Library("hdtensor", "FRAGMENT")

Sizes = tuple[int, ...] | None


def _run(local: torch.Tensor, src: str, dst: str, shape: Sequence[int], *rest: Any) -> torch.Tensor:
    src_sizes, dst_sizes = (None if sizes is None else tuple(sizes) for sizes in rest[:2])
    _, reverse, is_everywhere = rest[2:]
    run = _runner(
        (src, dst),
        tuple(shape),
        (src_sizes, dst_sizes),
        topology_in_use(),
        (current_rank(), reverse, is_everywhere),
    )
    with observe.profiled("redistribute"), observe.because("compiled graph"):
        result = run(local)
    return result.clone() if result is local else result


@functools.lru_cache(maxsize=4096)
def _runner(
    specs: tuple[str, str],
    shape: tuple[int, ...],
    top_sizes: tuple[Sizes, Sizes],
    topology: Topology,
    how: tuple[int, bool, bool],
) -> Callable[[torch.Tensor], torch.Tensor]:
    src, dst = map(HDSpec.from_text, specs)
    src_sizes, dst_sizes = top_sizes
    plan = resolve(
        src, dst, shape, src_top_sizes=src_sizes, dst_top_sizes=dst_sizes, topology=topology
    )
    _, reverse, is_everywhere = how
    if is_everywhere:
        groups.ensure_groups(groups.with_axes(plan.rank_sets(), (*src.subgroups, *dst.subgroups)))
        if plan.has_messages:
            groups.ensure_channels()
    return make_runner(plan, reverse=reverse)


_library.define(
    "move_local(Tensor local, str src, str dst, SymInt[] shape, SymInt[]? src_sizes, SymInt[]? dst_sizes, "
    "SymInt[] local_shape, bool reverse, bool everywhere) -> Tensor"
)
_library.impl("move_local", _run, "CompositeExplicitAutograd")
# A rank that only gives uses no result; without its call the others would wait for ever.
keep_in_order(
    "hdtensor::move_local",
    _library,
    lambda local, src, dst, shape, src_sizes, dst_sizes, local_shape, *how: local.new_empty(
        local_shape
    ),
)


def move_between(local: torch.Tensor, src: Any, dst: Any, *, reverse: bool) -> torch.Tensor:
    """Return this rank's part after a redistribution; every rank of the world calls it.

    Args:
        local: This rank's part before.
        src: Bound spec before.
        dst: Bound spec after.
        reverse: Whether a backward pass moves it.
    """
    keep_effects_of_checkpoints()
    return torch.ops.hdtensor.move_local(
        local,
        src.spec.text,
        dst.spec.text,
        src.shape,
        src.top_sizes,
        dst.top_sizes,
        dst.local_shape(),
        reverse,
        True,
    )


def move_inside(
    local: torch.Tensor, group: Subgroup, wanted: Sequence[Any], shape: Sequence[int]
) -> torch.Tensor:
    """Return this rank's part of a subgroup's block after a change of placements; every rank of the subgroup calls it.

    Args:
        local: This rank's part before.
        group: The subgroup with the placements before.
        wanted: The placements after.
        shape: The block's extents.
    """
    src, dst = HDSpec((group,)), HDSpec((group.with_placements(wanted),))
    own = local_shape(dst, tuple(shape), None, current_rank())
    keep_effects_of_checkpoints()
    return torch.ops.hdtensor.move_local(
        local, src.text, dst.text, shape, None, None, own, False, False
    )
