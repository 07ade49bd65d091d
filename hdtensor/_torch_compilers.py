"""The private names of torch that only compiled programs need; like ``_torch_compat``, with a row for each in ``_torch_names``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dynamo import decorators, trace_rules
from torch._library import opaque_object

from hdtensor._torch_compat import put_before
from hdtensor._torch_names import require_names_for_compilers


__all__ = [
    "extend_compile",
    "extend_marks",
    "extend_tangents",
    "is_marked_dynamic",
    "keep_effects_of_checkpoints",
    "keep_first_names",
    "keep_in_order",
    "mark_dynamic",
    "never_compile",
    "register_value_type",
]


def keep_in_order(name: str, library: torch.library.Library, fake: Callable[..., Any]) -> None:
    """Register an operator's fake kernel; have ``torch.compile`` keep all its calls, also without a use, and their order."""

    def run(*args: Any) -> Any:
        _order_effects()
        return fake(*args)

    torch.library.register_fake(name, run, lib=library)
    torch.library._register_effectful_op(name, torch.library.EffectType.ORDERED, lib=library)


def _order_effects() -> None:
    """Have inductor keep the order of effects, once it is imported.

    It notes the call before by its buffer's name, and looks for it by its operation's: so the order was free where it
    reorders, and was another on each rank.
    """
    lowering, op = sys.modules.get("torch._inductor.lowering"), torch.ops.higher_order.with_effects
    original = None if lowering is None else lowering.lowerings[op]
    if lowering is None or original is None or hasattr(original, "keeps_order"):
        return

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph = lowering.V.graph
        first = len(graph.operations)
        result = original(*args, **kwargs)
        for operation in graph.operations[first:]:
            for before in graph.additional_star_deps.pop(operation.get_name(), ()):
                graph.additional_buffer_deps[operation.get_operation_name()].add(before)
        return result

    lower.keeps_order = True  # type: ignore[attr-defined]
    lowering.lowerings[op] = lower


def register_value_type(cls: type, *members: str) -> None:
    """Have ``torch.compile`` take values of a class for constants, guarded by equality.

    Args:
        cls: It has ``__eq__``, ``__hash__`` and ``__fx_repr__``.
        members: Attributes and methods whose results are constants, too.
    """
    uses = dict.fromkeys(members, opaque_object.MemberType.USE_REAL)
    # Both words changed in torch 2.14, which logs a warning for the old ones.
    if hasattr(opaque_object, "register_custom_class"):
        opaque_object.register_custom_class(cls, typ="constant", members=uses)
    else:
        opaque_object.register_opaque_type(cls, typ="value", members=uses)


def never_compile(*modules: str) -> None:
    """Have ``torch.compile`` trace no function of these modules or packages, nor compile one that is called between graphs."""
    for module in modules:
        trace_rules.add(module)


def is_marked_dynamic(tensor: torch.Tensor, dim: int) -> bool:
    """Return whether a user marked a dim as one whose length changes between calls of a compiled program."""
    marks = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    return any(dim in getattr(tensor, name, ()) for name in marks)


def mark_dynamic(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Have a compiler take dims for ones whose lengths change, where its program allows it."""
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


@functools.cache
def keep_effects_of_checkpoints() -> None:
    """Have compiled checkpoints run no operator of ``keep_in_order`` again: a collective's result is kept, and a key drawn.

    A checkpoint marks all that it traces for being run again. Torch keeps the results of such operators elsewhere.
    """
    require_names_for_compilers()
    from torch._functorch import partitioners  # noqa: PLC0415 - imported by who compiles

    def unmark(original: Callable[..., Any], joint: torch.fx.GraphModule) -> Any:
        for node in joint.graph.nodes:
            if node.op == "call_function" and str(node.target) == "with_effects":
                for each in (node, *node.users):
                    each.meta.pop("recompute", None)
        return original(joint)

    put_before(partitioners, "has_recomputable_ops", unmark)


@functools.cache
def extend_tangents(tensor_type: type, convert: Callable[[torch.Tensor, Any], Any]) -> None:
    """Have compiled backwards take plain gradients of a subclass's outputs: torch makes zeros where none comes.

    Args:
        tensor_type: The subclass.
        convert: ``convert(plain, metadata) -> tensor`` with the metadata that was traced.
    """
    require_names_for_compilers()
    # Imported by who compiles; on its own it takes half a second.
    from torch._functorch._aot_autograd import runtime_wrappers  # noqa: PLC0415

    dispatch = runtime_wrappers.AOTDispatchAutograd

    def process(original: Callable[..., Any], x: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is torch.Tensor and getattr(meta, "original_subclass_type", None) is tensor_type:
            x = convert(x, meta.meta)
        return original(x, meta, *args, **kwargs)

    put_before(dispatch, "process_runtime_tangent", process)
    dispatch.process_runtime_tangent = staticmethod(dispatch.process_runtime_tangent)  # type: ignore[method-assign]


@functools.cache
def keep_first_names() -> None:
    """Have tracers go on taking an open size for the first value that had its name.

    They look sizes up by name that they did not see being made, as those of wrappers. Named anew by what was made of such a
    size and is as large (``max(n, 1)``), it would be looked for in itself without end.
    """
    require_names_for_compilers()
    from torch.fx.experimental import proxy_tensor  # noqa: PLC0415 - imported by who compiles

    def set_slot(original: Callable[..., None], obj: Any, tracer: Any, proxy: Any) -> None:
        names = tracer.sympy_expr_tracker if isinstance(obj, torch.SymInt) else {}
        name = getattr(obj.node, "expr", None) if names else None
        known = names.get(name)
        original(obj, tracer, proxy)
        if known is not None:
            names[name] = known

    put_before(proxy_tensor, "set_proxy_slot", set_slot)


def extend_compile(note: Callable[[], None]) -> None:
    """Have ``note()`` called whenever a module is compiled in place."""

    def compile_module(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        note()
        original(*args, **kwargs)

    put_before(torch.nn.Module, "compile", compile_module)


def extend_marks(kind: type, check: Callable[[Any, int], None]) -> None:
    """Have ``check(t, dim)`` called where ``mark_dynamic(t, dim, min=, max=)`` gives a tensor of a type limits."""

    def mark_inner(original: Any, mark: Any, t: Any, dim: Any, **kw: Any) -> None:
        if isinstance(t, kind) and type(dim) is int and any(v is not None for v in kw.values()):
            check(t, dim)
        original(mark, t, dim, **kw)

    put_before(decorators, "_apply_func_to_inner_tensors_of_same_dim", mark_inner)
