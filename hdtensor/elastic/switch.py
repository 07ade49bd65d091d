"""``switch``: a model and its optimizer from one plan to another, in place (Sec. 7, Fig. 14).

All tensors travel in one fused batch, cut into rounds that fit a budget of memory:

==================  ==================================================  =================================
mode                a failure in the middle                             extra memory
==================  ==================================================  =================================
``atomic=True``     leaves every tensor as it was                       all new shards and the budget;
                                                                        with ``stage_on_host`` the budget,
                                                                        and all new shards on the host
``atomic=False``    leaves each tensor whole in the old or the new      the budget
                    plan; the error says which
==================  ==================================================  =================================
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from hdtensor._rank import current_rank
from hdtensor._torch_compat import in_backward
from hdtensor.api.agreement import attempt, communicates, exchange, require_alike
from hdtensor.api.local import prepare_groups
from hdtensor.api.parallelize import (
    ParallelState,
    check_supported,
    prepare_plan,
    replace_plan,
    state_of,
)
from hdtensor.collectives import groups, observe
from hdtensor.elastic.plan_switch import Item, Rules, SwitchPlan, plan_items
from hdtensor.elastic.rounds import Round, is_moved, make_rounds
from hdtensor.elastic.state import Slot, parameter_slots, state_slots
from hdtensor.elastic.transport import Cargo, Carrier
from hdtensor.errors import PlanError, SwitchError
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements import HDSpec
from hdtensor.placements.text import as_spec
from hdtensor.plan import AnnotationPlan, ExpandedPlan, ModelDescription
from hdtensor.redistribute.steps import Layout
from hdtensor.redistribute.topology import UNIFORM, Topology
from hdtensor.tensor import HDTensor


#: Default memory for messages.
BUDGET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOptions:
    """How a switch is carried out; the same on every rank.

    Attributes:
        atomic: Whether a failure leaves everything as it was.
        budget_bytes: Memory for messages; without ``atomic`` for new shards too.
        stage_on_host: With ``atomic``: keep new shards in host memory until the end.
        timeout: How long to wait for a message; None for the process group's timeout.
        topology: Links between the ranks, for the choice of senders.
        exclude_ranks: Dead ranks: what they hold is taken from others.
        rules: How senders are chosen; "relay" lets idle neighbours forward.
    """

    atomic: bool = True
    budget_bytes: int = BUDGET_BYTES
    stage_on_host: bool = False
    timeout: timedelta | None = None
    topology: Topology = UNIFORM
    exclude_ranks: Collection[int] = ()
    rules: Rules = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude_ranks", tuple(sorted(set(self.exclude_ranks))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """What a switch did.

    Attributes:
        plan: Who sent what to whom.
        moved: Names of the tensors whose shards changed on some rank.
        num_rounds: Number of rounds.
        seconds: Time on this rank.
    """

    plan: SwitchPlan
    moved: tuple[str, ...]
    num_rounds: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{len(self.moved)} tensors, {self.plan.num_bytes / 2**20:.1f} MiB in {self.num_rounds} "
            f"round{'' if self.num_rounds == 1 else 's'}, {self.seconds:.3f} s"
        )


def switch(
    model: nn.Module,
    plan: AnnotationPlan | ExpandedPlan,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    options: SwitchOptions | None = None,
    extra: Mapping[str, tuple[HDTensor, HDSpec | str]] | None = None,
) -> SwitchReport:
    """Bring a parallelized model, its gradients and its optimizers to another plan, in place.

    Parameters stay the same objects, so optimizers' param groups, schedulers and hooks keep working.
    Every rank of the world calls it between two steps; ranks may be in either plan, in both or in
    none. A rank that joins passes a fresh optimizer. Gradients in accumulation are brought home first.

    Args:
        model: What ``parallelize`` returned.
        plan: The new plan, for this model.
        optimizers: The optimizers of its parameters.
        options: Mode, budget, timeout, topology, dead ranks; default ``SwitchOptions()``.
        extra: Further tensors, such as averaged weights: name -> (tensor, new spec).

    Returns:
        What moved, and how long it took.

    Raises:
        PlanError: If the plan does not fit the model or the world, or the budget is too small.
        SwitchError: If it is called inside a forward or a backward, or a rank failed on the way; the
            message says what holds now.
        DisagreementError: On every rank, if ranks pass unlike plans or have unlike states.
    """
    options = SwitchOptions() if options is None else options
    state = state_of(model)
    expanded = _agreed_model_plan(model, plan, state)
    many = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    prepare_plan(model, expanded)
    state.sync.flush()
    slots = parameter_slots(dict(model.named_parameters()), expanded.tensors)
    slots += state_slots(slots, many)
    for name, (tensor, spec) in (extra or {}).items():
        slots += parameter_slots({name: tensor}, {name: as_spec(spec)})
    return _switch(slots, options, lambda: replace_plan(model, expanded))


def switch_tensors(
    tensors: Mapping[str, HDTensor],
    specs: Mapping[str, HDSpec | str],
    *,
    options: SwitchOptions | None = None,
) -> SwitchReport:
    """Bring tensors to other specs in place, all in one fused batch. Every rank of the world calls it.

    Args:
        tensors: Name -> tensor, in the same order on every rank.
        specs: Name -> new spec.
        options: As for ``switch``.

    Raises:
        SwitchError: As ``switch``.
        PlanError: If a tensor has a pending reduction, or the budget is too small.
        DisagreementError: As ``switch``.
    """
    slots = parameter_slots(tensors, {name: as_spec(spec) for name, spec in specs.items()})
    if communicates():
        prepare_groups(*(slot.dst.spec for slot in slots))
    return _switch(slots, SwitchOptions() if options is None else options, lambda: None)


def _switch(
    slots: Sequence[Slot], options: SwitchOptions, finish: Callable[[], None]
) -> SwitchReport:
    start = time.perf_counter()
    plan, rounds = _agreed_plan(slots, options)
    cargo = [
        Cargo(item, tensor._local_tensor.detach().resolve_conj().resolve_neg())
        for item, (_, tensor, _) in zip(plan.items, slots, strict=True)
    ]
    carrier = Carrier(cargo, current_rank(), options.topology, options.timeout)
    with observe.because("switch"):
        if options.atomic:
            _all_or_nothing(carrier, rounds, options)
        else:
            _round_by_round(carrier, rounds, slots, options)
    for slot, each in zip(slots, cargo, strict=True):
        if slot.tensor._spec is not slot.dst:
            _commit(slot, each)
    finish()
    return SwitchReport(
        plan=plan,
        moved=tuple(item.name for item in plan.items if is_moved(item)),
        num_rounds=len(rounds),
        seconds=time.perf_counter() - start,
    )


def _agreed_model_plan(
    model: nn.Module, plan: AnnotationPlan | ExpandedPlan, state: ParallelState
) -> ExpandedPlan:
    """Expand and check the plan; raise on every rank unless all can go on, with the same plan."""

    def make() -> ExpandedPlan:
        _check_between_steps(state)
        if not isinstance(plan, AnnotationPlan):
            raise PlanError(f"switch takes an AnnotationPlan, got a {type(plan).__name__}.")
        expanded = plan.expand(ModelDescription.from_module(model), state.patterns)
        check_supported(expanded)
        if communicates():
            expanded.check(world_size=dist.get_world_size())
        return expanded

    expanded, problem = attempt(make)
    if communicates():
        text = None if expanded is None else str(expanded.to_dict())
        digest = None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]
        said = exchange("switch", digest, problem)
        require_alike("switch", said, "Pass the same plan on every rank.")
    elif problem is not None:
        raise problem
    assert expanded is not None, "without a problem there is a plan"
    return expanded


def _agreed_plan(
    slots: Sequence[Slot], options: SwitchOptions
) -> tuple[SwitchPlan, tuple[Round, ...]]:
    """Plan the switch; raise on every rank unless all plan the same."""

    items = tuple(
        Item(name, _layout(tensor._spec), _layout(dst), tensor.dtype.itemsize)
        for name, tensor, dst in slots
    )
    made, problem = attempt(lambda: _plan_rounds(items, options))
    if communicates():
        require_alike(
            "switch",
            exchange("switch", (len(slots), _digest(items, options)), problem),
            "Pass the same plan, optimizers, options and extra tensors on every rank.",
        )
    elif problem is not None:
        raise problem
    assert made is not None, "without a problem there is a plan"
    return made


@functools.lru_cache(maxsize=16)
def _digest(items: tuple[Item, ...], options: SwitchOptions) -> str:
    facts = [
        (name, str(src.spec), src.top_sizes, str(dst.spec), dst.top_sizes, dst.shape, itemsize)
        for name, src, dst, itemsize in items
    ]
    return hashlib.sha256(repr((facts, options)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=16)
def _plan_rounds(
    items: tuple[Item, ...], options: SwitchOptions
) -> tuple[SwitchPlan, tuple[Round, ...]]:
    """Plan a switch; a training that alternates between two plans (Fig. 18) does it once for each way."""
    plan = plan_items(
        items, options.topology, exclude_ranks=options.exclude_ranks, rules=options.rules
    )
    with_new = not options.atomic or options.stage_on_host
    return plan, make_rounds(plan, options.budget_bytes, with_new=with_new)


def _all_or_nothing(carrier: Carrier, rounds: Sequence[Round], options: SwitchOptions) -> None:
    """Bring all tensors over beside the old ones."""
    try:
        for round_ in rounds:
            carrier.run(round_)
            if options.stage_on_host:
                carrier.stage(round_.closes)
        _wait_for_all(options.timeout)
    except Exception as error:
        raise SwitchError(
            f"the switch failed on rank {carrier.rank}: {error} Nothing was changed: every tensor is "
            f"whole and in the old plan. Start new process groups with the ranks that are left, and "
            f"switch with exclude_ranks."
        ) from error


def _round_by_round(
    carrier: Carrier, rounds: Sequence[Round], slots: Sequence[Slot], options: SwitchOptions
) -> None:
    """Bring tensors over round by round, freeing the old ones after each."""
    moved: list[str] = []
    for round_ in rounds:
        try:
            carrier.run(round_)
            _wait_for_all(options.timeout)
        except Exception as error:
            left = [slot.name for slot in slots if slot.name not in set(moved)]
            raise SwitchError(
                f"the switch failed on rank {carrier.rank}: {error} Each tensor is whole. In the new plan "
                f"are {len(moved)}: {', '.join(moved) or 'none'}. In the old plan are {len(left)}: "
                f"{', '.join(left)}.",
                moved=tuple(moved),
                left=tuple(left),
            ) from error
        for index in round_.closes:
            _commit(slots[index], carrier.cargo[index])
            moved.append(slots[index].name)


def _commit(slot: Slot, cargo: Cargo) -> None:
    """Put the new local tensor in the old one's place; a graph that saved the old one must not be used."""
    new = slot.tensor._local_tensor if cargo.new is None else cargo.new
    if new.device != cargo.old.device:
        device = cargo.old.device
        cargo.old = slot.tensor._local_tensor = new.new_empty(0)  # frees the old one first
        new = new.to(device)
    if new is not cargo.old:
        torch.autograd.graph.increment_version(slot.tensor._local_tensor)
        slot.tensor._local_tensor = new
    slot.tensor._spec = slot.dst
    torch.autograd.graph.increment_version(slot.tensor)
    cargo.old = cargo.new = slot.tensor._local_tensor


def _wait_for_all(timeout: timedelta | None) -> None:
    """Wait until every rank is here."""
    if not communicates():
        return
    work = dist.all_reduce(torch.zeros(1, device=groups.device_type()), async_op=True)
    assert work is not None, "this rank is in the default group"
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)


def _check_between_steps(state: ParallelState) -> None:
    """Raise inside a forward or backward (case 36): running operators would meet unlike layouts."""
    where = "backward" if in_backward() else "forward" if state.depth else None
    if where is not None:
        raise SwitchError(
            f"switch was called inside a {where} of the model. Call it between two steps, on every rank."
        )


def _layout(bound: BoundSpec) -> Layout:
    return Layout(bound.spec, tuple(bound.shape), bound.top_sizes)
