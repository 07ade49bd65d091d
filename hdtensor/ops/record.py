"""Records: one generated function per (operator, operand specs), and the two caches that find them.

A record does the least Python can: unwrap, convert where the decision says so, call torch's binding,
wrap. It is specialised by text generation, since a closure over a loop costs 1 us more an operator.

Two caches. The first maps exact operands (interned ``BoundSpec``s) to records; it is a dictionary per
operator, read by ``dispatch.py``. On a miss, the second maps operands *without sizes* to decisions, so that a
batch of another length binds anew (tens of microseconds) but deduces nothing (milliseconds).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hdtensor.ops import deduce, symbolic
from hdtensor.ops.binding import Binding
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import RESHAPES, SHAPE_ARGS, Call, as_list, check_same_cut
from hdtensor.ops.decision import Decision
from hdtensor.ops.generate import Run, generate
from hdtensor.ops.metas import metas_of
from hdtensor.ops.propagate import PROPAGATOR, operands
from hdtensor.placements import checks
from hdtensor.placements.sizes import same


aten = torch.ops.aten

#: Decisions kept; past it the table starts anew.
MAX_DECISIONS = 16384

_decisions: dict[Any, Decision] = {}

#: How often each part ran, for benchmarks and tests: records made, decisions made.
counts = {"records": 0, "decisions": 0}


def make_record(call: Call, tensor_type: type, device: torch.device | None) -> Run:
    """Deduce a call and generate the function that runs it on this rank.

    Args:
        call: The call, with a ``BoundSpec`` for every tensor.
        tensor_type: ``HDTensor``.
        device: Where the caller asked for the results, None for where the operands are.

    Returns:
        ``run(*args, kwargs)``, which takes the operands themselves.

    Raises:
        DeductionError: As ``deduce.decide`` does.
    """
    counts["records"] += 1
    if symbolic.has_open_sizes(call):
        return generate(_bind_open(call), tensor_type, device)
    key = sizeless_key(call)
    metas = metas_of(call, key if key is not None and _is_fixed_by(call) else None)
    call = _resolve_shape(call, metas)
    decision = decision_of(call, metas, key)
    return generate(Binding(call, decision, metas), tensor_type, device)


def _bind_open(call: Call) -> Binding:
    """Return the binding of a call with sizes that a compiler has not fixed."""
    known = symbolic.hinted(call)
    key = sizeless_key(known)
    known_metas = metas_of(known, key if key is not None and _is_fixed_by(known) else None)
    metas = symbolic.open_metas(call, known_metas)
    call, known = _resolve_shape(call, metas), _resolve_shape(known, known_metas)
    if call.func in RESHAPES:
        return Binding(call, deduce.decide(call, metas), metas)
    key = sizeless_key(call)
    check_same_cut(call)
    decision = decision_of(known, known_metas, None if key is None else ("open", key))
    return Binding(call, decision, metas)


def _resolve_shape(call: Call, metas: Any) -> Call:
    """Put the output's shape where the caller wrote -1."""
    position = SHAPE_ARGS.get(call.func)
    if position is None:
        return call
    shape = list(as_list(metas)[0].shape)
    args = (*call.args[:position], shape, *call.args[position + 1 :])
    return Call(call.func, args, call.kwargs, call.plain)


def _is_fixed_by(call: Call) -> bool:
    """Return whether the key holds every number that a result's shape may depend on."""
    if torch.Tag.pointwise in call.func.tags:
        return True
    return all(
        type(value) is not int or is_static(call.func, path[0])
        for path, value in operands(call.args, call.kwargs)
    )


def decision_of(call: Call, metas: Any, key: Any) -> Decision:
    """Return the cached decision for a call's placements, or make it.

    Args:
        call: The call.
        metas: Metadata of its results.
        key: Its ``sizeless_key``.
    """
    if key is not None:
        # How many pieces a split gives is told by lengths, which the key leaves out.
        key = (key, len(as_list(metas)))
    found = _decisions.get(key) if key is not None else None
    if found is None:
        counts["decisions"] += 1
        found = deduce.decide(call, metas)
        if key is not None and not found.sized:
            if len(_decisions) >= MAX_DECISIONS:
                _decisions.clear()
            _decisions[key] = found
    elif found.out_sizes_from is not None or len(call.specs) > 1:
        check_same_cut(call)
    return found


def sizeless_key(call: Call) -> Any:
    """Return what a rule may look at: placements, kinds of extents, static arguments; or None."""
    shape_position = SHAPE_ARGS.get(call.func)
    if call.func in RESHAPES:
        return None
    first = next(iter(call.specs.values()))
    parts: list[Any] = [call.func, first.rank, torch.get_default_dtype()]
    if shape_position is not None:  # a new tensor is cut as the operand if it has its shape
        wanted = list(call.args[shape_position])
        parts.append(len(wanted) == len(first.shape) and all(map(same, wanted, first.shape)))
    for path, value in operands(call.args, call.kwargs):
        if isinstance(value, BoundSpec):
            kinds = symbolic.open_kinds(value) if value.is_symbolic else _kinds(value)
            parts += [path, value.spec, value.dtype, kinds]
        elif shape_position is None or path[0] != shape_position:
            parts += [path, type(value), literal_key(call.func, path[0], value)]
        else:
            parts += [path]
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


@functools.lru_cache(maxsize=65536)
def _kinds(bound: BoundSpec) -> tuple[Any, ...]:
    """Return of each dim whether it is 0, 1 or longer, and whether each tier divides it evenly.

    That is all of a size that placement rules look at; it also tells dims that are equal apart from
    dims that are not, since broadcasting looks at 1 only.
    """
    shape = tuple(bound.shape)
    kinds: list[Any] = [min(n, 2) for n in shape]
    sizes = bound.top_sizes
    kinds.append(sizes is not None and len(set(sizes)) == 1)
    kinds.append(sizes is not None and 0 in sizes)
    for index, group in enumerate(bound.spec.subgroups):
        block = bound.block_shape(index)
        for size, placement in zip(group.mesh_shape, group.placements, strict=True):
            dim = checks.shard_dim(placement)
            if dim is not None:
                kinds.append((block[dim] % size == 0, min(block[dim] // size, 2)))
            elif size > 1:  # a replicated dim may become a cut one: its evenness counts
                kinds.append(tuple((n % size == 0, n >= size) for n in block))
    return tuple(kinds)


def literal_key(func: Any, where: Any, value: Any) -> Any:
    """Return a plain argument's part of a key: its value where a rule looks at it, else its type.

    DTensor says which arguments are static. Numbers of pointwise operators never are: an optimizer's step
    size changes at every step.
    """
    kind = type(value)
    if kind in (int, float, torch.SymInt):
        return value if is_static(func, where) else kind
    return value


@functools.lru_cache(maxsize=4096)
def is_static(func: Any, where: Any) -> bool:
    """Return whether a rule looks at the number at this position (or under this name)."""
    if torch.Tag.pointwise in func.tags:
        return False
    info = PROPAGATOR.schema_info(func)
    if info is None:
        return True
    if isinstance(where, str):
        return where in (info.static_kwargkey or ())
    return bool(where >= info.static_argnum)
