"""The hooks at the layers of a lane with several stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor._rank import current_rank
from hdtensor.api import points
from hdtensor.pipeline.runtime import replay
from hdtensor.pipeline.runtime.lane_plan import LanePlan
from hdtensor.pipeline.runtime.learned import Border
from hdtensor.pipeline.runtime.passage import running
from hdtensor.placements import HDSpec
from hdtensor.tensor import HDTensor


#: Model -> the hooks of its newest runner. They follow from the plan, so that earlier runners go on with them.
_placed: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle | points.PlacedPoint]] = (
    weakref.WeakKeyDictionary()
)


def place(
    model: nn.Module, plan: LanePlan, layers: Mapping[int, Sequence[str]]
) -> list[RemovableHandle | points.PlacedPoint]:
    """Hook a lane's points into a model; return the handles that take them out.

    Layers that begin no stage are hooked too: what the model gives to several layers (positions, masks, a skip
    connection) comes from the stage where it was made, and has to follow to each stage that uses it.

    Args:
        model: The model.
        plan: The lane's.
        layers: Index of a layer -> its modules.
    """
    for handle in _placed.pop(model, ()):  # of an earlier runner
        handle.remove()
    _take_out_copied(model)
    hooks: list[RemovableHandle | points.PlacedPoint] = []
    for point in plan.points:
        if point.kind != "stage":
            hooks.append(points.hook_in(model, point))
    for name, hook in _stage_hooks(plan, layers).items():
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    _placed[model] = hooks
    return hooks


def _take_out_copied(model: nn.Module) -> None:
    """Take out stage points that a copy of a model has from it: a layer would begin its stage twice."""
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, StagePoint):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


def _stage_hooks(plan: LanePlan, layers: Mapping[int, Sequence[str]]) -> dict[str, StagePoint]:
    """Return what each layer's input passes; nothing in a lane of one stage."""
    if plan.lane.num_stages < 2:
        return {}
    found = {p.module: p for p in plan.points if p.kind == "stage"}
    hooks: dict[str, StagePoint] = {}
    spec = plan.inputs
    for index in sorted(layers):
        before = spec
        for name in layers[index]:
            point = found.get(name)
            spec = before if point is None else point.spec
            is_turn = point is not None and bool(point.turns)
            begins = is_turn or set(spec.ranks) != set(before.ranks)
            ranks = frozenset(spec.ranks)
            is_home = current_rank() in ranks
            hooks[name] = StagePoint(Border(spec, ranks, is_home, is_turn, begins))
    return hooks


class StagePoint:
    """Takes what a module is called with to the module's stage."""

    def __init__(self, border: Border) -> None:
        """Take what the lane's plan says.

        Args:
            border: Where the module is.
        """
        self.border = border

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the module's arguments on its stage."""
        passage = running()
        if passage is None and not replay.is_replaying():
            return None
        if (
            passage is not None
            and not _has_foreign((args, kwargs), self.border.spec)
            and passage.goes_on(self.border)
        ):
            return None
        named: dict[Any, torch.Tensor] = {}
        _name((args, kwargs), (), named)
        tensors = list(named.values())
        if passage is None:
            if not self.border.begins and not replay.has_passed(self):
                return None
            moved = iter(replay.again(self, tensors))
        else:
            found = passage.cross(named, self.border)
            if not self.border.begins and all(x is y for x, y in zip(tensors, found, strict=True)):
                return None
            if not passage.is_rehearsal:
                replay.note(self, passage, tensors, found)
            moved = iter(found)
        return _replaced((args, kwargs), lambda _: next(moved))


def _has_foreign(value: Any, spec: HDSpec) -> bool:
    """Return whether there is an ``HDTensor`` of another spec in what a module is called with."""
    kind = type(value)
    if kind is HDTensor:
        return value._spec.spec is not spec
    if kind is tuple or kind is list or kind is dict:
        for inner in value.values() if kind is dict else value:
            if type(inner) is not torch.Tensor and inner is not None and _has_foreign(inner, spec):
                return True
    return False


def _name(value: Any, path: tuple[Any, ...], named: dict[Any, torch.Tensor]) -> None:
    """Note where each tensor stands, in the order in which ``_replaced`` meets them."""
    if isinstance(value, torch.Tensor):
        named[path] = value
    elif type(value) is tuple or type(value) is list:
        for i, v in enumerate(value):
            _name(v, (*path, i), named)
    elif type(value) is dict:
        for key, v in value.items():
            _name(v, (*path, key), named)


def _replaced(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return what a module is called with, with ``change(x)`` for every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_replaced(v, change) for v in value])
    if kind is dict:
        return {k: _replaced(v, change) for k, v in value.items()}
    return value
