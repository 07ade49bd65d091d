"""Which ranks of a lane need which tensors of a micro-batch, and what the model and the loss are called with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from hdtensor._torch_compat import new_wrapper
from hdtensor.errors import PlanError
from hdtensor.ops.bound import BoundSpec
from hdtensor.ops.shard import shard_of
from hdtensor.pipeline.runtime.batches import map_tensors
from hdtensor.pipeline.runtime.lane_plan import LanePlan
from hdtensor.pipeline.runtime.losses import AUXILIARY
from hdtensor.placements import HDSpec
from hdtensor.tensor import HDTensor


class InputLayout:
    """Where the tensors of a lane's micro-batches go.

    A batch is a mapping, whose targets are known by name, or a tuple whose last element is the target.

    Attributes:
        plan: The lane's.
    """

    def __init__(
        self, plan: LanePlan, targets: Collection[str], keep_plain: Collection[str]
    ) -> None:
        """Prepare.

        Args:
            plan: The lane's.
            targets: Names of what the loss needs.
            keep_plain: Names of what stays plain, and is the same on every rank of the lane.
        """
        self.plan = plan
        self._targets = tuple(targets)
        self._keep_plain = frozenset(keep_plain)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The lane's ranks."""
        return self.plan.lane.ranks

    def needed_by(self, rank: int, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of a micro-batch for all tensors whose values a rank needs.

        Args:
            rank: One of the lane's.
            part: The micro-batch.
        """
        inputs, labels = self.plan.inputs.ranks, self.plan.labels.ranks
        for key, value in part.items() if isinstance(part, Mapping) else enumerate(part):
            is_target = key in self._targets if isinstance(part, Mapping) else key == len(part) - 1
            holders = labels if is_target else inputs
            found: list[tuple[str, torch.Tensor]] = []
            map_tensors(value, lambda name, t, into=found: into.append((name, t)), f"{key}")  # type: ignore[misc]
            for name, tensor in found:
                if key in self._keep_plain or not tensor.ndim or rank in holders:
                    yield name, tensor

    def divide(self, part: Any, *, plain_inputs: bool, plain_target: bool) -> tuple[Any, Any]:
        """Return what the model is called with, a dict or a list, and the target.

        Args:
            part: A micro-batch.
            plain_inputs: Whether the inputs stay as they are, where one rank has all of the first stage.
            plain_target: Whether the target stays as it is, where one rank needs all of it.
        """
        inputs = None if plain_inputs else self.plan.inputs
        labels = None if plain_target else self.plan.labels
        if isinstance(part, Mapping):
            to_model = {
                k: v if k in self._keep_plain else _cut(v, inputs)
                for k, v in part.items()
                if k not in self._targets
            }
            found = {k: _cut(part[k], labels) for k in self._targets if k in part}
            return to_model, next(iter(found.values())) if len(found) == 1 else found
        *first, last = part
        return [_cut(v, inputs) for v in first], _cut(last, labels)


def check_form(part: Any) -> None:
    """Raise unless a batch has a form that is known.

    Raises:
        PlanError: If it is no mapping and no tuple, or asks for a loss that micro-batches cannot be summed to.
    """
    if not isinstance(part, Mapping | tuple) or not part:
        raise PlanError(
            f"a batch is a mapping of tensors, or a tuple (inputs..., target), got {type(part).__name__}. Micro-batches "
            f"of your own go to step(lanes={{lane: [micro-batch, ...]}})."
        )
    if isinstance(part, Mapping) and part.get("output_router_logits"):
        raise PlanError(AUXILIARY)


def _cut(value: Any, spec: HDSpec | None) -> Any:
    """Return a plain batch's tensors as this rank's part of a micro-batch; as they are without a spec."""
    if spec is None:
        return value

    def cut(_: str, tensor: torch.Tensor) -> Any:
        if not tensor.ndim:
            return tensor
        bound = BoundSpec.bind(spec, tensor.shape, None, tensor.dtype)
        return new_wrapper(HDTensor, shard_of(tensor, bound), bound, False)

    return map_tensors(value, cut)
