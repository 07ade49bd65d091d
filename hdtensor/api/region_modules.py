"""Which modules of a model are made regions, and which calls of them are left alone."""

from __future__ import annotations

from torch import nn

from hdtensor.plan import ModelDescription


def modules_of(model: nn.Module, description: ModelDescription) -> list[tuple[nn.Module, bool]]:
    """Return the modules that are made regions, each with whether it holds the stack of layers."""
    layers = {name for names in description.layer_modules.values() for name in names}
    chosen = []
    for name, module in model.named_modules():
        if not name or not any(True for _ in module.parameters()):
            continue
        is_inside = any(name.startswith(f"{layer}.") for layer in layers)
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # without a forward
        if not is_list and (name.rpartition(".")[0] in layers or not is_inside):
            chosen.append((module, any(layer.startswith(f"{name}.") for layer in layers)))
    return chosen
