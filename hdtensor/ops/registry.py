"""Where special operators are registered, and the wrapper type that dispatch builds.

A special rule sees a call before deduction does. It may return the function that runs the call on this rank,
which is then cached like any record, or None to let deduction take it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hdtensor._torch_compat import in_backward, new_wrapper
from hdtensor.ops.bound import BoundSpec


#: ``rule(func, args, kwargs) -> run | None`` with ``run(*args, kwargs)``.
SpecialRule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[..., Any] | None]

SPECIAL: dict[Any, SpecialRule] = {}

#: Special operators whose run is a record after all, so that plain local tensors would do the same.
LOCAL_SPECIAL: set[Any] = set()

#: ``HDTensor``, set once by ``tensor.py``: the layers below may build it but not import it.
_tensor_type: list[type] = []

#: Things that happened which a computation on plain local tensors would not do: conversions between layouts, and
#: operators with a special rule (global counts, random numbers, reads). ``api.regions`` watches it.
events = [0]

#: Redistributions between subgroups so far: where one happens, no rank may skip the module around it.
moves = [0]

#: Counts what may make other parameters of a module: a registration of one in any module, and data of another dtype.
#: What was learnt of a parallelized model is looked at again when it has grown.
changes = [0]

#: How many graphs of local tensors of this process there may be, which must learn of writes into those (``ops.writes``):
#: whatever builds one says so. Those of regions end with their backward, others are never taken away.
local_graphs = [0]


class LocalGraph:
    """Stands for a graph of local tensors as long as it is referred to."""

    __slots__ = ()

    def __init__(self) -> None:
        local_graphs[0] += 1

    def __del__(self) -> None:
        local_graphs[0] -= 1


#: Whether plain tensors count as replicated operands (``implicit_replication``); the same in the program that is being
#: traced. A trace that fails may leave the latter set, so that it says nothing outside of one.
implicit = [False]
implicit_in_graph = [False]


def accepts_plain() -> bool:
    """Return whether plain tensors count as replicated operands now.

    They do inside ``implicit_replication()``, and during backward, whose formulas meet again the plain tensors that the
    forward accepted.
    """
    if implicit[0] or in_backward():
        return True
    return implicit_in_graph[0] and torch.compiler.is_compiling()


#: ``(func, args, kwargs) -> run`` by deduction alone, set by ``dispatch.py``: special rules end in it.
_deduce: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[..., Any]]] = []

#: ``(func, *args, **kwargs) -> result`` by dispatch, set by ``dispatch.py``: special rules compose operators.
_call: list[Callable[..., Any]] = []


def set_dispatch(deduce: Any, call: Any) -> None:
    """Name what special rules call back into; ``dispatch.py`` does it at import."""
    _deduce[:] = [deduce]
    _call[:] = [call]


def deduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return the record of a call by deduction, without special rules."""
    return _deduce[0](func, args, kwargs)


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator, from inside a special rule's run."""
    return _call[0](func, *args, **kwargs)


def special(*ops: Any, is_local: bool = False) -> Callable[[SpecialRule], SpecialRule]:
    """Register a special rule for ``ops``; a second rule for an op is an error.

    Args:
        ops: The operators.
        is_local: Whether the run does no more than the operator on local tensors (``LOCAL_SPECIAL``).
    """

    def register(rule: SpecialRule) -> SpecialRule:
        for op in ops:
            if op in SPECIAL:
                raise ValueError(f"{op} already has a special rule: {SPECIAL[op]}.")
            SPECIAL[op] = rule
            if is_local:
                LOCAL_SPECIAL.add(op)
        return rule

    return register


def set_tensor_type(tensor_type: type) -> None:
    """Name the wrapper type; ``tensor.py`` calls it at import."""
    _tensor_type[:] = [tensor_type]


def tensor_type() -> type:
    """Return ``HDTensor``."""
    return _tensor_type[0]


def is_hdtensor(value: Any) -> bool:
    """Return whether the value is an ``HDTensor``."""
    return type(value) is _tensor_type[0]


def wrap(local: torch.Tensor, bound: BoundSpec) -> Any:
    """Return an ``HDTensor`` over a local tensor, without autograd."""
    return new_wrapper(_tensor_type[0], local, bound, False)
