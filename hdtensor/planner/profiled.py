"""``ProfiledCosts``: seconds and bytes from measurements, by regression, with the roofline where there are none.

Section 8: the planner builds a cost model for each operator on each device from profiles of representative
configurations; here an operator is a unit of the model, and ``profile_lines`` has the regression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hdtensor.errors import PlannerError
from hdtensor.planner.cluster import Link
from hdtensor.planner.collective_times import all_reduce_seconds
from hdtensor.planner.costs import (
    LayerSpan,
    RuntimeTraits,
    StageGroup,
    StageMemory,
    SummedCosts,
    Unit,
    UnitSeconds,
)
from hdtensor.planner.profile_lines import ProfileLines, unit_operations
from hdtensor.planner.profiles import Profile
from hdtensor.planner.regression import fit_line
from hdtensor.planner.roofline import RooflineCosts
from hdtensor.planner.unit_bytes import span_bytes
from hdtensor.planner.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConstants:
    """The few numbers of a training system that no profile of units has; ``calibrate`` finds them.

    Attributes:
        message: Seconds of each message beside its bytes: metadata, launches, waking up.
        start: Seconds of a step with several stages beside its passes.
        is_blocking: Whether messages block both ends.
        reserved_bytes: Name of a device -> what runtime and libraries take.
        workspace: Bytes for each byte of parameters, gradients and optimizer state beside them.
    """

    message: float = 0.0
    start: float = 0.0
    is_blocking: bool = False
    reserved_bytes: Mapping[str, float] = field(default_factory=dict)
    workspace: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProfiledCosts(SummedCosts):
    """Costs from profiles of some devices; of all others from the roofline.

    Attributes:
        roofline: For the same model and workload.
        profiles: Name of a device -> its profile.
        constants: Of the training system.
        smoothing: Weight of the line where there is a measurement of just this size; the rest is the
            measurement's. A line is right where each measurement has its own noise.
        slowness: Name of a device -> factor on its measured seconds, as ``calibrate`` finds it.
    """

    roofline: RooflineCosts
    profiles: Mapping[str, Profile]
    constants: RuntimeConstants = field(default_factory=RuntimeConstants)
    smoothing: float = 1.0
    slowness: Mapping[str, float] = field(default_factory=dict)
    _cache: dict[tuple[Unit, StageGroup, int], UnitSeconds] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, profile in self.profiles.items():
            _check_profile(name, profile, self.roofline)

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return self.roofline.workload

    def slowed(self, factors: Mapping[str, float]) -> ProfiledCosts:
        """Return costs whose devices compute slower by these factors: name of a device -> factor."""
        slowness = {
            **self.slowness,
            **{name: self.slowness.get(name, 1.0) * by for name, by in factors.items()},
        }
        return replace(self, slowness=slowness, roofline=self.roofline.slowed(factors))

    @cached_property
    def lines(self) -> dict[str, ProfileLines]:
        """Name of a device -> what its profile says."""
        return {name: ProfileLines(each, self.roofline) for name, each in self.profiles.items()}

    def terms(self, unit: Unit, group: StageGroup, mbs: int) -> dict[str, UnitSeconds]:
        """Return the seconds of each part of a unit's passes."""
        table = self.lines.get(group.device.name)
        found = table.at(unit, group) if table else None
        if table is None or found is None:
            return self.roofline.terms(unit, group, mbs)
        forward, backward = found
        context = self.roofline.workload.context
        tokens = mbs * context / group.cp
        work = unit_operations(self.roofline.model, unit, tokens, context)
        exact = table.measured(unit, group.tp, work) if group.cp == 1 else None
        factor = self.slowness.get(group.device.name, 1.0)
        weight = factor * (1.0 if exact is None else self.smoothing)
        parts = {
            "fixed": UnitSeconds(forward.fixed * weight, backward.fixed * weight),
            "by work": UnitSeconds(
                forward.per_work * work * weight, backward.per_work * work * weight
            ),
        }
        if exact is not None:
            rest = factor - weight
            parts["as measured"] = UnitSeconds(exact.forward * rest, exact.backward * rest)
        return parts | self._beside(unit, group, tokens, parts)

    def _beside(
        self, unit: Unit, group: StageGroup, tokens: float, parts: Mapping[str, UnitSeconds]
    ) -> dict[str, UnitSeconds]:
        """Return the parts that no profile of one rank has."""
        more = {}
        if group.tp > 1 and not self.profiles[group.device.name].has_collectives:
            reduce = self._reduce_seconds(unit, group, tokens)
            back = 0.0 if unit == "embedding" else reduce
            more["all-reduces of tensor parallelism"] = UnitSeconds(reduce, back)
        if group.cp > 1:
            ring = self.roofline.context_parallel_seconds(unit, group, tokens)
            more["gathers of context parallelism"] = UnitSeconds(ring, 2 * ring)
        if unit == "layer" and self.roofline.workload.recompute == "full":
            forward = sum(part.forward for part in (*parts.values(), *more.values()))
            more["computed again"] = UnitSeconds(0.0, forward)
        return more

    def _reduce_seconds(self, unit: Unit, group: StageGroup, tokens: float) -> float:
        """Return the seconds of a unit's all-reduces in forward, by measured ones where there are some."""
        transfers = [
            (float(time.num_bytes), time.seconds)
            for time in self.profiles[group.device.name].transfers
            if (time.kind, time.num_ranks, time.link) == ("all_reduce", group.tp, "inside")
        ]
        if not transfers:
            return self.roofline.tensor_parallel_seconds(unit, group, tokens)
        num_bytes = tokens * self.roofline.model.hidden * self.roofline.itemsize
        line = fit_line(*zip(*transfers, strict=True))
        return (2 if unit == "layer" else 1) * line.at(num_bytes)

    def message(self, sender: StageGroup, receiver: StageGroup, link: Link, mbs: int) -> float:
        """Return the seconds of a micro-batch's hidden states, or their gradient, over a link."""
        return self.constants.message + self.roofline.message(sender, receiver, link, mbs)

    def memory(self, group: StageGroup, layers: LayerSpan, mbs: int) -> StageMemory:
        """Return the bytes on each rank of a stage that holds these layers."""
        plain = self.roofline.memory(group, layers, mbs)
        reserved = self.constants.reserved_bytes.get(
            group.device.name, self.roofline.reserved_bytes
        )
        profile = self.profiles.get(group.device.name)
        workload = self.roofline.workload
        known = span_bytes(profile.sizes, layers, group.tp) if profile else None
        if known is not None:
            samples = mbs * workload.context / known.context / group.cp
            kept = known.activation * samples
            if workload.recompute == "full":
                kept = plain.activation
            plain = plain._replace(
                parameters=known.parameters,
                gradients=known.parameters,
                optimizer=known.parameters / self.roofline.itemsize * self.roofline.state_bytes(),
                activation=kept,
            )
        states = plain.parameters + plain.gradients + plain.optimizer
        more = reserved - self.roofline.reserved_bytes + self.constants.workspace * states
        return plain._replace(buffers=plain.buffers + more)

    def _parameter_bytes(self, group: StageGroup, layers: LayerSpan) -> float:
        return self.memory(group, layers, 1).parameters

    def synchronize(self, shares: tuple[StageGroup, ...], layers: LayerSpan, link: Link) -> float:
        """Return the seconds of summing gradients over copies of layers, and of gathering parameters."""
        largest = max(self._parameter_bytes(share, layers) for share in shares)
        return all_reduce_seconds(largest, len(shares), self.roofline.reached(link))

    def update(self, group: StageGroup, layers: LayerSpan, num_copies: int) -> float:
        """Return the seconds of the optimizer on each rank of a stage, by measured ones where there are some."""
        counts: dict[Unit, int] = {
            "embedding": layers.is_first,
            "layer": layers.num_layers,
            "head": layers.is_last,
        }
        table = self.lines.get(group.device.name)
        seconds = 0.0
        for unit, count in counts.items():
            each = table.update(unit, group.tp) if table and count else 0.0
            if table is None or each is None:
                return self.roofline.update(group, layers, num_copies)
            seconds += count * each
        return seconds / (num_copies if self.roofline.workload.zero else 1)

    def runtime(self) -> RuntimeTraits:
        """Return what depends on the software that trains."""
        return RuntimeTraits(self.constants.is_blocking, self.constants.start)

    def held_out(self) -> dict[str, float]:
        """Return, for each profiled device, the mean absolute relative error on measurements left out of the fit."""
        errors = {name: table.held_out_errors() for name, table in self.lines.items()}
        return {name: sum(map(abs, all_)) / len(all_) for name, all_ in errors.items() if all_}


def _check_profile(name: str, profile: Profile, roofline: RooflineCosts) -> None:
    if profile.precision != roofline.workload.precision:
        raise PlannerError(
            f"precision: the profile of {name} is of {profile.precision}, the workload of "
            f"{roofline.workload.precision}. Give a profile of that type, or change the workload."
        )
    for size in ("hidden", "ffn", "num_heads", "vocab"):
        mine, theirs = getattr(roofline.model, size), getattr(profile.model, size)
        if mine != theirs:
            raise PlannerError(
                f"model: the profile of {name} is of a model with {size} {theirs}, not {mine}."
            )
