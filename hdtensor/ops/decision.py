"""``Decision``: placements of one operator call without sizes, and the two that need no rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import TensorMeta
from hdtensor.ops import views
from hdtensor.ops.calls import (
    Call,
    as_list,
    needs_communication,
)
from hdtensor.ops.propagate import (
    Path,
    Placements,
)
from hdtensor.placements import checks
from hdtensor.placements.sizes import same
from hdtensor.placements.spec import HDSpec


@dataclass(frozen=True, slots=True)
class Decision:
    """Placements of one operator call, without sizes.

    Attributes:
        outs: Spec of each output, None for one that is no tensor.
        out_sizes_from: Path of the operand whose top extents the outputs' follow.
        top_inputs: Operands whose top placement changes; local conversions from ``Replicate`` only.
        bottom_inputs: For each subgroup, operands whose bottom placements change.
        ops: For each subgroup, the operator to run.
        literals: For each subgroup, rewritten plain arguments by position.
        sized: Whether the decision depends on exact sizes and must not be reused for others.
        top_sizes: Exact extents of the outputs where a view computed them.
    """

    outs: tuple[HDSpec | None, ...]
    out_sizes_from: Path | None
    top_inputs: dict[Path, Placement]
    bottom_inputs: tuple[dict[Path, Placements], ...]
    ops: tuple[Any, ...]
    literals: tuple[dict[int, Any], ...]
    sized: bool = False
    top_sizes: tuple[tuple[int, ...] | None, ...] | None = None


def replicated(call: Call, metas: Any) -> Decision:
    """Every rank that takes part does the same on the same data: right for any deterministic op."""
    spec = next(iter(call.specs.values())).spec.replace(top=Replicate())
    spec = spec.map_bottom(lambda _: Replicate())
    num = spec.num_subgroups
    outs = tuple(spec if isinstance(m, TensorMeta) else None for m in as_list(metas))
    return Decision(outs, None, {}, ({},) * num, (call.func,) * num, ({},) * num)


def decide_reshape(call: Call, metas: Any) -> Decision:
    """Decide a view that regroups elements (``views``).

    Raises:
        DeductionError: If the top cut cannot be followed.
    """
    bound = call.specs[(0,)]
    src, dst = tuple(bound.shape), tuple(metas.shape)
    if len(src) == len(dst) and all(map(same, src, dst)):
        # Nothing is regrouped, whatever the sizes.
        return _reshape(call, bound.spec, ({},) * bound.spec.num_subgroups, bound.top_sizes)
    if math.prod(src) == 0:  # every rank has all of nothing; DTensor's rule may loop for ever
        return replicated(call, metas)
    top, sizes = bound.spec.top, None
    if bound.top_sizes is not None:
        moved = views.view_top(top, bound.top_sizes, src, dst)
        if moved is None:
            raise needs_communication(call, (0,), Replicate())
        top, sizes = moved
    outs, inputs = [], []
    for index, group in enumerate(bound.spec.subgroups):
        block_in, block_out = list(bound.block_shape(index)), list(dst)
        if sizes is not None:
            if not sizes[index]:  # an empty block regroups as any block would
                block_in[bound.spec.top.dim] = src[bound.spec.top.dim]  # type: ignore[attr-defined]
            else:
                block_out[top.dim] = sizes[index]  # type: ignore[attr-defined]
        followed = views.view_bottom(group.placements, group.mesh_shape, block_in, block_out)
        have = group.placements
        wanted = tuple(
            h if f is not None else Replicate() for h, f in zip(have, followed, strict=True)
        )
        inputs.append({(0,): wanted} if wanted != have else {})
        outs.append(group.with_placements(f if f is not None else Replicate() for f in followed))
    spec = HDSpec(outs, top, bound.spec.top_ratio if checks.is_cut(top) else None)
    return _reshape(call, spec, tuple(inputs), sizes)


def _reshape(
    call: Call,
    spec: HDSpec,
    inputs: tuple[dict[Path, Placements], ...],
    sizes: tuple[int, ...] | None,
) -> Decision:
    num = len(inputs)
    return Decision(
        (spec,),
        (0,) if sizes else None,
        {},
        inputs,
        (call.func,) * num,
        ({},) * num,
        sized=True,
        top_sizes=(sizes,),
    )
