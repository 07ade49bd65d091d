"""``_foreach_*`` and ``_fused_*`` operators over tensors of *different* subgroups.

Lists are taken element by element: entry i of every list is one call of the single operator, deduced alone; then one
fused call runs on this rank's local tensors, those of elements that it holds. An optimizer's lists may hold parameters
of every stage and subgroup.
"""

from __future__ import annotations

from typing import Any

import torch

from hdtensor._torch_compat import local_binding, new_wrapper
from hdtensor.errors import DeductionError
from hdtensor.ops import record
from hdtensor.ops.binding import Binding, check_writable
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import Call
from hdtensor.ops.generate import compiled, empty_beside
from hdtensor.ops.operand import make_call
from hdtensor.ops.propagate import output_metas
from hdtensor.ops.registry import is_hdtensor, tensor_type


def is_foreach(func: Any) -> bool:
    """Return whether the operator takes lists element by element."""
    return func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


def make_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the function that runs a foreach call on this rank.

    Raises:
        DeductionError: If one element's operands are laid out unlike, or would change layout in place.
    """
    num = max(len(a) for a in args if isinstance(a, list | tuple))
    plans: dict[Any, _Element] = {}
    elements = []
    for i in range(num):
        key = tuple(
            _spec_of(a[i]) if isinstance(a, list | tuple) and i < len(a) else None for a in args
        )
        found = plans.get(key)
        if found is None:
            found = plans[key] = _deduce_element(func, args, kwargs, i)
        elements.append(found)
    run = _Run(func, args, elements)
    return _plain_run(func, args, run) or run


def _spec_of(value: Any) -> Any:
    return value._spec if is_hdtensor(value) else type(value)


class _Element:
    """One entry's results and conversions on this rank."""

    __slots__ = ("conversions", "local", "outs")

    def __init__(self, binding: Binding) -> None:
        self.local = binding.index is not None
        self.outs = binding.outs
        self.conversions = {path[0]: step for path, step in binding.conversions.items()}


def _deduce_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], i: int) -> _Element:
    single = tuple([a[i]] if isinstance(a, list | tuple) and i < len(a) else a for a in args)
    call = make_call(func, single, kwargs)
    # Paths of one-element lists are (argument, 0).
    metas: Any = _metas(call)
    decision = record.decision_of(call, metas, record.sizeless_key(call))
    binding = Binding(call, decision, metas)
    _check_in_place(call, binding)
    return _Element(binding)


def _metas(call: Call) -> Any:
    args, kwargs = call.tier(lambda b: b.top())
    return output_metas(call.func, args, kwargs)


def _check_in_place(call: Call, binding: Binding) -> None:
    if not call.func._schema.is_mutable:
        return
    writes = {
        i
        for i, a in enumerate(call.func._schema.arguments)
        if a.alias_info and a.alias_info.is_write
    }
    # A fused step writes to gradients only to unscale them.
    if call.kwargs.get("grad_scale") is None:
        writes -= {i for i, a in enumerate(call.func._schema.arguments) if a.name == "grads"}
    for path, bound in call.specs.items():
        if path[0] in writes:
            check_writable(call.func, call.name_of(path), bound)
    for path in {
        **binding.decision.top_inputs,
        **{p: 0 for b in binding.decision.bottom_inputs for p in b},
    }:
        if path[0] in writes and isinstance(call.specs[path], BoundSpec) and path not in call.plain:
            raise DeductionError(
                f"{call.func}: writing in place would change the layout of {call.name_of(path)!r} "
                f"({call.specs[path]}). Redistribute it first."
            )


def _plain_run(func: Any, args: tuple[Any, ...], run: _Run) -> Any:
    """Return a run without decisions left: this rank holds every element, and nothing is converted.

    Returns None where that is not so.
    """
    lists = [i for i, a in enumerate(args) if isinstance(a, list | tuple)]
    tensors = [x for i in lists for x in args[i] if isinstance(x, torch.Tensor)]
    if not run.all_local or run.conversions or run.shared or not all(map(is_hdtensor, tensors)):
        return None
    names = [f"a{i}" for i in range(len(args))]
    locals_ = [
        f"[x._local_tensor for x in a{i}]"
        if i in lists and args[i] and is_hdtensor(args[i][0])
        else f"a{i}"
        for i in range(len(args))
    ]
    call = f"op({', '.join(locals_)}, **kw) if kw else op({', '.join(locals_)})"
    body = f"return [new(HD, v, o, False) for v, o in zip({call}, outs)]" if run.returns else call
    env = {
        "op": local_binding(func._schema.name.split("::")[1]) or func,
        "new": new_wrapper,
        "HD": tensor_type(),
        "outs": run.outs,
    }
    exec(compiled(f"def run({', '.join([*names, 'kw'])}):\n    {body}\n"), env)
    return env["run"]


class _Run:
    """A foreach call on this rank, with all decisions made."""

    def __init__(self, func: Any, args: tuple[Any, ...], elements: list[_Element]) -> None:
        self.func = func
        self.local = [i for i, e in enumerate(elements) if e.local]
        self.held = frozenset(self.local)
        self.all_local = len(self.local) == len(elements)
        self.num = len(elements)
        self.lists = [i for i, a in enumerate(args) if isinstance(a, list | tuple)]
        # A tensor that stands beside all elements, such as the factor of a clipped gradient.
        steps = elements[0].conversions
        self.shared = [(i, steps.get(i)) for i, a in enumerate(args) if is_hdtensor(a)]
        self.returns = bool(func._schema.returns) and not func._schema.is_mutable
        self.outs = [e.outs[0] if e.outs else None for e in elements]
        self.dtypes: list[Any] = [None if b is None else b.dtype for b in self.outs]
        self.conversions = [
            (argument, i, step)
            for i, e in enumerate(elements)
            for argument, step in e.conversions.items()
            if argument in self.lists
        ]
        self.tensor_type = tensor_type()

    def __call__(self, *args_and_kwargs: Any) -> Any:
        args: list[Any] = list(args_and_kwargs[:-1])
        kwargs = args_and_kwargs[-1]
        hd: Any = self.tensor_type
        for k in self.lists:
            args[k] = [x._local_tensor if type(x) is hd else x for x in args[k]]
        beside = args[self.lists[0]]
        for argument, i, step in self.conversions:
            args[argument][i] = step(args[argument][i])
        for k, convert in self.shared if self.local else ():
            shared: Any = args[k]
            args[k] = convert(shared._local_tensor) if convert else shared._local_tensor
        if not self.all_local:
            for k in self.lists:
                if len(args[k]) == self.num:
                    args[k] = [args[k][i] for i in self.local]
        results = self.func(*args, **(kwargs or {})) if self.local else []
        if not self.returns:
            return None
        found = iter(results)
        return [
            new_wrapper(
                hd,
                next(found) if i in self.held else empty_beside(beside[i], self.dtypes[i]),
                bound,
                False,
            )
            for i, bound in enumerate(self.outs)
        ]
