"""The part of a plan that one lane executes. Pure: names and specs only."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Shard

from hdtensor.errors import PlanError
from hdtensor.pipeline.lanes import Lane
from hdtensor.placements import HDSpec
from hdtensor.plan import ExpandedPlan
from hdtensor.plan.expanded import RedistributePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """One lane, and what its ranks see of a plan: specs of the lane's own subgroups.

    Attributes:
        lane: The stages.
        inputs: Spec of a micro-batch on the first stage.
        labels: Spec of what the last stage needs of it.
        points: Where hidden states are redistributed.
        slots: Parameter, under each of its names -> spec on the stage that uses it there.
    """

    lane: Lane
    inputs: HDSpec
    labels: HDSpec
    points: tuple[RedistributePoint, ...]
    slots: Mapping[str, HDSpec]


def _check_shares(plan: ExpandedPlan) -> None:
    """Raise unless a plan's lanes share the batch by samples.

    Raises:
        PlanError: If they share sequences.
    """
    top = plan.inputs.top
    if isinstance(top, Shard) and top.dim != 0:
        raise PlanError(
            "the plan says 'split': 'sequence', but a Runner's lanes each take samples of their own. Say 'split': "
            "'batch', with 'cp' in the stages that cut sequences; parallelize runs plans of one stage in each pipeline "
            "that share sequences."
        )


def lane_plan(plan: ExpandedPlan, lane: Lane, names: Sequence[tuple[str, str]]) -> LanePlan:
    """Return what one lane executes of a plan.

    Args:
        plan: The whole plan.
        lane: One of its lanes.
        names: (name, first name of the same parameter) of every parameter in registration order.

    Raises:
        PlanError: If a parameter is used on several stages of the lane under fewer names than stages, or lanes share
            sequences.
    """
    _check_shares(plan)
    view = _View(lane)
    uses: defaultdict[str, list[str]] = defaultdict(list)
    for name, first in names:
        uses[first].append(name)
    slots: dict[str, HDSpec] = {}
    for first, own_names in uses.items():
        slots.update(view.uses(first, plan.tensors[first], own_names))
    return LanePlan(
        lane=lane,
        inputs=view.activation(plan.inputs),
        labels=view.activation(plan.labels),
        points=tuple(map(view.point, plan.points)),
        slots=slots,
    )


class _View:
    """What the ranks of one lane see of specs."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._ranks = set(lane.ranks)

    def activation(self, spec: HDSpec) -> HDSpec:
        """Return the spec that hidden states, cut over the lanes, have inside this lane."""
        inside = [group for group in spec.subgroups if self._ranks.issuperset(group.ranks)]
        if len(inside) == 1:
            return HDSpec(inside)
        assert inside, f"lane {self._lane} has no part in {spec}"
        return HDSpec(inside, spec.top)

    def point(self, point: RedistributePoint) -> RedistributePoint:
        """Return a point as this lane passes it."""
        inside = [i for i, g in enumerate(point.spec.subgroups) if self._ranks.issuperset(g.ranks)]
        turns = tuple(i for i, index in enumerate(inside) if index in point.turns)
        return dataclasses.replace(point, spec=self.activation(point.spec), turns=turns)

    def uses(self, first: str, spec: HDSpec, names: Sequence[str]) -> dict[str, HDSpec]:
        """Return the spec of each use of a parameter: its names in order are on its stages in order."""
        inside = [group for group in spec.subgroups if self._ranks.issuperset(group.ranks)]
        if len(inside) == 1:
            return dict.fromkeys(names, HDSpec(inside))
        if len(inside) != len(names):
            raise PlanError(
                f"{first}: the lane {self._lane} uses it on {len(inside)} stages, but the model has it in "
                f"{len(names)} place(s), {', '.join(names)}, so that each stage cannot have its own. Tie the weights "
                f"of two modules, or put both uses on one stage."
            )
        return {name: HDSpec([group]) for name, group in zip(names, inside, strict=True)}
