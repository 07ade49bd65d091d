"""Parallelized models that are changed or copied afterwards.

Parametrizations, ``load_state_dict(assign=True)`` and the like give a module other parameters; torch counts them for us
(``registry.changes``). ``module.to(dtype)`` swaps what is inside of parameters, which so lose their hooks. Where either
shows, the next call of the model looks at its parameters again. A copy of a model gets hooks, regions and gradient synchronisation of its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial

from hdtensor._rank import is_played
from hdtensor.api.gradients import GradientSync, gradient_plan
from hdtensor.collectives import groups
from hdtensor.errors import PlanError
from hdtensor.ops.registry import changes
from hdtensor.tensor import HDTensor


@functools.cache
def count_registrations() -> None:
    """Have torch count every parameter that any module is given."""
    nn.modules.module.register_module_parameter_registration_hook(_count)


def _count(module: nn.Module, name: str, parameter: Any) -> None:
    changes[0] += 1


class Upkeep:
    """Keeps what was installed on a model in step with the model's parameters.

    Attributes:
        seen: ``registry.changes`` when the parameters were last looked at.
    """

    def __init__(self, model: nn.Module, sync: GradientSync) -> None:
        count_registrations()
        self.sync = sync
        self.seen = changes[0]
        self._facts = _facts(model)

    def is_current(self) -> bool:
        """Return whether nothing was changed since the last look."""
        return self.seen == changes[0] and self.sync.is_current()

    def look(self, model: nn.Module, reinstall: Callable[[], None]) -> None:
        """Watch the model's present parameters; call ``reinstall`` if they are others or elsewhere.

        Every rank of the world calls it: groups are made for parameters whose gradients need new ones.
        """
        self.seen = changes[0]
        self.sync.watch(model.parameters())
        facts = _facts(model)
        if facts != self._facts:
            self._facts = facts
            _ensure_groups(model)
            reinstall()


def _facts(model: nn.Module) -> list[Any]:
    return [(name, id(p), p.dtype) for name, p in model.named_parameters()]


def _ensure_groups(model: nn.Module) -> None:
    """Create the groups that sum the parameters' gradients over subgroups."""
    if not dist.is_initialized() or is_played():
        return
    rank_sets: set[tuple[int, ...]] = set()
    for parameter in model.parameters():
        if isinstance(parameter, HDTensor):
            bound = parameter._spec
            pending = bound.with_spec(bound.spec.replace(top=Partial()))
            rank_sets |= set(gradient_plan(pending, bound).rank_sets())
    groups.ensure_groups(sorted(rank_sets))


def make_copyable(
    model: nn.Module,
    uninstall: Callable[[nn.Module], None],
    install: Callable[[nn.Module, nn.Module], None],
) -> None:
    """Have ``copy.deepcopy(model)`` give a parallelized model that shares nothing with this one.

    Args:
        model: The model; inside another module too.
        uninstall: Takes from the model whatever parallelize put on it.
        install: ``install(model, like)`` puts it on ``model``, in the plan of ``like``.
    """

    def copied(memo: dict[int, Any]) -> nn.Module:
        uninstall(model)
        del model.__deepcopy__
        try:
            other = copy.deepcopy(model, memo)
            install(other, model)
        finally:
            install(model, model)
        return other

    model.__deepcopy__ = copied  # type: ignore[assignment]


def own_forward(model: nn.Module) -> None:
    """Give a model the forward back that ``parallelize`` wrapped.

    Raises:
        PlanError: If something else was put over it since.
    """
    forward = model.__dict__.get("forward")
    original = getattr(forward, "__wrapped__", None)
    if original is None:
        raise PlanError(
            f"the forward of this parallelized {type(model).__name__} was replaced, so the model cannot be copied. "
            f"Copy it before, or wrap it in a module of your own."
        )
    if getattr(original, "__self__", None) is model and original.__func__ is type(model).forward:
        del model.forward
    else:
        model.forward = original
