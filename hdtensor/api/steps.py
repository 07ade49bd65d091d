"""What an optimizer must not step on: gradients that are not summed yet, parameters that a model no longer has, old states.

The first two would train without an error, each subgroup on its own batch or nobody on anything; a state that stayed behind in
a switch of plans is an error far from its cause. torch calls ``check`` before each
step of any optimizer. It costs nothing that grows with the model unless one of them is there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hdtensor.api.gradients import GradientSync, pending_spec
from hdtensor.errors import DeductionError, PlanError, SwitchError
from hdtensor.placements import checks
from hdtensor.placements.spec import HDSpec
from hdtensor.tensor import HDTensor


#: Parameters that ``parallelize`` replaced and somebody still holds, by their id, with their names.
_replaced: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
#: Optimizers whose states went along in the last switch of plans, or are known to lie where their parameters do.
_up_to_date: weakref.WeakSet[torch.optim.Optimizer] | None = None


def note_switched(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have the next step of every other optimizer looked at: its state may lie where the parameters were."""
    global _up_to_date
    _up_to_date = weakref.WeakSet(optimizers)


def note_replaced(parameter: torch.Tensor, name: str) -> None:
    """Remember a parameter that a model no longer has, for as long as somebody holds it."""
    key = id(parameter)
    _replaced[key] = (weakref.ref(parameter, lambda _: _replaced.pop(key, None)), name)


@functools.cache
def watch_steps(syncs: Callable[[], Iterable[tuple[GradientSync, HDSpec]]]) -> None:
    """Have every optimizer's step checked from now on.

    Args:
        syncs: Returns what brings each model's gradients home, with the spec of the model's inputs.
    """

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if _replaced:
            _check_replaced(optimizer)
        if _up_to_date is not None and optimizer not in _up_to_date:
            _check_moved(optimizer)
            _up_to_date.add(optimizer)
        for sync, inputs in syncs():
            if sync.is_deferred:
                _check_pending(optimizer, sync, inputs)

    register_optimizer_step_pre_hook(before)


def _check_replaced(optimizer: torch.optim.Optimizer) -> None:
    names = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference, name = _replaced.get(id(parameter), (None, ""))
            if reference is not None and reference() is parameter:
                names.append(name)
    if names:
        raise PlanError(
            f"this {type(optimizer).__name__} was made before parallelize, which replaced {len(names)} of its "
            f"parameters ({names[0]!r} the first): it would step on what the model no longer has. Make the optimizer "
            f"after hdtensor.parallelize(model, plan), from model.parameters()."
        )


def _check_moved(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, HDTensor) or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if not isinstance(value, HDTensor) or value.shape != parameter.shape:
                continue
            there, here = ([g.ranks for g in t.spec.subgroups] for t in (value, parameter))
            if there != here:
                raise SwitchError(
                    f"the states of this {type(optimizer).__name__} stayed behind when hdtensor.switch moved its "
                    f"parameters: {key!r} is {value.spec}, its parameter {parameter.spec}. Pass every optimizer of the "
                    f"model, hdtensor.switch(model, plan, optimizer). To begin anew call optimizer.state.clear()."
                )


def _check_pending(optimizer: torch.optim.Optimizer, sync: GradientSync, inputs: HDSpec) -> None:
    """Raise if gradients of a backward inside of ``no_sync`` are to be stepped on.

    Also on ranks that have no part in them: the layout they would have follows from the plan.
    """
    watched = {id(p) for p in sync.parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in watched or not isinstance(parameter, HDTensor):
                continue
            grad, home = parameter.grad, parameter.spec
            if grad is None:
                continue
            pending = grad.spec
            if not parameter.is_local and pending is home:
                pending = pending_spec(home, inputs)
                if home.num_subgroups == 1 or not checks.is_cut(inputs.top):
                    pending = pending.replace(top=home.top)
            if pending.has_partial() and pending is not home:
                raise DeductionError(
                    f"{type(optimizer).__name__}.step: gradients are not summed over subgroups yet, as the last "
                    f"backward was inside of no_sync (one of them is {pending}, its parameter {home}). Call "
                    f"hdtensor.sync_gradients(model) first, or have the last backward outside of no_sync."
                )
