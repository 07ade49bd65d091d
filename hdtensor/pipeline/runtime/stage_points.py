"""The hooks at a lane's stage points."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hdtensor.api import points
from hdtensor.api.region_nodes import replace_tensors, tensors_in
from hdtensor.pipeline.runtime import replay
from hdtensor.pipeline.runtime.lane_plan import LanePlan
from hdtensor.pipeline.runtime.passage import running
from hdtensor.placements import HDSpec


def place(model: nn.Module, plan: LanePlan) -> list[RemovableHandle]:
    """Hook a lane's points into a model; return the handles that take them out."""
    hooks = []
    for point in plan.points:
        module = model.get_submodule(point.module)
        if point.kind == "stage":
            hook = StagePoint(point.spec, is_turn=bool(point.turns))
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            hooks.append(points.hook_in(model, point))
    return hooks


class StagePoint:
    """Takes what a module is called with to the module's stage."""

    def __init__(self, spec: HDSpec, *, is_turn: bool) -> None:
        self.spec = spec
        self.is_turn = is_turn

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the module's arguments on its stage."""
        passage = running()
        if passage is None and not replay.is_replaying():
            return None
        tensors = tensors_in((args, kwargs))
        if passage is None:
            moved = iter(replay.again(self, tensors))
        else:
            found = passage.cross(tensors, self.spec, is_turn=self.is_turn)
            replay.note(self, passage, tensors, found)
            moved = iter(found)
        new_args = replace_tensors(args, lambda _: next(moved))
        return new_args, replace_tensors(kwargs, lambda _: next(moved))
