"""Two-tier propagation: what an operator gives, and what each rank must do to run it (paper Sec. 6.1).

``decide`` asks both tiers' rules and returns placements only; ``bind`` applies a decision to exact sizes.
They are apart because a rule costs milliseconds and sizes change with every batch: a decision is cached
without sizes (see ``record.py``), binding costs microseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec, MaskPartial, TensorMeta, abstract_mesh
from hdtensor.errors import DeductionError, HDTensorError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import (
    RESHAPES,
    SHAPE_ARGS,
    Call,
    as_list,
    check_same_cut,
    check_same_subgroups,
    check_single_row,
    converted,
    is_view,
    needs_communication,
    out_top_sizes,
    reads_memory,
    refused,
    sizes_from,
)
from hdtensor.ops.decision import Decision, decide_reshape, replicated
from hdtensor.ops.propagate import (
    ROW_RULES,
    Path,
    Placements,
    TierResult,
    propagate,
    rows_of,
)
from hdtensor.ops.verify import fits_bottom, fits_top
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec


def decide(call: Call, metas: Any) -> Decision:
    """Ask both tiers.

    Args:
        call: The operator call.
        metas: Its outputs' global metadata (``output_metas`` of the top tier's arguments).

    Raises:
        DeductionError: If operands live on different subgroups, are cut unlike, or need communication
            between subgroups; the message names the operand and the ``redistribute`` to insert.
    """
    check_same_subgroups(call)
    check_same_cut(call)
    check_single_row(call)
    flags = _pending_flags(call)
    if flags:
        return _with_reductions(flags, decide(_reduced(call, flags), metas))
    if _allreplicated(call) and call.func not in ROW_RULES:
        return replicated(call, metas)
    if call.func in RESHAPES:
        return decide_reshape(call, metas)
    top = _decide_top(call, metas)
    after_top = _apply_top(call, top.inputs)
    if not fits_top(after_top, metas, top):
        cut = (p for p, b in call.specs.items() if b.top_sizes is not None)
        raise needs_communication(call, next(cut, next(iter(call.specs))), Replicate())
    bottoms = _decide_bottoms(after_top, top, metas)
    outs = tuple(
        None if placements is None else _join(call, placements[0], [b.outs[k] for b in bottoms])
        for k, placements in enumerate(top.outs)
    )
    sized = bool(call.func in RESHAPES or any(b.literals for b in bottoms))
    return Decision(
        outs=outs,
        out_sizes_from=sizes_from(after_top),
        top_inputs={path: wanted[0] for path, wanted in top.inputs.items()},
        bottom_inputs=tuple(b.inputs for b in bottoms),
        ops=tuple(b.op for b in bottoms),
        literals=tuple(b.literals for b in bottoms),
        sized=sized,
    )


def _pending_flags(call: Call) -> dict[Path, BoundSpec]:
    """Return the operands that are pending sums of booleans, with that reduction done.

    Their sum is "or", which no operator but a view commutes with: two true terms are one, and 2.0 after a cast.
    """
    if is_view(call.func):
        return {}
    found = {}
    for path, bound in call.specs.items():
        if bound.dtype is not torch.bool or not bound.spec.has_partial():
            continue
        if bound.spec.top == Partial():
            raise needs_communication(call, path, Replicate())
        spec = bound.spec.map_bottom(lambda p: Replicate() if p == Partial() else p)
        if spec is not bound.spec:
            found[path] = bound.with_spec(spec)
    return found


def _reduced(call: Call, flags: dict[Path, BoundSpec]) -> Call:
    for path, bound in flags.items():
        call = call.with_spec(path, bound)
    return call


def _with_reductions(flags: dict[Path, BoundSpec], decision: Decision) -> Decision:
    inputs = []
    for index, changes in enumerate(decision.bottom_inputs):
        reduced = {path: bound.spec.subgroups[index].placements for path, bound in flags.items()}
        inputs.append({**reduced, **changes})
    return dataclasses.replace(decision, bottom_inputs=tuple(inputs))


def _allreplicated(call: Call) -> bool:
    return all(
        isinstance(b.spec.top, Replicate)
        and all(isinstance(p, Replicate) for g in b.spec.subgroups for p in g.placements)
        for b in call.specs.values()
    )


def _decide_top(call: Call, metas: Any) -> TierResult:
    spec = next(iter(call.specs.values())).spec
    if spec.num_subgroups == 1:
        return _trivial_top(call, metas)
    try:
        result = _propagate_top(call)
    except DeductionError as error:
        is_whole = all(isinstance(b.spec.top, Replicate) for b in call.specs.values())
        if is_whole and isinstance(error.__cause__, NotImplementedError):
            return _trivial_top(call, metas)  # every subgroup does the same
        raise
    for path, wanted in result.inputs.items():
        have = call.specs[path].spec.top
        if not isinstance(have, Replicate):
            raise needs_communication(call, path, wanted[0])
    for placements in result.outs:
        if placements is not None:
            _check_top_out(call, placements[0])
    return result


def _trivial_top(call: Call, metas: Any) -> TierResult:
    outs = as_list(metas)
    placements = tuple((Replicate(),) if isinstance(m, TensorMeta) else None for m in outs)
    return TierResult(placements, {}, call.func, {})


def _propagate_top(call: Call) -> TierResult:
    """Ask the rule with true sizes if every block is equal, else with sizes scaled to be even; rows need no scaling."""
    cut = next((b for b in call.specs.values() if b.top_sizes is not None), None)
    uneven = cut is not None and len(set(cut.top_sizes or ())) > 1 and not _has_rows(call)
    attempts = (_scaled_top, _true_top) if uneven else (_true_top, _scaled_top)
    try:
        return attempts[0](call)
    except HDTensorError:
        raise
    except Exception as error:
        if cut is None:
            raise refused(call, "top", error) from error
        try:
            return attempts[1](call)
        except HDTensorError:
            raise
        except Exception:
            raise refused(call, "top", error) from error


def _has_rows(call: Call) -> bool:
    if call.func not in ROW_RULES:
        return False
    return rows_of(call.func, *call.tier(lambda b: b.top())) is not None


def _true_top(call: Call) -> TierResult:
    args, kwargs = call.tier(lambda b: b.top())
    return propagate(call.func, args, kwargs)


def _scaled_top(call: Call) -> TierResult:
    """Ask the rule with the cut dim n times as long, so that n subgroups divide it.

    The same dim of operands that are not cut grows along where it has the same length.
    """
    cut = next(b for b in call.specs.values() if b.top_sizes is not None)
    factor = cut.spec.num_subgroups
    length = cut.shape[cut.spec.top.dim]  # type: ignore[attr-defined]
    from_end = cut.spec.top.dim - len(cut.shape)  # type: ignore[attr-defined]

    def view(bound: BoundSpec) -> DTensorSpec:
        if bound.top_sizes is not None:
            return _stretched(bound, bound.spec.top.dim, factor)  # type: ignore[attr-defined]
        dim = from_end + len(bound.shape)
        if dim >= 0 and bound.shape[dim] == length:
            return _stretched(bound, dim, factor)
        return bound.top()

    args, kwargs = call.tier(view)
    position = SHAPE_ARGS.get(call.func)
    if position is not None:
        shape = list(args[position])
        dim = from_end + len(shape)
        if dim >= 0 and shape[dim] == length:
            shape[dim] *= factor
        args = (*args[:position], shape, *args[position + 1 :])
    return propagate(call.func, args, kwargs)


def _stretched(bound: BoundSpec, dim: int, factor: int) -> DTensorSpec:
    shape, stride = list(bound.shape), list(bound.stride)
    length, own = shape[dim], stride[dim]
    shape[dim] = max(length, 1) * factor
    stride = [s * factor if d != dim and s >= own * length else s for d, s in enumerate(stride)]
    meta = TensorMeta(torch.Size(shape), tuple(stride), bound.dtype)
    mesh = abstract_mesh((bound.spec.num_subgroups,), 0)
    return DTensorSpec(mesh, (bound.spec.top,), meta)


def _check_top_out(call: Call, placement: Placement) -> None:
    if isinstance(placement, MaskPartial):
        operand = next(p for p, b in call.specs.items() if not isinstance(b.spec.top, Replicate))
        raise needs_communication(call, operand, Replicate())
    if isinstance(placement, Partial) and placement.reduce_op == "avg":
        inputs = {b.spec.top for b in call.specs.values()}
        if placement not in inputs:
            raise DeductionError(
                f"{call.func}: the result would be an average over subgroups of unlike size, which is "
                f"wrong. Redistribute the operands to a top Replicate() first."
            )


def _apply_top(call: Call, changes: dict[Path, Placements]) -> Call:
    """Return the call after its free top-tier conversions."""
    for path, wanted in changes.items():
        call = call.with_spec(path, converted(call, path, wanted[0]))
    return call


def _decide_bottoms(call: Call, top: TierResult, metas: Any) -> list[TierResult]:
    """Ask each subgroup's rule; like subgroups with like blocks share the answer."""
    num = len(call.subgroups)
    own = next(iter(call.specs.values())).index
    answers: dict[Any, TierResult] = {}
    results = []
    for index in range(num):
        problem = (
            index == own,
            tuple(
                (
                    b.spec.subgroups[index].mesh_shape,
                    b.spec.subgroups[index].placements,
                    b.block_shape(index),
                )
                for b in call.specs.values()
            ),
        )
        found = answers.get(problem)
        if found is None:
            found = answers[problem] = _decide_bottom(call, top, index, metas)
        results.append(found)
    return results


