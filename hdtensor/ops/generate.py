"""The text of a record: one generated function per bound call, with nothing left to decide."""

from __future__ import annotations

import functools
import os.path
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial

from hdtensor._torch_compat import local_binding, new_wrapper, without_modes
from hdtensor.ops.binding import LAZY, Binding
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.calls import RESHAPES
from hdtensor.ops.propagate import Path


aten = torch.ops.aten

Run = Callable[..., Any]

#: Where generated code seems to stand: in this package, which compilers stay out of.
_FILE_NAME = os.path.join(os.path.dirname(__file__), "<record>")

_empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

#: Operators whose Python binding takes exactly the overload's positional arguments, so that it may stand in.
_BOUND_NAMES = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor mm.default addmm.default bmm.default relu.default "
    "t.default sigmoid.default tanh.default neg.default rsqrt.default transpose.int exp.default "
    "silu.default _softmax.default _log_softmax.default native_layer_norm.default sum.dim_IntList "
    "expand.default detach.default permute.default add_.Tensor mul_.Tensor sub_.Tensor div_.Tensor "
    "mean.dim unsqueeze.default select.int slice.Tensor gelu.default sqrt.default sum.default "
    "pow.Tensor_Scalar view.default cos.default sin.default copy_.default zero_.default lerp_.Scalar "
    "addcmul_.default addcdiv_.default split.Tensor where.self maximum.default abs.default"
)


@functools.lru_cache(maxsize=1)
def _bindings() -> dict[int, Any]:
    table: dict[int, Any] = {}
    for name in _BOUND_NAMES.split():
        packet, overload = name.split(".")
        func = getattr(getattr(aten, packet), overload)
        binding = local_binding(packet)
        if binding is not None:
            table[id(func)] = binding
    return table


