"""``install``: a model's regions."""

from __future__ import annotations

from torch import nn

from hdtensor.api.gradients import GradientSync
from hdtensor.api.region_hooks import count_compiles
from hdtensor.api.region_modules import modules_of
from hdtensor.api.regions import Region
from hdtensor.plan import ModelDescription


def install(
    model: nn.Module,
    description: ModelDescription,
    sync: GradientSync,
    *,
    only_skips: bool = False,
) -> list[Region]:
    """Make regions of a model's modules with parameters, down to the children of its layers.

    The module that holds the stack of layers is tried first: where all of it is local work, it runs as a whole.

    Args:
        model: Its parameters are ``HDTensor``s already.
        description: Tells which modules are layers.
        sync: Is told of gradients that plain passes accumulate.
        only_skips: Whether local modules stay op by op, so that the graph shows their parameters.
    """
    count_compiles()
    return [
        Region(module, sync, is_stack=holds_layers, only_skips=only_skips)
        for module, holds_layers in modules_of(model, description)
    ]
