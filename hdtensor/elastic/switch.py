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

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hdtensor._rank import current_rank
from hdtensor._torch_compat import in_backward
from hdtensor.api import masters
from hdtensor.api.agreement import attempt, communicates, exchange, require_alike
from hdtensor.api.forward import without_compiler
from hdtensor.api.local import prepare_groups
from hdtensor.api.parallelize import (
    ParallelState,
    check_switchable,
    prepare_plan,
    replace_plan,
    state_of,
)
from hdtensor.api.steps import note_switched
from hdtensor.collectives import observe
from hdtensor.elastic.decision import Decisions, advance, next_number
from hdtensor.elastic.options import SwitchOptions
from hdtensor.elastic.plan_switch import Item, SwitchPlan, plan_items
from hdtensor.elastic.report import SwitchReport
from hdtensor.elastic.rounds import Round, is_moved, make_rounds
from hdtensor.elastic.state import (
    Slot,
    check_optimizers,
    extra_slots,
    parameter_slots,
    state_slots,
)
from hdtensor.elastic.transport import Cargo, Carrier
from hdtensor.errors import DisagreementError, PlanError, SwitchError
from hdtensor.ops.bound import BoundSpec
from hdtensor.placements import HDSpec
from hdtensor.placements.text import as_spec
from hdtensor.plan import AnnotationPlan, ExpandedPlan, ModelDescription, Pattern
from hdtensor.redistribute.steps import (
    Layout,
)
from hdtensor.tensor import HDTensor


