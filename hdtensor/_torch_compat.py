"""The only file that imports private names of torch. Each says what it is for and where it was checked.

Checked on torch 2.13.0; names marked (2.11-2.15) kept their place over these releases.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    _disabled_torch_function_impl as no_torch_function,
)  # wrapper subclasses (2.11-2.15)
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)  # metas without a C++ meta kernel (2.11-2.15)
from torch.distributed.device_mesh import (
    DeviceMesh,
    _mesh_resources,  # the meshes of ``with mesh:`` blocks (2.13-2.15)
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # (2.11-2.15)
from torch.distributed.tensor._op_schema import OpSchema  # (2.11-2.15)
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # (2.11-2.15)
from torch.distributed.tensor._utils import ExplicitRedistributionContext  # (2.11-2.15)
from torch.distributed.tensor.placement_types import (  # (2.11-2.15)
    _MaskPartial as MaskPartial,
    _StridedShard as StridedShard,
)
from torch.utils import _pytree as pytree  # results that are mappings or dataclasses (2.11-2.15)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # to watch a pass of a module (2.11-2.15)


__all__ = [
    "DTensorSpec",
    "FakeTensorMode",
    "MaskPartial",
    "OpSchema",
    "Propagator",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "abstract_mesh",
    "at_backward_end",
    "backward_id",
    "change_outer_shape",
    "current_mesh",
    "dtensor_propagator",
    "group_timeout",
    "in_backward",
    "keep_in_order",
    "local_binding",
    "new_wrapper",
    "no_torch_function",
    "observe_conversion",
    "pytree",
    "raw_apply",
    "saved_tensor_hooks",
]

#: ``new_wrapper(cls, local, spec, requires_grad)``: DTensor's constructor of a wrapper subclass in C++;
#: it reads ``spec.tensor_meta`` and sets ``_local_tensor`` and ``_spec``. 0.5 us against 1 us for
#: ``_make_wrapper_subclass`` with keyword arguments. (2.13-2.15)
new_wrapper: Callable[..., Any] = torch.Tensor._dtensor__new__


def observe_conversion(src: DTensorSpec, dst: DTensorSpec, text: Callable[[], str]) -> None:
    """Report an implicit conversion to torch's ``ExplicitRedistributionContext``, which may forbid it. (2.13-2.15)"""
    if getattr(ExplicitRedistributionContext._local, "_active", None) is not None:
        ExplicitRedistributionContext.observe_redistribution(src, dst, text())  # type: ignore[arg-type]


def keep_in_order(name: str, library: torch.library.Library) -> None:
    """Have ``torch.compile`` keep all calls of an operator, also without a use, and their order. (2.13-2.15)"""
    torch.library._register_effectful_op(name, torch.library.EffectType.ORDERED, lib=library)


def saved_tensor_hooks() -> Any:
    """Return the innermost hooks on tensors that autograd saves, None without any. (2.13-2.15)"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_backward() -> bool:
    """Return whether the autograd engine is running a backward in this thread. (2.11-2.15)"""
    return backward_id() != -1


def group_timeout(group: Any, device_type: str) -> datetime.timedelta | None:
    """Return how long a group's collectives wait, None if its backend does not say. (2.13-2.15)

    ``new_group`` takes the backend's default (30 minutes for gloo) rather than the default group's.
    """
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


def raw_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return C++'s ``apply`` of an autograd function. (2.11-2.15)

    Python's binds default arguments and looks for functorch, 5 us a call.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def backward_id() -> int:
    """Return the number of the backward that the autograd engine runs in this thread, -1 for none. (2.11-2.15)"""
    return torch._C._current_graph_task_id()


def at_backward_end(callback: Callable[[], None]) -> None:
    """Have the autograd engine call ``callback`` once at the end of the running backward. (2.11-2.15)"""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def change_outer_shape(func: Any, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> None:
    """Run an operator that changes shape in place on a wrapper's own sizes, not on what is inside. (2.13-2.15)"""
    before = torch._C._meta_in_tls_dispatch_include()
    with torch._C._DisableTorchDispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(tensor, *args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def dtensor_propagator() -> ShardingPropagator:
    """Return DTensor's own propagator, which all operator rules are registered with."""
    return DTensor._op_dispatcher.sharding_propagator


class Propagator(ShardingPropagator):
    """DTensor's rules with another source of output metadata.

    The registries are DTensor's own, shared, so that rules which users register there hold here.

    Args:
        metas_of: ``(op_schema) -> TensorMeta | sequence of them | None``.
    """

    def __init__(self, metas_of: Callable[[OpSchema], Any]) -> None:
        self.__dict__.update(dtensor_propagator().__dict__)
        self._metas_of = metas_of

    def _propagate_tensor_meta_non_cached(self, op_schema: OpSchema) -> Any:
        return self._metas_of(op_schema)

    def has_rule(self, func: Any) -> bool:
        """Return whether DTensor has a rule for the op itself, not for its decomposition only."""
        return (
            func in self.op_single_dim_strategy_funcs
            or func in self.op_strategy_funcs
            or func in self.op_to_rules
        )

    def schema_info(self, func: Any) -> Any:
        """Return what DTensor says of the op's plain arguments, or None."""
        return self.op_to_schema_info.get(
            func
        ) or self.op_to_schema_info_for_single_dim_strategy.get(func)


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost ``with mesh:`` block, None outside of any. (2.13-2.15)"""
    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


@functools.lru_cache(maxsize=4096)
def abstract_mesh(mesh_shape: tuple[int, ...], index: int) -> DeviceMesh:
    """Return a mesh without process groups over ranks 0 .. n-1, seen by its ``index``-th rank.

    Deduction needs a mesh's shape and this rank's coordinate, never its processes.
    """
    size = 1
    for axis in mesh_shape:
        size *= axis
    ranks = torch.arange(size, dtype=torch.int).view(mesh_shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=index)


#: Where Python bindings of aten functions live, best first.
_BINDINGS = (torch._C._VariableFunctions, torch._C._nn, torch.Tensor)


def local_binding(name: str) -> Callable[..., Any] | None:
    """Return torch's Python binding of an aten function, 0.8 us cheaper than the ``OpOverload``."""
    for home in _BINDINGS:
        found = getattr(home, name, None)
        if found is not None:
            return found
    return None
