"""What the optimizer of a pipelined model updates: its parameters, or masters that are cut over their copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hdtensor.api import masters
from hdtensor.collectives import groups
from hdtensor.errors import PlanError
from hdtensor.pipeline.runtime.homes import Home, homes, rank_sets
from hdtensor.pipeline.runtime.masters import ShardedMasters


class OptimizerTargets:
    """The tensors that get gradients; with zero 1 they are made when they are first asked for."""

    def __init__(self, model: nn.Module, zero: int) -> None:
        """Prepare.

        Args:
            model: Parallelized.
            zero: The plan's, 0 or 1.
        """
        self._model = model
        self._zero = zero
        self._masters: ShardedMasters | None = None
        self._homes: list[Home] | None = None

    def tensors(self, free_bytes: Mapping[int, int] | None = None) -> list[torch.Tensor]:
        """Return what to build the optimizer from; every rank of the world calls it.

        Args:
            free_bytes: As for ``zero_specs``.

        Raises:
            PlanError: If free memory is given for zero 0, later than at the first call, or not for all ranks.
        """
        if free_bytes is not None and not self._zero:
            raise PlanError(
                "free_bytes: the plan has zero 0, so that no state is dealt; use zero 1."
            )
        if free_bytes is not None and self._homes is not None:
            raise PlanError("free_bytes: state was dealt already; pass it to the first call.")
        self.homes(free_bytes)
        module = self._model if self._masters is None else self._masters.module
        return list(module.parameters())

    def homes(self, free_bytes: Mapping[int, int] | None = None) -> list[Home]:
        """Return where the gradients of all parameters go; every rank of the world calls it at first.

        Args:
            free_bytes: As for ``tensors``.
        """
        if self._homes is None:
            if self._zero:
                self._masters = self._known_masters() if free_bytes is None else None
                if self._masters is None:
                    self._masters = ShardedMasters(self._model, free_bytes)
                    masters.register(self._model, self._masters)
            parameters: list[Any] = list(self._model.parameters())
            by_parameter = None if self._masters is None else self._masters.by_parameter
            found = homes(parameters, by_parameter)
            groups.ensure_groups(sorted(rank_sets(found)))
            self._homes = found
        elif self._masters is not None:
            self._masters.follow_parameters(only_written=True)
        return self._homes

    def _known_masters(self) -> ShardedMasters | None:
        """Return the masters that an earlier runner made: an optimizer that holds them goes on with this one."""
        found = masters.registered(self._model)
        if isinstance(found, ShardedMasters) and found.fits(self._model):
            found.follow_parameters(only_written=True)
            return found
        return None
