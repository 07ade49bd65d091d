"""The table of private names of torch that ``_torch_compat.py`` and ``_torch_compilers.py`` use; ``scripts/torch_compat_page.py`` shows it.

Importing this module looks them up, so that a torch without one is refused by one error that says so, and before anything
of it is used.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hdtensor.errors import TorchVersionError


#: The releases that the whole test suite passes on.
TESTED_VERSIONS = ("2.13.0", "2.14.1")


class PrivateName(NamedTuple):
    """A private name of torch that hdtensor relies on.

    Attributes:
        name: Dotted, as Python finds it; after ``->`` attributes of it, with ``or`` between names of which a release has one;
            in brackets what cannot be looked up: of what it returns, takes or holds.
        why: What for.
        versions: The releases over which it kept its place and meaning.
        for_compilers: Whether it is looked up, and its module imported, only when something is compiled.
    """

    name: str
    why: str
    versions: str
    for_compilers: bool = False

    def missing(self) -> list[str]:
        """Return which of its names the installed torch lacks.

        >>> PrivateName("torch.nn -> Linear, Gone or Lost, Gone or ReLU", "a doctest", "2.13-2.14").missing()
        ['torch.nn.Gone or Lost']
        """
        path, _, attributes = re.sub(r"\(.*?\)", "", self.name).strip().partition(" -> ")
        try:
            home = _find(path)
        except AttributeError:
            return [path]
        every = attributes.split(", ") if attributes else []
        return [
            f"{path}.{names}"
            for names in every
            if not any(hasattr(home, name) for name in names.split(" or "))
        ]


def _find(path: str) -> Any:
    """Read a dotted path; modules on the way that nobody imported are."""
    root, *parts = path.split(".")
    found: Any = importlib.import_module(root)
    for part in parts:
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, ModuleType):
                raise
            name = f"{found.__name__}.{part}"
            try:
                found = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:  # it is there, and needs another package
                    raise
                raise AttributeError(name) from None
    return found


_TENSOR = "torch.distributed.tensor"
PRIVATE_NAMES = (
    PrivateName(
        "torch.Tensor._dtensor__new__",
        "C++ constructor of the wrapper; reads `spec.tensor_meta`, sets `_local_tensor` and `_spec`",
        "2.13-2.15",
    ),
    PrivateName(
        "torch._C._disabled_torch_function_impl",
        "wrapper subclasses take no part in `__torch_function__`",
        "2.11-2.15",
    ),
    PrivateName(
        "torch._C._current_graph_task_id",
        "whether backward runs: plain operands of the forward are accepted again",
        "2.11-2.15",
    ),
    PrivateName(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "whether a region's graph ends with this backward: writes need not be counted for it any more",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.distributed.pipelining._backward -> stage_backward_input, stage_backward_weight",
        "zero-bubble schedules: a backward in two parts, for the input and for the weights",
        "2.13-2.14",
    ),
    PrivateName(
        "torch._C._will_engine_execute_node",
        "whether a backward is for all leaves or for named tensors: what a skipped module answers",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.Tensor._use_count",
        "whether a plain gradient may be kept as it is, or is held elsewhere too",
        "2.13-2.14",
    ),
    PrivateName(
        "torch._C._current_autograd_node (returns one with _sequence_nr)",
        "whose part of backward communicates: counts by module",
        "2.13-2.14",
    ),
    PrivateName(
        "torch._C._autograd._get_sequence_nr",
        "which autograd nodes a module makes: counts by module",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.autograd._profiler_enabled",
        "whether a profiler runs, in 50 ns: without one there are no ranges",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._get_backend (returns one with options._timeout)",
        "groups inherit the default group's timeout",
        "2.13-2.15",
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine -> queue_callback",
        "bring gradients home once, when backward ends",
        "2.11-2.15",
    ),
    PrivateName(
        "torch._C._VariableFunctions",
        "Python bindings of aten functions, 0.8 us cheaper a call than overloads",
        "2.11-2.15",
    ),
    PrivateName("torch._C._nn", "more of these bindings", "2.11-2.15"),
    PrivateName(
        "torch._C._DisableTorchDispatch",
        "operators that change shape in place, on the wrapper's own sizes",
        "2.13-2.15",
    ),
    PrivateName(
        "torch._C._meta_in_tls_dispatch_include",
        "the same: whether the meta kernel runs",
        "2.13-2.15",
    ),
    PrivateName(
        "torch._C._set_meta_in_tls_dispatch_include",
        "the same: have the meta kernel run",
        "2.13-2.15",
    ),
    PrivateName(
        "torch.distributed.device_mesh._mesh_resources -> mesh_stack",
        "the mesh of a `with mesh:` block, where a call names none, as DTensor's",
        "2.13-2.15",
    ),
    PrivateName(
        "torch.utils._pytree",
        "leaves of module results that are mappings or dataclasses",
        "2.11-2.15",
    ),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "to see a module's operators, whatever they run on",
        "2.11-2.15",
    ),
    PrivateName(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "whether a module puts a part of its computing off to backward",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.UntypedStorage._cdata",
        "whether tensors share memory, on the meta device too",
        "2.11-2.15",
    ),
    PrivateName(
        "torch.library._register_effectful_op",
        "compilers keep collectives and messages, and their order",
        "2.13-2.15",
    ),
    PrivateName(
        "torch.fx.experimental.proxy_tensor.set_proxy_slot (tracer.sympy_expr_tracker)",
        "tracers keep the first value that an open size's name stood for",
        "2.13-2.14",
        for_compilers=True,
    ),
    PrivateName(
        "torch._inductor.lowering -> lowerings, V",
        "inductor keeps that order too where it reorders operators",
        "2.13-2.14",
        for_compilers=True,
    ),
    PrivateName(
        "torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd -> process_runtime_tangent",
        "compiled backwards, where some of several outputs get no gradient",
        "2.13-2.15",
        for_compilers=True,
    ),
    PrivateName(
        "torch.utils._python_dispatch._disable_current_modes",
        "placements are deduced outside of what traces",
        "2.13-2.15",
    ),
    PrivateName(
        "torch.utils._python_dispatch._get_current_dispatch_mode",
        "the same: whether something traces",
        "2.13-2.15",
    ),
    PrivateName(
        "torch._dynamo.decorators._apply_func_to_inner_tensors_of_same_dim",
        "limits of lengths that are cut, which torch could not show, are refused",
        "2.13-2.14",
    ),
    PrivateName(
        "torch._dynamo.trace_rules.add",
        "compilers stay out of dispatch and of what runs between graphs",
        "2.13-2.15",
    ),
    PrivateName(
        "torch._functorch.partitioners.has_recomputable_ops",
        "compiled checkpoints run no collective, and draw no key, again",
        "2.13-2.15",
        for_compilers=True,
    ),
    PrivateName(
        "torch._dispatch.python.enable_python_dispatcher",
        "operators are recorded in the parts that compilers take them apart into",
        "2.11-2.15",
    ),
    PrivateName(
        "torch._dynamo.maybe_mark_dynamic",
        "extents of a user's choice are open sizes where a tensor's dims are",
        "2.13-2.15",
    ),
    PrivateName(
        "torch._library.opaque_object -> MemberType, register_custom_class or register_opaque_type",
        "compiled programs take specs for constants",
        "2.13-2.14",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "a program that reads values, where there are none",
        "2.11-2.15",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "output metadata of operators without a C++ meta kernel",
        "2.11-2.15",
    ),
    PrivateName(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "whether an operator is made of others; in `inference_mode` it arrives whole",
        "2.11-2.14",
    ),
    PrivateName(
        "torch.ops.aten.matmul.default -> _op_dk",
        "run it as those",
        "2.11-2.14",
    ),
    PrivateName(
        "torch.distributed.checkpoint.state_dict._gather_state_dict",
        "whole tensors for the getters' `full_state_dict=True`",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.distributed.checkpoint.state_dict._distribute_state_dict",
        "shards for the setters'",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.distributed.checkpoint.state_dict._broadcast_state_dict",
        "the same with `broadcast_from_rank0=True`",
        "2.13-2.14",
    ),
    PrivateName(
        "torch.optim._adafactor.adafactor",
        "Adafactor's step, matrix by matrix on one rank",
        "2.11-2.14",
    ),
    PrivateName(
        "torch.optim._muon._zeropower_via_newtonschulz",
        "Muon's iteration, on one rank",
        "2.11-2.14",
    ),
    PrivateName(
        "torch.optim.LBFGS._gather_flat_grad",
        "how LBFGS reads gradients: as one `HDTensor`",
        "2.11-2.14",
    ),
    PrivateName("torch.optim.LBFGS._add_grad", "how LBFGS moves parameters along it", "2.11-2.14"),
    PrivateName(
        f"{_TENSOR}._dtensor_spec.DTensorSpec",
        "what DTensor's propagator takes and gives",
        "2.11-2.15",
    ),
    PrivateName(
        f"{_TENSOR}._dtensor_spec.TensorMeta", "shape, stride and dtype in it", "2.11-2.15"
    ),
    PrivateName(
        f"{_TENSOR}._op_schema.OpSchema", "an operator call for the propagator", "2.11-2.15"
    ),
    PrivateName(
        f"{_TENSOR}._sharding_prop.ShardingPropagator -> _propagate_tensor_meta_non_cached",
        "DTensor's rules for both tiers; ours overrides where metadata come from",
        "2.11-2.15",
    ),
    PrivateName(
        f"{_TENSOR}.DTensor._op_dispatcher -> sharding_propagator",
        "the instance that all rules are registered with",
        "2.11-2.15",
    ),
    PrivateName(
        f"{_TENSOR}._utils.ExplicitRedistributionContext -> _local (holds _active)",
        "honoured for implicit conversions",
        "2.11-2.15",
    ),
    PrivateName(
        "torch.distributed.device_mesh.DeviceMesh (takes _init_backend, _rank)",
        "meshes without processes, for deduction",
        "2.13-2.15",
    ),
    PrivateName(
        f"{_TENSOR}.placement_types._StridedShard",
        "of which a rank owns several boxes; also a top cut behind another dim",
        "2.11-2.15",
    ),
    PrivateName(
        f"{_TENSOR}.placement_types._MaskPartial",
        "recognised, and answered by an ordinary `Partial` instead",
        "2.11-2.15",
    ),
)


def require_names(rows: Iterable[PrivateName]) -> None:
    """Look names up in the installed torch.

    Raises:
        TorchVersionError: If some are missing; the message has them all.
    """
    lost = [(name, row.why) for row in rows for name in row.missing()]
    if lost:
        tested = " and ".join(TESTED_VERSIONS)
        raise TorchVersionError(
            f"torch {torch.__version__} lacks private names that this hdtensor uses: "
            f"{'; '.join(f'{name} ({why})' for name, why in lost)}. It is tested with torch {tested}: install one of these, "
            f"such as by `pip install torch=={TESTED_VERSIONS[-1]}`, or an hdtensor that is made for torch {torch.__version__}."
        )


def require_names_for_compilers() -> None:
    """Look up what only compiled programs use.

    Raises:
        TorchVersionError: If some are missing.
    """
    require_names(row for row in PRIVATE_NAMES if row.for_compilers)


require_names(row for row in PRIVATE_NAMES if not row.for_compilers)