def _decide_bottom(call: Call, top: TierResult, index: int, metas: Any) -> TierResult:
    args, kwargs = call.tier(lambda b: _no_zero(b.sub(index)))
    args = block_shape_args(call, top, index, args, metas)
    if (
        all(
            isinstance(p, Replicate)
            for b in call.specs.values()
            for p in b.spec.subgroups[index].placements
        )
        and call.func not in ROW_RULES
    ):
        axes = len(call.subgroups[index].mesh_shape)
        outs = tuple(None if o is None else (Replicate(),) * axes for o in top.outs)
        return TierResult(outs, {}, top.op, dict(top.literals))
    try:
        result = propagate(call.func, args, kwargs)
    except HDTensorError:
        raise
    except Exception as error:
        return _gathered(call, top, index, error)
    if any(isinstance(p, MaskPartial) for out in result.outs if out for p in out):
        return _gathered(call, top, index, None)
    if _averages_unlike_shards(call, result, index):
        return _gathered(call, top, index, None)
    if not fits_bottom(call.func, args, kwargs, result):
        return _gathered(call, top, index, None)
    return result


def _averages_unlike_shards(call: Call, result: TierResult, index: int) -> bool:
    """Whether the rule averages the averages of shards that hold unlike counts."""
    average = Partial("avg")
    before = {p for b in call.specs.values() for p in b.spec.subgroups[index].placements}
    if average in before or not any(average in out for out in result.outs if out):
        return False
    sizes = call.subgroups[index].mesh_shape
    for bound in call.specs.values():
        block = bound.block_shape(index)
        for dim in range(len(block)):
            cuts = [checks.shard_dim(p) == dim for p in bound.spec.subgroups[index].placements]
            if block[dim] % math.prod(itertools.compress(sizes, cuts)):
                return True
    return False


