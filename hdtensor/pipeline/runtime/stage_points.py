"""The hooks at the layers of a lane with several stages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor.api import points
from hdtensor.api.region_nodes import replace_tensors, tensors_in
from hdtensor.pipeline.runtime import replay
from hdtensor.pipeline.runtime.lane_plan import LanePlan
from hdtensor.pipeline.runtime.passage import running
from hdtensor.placements import HDSpec


#: Model -> the hooks of its newest runner. They follow from the plan, so that earlier runners go on with them.
_placed: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def place(
    model: nn.Module, plan: LanePlan, layers: Mapping[int, Sequence[str]]
) -> list[RemovableHandle]:
    """Hook a lane's points into a model; return the handles that take them out.

    Layers that begin no stage are hooked too: what the model gives to several layers (positions, masks, a skip
    connection) comes from the stage where it was made, and has to follow to each stage that uses it.

    Args:
        model: The model.
        plan: The lane's.
        layers: Index of a layer -> its modules.
    """
    for handle in _placed.pop(
        model, ()
    ):  # of an earlier runner: a layer would begin its stage twice
        handle.remove()
    hooks = []
    for point in plan.points:
        if point.kind != "stage":
            hooks.append(points.hook_in(model, point))
    for name, hook in _stage_hooks(plan, layers).items():
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    _placed[model] = hooks
    return hooks


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
            hooks[name] = StagePoint(spec, is_turn=is_turn, begins=begins)
    return hooks


class StagePoint:
    """Takes what a module is called with to the module's stage."""

    def __init__(self, spec: HDSpec, *, is_turn: bool, begins: bool) -> None:
        """Take what the lane's plan says.

        Args:
            spec: Of hidden states on the stage.
            is_turn: Whether a stage begins though the ranks stay.
            begins: Whether a stage begins.
        """
        self.spec = spec
        self.is_turn = is_turn
        self.begins = begins

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the module's arguments on its stage."""
        passage = running()
        if passage is None and not replay.is_replaying():
            return None
        tensors = tensors_in((args, kwargs))
        if passage is None:
            if not self.begins and not replay.has_passed(self):
                return None
            moved = iter(replay.again(self, tensors))
        else:
            found = passage.cross(tensors, self.spec, is_turn=self.is_turn, begins=self.begins)
            if not self.begins and all(x is y for x, y in zip(tensors, found, strict=True)):
                return None
            replay.note(self, passage, tensors, found)
            moved = iter(found)
        new_args = replace_tensors(args, lambda _: next(moved))
        return new_args, replace_tensors(kwargs, lambda _: next(moved))
