"""The hot path: from an operator call on ``HDTensor``s to its record.

For each operator and number of arguments a *handler* is generated that builds the key of its record without a
loop: bound specs by identity, static arguments by value, other numbers by type. A hit costs a dictionary look-up;
a miss asks the special rules, then deduction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hdtensor._torch_compat import decomposed, is_traced, new_wrapper, without_modes
from hdtensor.collectives import observe
from hdtensor.errors import DeductionError
from hdtensor.ops import accumulation, foreach, record, writes
from hdtensor.ops.generate import compiled
from hdtensor.ops.inner import extents_of
from hdtensor.ops.operand import make_call
from hdtensor.ops.propagate import operands
from hdtensor.ops.registry import (
    LOCAL_SPECIAL,
    SPECIAL,
    accepts_plain,
    events,
    is_hdtensor,
    local_graphs,
    set_dispatch,
    tensor_type,
)


#: Namespaces of what ``torch.distributed`` sends with.
_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")

Handler = Callable[[tuple[Any, ...], dict[str, Any] | None], Any]

#: Records kept over all operators; past it all are dropped and made anew from the cached decisions.
MAX_RECORDS = 65536

_handlers: dict[int, Handler] = {}
_by_arity: dict[tuple[int, int], Handler] = {}
_records: list[dict[Any, Any]] = []
_num_records = [0]


def dispatch(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Run an operator on ``HDTensor``s: ``HDTensor.__torch_dispatch__``."""
    handler = _handlers.get(id(func))
    if handler is None:
        handler = _handlers[id(func)] = _handler_of(func, len(args))
    return handler(args, kwargs)