def _gathered(call: Call, top: TierResult, index: int, error: Exception | None) -> TierResult:
    """Return the answer with every operand replicated inside the subgroup.

    DTensor refuses some cuts (uneven flattening), and operators it has no rule for, that one device computes; the
    conversion stays inside the subgroup, as all implicit ones do.
    """
    axes = len(call.subgroups[index].mesh_shape)
    whole = (Replicate(),) * axes
    inputs: dict[Path, Placements] = {
        path: whole
        for path, bound in call.specs.items()
        if bound.spec.subgroups[index].placements != whole
    }
    if error is not None and (not inputs or reads_memory(call)):
        raise refused(call, "bottom", error) from error
    outs = tuple(None if o is None else whole for o in top.outs)
    return TierResult(outs, inputs, top.op, dict(top.literals))


def _no_zero(spec: DTensorSpec) -> DTensorSpec:
    """Give a block without elements a proxy size: rules divide by sizes, and one loops for ever."""
    if 0 not in spec.shape:
        return spec
    size = math.prod(spec.mesh.shape)
    shape = tuple(size if n == 0 else n for n in spec.shape)
    strides = torch.empty(shape, device="meta").stride()
    return spec.shallow_copy_with_tensor_meta(
        TensorMeta(torch.Size(shape), strides, spec.tensor_meta.dtype)  # type: ignore[union-attr]
    )


def block_shape_args(
    call: Call, top: TierResult, index: int, args: tuple[Any, ...], metas: Any
) -> tuple[Any, ...]:
    """Return the arguments with a global shape replaced by subgroup ``index``'s block's."""
    position = SHAPE_ARGS.get(call.func)
    if position is None:
        return args
    shape = list(as_list(metas)[0].shape)
    out = top.outs[0]
    if out is not None and checks.is_cut(out[0]):
        path = sizes_from(call)
        if path is not None:
            dim = out[0].dim  # type: ignore[attr-defined]
            sizes = out_top_sizes(call, path, out[0], shape)
            shape[dim] = sizes[index] or math.prod(call.subgroups[index].mesh_shape)
    return (*args[:position], shape, *args[position + 1 :])


def _join(call: Call, top: Placement, bottoms: Sequence[Placements | None]) -> HDSpec:
    groups = []
    for group, placements in zip(call.subgroups, bottoms, strict=True):
        if placements is None:
            raise DeductionError(f"{call.func}: the subgroups' rules disagree on the outputs.")
        groups.append(group.with_placements(placements))
    path = sizes_from(call)
    ratio = call.specs[path].spec.top_ratio if path and checks.is_cut(top) else None
    return HDSpec(groups, top, ratio)
