"""One tier's sharding propagation: DTensor's own rules, asked without processes.

A tier is a list of ``DTensorSpec`` operands over one abstract mesh. Both tiers ask the same question
(``propagate``); ``deduce`` puts the answers together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from hdtensor._torch_compat import DTensorSpec, FakeTensorMode, OpSchema, Propagator, TensorMeta
from hdtensor.errors import DeductionError


aten = torch.ops.aten

#: Where an operand stands: ``(i,)``, ``(i, j)`` inside a list argument, or ``("name",)``.
Path = tuple[Any, ...]
Placements = tuple[Placement, ...]

#: Operands up to which DTensor may derive a rule from an operator's decomposition: the work is exponential in them.
_MAX_TRACED = 4

#: Output metas kept; past it the table starts anew.
_MAX_METAS = 8192


class TierResult(NamedTuple):
    """What a tier's rule answered.

    Attributes:
        outs: Placements of each output; None entries are outputs that are no tensors.
        inputs: Placements wanted of the operands that must change.
        op: The operator to run; squeeze becomes ``squeeze.dims``.
        literals: Plain arguments that the rule rewrote, by position.
    """

    outs: tuple[Placements | None, ...]
    inputs: dict[Path, Placements]
    op: Any
    literals: dict[int, Any]


#: ``rule(args, kwargs) -> rows``: placements over ONE mesh axis, outputs first, then every operand in the
#: order of the call. For the operators that DTensor has no rule for.
RowRule = Callable[[tuple[Any, ...], dict[str, Any]], list[tuple[Placement, ...]] | None]
ROW_RULES: dict[Any, RowRule] = {}

_Rule = TypeVar("_Rule", bound=RowRule)


def row_rule(*ops: Any) -> Callable[[_Rule], _Rule]:
    """Register rows of placements for ``ops``; a second rule for an op is an error."""

    def register(rule: _Rule) -> _Rule:
        for op in ops:
            if op in ROW_RULES:
                raise ValueError(f"{op} already has a rule: {ROW_RULES[op]}.")
            ROW_RULES[op] = rule
        return rule

    return register


def operands(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield every argument and every element of a list argument, with its path."""
    for i, arg in enumerate(args):
        if isinstance(arg, list | tuple):
            for j, element in enumerate(arg):
                yield (i, j), element
        else:
            yield (i,), arg
    for name, arg in kwargs.items():
        yield (name,), arg