def _call(func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(func, (), args, kwargs)


def clear_caches() -> None:
    """Drop all records and decisions; the next call of each operator deduces anew."""
    for table in _records:
        table.clear()
    _num_records[0] = 0
    record._decisions.clear()


def _handler_of(func: Any, arity: int) -> Handler:
    found = _by_arity.get((id(func), arity))
    if found is None:
        touch = writes.touch_of(func)
        found = _generate_handler(func, arity, touch)
        if touch is None and func._schema.is_mutable:
            found = writes.counted(func, found)
        _by_arity[(id(func), arity)] = found
    return found


def _generate_handler(func: Any, arity: int, touch: Any) -> Handler:
    records: dict[Any, Any] = {}
    _records.append(records)
    names = [f"a{i}" for i in range(arity)]
    keys = [_key_text(func, i) for i in range(arity)]
    key = keys[0] if arity == 1 else f"({', '.join(keys)})"
    unpack = f"{', '.join(names)}, = args" if arity else "() = args"
    call_args = "".join(f"{name}, " for name in names)
    end = "return run({0}kw)"
    if touch is not None:  # one tensor is written, the first
        end = "out = run({0}kw)\n        if graphs[0]:\n            touch(a0)\n        return out"
    source = f"""
def handler(args, kw):
    try:
        {unpack}
    except ValueError:
        return handler_of(func, len(args))(args, kw)
    key = {key}
    if kw:
        key = (key, *[(k, type(v) if type(v) in free and k in loose else part(v, k)) for k, v in kw.items()])
    try:
        run = get(key)
    except TypeError:
        return miss(func, None, args, kw, records)
    if run.__class__ is tuple:
        return new(HD, a0._local_tensor, run[0], False)
    if run is not None:
        {end.format(call_args)}
    return miss(func, key, args, kw, records)
"""
    env: dict[str, Any] = {
        "HD": tensor_type(),
        "free": (float, int),
        "func": func,
        "get": records.get,
        "graphs": local_graphs,
        "handler_of": _handler_of,
        "loose": _loose_keywords(func),
        "miss": _miss if touch is None else functools.partial(_miss_and_touch, touch),
        "new": new_wrapper,
        "part": lambda value, where: _part(func, value, where),
        "plain": _plain_part,
        "records": records,
        "touch": touch,
    }
    exec(compiled(source), env)
    return env["handler"]


def _loose_keywords(func: Any) -> frozenset[str]:
    """Return the keyword arguments whose numbers no rule looks at: only their type is part of a key."""
    return frozenset(
        a.name
        for a in func._schema.arguments
        if a.kwarg_only and not record.is_static(func, a.name)
    )


def _key_text(func: Any, i: int) -> str:
    arguments = func._schema.arguments
    kind = str(arguments[i].type) if i < len(arguments) else "Any"
    if kind in ("Tensor", "Optional[Tensor]"):
        return f"a{i}._spec if type(a{i}) is HD else float if type(a{i}) is float else plain(a{i})"
    if "Tensor" in kind:
        return f"tuple([x._spec if type(x) is HD else plain(x) for x in a{i}])"
    if kind.startswith(("List[float", "List[number", "Optional[List[float")):
        return f"None if a{i} is None else len(a{i})"
    if kind.startswith(("List[", "Optional[List")):
        return f"tuple(a{i}) if type(a{i}) is list else a{i}"
    if kind in (
        "int",
        "SymInt",
        "float",
        "number",
        "Optional[number]",
        "Optional[float]",
        "Scalar",
    ):
        static = record.is_static(func, i)
        return f"(type(a{i}), a{i})" if static else f"type(a{i})"
    return f"a{i}"


def _part(func: Any, value: Any, where: Any) -> Any:
    """Return a keyword argument's part of a key."""
    if is_hdtensor(value):
        return value._spec
    if isinstance(value, torch.Tensor):
        return _plain_part(value)
    if isinstance(value, list | tuple):
        return tuple(_part(func, v, where) for v in value)
    return (type(value), record.literal_key(func, where, value))


def _plain_part(value: Any) -> Any:
    """Return the part of a key of something that may be a plain tensor, a number or None."""
    if isinstance(value, torch.Tensor):
        return (type(value), value.shape, value.stride(), value.dtype, accepts_plain())
    return type(value)


def _miss(func: Any, key: Any, args: tuple[Any, ...], kwargs: Any, records: dict[Any, Any]) -> Any:
    kwargs = kwargs or {}
    if key is not None and any(isinstance(v, torch.SymInt) for _, v in operands(args, kwargs)):
        key = None  # a table would keep what is being traced
    with observe.profiled("deduce"):
        if key is not None and is_traced():  # of open sizes it must see what is computed
            with without_modes():  # what traces the program must not see how placements are deduced
                run = make_run(func, args, kwargs)
        else:
            run = make_run(func, args, kwargs)
    if key is not None:
        _num_records[0] += 1
        if _num_records[0] > MAX_RECORDS:
            for table in _records:
                table.clear()
            _num_records[0] = 1
        # A pruned call with one result of the first operand's dtype needs no function: that one's empty tensor serves.
        records[key] = getattr(run, "pruned", run)
    result = run(*args, kwargs)
    if key is None:
        _keep_extents(result)
    elif _follows_default_dtype(args, kwargs, result):
        records[key] = _by_default_dtype(func, run)
    return result


def _keep_extents(result: Any) -> None:
    """Make what a compiler needs of results beside their local tensors, while it traces their operator."""
    for tensor in result if isinstance(result, list | tuple) else (result,):
        if is_hdtensor(tensor) and tensor._spec.is_symbolic and not tensor._spec.has_own_cut:
            extents_of(tensor)


def _miss_and_touch(
    touch: Any, func: Any, key: Any, args: tuple[Any, ...], kwargs: Any, records: dict[Any, Any]
) -> Any:
    result = _miss(func, key, args, kwargs, records)
    if local_graphs[0]:
        touch(args[0])
    return result


def _follows_default_dtype(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Return whether a floating result came of whole numbers: its dtype is torch's default one, which may change."""
    if kwargs.get("dtype") is not None:
        return False
    results = result if isinstance(result, list | tuple) else (result,)
    if not any(is_hdtensor(r) and not _is_whole(r.dtype) for r in results):
        return False
    return all(_is_whole(v.dtype) for _, v in operands(args, kwargs) if isinstance(v, torch.Tensor))


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _by_default_dtype(func: Any, run: Any) -> Any:
    """Return what runs the call by the record of torch's default dtype at the time."""
    runs = {torch.get_default_dtype(): run}

    def chosen(*args: Any) -> Any:
        found = runs.get(torch.get_default_dtype())
        if found is None:
            found = make_run(func, args[:-1], args[-1] or {})
            runs[torch.get_default_dtype()] = found
        return found(*args)

    return chosen


def make_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the function that runs this call on this rank.

    Raises:
        DeductionError: If the operator cannot run on operands that are laid out like this.
    """
    if func.namespace in _COLLECTIVES:
        raise DeductionError(
            f"{func}: torch.distributed's collectives do not know how a tensor is cut. For its value call "
            f"t.full_tensor() or hdtensor.item(t), to move data t.redistribute(spec); or pass t.to_local()."
        )
    rule = SPECIAL.get(func)
    if rule is not None:
        run = rule(func, args, kwargs)
        if run is not None:
            return run if func in LOCAL_SPECIAL else _counted(run)
    parts = decomposed(func)
    if parts is not None:  # what it is made of has rules, as outside of inference_mode
        return lambda *args: parts(*args[:-1], **(args[-1] or {}))
    if foreach.is_foreach(func):
        return foreach.make_run(func, args, kwargs)
    if writes.is_out_variant(func):
        return writes.make_out_run(func)
    _refuse_unrunnable(func)
    run = writes.make_in_place_run(func)
    if run is not None:
        return run
    try:
        return _deduced(func, args, kwargs)
    except DeductionError as refusal:
        run = accumulation.make_sum(func, args, kwargs, refusal)
        run = run or writes.make_instead_of_new_layout(func, args)
        if run is None:
            raise
        return run


def _deduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = next((v for _, v in operands(args, kwargs) if is_hdtensor(v)), None)
    if first is None:  # such as an out variant's, which writes to an HDTensor
        raise DeductionError(
            f"{func}: the result would go to an HDTensor, but no operand is one. Make it of HDTensors "
            f"(distribute_tensor(t, spec)), or compute it plainly and distribute_tensor the result."
        )
    # Where the result goes elsewhere (zeros_like(t, device="cpu")) an empty one does, too.
    asked = kwargs.get("device")
    device = None if asked is None else torch.device(asked)
    return record.make_record(make_call(func, args, kwargs), tensor_type(), device)


def _counted(run: Any) -> Any:
    def counted(*args: Any) -> Any:
        events[0] += 1
        return run(*args)

    return counted


def _refuse_unrunnable(func: Any) -> None:
    if torch.Tag.dynamic_output_shape in func.tags:
        raise DeductionError(
            f"{func}: the result's shape depends on the data, which no rank holds whole. Run it on local "
            f"tensors (hdtensor.local_map) or on the whole tensor (t.full_tensor())."
        )
    # As what t.data = other is traced from torch 2.14 on; before, as set_, which has the tag.
    if torch.Tag.inplace_view in func.tags or func.name() == "aten::shallow_copy_data_":
        raise DeductionError(
            f"{func}: giving a distributed tensor another shape or memory in place is not possible. Use the "
            f"out-of-place operator, or t.copy_(other)."
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise DeductionError(
            f"{func}: this random operator has no counter-based form, and shards would draw unlike values. "
            f"Draw on a whole plain tensor, then distribute_tensor(t, spec)."
        )


set_dispatch(_deduced, _call)
