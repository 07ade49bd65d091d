"""The table of private names of torch that ``_torch_compat.py`` uses; ``scripts/torch_compat_page.py`` shows it."""

from __future__ import annotations

from typing import NamedTuple


#: The releases that the whole test suite passes on.
TESTED_VERSIONS = ("2.13.0", "2.14.1")


class PrivateName(NamedTuple):
    """A private name of torch that hdtensor relies on.

    Attributes:
        name: Dotted, as Python finds it; after ``->`` attributes of what it gives.
        why: What for.
        versions: The releases over which it kept its place and meaning.
    """

    name: str
    why: str
    versions: str


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
        "torch._C._current_autograd_node -> _sequence_nr",
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
        "torch.distributed.ProcessGroup._get_backend -> options._timeout",
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
        "torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd -> process_runtime_tangent",
        "compiled backwards, where some of several outputs get no gradient",
        "2.13-2.15",
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
        "torch._library.opaque_object",
        "compiled programs take specs for constants",
        "2.13-2.15",
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
        "torch._ops.OpOverload -> _op_dk",
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
        f"{_TENSOR}._utils.ExplicitRedistributionContext -> _local, _active",
        "honoured for implicit conversions",
        "2.11-2.15",
    ),
    PrivateName(
        "torch.distributed.device_mesh.DeviceMesh -> _init_backend, _rank",
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