def empty_like_local(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the one empty tensor that stands for "no part here"; nothing ever writes to it."""
    found = _empties.get((dtype, device))
    if found is None:
        # In inference mode autograd could never meet it again; in one that traces it would be a part of that.
        with torch.inference_mode(False), without_modes():
            found = _empties[(dtype, device)] = torch.empty(0, dtype=dtype, device=device)
    return found


def empty_beside(
    local: torch.Tensor,
    dtype: torch.dtype,
    like: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the empty tensor that stands for "no part here" where the operand lies.

    A record serves operands on every device: its key holds no device, which differs from rank to rank.

    Args:
        local: An operand's empty tensor.
        dtype: Of the result.
        like: The empty tensor of the operand that has the dtype, if one has.
        device: Where the caller asked for the result.
    """
    if type(local) is torch.Tensor:
        return empty_like_local(dtype, local.device if device is None else device)
    # Traced: the one of all calls is no part of the graph, and an operand's own adds no operator to it.
    if device is not None and device != local.device:
        return local.new_empty(0, dtype=dtype, device=device)
    found: Any = local if like is None else like
    return found if found.dtype == dtype else _empty_of(found, dtype)


#: Where an empty tensor of a graph keeps those of other dtypes that were made beside it, so that there is one of each.
_SIBLINGS = "_hdtensor_siblings"


def _empty_of(local: Any, dtype: torch.dtype) -> torch.Tensor:
    siblings = getattr(local, _SIBLINGS, None)
    if siblings is None:
        siblings = {local.dtype: local}
        setattr(local, _SIBLINGS, siblings)
    found = siblings.get(dtype)
    if found is None:
        found = siblings[dtype] = local.new_empty(0, dtype=dtype)
        setattr(found, _SIBLINGS, siblings)
    return found


def generate(binding: Binding, tensor_type: type, device: torch.device | None) -> Run:
    """Return ``run(*args, kwargs)`` for a bound call on this rank.

    Args:
        binding: The call.
        tensor_type: ``HDTensor``.
        device: Where the caller asked for the results; None for where the operands are, which no key of a record tells.
    """
    env: dict[str, Any] = {"new": new_wrapper, "HD": tensor_type}
    call = binding.call
    names = [f"a{i}" for i in range(len(call.args))]
    if binding.index is None:
        body = _pruned_body(binding, env, device)
    else:
        body = _local_body(binding, env)
    if binding.watch is not None:
        body = f"{_name(env, 'watch', binding.watch)}()\n    {body}"
    source = f"def run({', '.join([*names, 'kw'])}):\n    {body}\n"
    exec(compiled(source), env)
    run = env["run"]
    out = binding.outs[0] if binding.outs and not binding.is_multi else None
    if binding.index is None and binding.mutated is None and out and binding.watch is None:
        first = call.args[0] if call.args and (0,) not in call.plain else None
        if device is None and isinstance(first, BoundSpec) and first.dtype == out.dtype:
            run.pruned = (out,)
    return run


@functools.lru_cache(maxsize=8192)
def compiled(source: str) -> Any:
    """Return the code of a generated function; like texts are compiled once."""
    return compile(source, _FILE_NAME, "exec")


def _pruned_body(binding: Binding, env: dict[str, Any], device: torch.device | None) -> str:
    if binding.mutated is not None:
        return f"return a{binding.mutated}" if binding.call.func._schema.returns else "return None"
    env["empty"], env["device"] = empty_beside, device
    held = {p: b for p, b in binding.call.specs.items() if p not in binding.call.plain}
    first = next(iter(held))

    def value(k: int, bound: BoundSpec) -> str:
        like = next((path for path, own in held.items() if own.dtype == bound.dtype), first)
        locals_ = f"{_text(first)}._local_tensor, {{}}, {_text(like)}._local_tensor"
        return f"empty({locals_.format(_name(env, f't{k}', bound.dtype))}, device)"

    return _return(binding, env, value)


def _text(path: Path) -> str:
    """Return the operand as the record's function sees it."""
    first, *rest = path
    text = f"kw[{first!r}]" if isinstance(first, str) else f"a{first}"
    return text + "".join(f"[{i}]" for i in rest)


def _local_body(binding: Binding, env: dict[str, Any]) -> str:
    call = binding.call
    env["op"] = _local_op(binding)
    parts = [
        _argument(binding, env, i, a) for i, a in enumerate(call.args) if i not in binding.literals
    ]
    if binding.literals:
        parts = []
        for i in range(max(len(call.args), max(binding.literals) + 1)):
            if i in binding.literals:
                parts.append(_name(env, f"l{i}", binding.literals[i]))
            else:
                parts.append(_argument(binding, env, i, call.args[i]))
        if binding.op is not call.func:  # squeeze became squeeze.dims: only its own arguments
            parts = parts[: len(binding.op._schema.arguments)]
    for name, value in call.kwargs.items():
        parts.append(f"{name}={_keyword(binding, env, name, value)}")
    expression = f"op({', '.join(parts)})"
    if binding.mutated is not None:
        tail = f"return a{binding.mutated}" if call.func._schema.returns else "return None"
        return f"{expression}\n    {tail}"
    if not binding.is_multi:
        return _return(binding, env, lambda k, bound: expression)
    targets = ", ".join(f"v{k}" for k in range(len(binding.outs)))
    return f"{targets}, = {expression}\n    " + _return(binding, env, lambda k, bound: f"v{k}")


def _return(binding: Binding, env: dict[str, Any], value: Callable[[int, BoundSpec], str]) -> str:
    items = []
    for k, bound in enumerate(binding.outs):
        if bound is None:
            items.append("None" if binding.index is None or not binding.is_multi else f"v{k}")
        else:
            items.append(f"new(HD, {value(k, bound)}, {_name(env, f'o{k}', bound)}, False)")
    if not binding.is_multi:
        if binding.outs and binding.outs[0] is not None:
            return f"return {items[0]}"
        return f"return {value(0, None)}" if binding.index is not None else "return None"  # type: ignore[arg-type]
    if binding.is_list:
        return f"return [{', '.join(items)}]"
    return f"return ({', '.join(items)},)"


def _name(env: dict[str, Any], name: str, value: Any) -> str:
    env[name] = value
    return name


def _argument(binding: Binding, env: dict[str, Any], i: int, value: Any) -> str:
    if type(value) in (list, tuple) and any(isinstance(v, BoundSpec) for v in value):
        items = [_operand(binding, env, (i, j), f"a{i}[{j}]", v) for j, v in enumerate(value)]
        return f"[{', '.join(items)}]"
    return _operand(binding, env, (i,), f"a{i}", value)


def _keyword(binding: Binding, env: dict[str, Any], name: str, value: Any) -> str:
    return _operand(binding, env, (name,), f"kw[{name!r}]", value)


def _operand(binding: Binding, env: dict[str, Any], path: Path, text: str, value: Any) -> str:
    if isinstance(value, BoundSpec) and path not in binding.call.plain:
        text += "._local_tensor"
    convert = binding.conversions.get(path)
    if convert is not None:
        text = f"{_name(env, 'c' + '_'.join(map(str, path)), convert)}({text})"
    return text


def _local_op(binding: Binding) -> Any:
    if binding.op in RESHAPES and binding.op is not aten.reshape.default:
        return _view_or_copy
    if _needs_identity(binding):
        return functools.partial(_identity, binding.outs[0])  # type: ignore[arg-type]
    if _gives_nothing(binding):
        return functools.partial(_nothing, binding)
    if binding.op in LAZY:
        return LAZY[binding.op]
    found = _bindings().get(id(binding.op))
    return binding.op if found is None else found


def _view_or_copy(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """View, or copy where the local strides do not allow what the global ones do.

    A local tensor is contiguous after a conversion, whatever the global strides say.
    """
    try:
        return x.view(shape)
    except RuntimeError:
        return x.reshape(shape)


def _needs_identity(binding: Binding) -> bool:
    """Whether an empty block enters a max or min, which torch refuses: it is the neutral element."""
    if binding.is_multi or not binding.outs or binding.outs[0] is None or binding.index is None:
        return False
    out = binding.outs[0]
    placements = (out.spec.top, *out.spec.subgroups[binding.index].placements)
    if not any(isinstance(p, Partial) and p.reduce_op in ("max", "min") for p in placements):
        return False
    if 0 in out.local_shape():
        return False
    converted = binding.decision.bottom_inputs[binding.index]
    for path, bound in binding.after_top.specs.items():
        if path in converted:  # what the kernel gets is the operand after its implicit conversion
            groups = list(bound.spec.subgroups)
            groups[binding.index] = groups[binding.index].with_placements(converted[path])
            bound = bound.with_spec(bound.spec.replace(subgroups=tuple(groups)))
        if 0 not in bound.local_shape():
            return False
    return True


def _gives_nothing(binding: Binding) -> bool:
    """Whether empty operands give empty results only, here: kernels refuse some of them."""
    if binding.mutated is not None or not any(binding.outs):
        return False
    outs = [bound for bound in binding.outs if bound is not None]
    ins = binding.after_top.specs.values()
    return all(0 in b.local_shape() for b in outs) and any(0 in b.local_shape() for b in ins)


def _nothing(binding: Binding, *operands: Any, **_: Any) -> Any:
    like = next(x for x in _tensors(operands))
    results = [
        None if b is None else like.new_empty(b.local_shape(), dtype=b.dtype) for b in binding.outs
    ]
    return results if binding.is_multi else results[0]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _identity(bound: BoundSpec, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    shape = bound.local_shape()
    tops = (bound.spec.top, *(p for g in bound.spec.subgroups for p in g.placements))
    op = next(p.reduce_op for p in tops if isinstance(p, Partial))
    if bound.dtype == torch.bool:
        return x.new_full(shape, op == "min", dtype=bound.dtype)
    if bound.dtype.is_floating_point:
        return x.new_full(shape, float("-inf") if op == "max" else float("inf"), dtype=bound.dtype)
    info = torch.iinfo(bound.dtype)
    return x.new_full(shape, info.min if op == "max" else info.max, dtype=bound.dtype)
