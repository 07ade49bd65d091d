"""Routers' logits for the loss that balances experts: over all tokens, as on one device.

That loss multiplies two means over tokens, so it is no sum of terms that subgroups could compute apart. ``transformers`` takes it
from the logits that routers return beside their routes. A hook gathers these over all parts of the batch, where a model is
asked for them; the routes themselves stay local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.hooks import RemovableHandle

from hdtensor.tensor import HDTensor


def install(model: nn.Module, is_wanted: Callable[[], bool]) -> list[RemovableHandle]:
    """Hook the routers whose logits a ``transformers`` model can record.

    Args:
        model: The model, before its own recording hooks are made.
        is_wanted: Whether the running forward was asked for them.
    """
    found = []
    for part in model.modules():
        recorders = getattr(part, "_can_record_outputs", None) or {}
        recorder = recorders.get("router_logits")
        kind = getattr(recorder, "target_class", recorder)
        if isinstance(kind, type):
            index = getattr(recorder, "index", 0)
            found += [(m, index) for m in part.modules() if isinstance(m, kind)]
    hooks = {id(m): (m, WholeLogits(index, is_wanted)) for m, index in found}
    return [module.register_forward_hook(hook) for module, hook in hooks.values()]


class WholeLogits:
    """Gathers one of a module's results."""

    def __init__(self, index: int, is_wanted: Callable[[], bool]) -> None:
        self.index = index
        self.is_wanted = is_wanted

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the results with the logits whole on every rank that holds some."""
        if not isinstance(output, tuple) or not self.is_wanted():
            return output
        logits = output[self.index]
        if not isinstance(logits, HDTensor):
            return output
        return (*output[: self.index], _whole(logits), *output[self.index + 1 :])


@torch.compiler.allow_in_graph
def _whole(x: HDTensor) -> torch.Tensor:
    spec = x.spec.replace(top=Replicate()).map_bottom(lambda _: Replicate())
    return x.view_as(x) if spec is x.spec else x.redistribute(spec)
