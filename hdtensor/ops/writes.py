"""Operators that write into an operand and have no rule of their own: the functional operator, then a copy.

That is every ``out=`` variant, and the in-place operators that DTensor has no rule for (``tril_``, ``cumprod_``). The
operand keeps its layout: the result is brought to it inside the subgroups, as any implicit conversion, or refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial

from hdtensor.errors import DeductionError
from hdtensor.ops.binding import check_writable
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.propagate import PROPAGATOR, ROW_RULES
from hdtensor.ops.registry import call, is_hdtensor, local_graphs


def touch_of(func: Any) -> Any | None:
    """Return what counts a write into the one tensor that an in-place operator writes, its first; None for other operators."""
    arguments = func._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    return _touch if written == [0] and str(arguments[0].type) == "Tensor" else None


def _touch(x: Any) -> None:
    if is_hdtensor(x) and x._spec.index is not None:
        local, base = x._local_tensor, x._base
        if type(local) is not torch.Tensor:  # traced: compilers count themselves
            return
        increment_version(local)
        if base is not None and is_hdtensor(base):  # a local view counts for itself only
            increment_version(base._local_tensor)


def counted(func: Any, handler: Any) -> Any:
    """Return the handler of an operator that writes such that local tensors count the writes, as torch's own do.

    Autograd counts them on the ``HDTensor`` only. But a graph of local tensors (in a region, a local function, behind
    ``to_local``) may need the values from before, and must not silently take the new ones.
    """
    arguments = func._schema.arguments
    written = [(i, a) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    positions = [i for i, a in written if not a.kwarg_only]
    names = [a.name for _, a in written]

    def handle(args: tuple[Any, ...], kwargs: Any) -> Any:
        result = handler(args, kwargs)
        if not local_graphs[0]:
            return result
        values = [args[i] for i in positions if i < len(args)]
        if kwargs:
            values += [kwargs[name] for name in names if name in kwargs]
        touched: list[torch.Tensor] = []
        for value in values:
            for x in value if isinstance(value, list | tuple) else (value,):
                if is_hdtensor(x) and x._spec.index is not None:
                    touched.append(x._local_tensor)
                    base = x._base
                    if base is not None and is_hdtensor(
                        base
                    ):  # a local view counts for itself only
                        touched.append(base._local_tensor)
        if touched and type(touched[0]) is torch.Tensor:  # else traced: compilers count themselves
            increment_version(touched)
        return result

    return handle


def is_out_variant(func: Any) -> bool:
    """Return whether the operator writes to an ``out=`` argument."""
    return any(argument.is_out for argument in func._schema.arguments)


def make_out_run(func: Any) -> Any:
    """Return the function that runs an out variant.

    Raises:
        DeductionError: If the operator has no functional form.
    """
    names = [a.name for a in func._schema.arguments if a.is_out]
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    functional = _overload(func, func._schema.name, wanted)
    if functional is None:
        raise DeductionError(
            f"{func}: no functional form of this out variant exists; call without out=."
        )

    def run(*args_and_kwargs: Any) -> Any:
        *args, kwargs = args_and_kwargs
        outs = [kwargs[name] for name in names]
        rest = {k: v for k, v in kwargs.items() if k not in names}
        results = call(functional, *args, **rest)
        for out, result in zip(outs, results if len(outs) > 1 else (results,), strict=True):
            is_list = isinstance(out, list | tuple)
            for one, value in zip(out, result, strict=True) if is_list else [(out, result)]:
                copy_into(func, one, value)
        if not func._schema.returns:
            return None
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run


def make_in_place_run(func: Any) -> Any | None:
    """Return the function that runs an in-place operator without a rule by its functional form; None for any other."""
    schema = func._schema
    if not (schema.is_mutable and schema.name.endswith("_")) or schema.name.endswith("__"):
        return None
    if PROPAGATOR.has_rule(func) or func in ROW_RULES:
        return None
    return functional_then_copy(func)


def make_instead_of_new_layout(func: Any, args: tuple[Any, ...]) -> Any | None:
    """Return the function that runs an in-place operator by its functional form, None where that is not offered.

    For where the operator's own rule gives the tensor another layout than it has: of one tensor alone, and of several where
    the written one's reduction is pending inside its subgroups: the first rank then keeps the result (autograd's own formulas
    fill such gradients under a mask). ``pending.relu_()`` stays an error, as in DTensor.
    """
    if not func._schema.is_mutable or not func._schema.name.endswith("_"):
        return None
    if sum(isinstance(arg, torch.Tensor) for arg in args) == 1:
        return functional_then_copy(func)
    return functional_then_copy(func, may_be_pending=True) if _is_pending_inside(args[0]) else None


def _is_pending_inside(x: Any) -> bool:
    """Whether a tensor's reduction is pending inside its subgroups only."""
    if not is_hdtensor(x) or isinstance(x.spec.top, Partial):
        return False
    return any(isinstance(p, Partial) for g in x.spec.subgroups for p in g.placements)


def functional_then_copy(func: Any, *, may_be_pending: bool = False) -> Any | None:
    """Return the function that runs an in-place operator by its functional form, None if it has none.

    Args:
        func: The operator.
        may_be_pending: Whether the tensor may be one whose reduction is pending inside its subgroups.
    """
    schema = func._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    functional = _overload(func, schema.name[:-1], wanted)
    if functional is None:
        return None

    def run(x: Any, *rest: Any) -> Any:
        result = call(functional, x, *rest[:-1], **(rest[-1] or {}))
        copy_into(func, x, result, func._schema.arguments[0].name, may_be_pending=may_be_pending)
        return x

    return run


def _overload(func: Any, name: str, arguments: list[tuple[str, str]]) -> Any | None:
    """Return the overload of another operator with these arguments."""
    namespace, _, name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    for overload in packet.overloads() if packet is not None else ():
        other = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == arguments:
            return other
    return None


def copy_into(
    func: Any, out: Any, result: Any, name: str = "out", *, may_be_pending: bool = False
) -> None:
    """Copy a result into a tensor that keeps its layout; ``name`` is what the operator calls it.

    Raises:
        DeductionError: If the shapes differ, or the result would have to move between subgroups.
    """
    if not is_hdtensor(out):
        raise DeductionError(
            f"{func}: {name} is a {'DTensor' if isinstance(out, DTensor) else 'plain tensor'} of shape {tuple(out.shape)}; give an HDTensor laid out as "
            f"{result._spec}."
        )
    check_writable(func, name, out._spec)
    into, have = out._spec, result._spec
    if out.shape != result.shape or not _is_near(into, have, may_be_pending):
        advice = "Use the out-of-place operator, or redistribute"
        raise DeductionError(
            f"{func}: writing in place would change the layout of {name!r} from {into} to {have}. {advice} {name!r} first."
        )
    if into.spec is not have.spec:
        result = torch.ops.hdtensor.redistribute(result, into.spec.text, into.top_sizes, False)
    out._local_tensor.copy_(result._local_tensor)


def _is_near(into: BoundSpec, have: BoundSpec, may_be_pending: bool) -> bool:
    """Whether a result fits as it is, or after a conversion inside the subgroups."""
    if into.top_sizes != have.top_sizes:
        return False
    if into.spec is have.spec:
        return True
    meshes = [[(g.ranks, g.mesh_shape) for g in b.spec.subgroups] for b in (into, have)]
    is_pending = isinstance(into.spec.top, Partial) if may_be_pending else into.spec.has_partial()
    return into.spec.top == have.spec.top and meshes[0] == meshes[1] and not is_pending