def map_operands(
    change: Callable[[Path, Any], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with ``change(path, value)`` in place of every argument and list element.

    Lists stay lists: DTensor reads a tuple otherwise.
    """
    new_args: list[Any] = []
    for i, arg in enumerate(args):
        if type(arg) in (list, tuple):
            new_args.append([change((i, j), element) for j, element in enumerate(arg)])
        else:
            new_args.append(change((i,), arg))
    return tuple(new_args), {name: change((name,), arg) for name, arg in kwargs.items()}


def rows_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the rows of placements that an operator may have, None where DTensor's rule says."""
    rule = ROW_RULES.get(func)
    return None if rule is None else rule(*_with_dims_from_start(func, args, kwargs))


def propagate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TierResult:
    """Ask one tier's rule.

    Args:
        func: The operator.
        args: Arguments with a ``DTensorSpec`` for every tensor.
        kwargs: Likewise.

    Raises:
        Exception: Whatever DTensor's rule raises; ``deduce`` turns it into a ``DeductionError``.
    """
    args, kwargs = _with_dims_from_start(func, args, kwargs)
    specs = [(path, s) for path, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    rows = rows_of(func, args, kwargs)
    if rows is not None:
        return _by_rows(func, rows, specs)
    if len(specs) > _MAX_TRACED and not PROPAGATOR.has_rule(func):
        raise NotImplementedError(
            f"it has {len(specs)} operands; tracing its decomposition would try every combination of placements"
        )
    schema = OpSchema(func, args, kwargs, PROPAGATOR.schema_info(func))
    answer = PROPAGATOR.propagate_op_sharding_non_cached(schema)
    outs = answer.output_spec
    out_specs: tuple[Any, ...] = tuple(outs) if isinstance(outs, tuple | list) else (outs,)
    placements = tuple(None if s is None else s.placements for s in out_specs)
    result = TierResult(placements, {}, func, {})
    if answer.redistribute_schema is not None:
        result = _with_changes(func, args, kwargs, answer, placements)
    # DTensor converts no keyword argument; its rules mean the tensors among them to be whole.
    for path, spec in specs:
        if isinstance(path[0], str) and not all(isinstance(p, Replicate) for p in spec.placements):
            result.inputs[path] = (Replicate(),) * len(spec.placements)
    return result


#: Operators whose result has one dim more than their operands; their ``dim`` counts that one too.
_INSERTING = (aten.unsqueeze.default, aten.unsqueeze_copy.default, aten.stack.default)


def _with_dims_from_start(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with non-negative dims.

    Some of DTensor's rules (cumulative sums, backwards of slices, sorts) compare a dim with a placement's as it comes,
    and take a negative one for a dim that nothing cuts: a wrong result without an error.
    """
    named = {a.name: i for i, a in enumerate(func._schema.arguments)}
    first = next(s for _, s in operands(args, kwargs) if isinstance(s, DTensorSpec))
    num_dims = len(first.shape) + (func in _INSERTING)
    sizes = named.get("input_sizes")
    if sizes is not None and sizes < len(args):
        num_dims = len(args[sizes])
    new_args, new_kwargs = list(args), dict(kwargs)
    for name in ("dim", "dims", "dim0", "dim1", "dim2"):
        home: Any = new_kwargs if name in kwargs else new_args
        place: Any = name if name in kwargs else named.get(name, len(args))
        if name in kwargs or place < len(args):
            home[place] = _from_start(home[place], max(num_dims, 1))
    return tuple(new_args), new_kwargs


def _from_start(dims: Any, num_dims: int) -> Any:
    if isinstance(dims, list | tuple):
        return type(dims)(_from_start(d, num_dims) for d in dims)
    is_negative = type(dims) is int and -num_dims <= dims < 0
    return dims + num_dims if is_negative else dims


def _with_changes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any, placements: Any
) -> TierResult:
    wanted = answer.redistribute_schema
    before = [(path, s) for path, s in operands(args, kwargs) if isinstance(s, DTensorSpec)]
    after = [
        s
        for _, s in operands(wanted.args_schema, wanted.kwargs_schema or {})
        if isinstance(s, DTensorSpec)
    ]
    inputs = {
        path: new.placements
        for (path, old), new in zip(before, after, strict=False)
        if old.placements != new.placements
    }
    literals: dict[int, Any] = {}
    if answer.use_val_from_redistribute_schema:
        for i, value in enumerate(wanted.args_schema):
            old = args[i] if i < len(args) else None
            if not _holds_spec(value) and (i >= len(args) or value != old):
                literals[i] = list(value) if isinstance(value, tuple | torch.Size) else value
    return TierResult(placements, inputs, wanted.op, literals)


def _holds_spec(value: Any) -> bool:
    if isinstance(value, list | tuple) and not isinstance(value, TensorMeta):
        return any(isinstance(v, DTensorSpec) for v in value)
    return isinstance(value, DTensorSpec)


def _by_rows(
    func: Any, rows: list[tuple[Placement, ...]], specs: list[tuple[Path, DTensorSpec]]
) -> TierResult:
    """Pick, axis by axis, the row that changes the fewest operands; the first of equals."""
    num_in = len(specs)
    num_out = len(rows[0]) - num_in
    num_axes = len(specs[0][1].placements)
    written = [_is_written(func, path) for path, _ in specs]
    chosen = []
    for axis in range(num_axes):
        have = [s.placements[axis] for _, s in specs]
        chosen.append(min(rows, key=lambda row: _price(have, row[num_out:], written)))
    outs = tuple(tuple(row[k] for row in chosen) for k in range(num_out))
    inputs = {}
    for k, (path, spec) in enumerate(specs):
        want = tuple(row[num_out + k] for row in chosen)
        if want != spec.placements:
            inputs[path] = want
    return TierResult(outs, inputs, func, {})


def _is_written(func: Any, path: Path) -> bool:
    """Whether the operator writes into this operand, whose layout must stay then."""
    arguments = func._schema.arguments
    info = arguments[path[0]].alias_info if isinstance(path[0], int) else None
    return info is not None and info.is_write


def _price(have: list[Placement], want: tuple[Placement, ...], written: list[bool]) -> int:
    """Count conversions: one from ``Replicate`` is local and nearly free, one of a written operand is refused."""
    return sum(
        0 if a == b else 1000 if is_written else 1 if isinstance(a, Replicate) else 16
        for a, b, is_written in zip(have, want, written, strict=True)
    )


# -- metadata of outputs ----------------------------------------------------------------------------

_metas: dict[Any, Any] = {}
_fake_mode: list[FakeTensorMode] = []


def output_metas(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the (shape, stride, dtype) of what ``func`` returns, without data.

    Runs the operator on the ``meta`` device; where there is no C++ meta kernel for it, under one shared
    ``FakeTensorMode`` (a fresh mode a call is two thirds of DTensor's deduction time).

    Returns:
        A ``TensorMeta``, a tuple or list of them (with None for other outputs), or None.
    """
    if not func._schema.returns:
        return None
    key = _meta_key(func, args, kwargs)
    if key is not None and key in _metas:
        return _metas[key]
    fake_args, fake_kwargs = map_operands(lambda _, a: _to_meta(a), args, kwargs)
    try:
        out = func(*fake_args, **_on_meta(fake_kwargs))
    except NotImplementedError:
        out = _run_fake(func, args, kwargs)
    result = _describe(out)
    if key is not None:
        if len(_metas) >= _MAX_METAS:
            _metas.clear()
        _metas[key] = result
    return result


def _meta_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts: list[Any] = [func, torch.get_default_dtype()]
    for path, value in operands(args, kwargs):
        parts += [path, type(value), value.tensor_meta if isinstance(value, DTensorSpec) else value]
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _to_meta(value: Any) -> Any:
    if isinstance(value, DTensorSpec):
        shape, stride, dtype = value.tensor_meta  # type: ignore[misc]
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return value


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") else kwargs


def _run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _fake_mode:
        _fake_mode.append(FakeTensorMode())
    with _fake_mode[0]:
        fake_args, fake_kwargs = map_operands(lambda _, a: _to_cpu(a), args, kwargs)
        return func(*fake_args, **fake_kwargs)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, DTensorSpec):
        shape, stride, dtype = value.tensor_meta  # type: ignore[misc]
        return torch.empty_strided(shape, stride, dtype=dtype)
    return value


def _describe(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        if out.layout != torch.strided:
            raise DeductionError(
                f"results of layout {out.layout} cannot be distributed; convert t.full_tensor() or t.to_local()."
            )
        return TensorMeta(out.shape, out.stride(), out.dtype)
    if isinstance(out, tuple | list):
        return (
            type(out)(_describe(o) for o in out)
            if type(out) in (tuple, list)
            else tuple(_describe(o) for o in out)
        )
    return None


PROPAGATOR = Propagator(
    lambda schema: output_metas(schema.op, schema.args_schema, schema.kwargs_schema)
)
