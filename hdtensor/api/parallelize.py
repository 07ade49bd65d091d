"""``parallelize``: give an unmodified model a plan."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor._rank import is_played
from hdtensor.api import local_modules as local, points, router_logits
from hdtensor.api.agreement import exchange
from hdtensor.api.changes import Upkeep, make_copyable, own_forward
from hdtensor.api.context_parallel import share_sequences
from hdtensor.api.forward import (
    accept_plain,
    make_generate_collective,
    own_generate,
    without_compiler,
)
from hdtensor.api.gradients import GradientSync, gradient_plan, paused, pending_spec
from hdtensor.api.local import prepare_groups
from hdtensor.api.parameters import device_of, distribute_parameters, initialize
from hdtensor.api.region_install import install
from hdtensor.api.regions import Region
from hdtensor.api.sequences import order_in
from hdtensor.api.steps import watch_steps
from hdtensor.collectives import groups
from hdtensor.errors import DisagreementError, PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements.spec import HDSpec
from hdtensor.plan import AnnotationPlan, ExpandedPlan, ModelDescription, Pattern


@dataclass(slots=True)
class ParallelState:
    """What ``parallelize`` knows of a model.

    Attributes:
        plan: The expanded plan.
        sync: Brings gradients home.
        patterns: The user's rules for parameter names.
        use_regions: Whether local modules may run on plain tensors.
        local_modules: The user's globs of modules that run on local tensors.
        local: Modules that do.
        regions: Modules that run as a whole, see ``api.regions``.
        hooks: The plan's redistribute points.
        restores: Give modules whose attention shares sequences their own forwards back.
        is_batch_checked: Whether a batch was compared over all ranks.
        depth: How many calls of the model's forward are running.
        generating: How many calls of the model's generate are running.
        wants_router_logits: Whether the running forward is to return routers' logits.
        runs_lane: Whether a pipeline's runner calls the model.
        router_hooks: They gather these logits.
        upkeep: Notices that the model's parameters are others.
        earlier: Points and regions of plans that the model followed, by the plan's text.
        undo: Take from the model what runners of its pipelines have put on it, the newest last.
    """

    plan: ExpandedPlan
    sync: GradientSync
    patterns: tuple[Pattern | tuple[str, str], ...] = ()
    use_regions: bool = True
    local_modules: tuple[str, ...] = ()
    local: list[local.LocalModule] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    hooks: list[points.PlacedPoint] = field(default_factory=list)
    restores: list[Callable[[], None]] = field(default_factory=list)
    is_batch_checked: bool = False
    depth: int = 0
    generating: int = 0
    wants_router_logits: bool = False
    runs_lane: bool = False
    router_hooks: list[RemovableHandle] = field(default_factory=list)
    upkeep: Upkeep = field(init=False)
    earlier: dict[str, tuple[list[points.PlacedPoint], list[Region]]] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_staged(self) -> bool:
        """Whether a pipeline's runner calls the model: hidden states go on to other ranks, or optimizer state is cut."""
        return self.plan.zero > 0 or any(point.kind == "stage" for point in self.plan.points)

    @contextlib.contextmanager
    def running_lane(self) -> Iterator[None]:
        """Allow calls of the model on its lanes' stages."""
        self.runs_lane = True
        try:
            yield
        finally:
            self.runs_lane = False


#: Plans of a model whose points and regions are kept: a program that was compiled under one is found again.
_MAX_EARLIER = 8

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
        raise PlanError(
            "the model is parallelized already; hdtensor.switch(model, plan, optimizer) brings it to another plan."
        )
    if not isinstance(plan, AnnotationPlan):
        raise PlanError(
            f"parallelize takes an AnnotationPlan, got a {type(plan).__name__}. Read one with "
            f"hdtensor.AnnotationPlan.load(path) or from_dict(obj)."
        )
    if dist.is_initialized() and not is_played():
        plan.check(world_size=dist.get_world_size())
    description = ModelDescription.from_module(model)
    expanded = plan.expand(description, patterns)
    _check(expanded, model, src_data_rank)
    prepare_plan(model, expanded)
    was_meta = distribute_parameters(model, expanded, device_of(device), src_data_rank)
    sync = GradientSync(p for p in model.parameters())
    state = ParallelState(expanded, sync, tuple(patterns), use_regions, tuple(local_modules))
    _states[model] = state
    if was_meta:
        initialize(model, device_of(device))
    _put_on(model, state)
    return model


def _put_on(model: nn.Module, state: ParallelState) -> None:
    state.upkeep = Upkeep(model, state.sync)
    watch_steps(_syncs)
    accept_plain(model, state, lambda: _reinstall(model, state))
    make_generate_collective(model, state)
    state.local = local.install(model, state.local_modules)
    state.router_hooks = router_logits.install(model, lambda: state.wants_router_logits)
    _install(model, state)
    make_copyable(model, _take_off, _put_on_like)