def switch(
    model: nn.Module,
    plan: AnnotationPlan | ExpandedPlan,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    options: SwitchOptions | None = None,
    extra: Mapping[str, tuple[HDTensor, HDSpec | str]] | None = None,
    patterns: Sequence[Pattern | tuple[str, str]] | None = None,
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
        patterns: Rules for parameter names where the plan is a strategy; default those of ``parallelize``.

    Returns:
        What moved, and how long it took.

    Raises:
        PlanError: If the plan does not fit the model or the world, or the budget is too small.
        SwitchError: If it is called inside a forward or a backward, or a rank failed on the way; the
            message says what holds now.
        DisagreementError: On every rank, if ranks pass unlike plans or have unlike states.
    """
    options = SwitchOptions() if options is None else options
    model = without_compiler(model)
    state = state_of(model)
    kept = masters.registered(model) if state.plan.zero else None
    many = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)

    def start() -> tuple[ExpandedPlan, list[Slot], list[Slot]]:
        _check_between_steps(state)
        expanded = _expanded(model, plan, state.patterns if patterns is None else patterns)
        check_switchable(state.plan, expanded, has_targets=bool(many) or kept is not None)
        slots = parameter_slots(dict(model.named_parameters()), expanded.tensors)
        if kept is not None:
            slots += parameter_slots(kept.named(), kept.specs_under(expanded.tensors))
        check_optimizers(slots, many)
        return expanded, slots, extra_slots(extra or {})

    with torch.inference_mode(False), torch.no_grad():
        (expanded, slots, further), number = _agreed_start(start, options, len(many))
        prepare_plan(model, expanded)
        if kept is not None:
            kept.prepare(expanded.tensors)
        state.sync.flush()
        slots += state_slots(slots, many)
        slots += further

        def finish() -> None:
            replace_plan(model, expanded)
            if kept is not None:
                kept.follow_specs()
            note_switched(many)

        return _switch(slots, options, number, finish)


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
    options = SwitchOptions() if options is None else options

    def start() -> tuple[list[Slot]]:
        wanted = {name: as_spec(spec) for name, spec in specs.items()}
        return (parameter_slots(tensors, wanted),)

    with torch.inference_mode(False), torch.no_grad():
        (slots,), number = _agreed_start(start, options, 0)
        if communicates():
            prepare_groups(*(slot.dst.spec for slot in slots))
        return _switch(slots, options, number, lambda: None)


def _switch(
    slots: Sequence[Slot], options: SwitchOptions, number: int, finish: Callable[[], None]
) -> SwitchReport:
    start = time.perf_counter()
    plan, rounds = _agreed_plan(slots, options)
    cargo = [
        Cargo(item, tensor._local_tensor.detach().resolve_conj().resolve_neg())
        for item, (_, tensor, _) in zip(plan.items, slots, strict=True)
    ]
    carrier = Carrier(cargo, current_rank(), options.topology, options.timeout)
    decisions = Decisions(number, options.timeout) if communicates() else None
    with observe.because("switch"), observe.profiled("switch"):
        if options.atomic:
            _all_or_nothing(carrier, rounds, options, decisions)
        else:
            _round_by_round(carrier, rounds, slots, decisions)
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


def _expanded(
    model: nn.Module,
    plan: AnnotationPlan | ExpandedPlan,
    patterns: Sequence[Pattern | tuple[str, str]],
) -> ExpandedPlan:
    if not isinstance(plan, AnnotationPlan):
        raise PlanError(
            f"switch takes an AnnotationPlan, got a {type(plan).__name__}. Read one with "
            f"hdtensor.AnnotationPlan.load(path) or from_dict(obj)."
        )
    if isinstance(plan, ExpandedPlan):  # it has a spec for every tensor
        patterns = ()
    if communicates():
        plan.check(world_size=dist.get_world_size())
    return plan.expand(ModelDescription.from_module(model), patterns)


_Start = TypeVar("_Start", bound=tuple[Any, ...])


def _agreed_start(
    start: Callable[[], _Start], options: SwitchOptions, num_optimizers: int
) -> tuple[_Start, int]:
    """Do what needs no other rank; raise on every rank unless all can go on, with the same arguments.

    Returns:
        What ``start`` returned, and the switch's number.
    """

    def facts() -> tuple[_Start, dict[str, Any]]:
        made = start()
        plans = [part.to_dict() for part in made if isinstance(part, ExpandedPlan)]
        slots = [_names(part) for part in made if not isinstance(part, ExpandedPlan)]
        return made, {
            "plan": _short(plans),
            "tensors and specs": _short(slots),
            "options": _short(options),
            "number of optimizers": num_optimizers,
        }

    found, problem = attempt(facts)
    number = next_number()
    if communicates():
        said = exchange("switch", (found and found[1], number), problem)
        for what in said[0][0]:
            each = [told[what] for told, _ in said]
            odd = [rank for rank, value in enumerate(each) if value != each[0]]
            if odd:
                raise DisagreementError(
                    f"switch was called with unlike arguments: the {what} of ranks {odd} differ from "
                    f"rank 0's. Pass the same on every rank."
                )
        number = max(other for _, other in said)
        advance(number)
    elif problem is not None:
        raise problem
    assert found is not None, "without a problem there is a start"
    return found[0], number


def _short(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _names(slots: Sequence[Slot]) -> list[tuple[str, str, str]]:
    return [(name, str(tensor._spec.spec), str(dst.spec)) for name, tensor, dst in slots]


def _agreed_plan(
    slots: Sequence[Slot], options: SwitchOptions
) -> tuple[SwitchPlan, tuple[Round, ...]]:
    """Plan the switch; raise on every rank unless all plan the same."""

    items = [
        Item(name, _layout(tensor._spec), _layout(dst), tensor.dtype.itemsize)
        for name, tensor, dst in slots
    ]
    mine = {i for i, slot in enumerate(slots) if not slot.tensor._local_tensor.is_contiguous()}
    strided = set(mine)
    if communicates():
        said = exchange("switch", (len(slots), _digest(tuple(items), options), mine), None)
        hint = "Every rank must have the same tensors, states and gradients."
        require_alike("switch", [other[:2] for other in said], hint)
        strided = set().union(*(other[2] for other in said))
    for i in strided:
        items[i] = items[i]._replace(is_contiguous=False)
    return _plan_rounds(tuple(items), options)  # the same on every rank, errors too


@functools.lru_cache(maxsize=16)
def _digest(items: tuple[Item, ...], options: SwitchOptions) -> str:
    facts = [
        (name, str(src.spec), src.top_sizes, str(dst.spec), dst.top_sizes, dst.shape, itemsize)
        for name, src, dst, itemsize, _ in items
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


def _all_or_nothing(
    carrier: Carrier,
    rounds: Sequence[Round],
    options: SwitchOptions,
    decisions: Decisions | None,
) -> None:
    """Bring all tensors over beside the old ones; return if every rank has."""
    try:
        with _telling(decisions):
            for round_ in rounds:
                carrier.run(round_)
                if options.stage_on_host:
                    carrier.stage(round_.closes)
        if decisions is not None:
            decisions.agree()
    except Exception as error:
        raise SwitchError(
            f"the switch failed on rank {carrier.rank}: {error} Nothing was changed: every tensor is "
            f"whole and in the old plan. Start new process groups with the ranks that are left, and "
            f"switch with exclude_ranks."
        ) from error


def _round_by_round(
    carrier: Carrier,
    rounds: Sequence[Round],
    slots: Sequence[Slot],
    decisions: Decisions | None,
) -> None:
    """Bring tensors over round by round, freeing the old ones after each."""
    moved: list[str] = []
    for round_ in rounds:
        try:
            with _telling(decisions):
                carrier.run(round_)
            if decisions is not None:
                decisions.agree()
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


@contextlib.contextmanager
def _telling(decisions: Decisions | None) -> Iterator[None]:
    """Have the other ranks give up at once where this one fails."""
    try:
        yield
    except BaseException:
        if decisions is not None:
            decisions.give_up()
        raise


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


def _check_between_steps(state: ParallelState) -> None:
    """Raise inside a forward or backward (case 36): running operators would meet unlike layouts."""
    where = "backward" if in_backward() else "forward" if state.depth else None
    if where is not None:
        raise SwitchError(
            f"switch was called inside a {where} of the model. Call it between two steps, on every rank."
        )


def _layout(bound: BoundSpec) -> Layout:
    return Layout(bound.spec, tuple(bound.shape), bound.top_sizes)
