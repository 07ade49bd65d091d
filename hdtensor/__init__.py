"""hdtensor: one ordinary PyTorch program on unlike devices.

A tensor is cut twice: across *subgroups* of ranks (top tier) and inside each subgroup with ordinary DTensor placements
(bottom tier). Operators stay local, ranks skip what they do not hold, and ``redistribute`` moves data.
"""

# First, as the other imports take seconds in which somebody may press Ctrl-C.
from hdtensor import _interrupts  # noqa: F401


# isort: split
# Before any use of torch: refuses one that lacks what is used of it.
from hdtensor import _torch_names  # noqa: F401


# isort: split
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hdtensor import debug, elastic, ops, pipeline
from hdtensor._rank import as_rank, current_rank
from hdtensor._torch_compilers import never_compile as _never_compile
from hdtensor.api import optimizers as _optimizers  # noqa: F401 - extends torch's
from hdtensor.api.batches import distribute_batch, restore_sequence
from hdtensor.api.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from hdtensor.api.collect import full_tensor, item
from hdtensor.api.context_parallel import context_parallel
from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.factories import empty, full, ones, rand, randn, zeros
from hdtensor.api.implicit import implicit_replication
from hdtensor.api.local import from_dtensor, from_local, prepare_groups
from hdtensor.api.local_map import local_map
from hdtensor.api.modules import distribute_module
from hdtensor.api.parallelize import no_sync, parallelize, sync_gradients
from hdtensor.checkpoint import full_state as _full_state  # noqa: F401 - extends torch's
from hdtensor.checkpoint.gather import full_state_dict
from hdtensor.checkpoint.hugging_face import load_hf, save_hf
from hdtensor.checkpoint.save_load import load_checkpoint, save_checkpoint
from hdtensor.elastic import SwitchOptions, plan_switch, switch, switch_tensors
from hdtensor.errors import (
    CheckpointError,
    ConfigError,
    DeductionError,
    DisagreementError,
    GroupError,
    HDTensorError,
    NonLocalError,
    PlanError,
    RedistributeError,
    ScheduleError,
    SpecError,
    SwitchError,
    TopologyError,
)
from hdtensor.placements import Box, HDSpec, Subgroup
from hdtensor.plan import AnnotationPlan, ModelDescription
from hdtensor.redistribute import RedistributePlan, explain, resolve, simulate
from hdtensor.redistribute.topology import Topology, use_topology
from hdtensor.tensor import HDTensor


# What compiled programs call of these is either kept whole in their graphs or runs between them.
_never_compile(
    "hdtensor._rank",
    "hdtensor.api.agreement",
    "hdtensor.api.clip",
    "hdtensor.api.collect",
    "hdtensor.api.optimizers",
    "hdtensor.checkpoint",
    "hdtensor.collectives",
    "hdtensor.elastic",
    "hdtensor.ops",
    "hdtensor.placements.box",
    "hdtensor.placements.checks",
    "hdtensor.placements.layout",
    "hdtensor.placements.spec",
    "hdtensor.placements.subgroup",
    "hdtensor.placements.text",
    "hdtensor.plan",
    "hdtensor.redistribute",
)

__all__ = [
    "AnnotationPlan",
    "Box",
    "CheckpointError",
    "ConfigError",
    "DeductionError",
    "DisagreementError",
    "GroupError",
    "HDSpec",
    "HDTensor",
    "HDTensorError",
    "ModelDescription",
    "NonLocalError",
    "Partial",
    "Placement",
    "PlanError",
    "RedistributeError",
    "RedistributePlan",
    "Replicate",
    "ScheduleError",
    "Shard",
    "SpecError",
    "Subgroup",
    "SwitchError",
    "SwitchOptions",
    "Topology",
    "TopologyError",
    "as_rank",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "context_parallel",
    "current_rank",
    "debug",
    "distribute_batch",
    "distribute_module",
    "distribute_tensor",
    "elastic",
    "empty",
    "explain",
    "from_dtensor",
    "from_local",
    "full",
    "full_state_dict",
    "full_tensor",
    "get_total_norm",
    "implicit_replication",
    "item",
    "load_checkpoint",
    "load_hf",
    "local_map",
    "no_sync",
    "ones",
    "ops",
    "parallelize",
    "pipeline",
    "plan_switch",
    "prepare_groups",
    "rand",
    "randn",
    "resolve",
    "restore_sequence",
    "save_checkpoint",
    "save_hf",
    "simulate",
    "switch",
    "switch_tensors",
    "sync_gradients",
    "use_topology",
    "zeros",
]