def _syncs() -> list[tuple[GradientSync, HDSpec]]:
    return [(state.sync, state.plan.inputs) for state in _states.values()]


def _take_off(model: nn.Module) -> None:
    """Take from a model what ``parallelize`` put on it, its parameters excepted."""
    state = state_of(model)
    if state.depth:
        raise PlanError("the model is running; copy it between two steps.")
    own_forward(model)
    own_generate(model)
    _remove(state)
    for hook in state.router_hooks:
        hook.remove()
    for module in state.local:
        module.remove()


def _put_on_like(model: nn.Module, like: nn.Module) -> None:
    state = state_of(like)
    if model is not like:
        sync = GradientSync(model.parameters())
        state = ParallelState(
            state.plan, sync, state.patterns, state.use_regions, state.local_modules
        )
        _states[model] = state
    _put_on(model, state)


def _remove(state: ParallelState) -> None:
    for hook in state.hooks:
        hook.remove()
    for region in state.regions:
        region.remove()
    for restore in state.restores:
        restore()


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
        pending = bound.with_spec(pending_spec(bound.spec, plan.inputs))
        rank_sets |= set(gradient_plan(pending, bound).rank_sets())
    groups.ensure_groups(sorted(rank_sets), plan.inputs.subgroups)


def replace_plan(model: nn.Module, plan: ExpandedPlan) -> None:
    """Have a parallelized model follow another plan, whose specs its parameters have already.

    ``prepare_plan`` must have been called. ``elastic.switch`` moves the parameters in between.
    """
    state = state_of(model)
    while state.undo:
        state.undo.pop()()
    _remove(state)
    state.plan = plan
    state.is_batch_checked = False
    _install(model, state)


def _install(model: nn.Module, state: ParallelState) -> None:
    """Place what depends on the plan: redistribute points, and regions inside of them.

    With several stages in a pipeline its runner does, lane by lane.
    """
    if state.is_staged:
        state.hooks, state.restores, state.regions = [], [], []
        return
    text = state.plan.to_json()
    kept = state.earlier.pop(text, None)
    if kept is None:
        state.hooks = points.place(model, state.plan)
    else:
        state.hooks = kept[0]
        for hook in state.hooks:
            hook.put_back()
    sharing = state.plan.shared_sequences
    state.restores = []
    if sharing is not None:
        order = order_in(state.plan)
        modules = [model.get_submodule(name) for name in sharing.modules]
        state.restores = [share_sequences(module, sharing.method, order) for module in modules]
    if kept is not None:
        state.regions = kept[1]
        for region in state.regions:
            region.put_back()
    elif state.use_regions:
        description = ModelDescription.from_module(model)
        state.regions = install(model, description, state.sync)
    while len(state.earlier) >= _MAX_EARLIER:
        del state.earlier[next(iter(state.earlier))]
    state.earlier[text] = (state.hooks, state.regions)


def is_parallelized(model: nn.Module) -> bool:
    """Return whether ``parallelize`` was called with the model."""
    return without_compiler(model) in _states


def state_of(model: nn.Module) -> ParallelState:
    """Return what ``parallelize`` knows of a model, or of the one that ``torch.compile`` wrapped.

    Raises:
        PlanError: If the model was not parallelized.
    """
    state = _states.get(without_compiler(model))
    if state is None:
        raise PlanError(
            f"this {type(model).__name__} was not parallelized; call hdtensor.parallelize."
        )
    return state


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
        PlanError: For ZeRO of gradients and parameters.
    """
    if plan.zero > 1:
        raise PlanError(
            f"zero: ZeRO-{plan.zero} is not executed: gradients and parameters are held whole, optimizer state alone is "
            f"cut. Use zero 1 or 0."
        )


def check_switchable(now: ExpandedPlan, then: ExpandedPlan, *, has_targets: bool) -> None:
    """Raise unless ``elastic.switch`` can go from one plan to another.

    Args:
        now: The present plan.
        then: The next one.
        has_targets: Whether optimizers or masters go along.

    Raises:
        PlanError: As ``check_supported``, and if optimizers would have to update other tensors.
    """
    for plan in (now, then):
        check_supported(plan)
    if has_targets and now.zero != then.zero:
        raise PlanError(
            f"zero: optimizers of zero {now.zero} and of zero {then.zero} update other tensors (the parameters, or masters "
            f"of them), so that a switch cannot take one from the one to the other. Give both plans the same zero, or save a "
            f"checkpoint and load it under the other plan."
        )


def _check(plan: ExpandedPlan, model: nn.Module, src_data_rank: int | None) -> None:
    check_supported(plan)
    if not dist.is_initialized() or is_played():
        return
    mine = (str(plan.to_dict()), _fingerprint(model, src_data_rank))
    said = exchange("parallelize", mine, None)
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


def _reinstall(model: nn.Module, state: ParallelState) -> None:
    state.earlier.clear()
    _remove(state)
    _install(model, state)
