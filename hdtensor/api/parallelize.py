"""``parallelize``: give an unmodified model a plan."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial
from torch.utils.hooks import RemovableHandle

from hdtensor._rank import is_played
from hdtensor._torch_compat import new_wrapper
from hdtensor.api import local_modules as local, points, regions, router_logits
from hdtensor.api.agreement import attempt, communicates, exchange, require_alike
from hdtensor.api.distribute import distribute_tensor
from hdtensor.api.forward import accept_plain, make_generate_collective
from hdtensor.api.gradients import GradientSync, gradient_plan, paused
from hdtensor.api.local import prepare_groups, shard_of
from hdtensor.collectives import groups
from hdtensor.errors import DisagreementError, PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements.spec import HDSpec
from hdtensor.plan import AnnotationPlan, ExpandedPlan, ModelDescription, Pattern
from hdtensor.tensor import HDTensor


@dataclass(slots=True)
class ParallelState:
    """What ``parallelize`` knows of a model.

    Attributes:
        plan: The expanded plan.
        sync: Brings gradients home.
        patterns: The user's rules for parameter names.
        use_regions: Whether local modules may run on plain tensors.
        regions: Modules that run as a whole, see ``api.regions``.
        hooks: The plan's redistribute points.
        is_batch_checked: Whether a batch was compared over all ranks.
        depth: How many calls of the model's forward are running.
        generating: How many calls of the model's generate are running.
        wants_router_logits: Whether the running forward is to return routers' logits.
    """

    plan: ExpandedPlan
    sync: GradientSync
    patterns: tuple[Pattern | tuple[str, str], ...] = ()
    use_regions: bool = True
    regions: list[regions.Region] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    is_batch_checked: bool = False
    depth: int = 0
    generating: int = 0
    wants_router_logits: bool = False


_states: weakref.WeakKeyDictionary[nn.Module, ParallelState] = weakref.WeakKeyDictionary()


def parallelize(
    model: nn.Module,
    plan: AnnotationPlan | ExpandedPlan,
    *,
    patterns: Sequence[Pattern | tuple[str, str]] = (),
    device: torch.device | str | None = None,
    src_data_rank: int | None = None,
    use_regions: bool = True,
    local_modules: Sequence[str] = (),
) -> nn.Module:
    """Spread a model over ranks as a plan says, in place; every rank of the world calls it.

    Parameters become ``HDTensor``s. The hidden states are redistributed at the plan's points. Plain tensors (masks,
    positions) are accepted inside the model's forward. After each backward every gradient is in its parameter's spec.

    Args:
        model: Any module whose parameter names the patterns know. On the ``meta`` device it is materialised shard by
            shard and initialised there (``init_weights()``, or each module's ``reset_parameters()``), with the same
            values under every plan; no rank ever holds it whole.
        plan: A strategy, or an expanded plan for exactly this model.
        patterns: Rules for parameter names before the built-in ones, ``(glob, role)``.
        device: Where shards of a ``meta`` model are made; default: the current accelerator of the default process group,
            else the CPU.
        src_data_rank: Rank whose weights count. None: every rank has built the same model (one seed), which is checked
            with checksums.
        use_regions: Run local modules on plain tensors where a recorded pass showed that it is the same.
        local_modules: Globs of names, or of classes, of modules whose every result row follows from the same rows of their
            inputs, and whose shapes inside may depend on data: they run on local tensors. Stacked experts are known.

    Returns:
        The model.

    Raises:
        PlanError: If the plan does not fit the model or the world, or needs what does not exist yet.
        DisagreementError: On every rank, if ranks hold unlike plans or weights.
    """
    if model in _states:
        raise PlanError("the model is parallelized already; build a new one for another plan.")
    if not isinstance(plan, AnnotationPlan):
        raise PlanError(
            f"parallelize takes an AnnotationPlan, got a {type(plan).__name__}. Read one with "
            f"hdtensor.AnnotationPlan.load(path) or from_dict(obj)."
        )
    description = ModelDescription.from_module(model)
    expanded = plan.expand(description, patterns)
    _check(expanded, model, src_data_rank)
    prepare_plan(model, expanded)
    was_meta = _distribute_parameters(model, expanded, _device(device), src_data_rank)
    sync = GradientSync(p for p in model.parameters())
    state = ParallelState(expanded, sync, tuple(patterns), use_regions)
    _states[model] = state
    if was_meta:
        _initialize(model, _device(device))
    accept_plain(model, state)
    make_generate_collective(model, state)
    local.install(model, local_modules)
    router_logits.install(model, lambda: state.wants_router_logits)
    _install(model, state)
    return model


def prepare_plan(model: nn.Module, plan: ExpandedPlan) -> None:
    """Create all process groups that a model needs under a plan; every rank of the world calls it.

    Raises:
        PlanError: If the plan does not fit the model or the world, or needs what does not exist yet.
    """
    check_supported(plan)
    if not dist.is_initialized() or is_played():
        return
    plan.check(world_size=dist.get_world_size())
    prepare_groups(plan.inputs, plan.labels, *plan.tensors.values())
    rank_sets: set[tuple[int, ...]] = set()
    for name, parameter in model.named_parameters():
        bound = BoundSpec.bind(plan.tensors[name], parameter.shape, None, parameter.dtype)
        pending = bound.with_spec(bound.spec.replace(top=Partial()))
        rank_sets |= set(gradient_plan(pending, bound).rank_sets())
    groups.ensure_groups(sorted(rank_sets), plan.inputs.subgroups)


def replace_plan(model: nn.Module, plan: ExpandedPlan) -> None:
    """Have a parallelized model follow another plan, whose specs its parameters have already.

    ``prepare_plan`` must have been called. ``elastic.switch`` moves the parameters in between.
    """
    state = state_of(model)
    for hook in state.hooks:
        hook.remove()
    for region in state.regions:
        region.remove()
    state.plan = plan
    state.is_batch_checked = False
    _install(model, state)


def _install(model: nn.Module, state: ParallelState) -> None:
    """Place what depends on the plan: redistribute points, and regions inside of them."""
    state.hooks = points.place(model, state.plan)
    if state.use_regions:
        description = ModelDescription.from_module(model)
        state.regions = regions.install(model, description, state.sync)


def state_of(model: nn.Module) -> ParallelState:
    """Return what ``parallelize`` knows of a model.

    Raises:
        PlanError: If the model was not parallelized.
    """
    state = _states.get(model)
    if state is None:
        raise PlanError(
            f"this {type(model).__name__} was not parallelized; call hdtensor.parallelize."
        )
    return state


def distribute_batch(
    model: nn.Module, batch: Any, *, keep_plain: Collection[str] = ("attention_mask",)
) -> Any:
    """Cut a batch as the model's plan says: dim 0 in the pipelines' shares.

    Args:
        model: A parallelized model.
        batch: A tensor, or a mapping, list or tuple of them; the same whole batch on every rank. Other
            values pass.
        keep_plain: Names in mappings that stay plain tensors. Hugging Face models read attention masks on
            the host to see whether they mask at all; the model's forward takes their part by itself.

    Returns:
        The same structure of ``HDTensor``s.

    Raises:
        DisagreementError: On every rank, if the ranks' first batches differ: each rank must pass the whole batch, not a
            part of its own as a distributed sampler gives. Later batches are not compared.
    """
    state = state_of(model)
    spec = state.plan.inputs
    if not state.is_batch_checked and communicates():
        _check_same_batch(batch)
        state.is_batch_checked = True

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim:
            return distribute_tensor(value, spec, src_data_rank=None)
        if isinstance(value, Mapping):
            return {k: v if k in keep_plain else cut(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(cut(v) for v in value)
        return value

    return cut(batch)


def _check_same_batch(batch: Any) -> None:
    """Compare a batch's shapes and checksums over all ranks."""

    def facts(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            total = value.double().sum().item() if not value.is_complex() else 0.0
            return (tuple(value.shape), str(value.dtype), repr(total))
        if isinstance(value, Mapping):
            return tuple((str(k), facts(v)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return tuple(facts(v) for v in value)
        return type(value).__name__

    mine, problem = attempt(lambda: facts(batch))
    require_alike(
        "distribute_batch",
        exchange("distribute_batch", mine, problem),
        "Every rank passes the same whole batch; distribute_batch takes each rank's part.",
    )


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without summing them over subgroups; the first backward outside does it once."""
    with paused(state_of(model).sync):
        yield


def sync_gradients(model: nn.Module) -> None:
    """Bring home gradients that ``no_sync`` left pending, where no further backward follows."""
    state_of(model).sync.flush()


# -- checks ------------------------------------------------------------------------------------------------------


def check_supported(plan: ExpandedPlan) -> None:
    """Raise where a plan needs what is not executed.

    Raises:
        PlanError: For several stages in a pipeline, and for ZeRO.
    """
    stages = [p for p in plan.points if p.kind == "stage"]
    if stages:
        raise PlanError(
            f"pipelines: the plan has several stages in a pipeline (hidden states move to other ranks at "
            f"{stages[0].module!r}); one stage in each is what this version executes."
        )
    if plan.zero:
        raise PlanError(f"zero: ZeRO-{plan.zero} is not executed by this version; use zero 0.")


def _check(plan: ExpandedPlan, model: nn.Module, src_data_rank: int | None) -> None:
    check_supported(plan)
    if not dist.is_initialized() or is_played():
        return
    plan.check(world_size=dist.get_world_size())
    mine = (str(plan.to_dict()), _fingerprint(model, src_data_rank))
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    for what, values in (("plans", [s[0] for s in said]), ("weights", [s[1] for s in said])):
        if len(set(values)) > 1:
            odd = [r for r, v in enumerate(values) if v != values[0]]
            raise DisagreementError(
                f"parallelize: ranks {odd} have other {what} than rank 0. Pass the same plan and build the same "
                f"model on every rank (torch.manual_seed with one seed), or give src_data_rank=0."
            )


def _fingerprint(model: nn.Module, src_data_rank: int | None) -> Any:
    """Return names, shapes and a checksum of the weights."""
    with torch.no_grad():
        return tuple(
            (
                name,
                tuple(p.shape),
                str(p.dtype),
                0.0 if p.is_meta or src_data_rank is not None else float(p.double().sum()),
            )
            for name, p in model.named_parameters()
        )


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# -- parameters ----------------------------------------------------------------------------------------------------


def _distribute_parameters(
    model: nn.Module, plan: ExpandedPlan, device: torch.device, src_data_rank: int | None
) -> bool:
    """Replace every parameter by its shard; return whether the model was on the meta device."""
    replaced: dict[int, nn.Parameter] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    was_meta = False
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            new = replaced.get(id(parameter))
            if new is None:
                spec = plan.tensors[names[id(parameter)]]
                new = _distribute_parameter(parameter, spec, device, src_data_rank)
                replaced[id(parameter)] = new
                was_meta |= parameter.is_meta
            module._parameters[key] = new
    return was_meta


def _distribute_parameter(
    parameter: nn.Parameter, spec: HDSpec, device: torch.device, src_data_rank: int | None
) -> nn.Parameter:
    bound = BoundSpec.bind(spec, parameter.shape, None, parameter.dtype)
    if parameter.is_meta:
        local = torch.empty(bound.local_shape(), dtype=parameter.dtype, device=device)
        tensor = new_wrapper(HDTensor, local, bound, False)
    elif src_data_rank is None:
        tensor = new_wrapper(HDTensor, shard_of(parameter, bound), bound, False)
    else:
        tensor = distribute_tensor(parameter.detach(), spec, src_data_rank=src_data_rank)
    return nn.Parameter(tensor, parameter.requires_grad)


def _initialize(model: nn.Module, device: torch.device) -> None:
    """Fill parameters and buffers of a model that was built on the meta device."""
    for module in model.modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
    init_weights = getattr(model, "init_weights", None)
    if init_weights is not None:
        init_weights()
        return
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        elif own:
            raise PlanError(
                f"the model is on the meta device and {type(module).__name__} has parameters but no "
                f"reset_parameters(); give it one, or the model an init_weights()."
            )
