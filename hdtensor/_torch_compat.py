"""The only file that uses private names of torch. Each has a row in ``_torch_names.py``: what for, and where it holds."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _disabled_torch_function_impl as no_torch_function
from torch._dispatch.python import enable_python_dispatcher as traced_composites
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.pipelining._backward import (
    stage_backward_input as backward_for_input,
    stage_backward_weight as backward_for_weight,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.placement_types import (
    _MaskPartial as MaskPartial,
    _StridedShard as StridedShard,
)
from torch.optim import _adafactor as adafactor, _muon as muon
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes as without_modes,
    _get_current_dispatch_mode,
)


__all__ = [
    "DTensorSpec",
    "DataDependentOutputException",
    "FakeTensorMode",
    "MaskPartial",
    "OpSchema",
    "Propagator",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "ViewsOnly",
    "abstract_mesh",
    "at_backward_end",
    "backward_for_input",
    "backward_for_weight",
    "backward_id",
    "backward_reaches",
    "change_outer_shape",
    "current_mesh",
    "decomposed",
    "dtensor_propagator",
    "extend_optimizers",
    "extend_state_dicts",
    "group_timeout",
    "in_backward",
    "is_profiled",
    "is_traced",
    "keeps_graph",
    "local_binding",
    "new_wrapper",
    "no_torch_function",
    "node_in_backward",
    "number_of_next_node",
    "number_of_node",
    "observe_conversion",
    "put_before",
    "pytree",
    "raw_apply",
    "replace_lbfgs_parts",
    "saved_tensor_hooks",
    "storage_of",
    "traced_composites",
    "use_count",
    "without_modes",
]

#: ``new_wrapper(cls, local, spec, requires_grad)``: DTensor's constructor of a wrapper subclass in C++;
#: it reads ``spec.tensor_meta`` and sets ``_local_tensor`` and ``_spec``. 0.5 us against 1 us for
#: ``_make_wrapper_subclass`` with keyword arguments.
new_wrapper: Callable[..., Any] = torch.Tensor._dtensor__new__


def observe_conversion(src: DTensorSpec, dst: DTensorSpec, text: Callable[[], str]) -> None:
    """Report an implicit conversion to torch's ``ExplicitRedistributionContext``, which may forbid it."""
    if getattr(ExplicitRedistributionContext._local, "_active", None) is not None:
        ExplicitRedistributionContext.observe_redistribution(src, dst, text())  # type: ignore[arg-type]


#: ``use_count(tensor)``: how many others hold a tensor, all of Python counting as one.
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]

#: ``is_profiled()``: whether torch's profiler is running, in 50 ns.
is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled


def decomposed(func: Any) -> Callable[..., Any] | None:
    """Return what runs an operator as those that it is made of, None if it is made of none.

    In ``inference_mode`` it arrives whole, as autograd is left out. One with a kernel of its own is not taken apart: its
    parts (those of ``silu_backward``) round otherwise.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    if not has_kernel(name, "CompositeImplicitAutograd") or has_kernel(name, "CPU"):
        return None
    return functools.partial(func._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def is_traced() -> bool:
    """Return whether what runs is being traced, or runs on tensors without values."""
    mode = _get_current_dispatch_mode()
    return mode is not None and (torch.compiler.is_compiling() or mode.is_infra_mode())


def saved_tensor_hooks() -> Any:
    """Return the innermost hooks on tensors that autograd saves, None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_backward() -> bool:
    """Return whether the autograd engine is running a backward in this thread."""
    return backward_id() != -1


def group_timeout(group: Any, device_type: str) -> datetime.timedelta | None:
    """Return how long a group's collectives wait, None if its backend does not say.

    ``new_group`` takes the backend's default (30 minutes for gloo) rather than the default group's.
    """
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


def raw_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return C++'s ``apply`` of an autograd function.

    Python's binds default arguments and looks for functorch, 5 us a call.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


#: ``backward_id()``: the number of the backward that the autograd engine runs in this thread, -1 for none.
backward_id: Callable[[], int] = torch._C._current_graph_task_id

#: ``keeps_graph()``: whether the backward that runs in this thread retains the graph.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


#: ``number_of_next_node()``: the sequence number that the next autograd node of this thread gets.
number_of_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


def number_of_node(node: Any) -> int:
    """Return an autograd node's sequence number."""
    return int(node._sequence_nr())


def node_in_backward() -> int | None:
    """Return the sequence number of the node that backward is at in this thread, None outside."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def backward_reaches(node: Any) -> bool:
    """Return whether the running backward goes on to this node of its graph; not if somebody asked for others only."""
    return torch._C._will_engine_execute_node(node)


def at_backward_end(callback: Callable[[], None]) -> None:
    """Have the autograd engine call ``callback`` once at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def extend_optimizers(
    factorize: Callable[..., None], orthogonalize: Callable[..., torch.Tensor]
) -> None:
    """Put functions before those of torch's optimizers; each gets torch's own first, then its arguments."""
    put_before(adafactor, "adafactor", factorize)
    put_before(muon, "_zeropower_via_newtonschulz", orthogonalize)


def extend_state_dicts(
    gather: Callable[..., Any], distribute: Callable[..., None], broadcast: Callable[..., None]
) -> None:
    """Put functions before those by which torch's getters and setters of state dicts know whole tensors."""
    put_before(state_dicts, "_gather_state_dict", gather)
    put_before(state_dicts, "_distribute_state_dict", distribute)
    put_before(state_dicts, "_broadcast_state_dict", broadcast)


def put_before(home: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(home, name)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(home, name, run)


def replace_lbfgs_parts(
    optimizer: Any, gather: Callable[[], Any], add: Callable[[Any, Any], None]
) -> None:
    """Have an LBFGS read gradients and move parameters by these functions; its copies and pickles leave them out."""
    optimizer._gather_flat_grad, optimizer._add_grad = gather, add


def change_outer_shape(func: Any, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> None:
    """Run an operator that changes shape in place on a wrapper's own sizes, not on what is inside."""
    before = torch._C._meta_in_tls_dispatch_include()
    with torch._C._DisableTorchDispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(tensor, *args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


class ViewsOnly(TorchDispatchMode):
    """Where a tensor's copy is made, as ``contiguous`` does, give the tensor itself; storage and strides tell its origin."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells whether tensors share memory, on the meta device too."""
    return tensor.untyped_storage()._cdata


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
    with without_modes():  # it is kept, and a compiler's tensors have no values
        ranks = torch.arange(math.prod(mesh_shape), dtype=torch.int).view(mesh_shape)
        return DeviceMesh("cpu", ranks, _init_backend=False, _rank=index)


#: Where Python bindings of aten functions live, best first.
_BINDINGS = (torch._C._VariableFunctions, torch._C._nn, torch.Tensor)


def local_binding(name: str) -> Callable[..., Any] | None:
    """Return torch's Python binding of an aten function, 0.8 us cheaper than the ``OpOverload``."""
    return next((getattr(home, name) for home in _BINDINGS if hasattr(home, name)), None)
