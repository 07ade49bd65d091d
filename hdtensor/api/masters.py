"""Which models have optimizers that update masters: other tensors, of the parameters' names, that parameters follow."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from typing import Protocol

import torch
from torch import nn

from hdtensor.placements.spec import HDSpec
from hdtensor.tensor import HDTensor


class Masters(Protocol):
    """What checkpoints and switches of plans ask of a model's masters."""

    @property
    def module(self) -> nn.Module:
        """A module whose parameters are the masters, under the names that the model has for them."""

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer updates masters."""

    def beyond_parameters(self) -> dict[str, torch.Tensor]:
        """Return the masters that the parameters do not tell, being of fewer bits."""

    def follow_parameters(self, *, but: Container[str] = ()) -> None:
        """Take the parameters' values, but for the masters of these names."""

    def gather(self) -> None:
        """Give the parameters the masters' values; every rank of the world calls it."""

    def named(self) -> Mapping[str, HDTensor]:
        """Return the masters, each under its parameter's name with a mark that tells the two apart."""

    def specs_under(self, tensors: Mapping[str, HDSpec]) -> dict[str, HDSpec]:
        """Return the masters' specs, by the names of ``named``, once parameters have others.

        Args:
            tensors: Name of each parameter -> its spec then.
        """

    def prepare(self, tensors: Mapping[str, HDSpec]) -> None:
        """Create the groups that masters need under other specs of parameters; every rank of the world calls it."""

    def follow_specs(self) -> None:
        """Find the ways between parameters and masters anew, after all have other specs."""


_masters: weakref.WeakKeyDictionary[nn.Module, Masters] = weakref.WeakKeyDictionary()


def register(model: nn.Module, masters: Masters) -> None:
    """Note a model's masters."""
    _masters[model] = masters


def registered(model: nn.Module) -> Masters | None:
    """Return a model's masters; None where nobody asked for them."""
    return _masters.get(model)


def masters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Masters | None:
    """Return a model's masters if the optimizer updates them."""
    found = _masters.get(model)
    return found if found is not None and found.holds(optimizer) else None
