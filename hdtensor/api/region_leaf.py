"""Stand-ins for a module's parameters: others while it is watched, plain tensors while it runs on plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hdtensor.tensor import HDTensor


class Places:
    """A module's parameters, and where they stand.

    Attributes:
        parameters: In their order, each once.
        groups: Numbers of the parameters whose gradients leave the module together: of a stack those of each layer, else
            all. Of the layers that a call of ``torch.autograd.grad`` asks nothing of, it computes nothing.
    """

    def __init__(self, module: nn.Module, *, is_stack: bool = False) -> None:
        slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for inner in module.modules():
            for key, parameter in inner._parameters.items():
                if parameter is not None:
                    # A tied one stands in several places.
                    slots.setdefault(id(parameter), []).append((inner._parameters, key))
        self.parameters: list[Any] = []
        layers: dict[str, list[int]] = {}
        for i, (name, parameter) in enumerate(module.named_parameters()):
            self.parameters.append(parameter)
            layer = ".".join(name.split(".")[:2]) if is_stack else ""
            layers.setdefault(layer, []).append(i)
        self.groups = list(layers.values())
        self._slots = [
            (home, key, i) for i, p in enumerate(self.parameters) for home, key in slots[id(p)]
        ]

    def is_current(self) -> bool:
        """Return whether the parameters stand there now: ``torch.func.functional_call`` replaces them for a while."""
        parameters = self.parameters
        return all(home.get(key) is parameters[i] for home, key, i in self._slots)

    @contextlib.contextmanager
    def filled(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Have these stand in for the parameters, in their order."""
        for home, key, i in self._slots:
            home[key] = tensors[i]
        try:
            yield
        finally:
            for home, key, i in self._slots:
                home[key] = self.parameters[i]


def parameters_as(
    module: nn.Module, change: Callable[[int, HDTensor], Any]
) -> contextlib.AbstractContextManager[None]:
    """Have ``change(i, parameter)`` stand in for each parameter."""
    places = Places(module)
    return places.filled([change(i, p) for i, p in enumerate(places.parameters)])


def local_of(x: HDTensor) -> torch.Tensor:
    """Return the local tensor, outside autograd."""
    return x._local_tensor
